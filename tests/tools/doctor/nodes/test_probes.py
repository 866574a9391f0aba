"""Probes of many hosts against each other."""

from __future__ import annotations

import json

import pytest

from tests.tools.doctor.nodes.reports import report
from tests.tools.doctor.probe.reports import probe, scale
from tools.doctor.nodes.ask import Answer, Trouble, parsed
from tools.doctor.nodes.compare import compare
from tools.doctor.report import Report


def outliers(reports):
    found = compare({host: Answer(told) for host, told in reports.items()}).outliers
    return [(item.what, item.verdict, list(item.hosts)) for item in found if item.what != "clocks"]


def hosts(count):
    return {f"node{number}": probe(seed=number) for number in range(count)}


def reports(probes):
    return {host: report(probe=one) for host, one in probes.items()}


def test_hosts_that_are_equally_fast():
    assert outliers(reports(hosts(8))) == []


def test_a_host_all_of_whose_workers_are_slow():
    """On that host alone nothing is to be seen: all of its workers are alike."""
    probes = hosts(8)
    for worker in probes["node5"]["workers"]:
        scale(worker["matmul"], 0.5)
    assert outliers({"node5": report(probe=probes["node5"])}) == []
    found = outliers(reports(probes))
    assert found == [("probe matmul", "fail", ["node5"])]


def test_a_host_that_was_not_probed():
    found = outliers({**reports(hosts(3)), "node9": report()})
    assert found == [("probe", "unknown", ["node9"])]


def test_workers_without_a_peer_are_unknown():
    assert outliers(reports({"a": probe(workers=1)})) == [("probe", "unknown", ["a"])]


WORKER = {"matmul": "fast", "memory": [1.0, float("nan")], "failed": None, "disk": [0.0], "rank": "0"}


@pytest.mark.parametrize("key", WORKER)
def test_a_probe_in_another_form_is_no_report(key):
    broken = json.loads(report(probe=probe()).text())
    broken["probe"]["workers"][1][key] = WORKER[key]
    told = parsed(json.dumps(broken))
    assert isinstance(told, Trouble) and "its probe cannot be read" in told.words


def test_a_link_to_a_worker_that_is_not_there():
    broken = json.loads(report(probe=probe()).text())
    broken["probe"]["links"][0]["target"] = 4
    assert isinstance(parsed(json.dumps(broken)), Trouble)


@pytest.mark.parametrize("numbers", [[], [1.0], [1e-9] * 9])
def test_numbers_that_a_failed_worker_leaves(numbers):
    """Whatever is in the lists, the comparison ends."""
    probes = hosts(3)
    for key in ("matmul", "memory", "disk", "waited", "throttled"):
        probes["node1"]["workers"][0][key] = numbers
    probes["node1"]["links"][0]["bandwidth"] = numbers
    assert isinstance(parsed(report(probe=probes["node1"]).text()), Report)
    assert outliers(reports(probes)) is not None
