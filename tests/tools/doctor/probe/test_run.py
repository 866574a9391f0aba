"""One small probe of this host, and the pairs of a ring."""

from __future__ import annotations

import os

import pytest

from tools.doctor.probe import run
from tools.doctor.probe.outliers import gate
from tools.doctor.probe.run import Seat

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def short(monkeypatch):
    """Pieces of a few milliseconds."""
    for piece in ("MATMUL", "MEMORY", "LINK"):
        monkeypatch.setattr(run, piece, 0.01)
    monkeypatch.setattr(run, "DISK", 4096)


def test_a_probe_of_two_workers_here(tmp_path, short):
    report = run.measure([Seat(rank, [CORES[rank % len(CORES)]]) for rank in range(2)], tmp_path / "new" / "run", 2)
    assert report["folder"] == str(tmp_path) and not list(tmp_path.iterdir()) and report["device"] == "CPU"
    for worker in report["workers"]:
        assert worker["failed"] == "" and worker["kind"].endswith(", 1 core")
        for measure in ("matmul", "memory", "disk"):
            assert len(worker[measure]) == 2 and min(worker[measure]) > 0
        assert all(0 <= share <= 1 for share in worker["waited"] + worker["throttled"])
    assert [(link["source"], link["target"]) for link in report["links"]] == [(0, 1), (1, 0)]
    assert [len(link["bandwidth"]) for link in report["links"]] == [2, 2]
    assert all(0 <= share <= 1 for link in report["links"] for share in link["waited"])
    assert [len(link["latency"]) for link in report["links"]] == [2, 0]


def test_a_worker_that_cannot_write_fails_the_gate(tmp_path, short, monkeypatch):
    seats = [Seat(0), Seat(1)]
    start = run._start
    monkeypatch.setattr(run, "_start", lambda seat, folder: start(seat, folder + "/missing" * seat.rank))
    verdict = gate({"": run.measure(seats, tmp_path, 1)})
    assert verdict.verdict == "fail" and verdict.reasons[0].startswith("worker 1: disk: FileNotFoundError")


def test_a_link_that_cannot_be_reached_is_named_and_the_workers_go_on(tmp_path, short, monkeypatch):
    """127.0.0.2 is this host's, too, but the second worker listens at 127.0.0.1 alone."""
    monkeypatch.setattr(run.Course, "_address", lambda course, index: ["127.0.0.1", "127.0.0.2"][index])
    report = run.measure([Seat(0), Seat(1)], tmp_path, 2)
    assert [len(worker["matmul"]) for worker in report["workers"]] == [2, 2]
    assert [worker["failed"] for worker in report["workers"]] == ["", ""]
    assert [bool(link["failed"]) for link in report["links"]] == [True, False]
    assert "refused" in report["links"][0]["failed"] and len(report["links"][1]["bandwidth"]) == 2


@pytest.mark.parametrize(("count", "links"), [(1, 0), (2, 1), (3, 3), (4, 6), (5, 10), (8, 20), (64, 64 * 5 + 32)])
def test_pairs_of_a_ring(count, links):
    found = run.pairs(count)
    assert len(found) == len(set(found)) == links and all(0 <= a < b < count for a, b in found)
    if count > 1:
        assert {worker for pair in found for worker in pair} == set(range(count))


def test_workers_that_nobody_counted_are_one_a_core(monkeypatch, tmp_path):
    asked = {}

    def measure(seats, folder, rounds, notes):
        asked.update(seats=seats, notes=notes)

    monkeypatch.setattr(run, "measure", measure)
    run.probe(None, None, tmp_path)
    assert len(asked["seats"]) == min(run.MOST, len(CORES))
    assert sorted(core for seat in asked["seats"] for core in seat.cores)[: len(asked["seats"])]
    run.probe(None, len(CORES) + 1, tmp_path)
    assert [list(seat.cores) for seat in asked["seats"]] == [[]] * (len(CORES) + 1) and "none is bound" in asked[
        "notes"
    ][0]
