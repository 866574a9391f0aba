"""These tests check which workers, links and disks of probes are named as outliers."""

import pytest

from tests.tools.doctor.reports import probe, scale
from tools.doctor.outliers import FLOORS, Times, findings, floors, gate, outliers, slow


def named(*reports):
    """(host, who, measure) of every outlier."""
    return [(one.host, one.who, one.measure) for one in outliers(dict(zip("abcdefgh", reports, strict=False)))]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_noise_of_a_few_percent_raises_nothing(workers):
    assert [named(*(probe(workers, seed=10 * seed + host) for host in range(3))) for seed in range(30)] == [[]] * 30


@pytest.mark.parametrize("measure", ["matmul", "memory"])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_slow_worker_is_named_also_beside_one_other(workers, measure):
    report = probe(workers)
    scale(report["workers"][1][measure], 0.5)
    assert named(report) == [("a", "worker 1", measure)]


def test_half_of_the_workers_may_be_slow():
    report = probe(4)
    for rank in (0, 3):
        scale(report["workers"][rank]["matmul"], 0.5)
    assert named(report) == [("a", "worker 0", "matmul"), ("a", "worker 3", "matmul")]


def test_slow_in_most_rounds_but_not_in_the_best_is_a_neighbour_and_no_outlier():
    report = probe(2)
    report["workers"][1]["matmul"][:5] = [20.0] * 5
    assert named(report) == []
    report["workers"][1]["matmul"][5:] = [20.0] * 2
    assert named(report) == [("a", "worker 1", "matmul")]


def test_slow_in_a_few_rounds_is_none_either():
    report = probe(2)
    report["workers"][1]["matmul"][:3] = [20.0] * 3
    assert named(report) == []


def test_a_slow_host_is_named_once_against_the_others():
    reports = [probe(8, seed=host) for host in range(4)]
    for worker in reports[2]["workers"]:
        scale(worker["matmul"], 0.5)
    assert named(*reports) == [("c", "all 8 workers", "matmul")]


@pytest.mark.parametrize(("device", "who"), [("CPU", []), ("Ascend", [("a", "worker 1", "matmul")])])
def test_what_a_core_loses_to_its_other_thread_is_no_alarm(device, who):
    """Idle cores of a virtual machine were up to 57 % apart for a whole probe (benchmarks/RESULTS.md)."""
    report = {**probe(2), "device": device}
    scale(report["workers"][1]["matmul"], 1 / 1.57)
    assert named(report) == who


@pytest.mark.parametrize(("device", "who"), [("CPU", []), ("Ascend", [("a", "worker 1 to worker 0", "bandwidth")])])
def test_messages_that_cores_copy_are_judged_by_more(device, who):
    """A link over loopback was 2.46 times slower for a whole clean probe (benchmarks/RESULTS.md)."""
    report = {**probe(2), "device": device}
    scale(report["links"][1]["bandwidth"], 1 / 2.46)
    assert named(report) == who


def test_alone_a_slow_host_cannot_be_told():
    report = probe(8)
    for worker in report["workers"]:
        scale(worker["matmul"], 0.6)
    assert named(report) == []


def test_other_kinds_are_not_compared():
    reports = [probe(1, seed=host) for host in range(3)]
    scale(reports[1]["workers"][0]["matmul"], 0.5)
    reports[1]["workers"][0]["kind"] = "an older processor"
    assert named(*reports) == []


def test_disks_are_compared_between_hosts_alone():
    reports = [probe(2, seed=host) for host in range(3)]
    scale(reports[0]["workers"][0]["disk"], 0.1)
    assert named(*reports) == [] and named(reports[0]) == []
    scale(reports[0]["workers"][1]["disk"], 0.1)
    assert named(*reports) == [("a", "/checkpoints", "disk")]


def test_an_interface_that_sends_slowly_is_named_and_not_each_of_its_links():
    report = probe(4, places=True)
    for link in report["links"]:
        if link["source"] == 2:
            scale(link["bandwidth"], 0.1)
    (one,) = outliers({"cluster": report})
    assert (one.who, one.measure) == ("node2 worker 0", "bandwidth") and "sends slowly" in one.seen


def test_one_slow_cable_is_named_by_both_ends():
    report = probe(4, places=True)
    for link in report["links"]:
        if (link["source"], link["target"]) == (1, 3):
            scale(link["bandwidth"], 0.1)
    assert named(report) == [("a", "node1 worker 0 to node3 worker 0", "bandwidth")]


def test_of_two_workers_the_slow_direction_is_named():
    report = probe(2)
    scale(report["links"][1]["bandwidth"], 0.1)
    assert named(report) == [("a", "worker 1 to worker 0", "bandwidth")]


def test_a_worker_that_answers_late_is_named():
    report = probe(5, places=True)
    for link in report["links"]:
        if 4 in (link["source"], link["target"]):
            scale(link["latency"], 20)
    assert named(report) == [("a", "node4 worker 0", "latency")]


def test_links_within_a_host_are_not_compared_with_those_between_hosts():
    report = probe(4)
    for rank, worker in enumerate(report["workers"]):
        worker["place"] = f"node{rank // 2}"
    for link in report["links"]:
        if link["source"] // 2 != link["target"] // 2:
            scale(link["bandwidth"], 0.05)
    assert named(report) == []


def limit(ratio, count, floor):
    """The limit of one among so many, whose times are 1 to 1.4 and the one's `ratio` times their middle."""
    times = {index: Times(1 + 0.1 * (index % 5), 1 + 0.1 * (index % 5)) for index in range(count)}
    times[-1] = Times(1.2 * ratio, 1.2 * ratio)
    found = slow(times, dict.fromkeys(times, floor))
    assert all(row[0] == pytest.approx(ratio) for row in found.values()) and list(found) in ([], [-1])
    return found[-1][1] if found else None


def test_the_limit_grows_with_the_spread_and_with_the_number_of_workers():
    assert limit(1.4, 10, 0.1) is None
    assert limit(2.0, 10, 0.1) == pytest.approx(1 + 3.5 * 1.4826 * 0.1 / 1.2)
    assert limit(2.0, 5000, 0.1) == pytest.approx(1 + 4.61 * 1.4826 * 0.1 / 1.2, rel=1e-3)


def test_without_spread_the_floor_is_the_limit():
    times = {index: Times(1.0, 1.0) for index in range(4)}
    edge, alike = 1 + FLOORS["matmul"], dict.fromkeys(range(5), FLOORS["matmul"])
    assert slow({**times, 4: Times(edge, edge)}, alike) == {}
    assert list(slow({**times, 4: Times(edge + 0.01, edge + 0.01)}, alike)) == [4]


def test_the_floor_grows_with_the_waiting_of_a_worker_or_of_its_peers():
    base = FLOORS["matmul"]
    assert floors("matmul", {0: 0.0, 1: 0.0, 2: 0.5}) == {0: base, 1: base, 2: 2 * base}
    assert floors("matmul", {0: 0.0, 1: 0.5, 2: 0.75}) == {0: 2 * base, 1: 2 * base, 2: 4 * base}
    assert floors("matmul", {0: 0.0, 1: 0.5}) == {0: 2 * base, 1: 2 * base}
    assert floors("matmul", {0: 1.0, 1: 1.0}) == pytest.approx({0: 100 * base, 1: 100 * base})


@pytest.mark.parametrize(("waited", "who"), [(0.0, ["worker 1"]), (0.8, [])])
def test_a_worker_that_hardly_ran_is_judged_by_more(waited, who):
    report = probe(2)
    scale(report["workers"][1]["matmul"], 0.5)
    report["workers"][1]["waited"] = [waited] * 7
    assert [one.who for one in outliers({"": report}) if one.verdict == "fail"] == who


def test_a_link_that_is_broken_is_named():
    report = probe(3, places=True)
    report["links"][0].update(bandwidth=[], latency=[], waited=[], failed="timed out")
    (one,) = outliers({"a": report})
    assert (one.who, one.verdict, one.seen) == ("node0 worker 0 to node1 worker 0", "fail", "timed out")


@pytest.mark.parametrize(
    ("factor", "waited", "word"), [(0.4, 0.0, "fail"), (0.4, 0.4, "ok"), (0.01, 0.4, "fail"), (0.01, 0.6, "unknown")]
)
def test_a_link_whose_ends_waited_for_their_cores_is_judged_by_more_or_not_at_all(factor, waited, word):
    """A link that took 100 times as long was ok where its workers had no core for 60 % of the time."""
    report = {**probe(2), "device": "Ascend"}
    scale(report["links"][1]["bandwidth"], factor)
    report["links"][1]["waited"] = [waited] * 7
    assert gate({"a": report}).verdict == word and len(named(report)) == (word != "ok")


def test_workers_that_differ_too_much_among_each_other_are_unknown():
    """Of workers at 100, 67, 50 and 40 GFLOP/s none was slower than the others."""
    report = {**probe(4), "device": "Ascend"}
    for worker, factor in zip(report["workers"], (1.0, 0.67, 0.5, 0.4), strict=True):
        scale(worker["matmul"], factor)
    verdict = gate({"a": report})
    assert verdict.verdict == "unknown" and len(verdict.reasons) == 2
    assert all("they differ too much among each other" in reason for reason in verdict.reasons)
    assert findings({"a": report})[-1].seen.startswith("none of the 4 workers is surely slower")


def test_links_that_differ_too_much_among_each_other_are_unknown():
    """Of twelve links at 1, .67, .4 and .3 of a rate none was slower than the others."""
    report = {**probe(4, noise=0.0), "device": "Ascend"}
    for link, factor in zip(report["links"], 3 * (1.0, 0.67, 0.4, 0.3), strict=True):
        scale(link["bandwidth"], factor)
    verdict = gate({"a": report})
    assert verdict.verdict == "unknown" and len(verdict.reasons) == 3
    assert all("they differ too much among each other" in reason for reason in verdict.reasons)


def test_times_of_zero_have_ratios_too():
    assert slow({"a": Times(0.0, 0.0)}, {"a": 0.25}) == {}
    assert slow(dict.fromkeys("abc", Times(0.0, 0.0)), dict.fromkeys("abc", 0.25)) == {}


def test_a_worker_whose_links_all_waited_for_cores_is_not_said_to_send_slowly():
    report = {**probe(4), "device": "Ascend"}
    for link in [link for link in report["links"] if link["source"] == 1]:
        scale(link["bandwidth"], 0.01)
        link["waited"] = [0.6] * 7
    assert {(one.who, one.verdict) for one in outliers({"": report})} == {("worker 1", "unknown")}


def test_the_gate():
    assert gate({"a": probe(4)}).verdict == "ok"
    slow_one, lost, waiting = probe(4), probe(4), probe(4)
    scale(slow_one["workers"][3]["matmul"], 0.5)
    verdict = gate({"a": slow_one})
    assert verdict.verdict == "fail" and "a, worker 3: matmul" in verdict.reasons[0]
    lost["workers"][1].update(matmul=[], memory=[], failed="no answer within 30 s")
    verdict = gate({"a": lost})
    assert verdict.verdict == "fail" and verdict.reasons == ["a, worker 1: no answer within 30 s"]
    waiting["workers"][1]["waited"] = [0.4] * 7
    verdict = gate({"a": waiting})
    assert verdict.verdict == "warn" and "40%" in verdict.reasons[0]


def test_what_the_plan_says_stands_beside():
    report = probe(2)
    report["notes"] = ["2 cores for 2 workers"]
    assert gate({"a": report, "b": report}).reasons == [
        "none of the 4 workers is slower than the others; 2 cores for 2 workers"
    ]


def test_one_worker_alone_is_unknown_to_the_gate():
    verdict = gate({"a": probe(1)})
    assert verdict.verdict == "unknown" and "cannot be compared" in verdict.reasons[0]
    assert gate({"a": probe(1), "b": probe(1, seed=1)}).verdict == "ok"


def test_a_limit_that_stops_all_workers_alike_is_told():
    report = probe(2)
    for worker in report["workers"]:
        worker["throttled"] = [0.5] * 7
    assert gate({"a": report}).verdict == "warn"
