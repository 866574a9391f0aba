"""Probes recorded on a machine with two loaded cores, by benchmarks/cluster/doctor_probe.py: what is said of them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from launch.run.msrun import ROOT
from tools.doctor import cli, probe
from tools.doctor.outliers import gate, outliers

RECORDED = ROOT / "tests/tools/doctor/recorded_probes"
NAMED = {
    "clean": set(),
    "throttled": {("worker 1", "matmul"), ("worker 1", "memory")},  # a tenth of a core by cpu.cfs_quota_us
    "shaped": {("tc3-probe2 worker 0", "bandwidth")},  # 200 Mbit/s at its interface
}


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMED)
def test_who_is_named(name):
    found = outliers({"here": recorded(name)})
    assert {(one.who, one.measure) for one in found if one.verdict == "fail"} == NAMED[name]
    assert gate({"here": recorded(name)}).verdict == ("fail" if NAMED[name] else "warn")


def test_a_limit_of_cpu_is_told_as_the_cause():
    (one,) = (one for one in outliers({"here": recorded("throttled")}) if one.measure == "throttled")
    assert one.who == "worker 1" and "cpu.max" in one.seen


def test_recorded_hosts_are_compared_with_each_other():
    """Alone, a host whose workers are all slow has nobody to be slower than."""
    slow = recorded("throttled")
    slow["workers"] = [slow["workers"][1], {**slow["workers"][1], "rank": 0}]
    slow["links"] = []
    assert [one for one in outliers({"a": slow}) if one.verdict == "fail"] == []
    hosts = {"a": slow, "b": recorded("clean"), "c": recorded("clean")}
    named = {(one.host, one.who, one.measure) for one in outliers(hosts) if one.verdict == "fail"}
    assert ("a", "all 2 workers", "matmul") in named and {host for host, _, _ in named} == {"a"}


def call(monkeypatch, report, *words):
    monkeypatch.setattr(probe, "probe", lambda recipe, workers, folder: report)
    monkeypatch.setattr(cli, "examine", lambda patient, modules: [])
    return CliRunner().invoke(cli.doctor, ["--probe", *words])


def test_an_outlier_is_exit_code_1_and_none_is_0(monkeypatch):
    result = call(monkeypatch, recorded("throttled"))
    assert result.exit_code == 1, result.output
    assert "fail    probe  worker 1: matmul" in result.stdout and "mend: compare clocks" in result.stdout
    result = call(monkeypatch, recorded("clean"))
    assert result.exit_code == 0 and "none of the 2 workers is slower than the others" in result.stdout


def test_one_worker_is_unknown_and_exit_code_0(monkeypatch):
    report = recorded("clean")
    report["workers"], report["links"] = report["workers"][:1], []
    result = call(monkeypatch, report)
    assert result.exit_code == 0 and "1 of 1 worker cannot be compared" in result.stdout
    assert "unknown probe" in result.stdout and "ok      probe" not in result.stdout
