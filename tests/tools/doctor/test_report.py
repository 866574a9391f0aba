"""These tests check what a host's report says about a recipe and its data; tests/tools/doctor/test_measures.py tests
what it says about the hardware.

Probes recorded on a machine with two loaded cores, by benchmarks/cluster/doctor_probe.py: what is said of them.

Workers of a host beside those that a first hour measured: `tc3 doctor --probe --measured BUNDLE`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.run.msrun import ROOT
from plugins.errors import DataError
from tests.tools.doctor.reports import probe as measured_probe
from tests.tools.doctor.reports import report as sound_report
from tests.tools.doctor.reports import scale
from tools.doctor import cli, probe
from tools.doctor.checks import Patient
from tools.doctor.outliers import against, findings, gate, outliers
from tools.doctor.report import Report, gather, tool_version
from tools.measured import FORMAT, OUTCOMES, Bundle, Manifest, read_bundle, recipe_digest, software, write_bundle
from tools.process.host import Root
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

MINI = Path(__file__).resolve().parents[3] / "recipes/mini/pretrain_dp2.yaml"


def facts(*overrides):
    return gather(Patient(Root(), View(apply_overrides(load_recipe(MINI), overrides))))


def test_a_recipe_on_cpu_wants_nothing_of_npus(tmp_path):
    assert not facts().keys() & {"driver", "firmware", "CANN", "NPUs"}
    assert gather(Patient(Root(tmp_path)))["driver"] is None


def test_another_value_is_another_recipe():
    """Also one that stands in the base; the same one twice is the same recipe."""
    assert facts()["recipe"] == facts()["recipe"] != facts("lr_schedule.learning_rate=0.125")["recipe"]


def test_data_by_size_and_content(tmp_path):
    prefix = tmp_path / "text"

    def data():
        return facts(f"train_dataset.data_loader.config.data_path.1={prefix}")[f"data {prefix}"]

    assert data() == "not there"
    Path(f"{prefix}.idx").write_bytes(b"index")
    Path(f"{prefix}.bin").write_bytes(bytes(1000))
    first = data()
    assert first.startswith(".idx 5 bytes, .bin 1,000 bytes, ") and data() == first
    Path(f"{prefix}.bin").write_bytes(bytes(999) + b"x")
    assert data().startswith(".idx 5 bytes, .bin 1,000 bytes, ") and data() != first


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


PLAIN = ROOT / "recipes" / "mini" / "pretrain.yaml"


def bundle(path, probes):
    """A bundle of an hour that probed these hosts."""
    manifest = Manifest(
        format=FORMAT, made="2026-11-27T00:00:00Z", device="910B3", devices=16, simulated=False, names="plain",
        recipe="recipes/mini/pretrain.yaml", digest=recipe_digest(PLAIN), versions=software(), verdict="go",
    )  # fmt: skip
    rows = [{"check": "devices", "verdict": "ok", "evidence": {"probes": probes}, "findings": [], "seconds": 1.0}]
    write_bundle(path, manifest, {OUTCOMES: json.dumps(rows) + "\n"})
    return read_bundle(path)


@pytest.fixture
def measured(tmp_path) -> Bundle:
    return bundle(tmp_path / "b.zip", {host: measured_probe(8, seed=number) for number, host in enumerate("ab")})


@pytest.mark.parametrize("seed", range(20))
def test_a_host_like_those_of_the_hour_is_ok(measured, seed):
    (found,) = against(measured_probe(8, seed=100 + seed), measured)
    assert (found.verdict, found.seen) == ("ok", "8 workers are as fast as 16 that were measured")


@pytest.mark.parametrize(("measure", "factor"), [("matmul", 0.5), ("memory", 0.5), ("disk", 0.1)])
def test_a_host_whose_workers_are_all_slow_is_named_which_its_own_peers_do_not_show(measured, measure, factor):
    own = measured_probe(8, seed=7)
    for worker in own["workers"]:
        scale(worker[measure], factor)
    found = against(own, measured)
    assert {item.verdict for item in found} == {"fail"} and len(found) == 8
    assert f"worker 0: {measure} " in found[0].seen and "times as long" in found[0].seen and found[0].mend


def test_slow_in_some_rounds_only_is_a_neighbour_on_the_host(measured):
    own = measured_probe(8, seed=7)
    own["workers"][3]["matmul"][:5] = [rate / 2 for rate in own["workers"][3]["matmul"][:5]]
    assert {item.verdict for item in against(own, measured)} == {"ok"}


def test_another_kind_of_device_is_unknown_and_not_ok(measured):
    own = measured_probe(2, seed=7)
    for worker in own["workers"]:
        worker["kind"] = "another device"
    (found,) = against(own, measured)
    assert (found.verdict, found.seen) == ("unknown", "the bundle has no worker of the kind another device")


def test_a_bundle_without_probes_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"e\.zip: the bundle has no speed tests of hosts; run tc3 firsthour read"):
        against(measured_probe(2), bundle(tmp_path / "e.zip", {}))


def test_the_command_adds_what_it_finds_to_the_report(measured, monkeypatch):
    own = measured_probe(8, seed=7)
    for worker in own["workers"]:
        scale(worker["matmul"], 0.5)
    monkeypatch.setattr(cli, "probe_if", lambda *words: own)
    monkeypatch.setattr(cli, "examine", lambda *words: [])
    done = CliRunner().invoke(cli.doctor, ["--probe", "--measured", str(measured.path), "--json"])
    assert done.exit_code == 1
    found = [item for item in json.loads(done.stdout)["findings"] if item["verdict"] == "fail"]
    assert len(found) == 8 and all("first hour measured" in item["seen"] for item in found)
    assert "16 x 910B3" in done.stderr


def test_a_host_that_is_slower_than_the_hour_stays_unfit_among_hosts_that_are_all_slow(measured, tmp_path):
    told = {}
    for number in range(3):
        own = measured_probe(4, seed=number)
        for worker in own["workers"]:
            scale(worker["matmul"], 0.5)
        told[f"node{number}"] = Report(
            [*sound_report().findings, *findings({"": own}), *against(own, measured)], {"tc3": tool_version()}, own
        )
        (tmp_path / f"node{number}.json").write_text(told[f"node{number}"].text())
    result = CliRunner().invoke(cli.doctor, ["--nodes", str(tmp_path)])
    assert result.exit_code == 1
    assert "fail    probe first hour  3 hosts, node[0-2]: worker 0: matmul" in result.stdout
    assert "and 11 more" in result.stdout


def test_a_worker_that_ended_is_not_as_fast_as_those_of_the_hour(measured):
    own = measured_probe(4, seed=7)
    own["workers"][1] |= {name: [] for name in ("matmul", "memory", "disk", "waited", "throttled")}
    own["workers"][1]["failed"] = "matmul: ended by signal 9"
    (found,) = against(own, measured)
    assert found.seen == "3 workers are as fast as 16 that were measured"
