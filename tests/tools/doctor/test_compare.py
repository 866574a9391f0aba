"""These tests check which differences between hosts are found: by reports in a folder, and by clocks that were
measured.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.tools.doctor.reports import CHECKS, FACTS, folder, probe, report, scale, without
from tools.doctor.ask import Answer, Skew, Trouble, parsed, read_folder
from tools.doctor.cli import doctor
from tools.doctor.compare import compare, text
from tools.doctor.report import Report, ReportError, read_report


def outliers(reports):
    """{(what, verdict): (hosts, seen)} without the line on clocks, which reports by themselves never tell."""
    found = compare({host: Answer(told) for host, told in reports.items()}).outliers
    return {(item.what, item.verdict): (item.hosts, item.seen) for item in found if item.what != "clocks"}


def hosts(count, **others):
    return {**{f"node{number}": report() for number in range(count)}, **others}


def test_a_report_is_read_as_it_was_written():
    written = report({"driver": None}, probe=probe(), swap="warn")
    assert read_report(written.text()) == written


def test_a_single_host_cannot_be_compared():
    """It had no outlier, as hosts have that are alike."""
    words = "no other host has a report to compare this one with"
    assert outliers(hosts(1)) == {("comparison", "unknown"): (["node0"], words)}
    answers = {"node0": Answer(report(), Skew(0.0, 0.001))}
    assert text(answers, compare(answers)).endswith("\n1 unknown")


def test_hosts_alike_have_no_outlier():
    assert outliers(hosts(4)) == {}


@pytest.mark.parametrize(
    ("fact", "value", "verdict"),
    [
        ("driver", "24.1.rc2", "warn"),
        ("CANN", "8.2.RC1", "fail"),
        ("code", "01d", "fail"),
        ("recipe", "0ther", "fail"),
        ("data /data/web", "not there", "fail"),
        ("packet size of eth0", "1500", "warn"),
        ("driver", None, "unknown"),
    ],
)
def test_what_one_host_has_otherwise(fact, value, verdict):
    found = outliers(hosts(3, odd=report({fact: value})))
    assert found == {(fact, verdict): (["odd"], value or "not told")}


def test_a_card_that_one_host_alone_has():
    assert outliers(hosts(3, odd=report({"packet size of eth1": "1500"}))) == {
        ("packet size of eth1", "unknown"): (["node0", "node1", "node2"], "not told")
    }


def test_without_a_majority_all_values_are_shown():
    found = compare({host: Answer(told) for host, told in {"a": report(), "b": report({"recipe": "x"})}.items()})
    rows = [item for item in found.outliers if item.what == "recipe"]
    assert [(list(item.hosts), item.seen) for item in rows] == [(["a"], "5eed"), (["b"], "x")]
    assert all(item.usual == "no value is common to most hosts" and item.verdict == "fail" for item in rows)
    assert "recipe" not in found.common and found.common["driver"] == "25.5.2"


def test_what_no_host_tells_is_unknown_not_fine():
    found = outliers({host: report({"CANN": None}) for host in ("a", "b")})
    assert found == {("CANN", "unknown"): (["a", "b"], "not told")}


def test_checks_by_hosts():
    many = hosts(3, odd=report(governor="warn", swap="fail"))
    assert outliers(many) == {("swap", "fail"): (["odd"], "fine"), ("governor", "warn"): (["odd"], "fine")}
    assert outliers({host: report(swap="fail") for host in "ab"}) == {("swap", "fail"): (["a", "b"], "fine")}


def test_what_every_host_has_is_one_line():
    found = compare({host: Answer(report(swap="warn", clock="unknown")) for host in "ab"})
    assert found.everywhere == {"ok": ["governor"], "unknown": ["clock"], "warn": ["swap"]}


def test_a_check_that_a_report_lacks_is_unknown():
    short = Report([item for item in report().findings if item.check != "swap"], FACTS)
    assert outliers(hosts(2, odd=short)) == {("swap", "unknown"): (["odd"], "not in its report")}


WHOLE = report().text()
BROKEN = {
    "": "the text is empty",
    WHOLE[: len(WHOLE) // 2]: "not complete JSON",
    "[]": "an earlier version of tc3",
    "{}": "not a report of tc3 doctor",
    "7": "not a report of tc3 doctor",
    "[" * 100_000: "not complete JSON",
    WHOLE.replace(f'"{FACTS["tc3"]}"', '"0.0.1"'): "version 0.0.1 of tc3 wrote this report, but this is",
    WHOLE.replace('"ok"', '"fine"'): "findings or its probe cannot be read",
    WHOLE.replace('"probe": null', '"probe": [1]'): "findings or its probe cannot be read",
    without(report(), "findings"): "findings or its probe cannot be read",
    Report([], FACTS).text(): "findings or its probe cannot be read",
    Report([*report(clock="fail").findings, *report().findings], FACTS).text(): "findings or its probe cannot be read",
    " " * ((1 << 22) + 1): "so it is not a report",
}


@pytest.mark.parametrize("text", BROKEN, ids=[words[:30] for words in BROKEN.values()])
def test_a_text_that_is_no_report(text):
    told = parsed(text)
    assert isinstance(told, Trouble) and BROKEN[text] in told.words
    found = compare({"a": Answer(report()), "b": Answer(told)}).outliers
    assert (found[0].what, found[0].verdict, found[0].hosts) == ("report", "fail", ["b"])


def clocks(*skews):
    found = compare({f"n{number}": Answer(report(), skew) for number, skew in enumerate(skews)}).outliers
    return [(item.verdict, list(item.hosts)) for item in found if item.what == "clocks"]


def test_clocks_are_compared_with_the_middle_one():
    """All hosts are three seconds ahead of ours, which is nobody's fault but ours; one is a second ahead of them."""
    near = [Skew(3.0 + offset, 0.002) for offset in (0, 0.01, -0.02, 0.05)]
    assert clocks(*near) == []
    assert clocks(*near, Skew(4.0, 0.002)) == [("fail", ["n4"])]


def test_many_wrong_clocks_are_one_line():
    near = [Skew(0.0, 0.001)] * 5
    found = compare(
        {f"n{n}": Answer(report(), skew) for n, skew in enumerate([*near, Skew(2, 0.001), Skew(-1, 0.001)])}
    )
    assert [(list(item.hosts), item.seen) for item in found.outliers] == [(["n5", "n6"], "-1.000 to +2.000 s")]


def test_hosts_that_cannot_be_reached_are_one_line():
    away = {f"n{n}": Answer(Trouble("ssh", f"ssh: connect to host n{n} port 22: timed out", "x")) for n in (1, 2)}
    there = {f"n{n}": Answer(report(), Skew(0.0, 0.001)) for n in (0, 3)}
    found = compare({**there, **away}).outliers
    assert [(list(item.hosts), item.seen) for item in found] == [
        (["n1", "n2"], "ssh: connect to host HOST port 22: timed out")
    ]


def test_a_skew_that_the_round_trip_hides_is_unknown():
    near = [Skew(0.0, 0.002)] * 3
    assert clocks(*near, Skew(0.15, 0.2)) == [("unknown", ["n3"])]
    assert clocks(*near, None) == [("unknown", ["n3"])]


def run(*arguments):
    return CliRunner().invoke(doctor, list(map(str, arguments)))


def test_512_hosts_in_a_folder(tmp_path):
    """The outliers among them, and nothing else, in a page."""
    many = {f"node{number:03d}": report(swap="warn") for number in range(512)}
    many["node017"] = report({"driver": "24.1.rc2"}, swap="warn")
    many |= {f"node{number}": report({"packet size of eth0": "1500"}, swap="warn") for number in range(100, 140)}
    many["node200"] = WHOLE[:-9]
    many["node300"] = report(governor="fail", swap="warn")
    many["node301"] = report(governor="fail", swap="warn")
    result = run("--nodes", folder(tmp_path / "reports", many))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "512 hosts, 511 with a report" and len(lines) < 25, result.stdout
    assert "fail    report               node200: the text is not complete JSON" in result.stdout
    assert "fail    governor             2 hosts, node[300-301]: fine" in result.stdout
    assert "warn    packet size of eth0  40 hosts, node[100-139]: 1500" in result.stdout
    assert "471 of 511 hosts have 9000" in result.stdout and "510 of 511 hosts have 25.5.2" in result.stdout
    assert "warn on every host: swap" in result.stdout and "2 fail, 2 warn, 1 unknown" in lines[-1]


def test_json_and_the_exit_code_of_hosts_alike(tmp_path):
    result = run("--nodes", folder(tmp_path / "reports", hosts(3)), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["hosts"] == dict.fromkeys(("node0", "node1", "node2"), True)
    assert [item["what"] for item in found["outliers"]] == ["clocks"] and found["common"]["driver"] == "25.5.2"
    assert found["everywhere"] == {"ok": list(CHECKS)}


def test_a_report_that_may_not_be_read(tmp_path):
    (tmp_path / "node0.json").mkdir()
    told = read_folder(tmp_path)["node0"].told
    assert isinstance(told, Trouble) and "Is a directory" in told.words


def probed_outliers(reports):
    found = compare({host: Answer(told) for host, told in reports.items()}).outliers
    return [(item.what, item.verdict, list(item.hosts)) for item in found if item.what != "clocks"]


def probed_hosts(count):
    return {f"node{number}": probe(seed=number) for number in range(count)}


def reports(probes):
    return {host: report(probe=one) for host, one in probes.items()}


def test_hosts_that_are_equally_fast():
    assert probed_outliers(reports(probed_hosts(8))) == []


def test_a_host_all_of_whose_workers_are_slow():
    """On only that host nothing is to be seen: all of its workers are alike."""
    probes = probed_hosts(8)
    for worker in probes["node5"]["workers"]:
        scale(worker["matmul"], 0.5)
    assert probed_outliers({"node5": report(probe=probes["node5"])}) == [("comparison", "unknown", ["node5"])]
    found = probed_outliers(reports(probes))
    assert found == [("probe matmul", "fail", ["node5"])]


def test_a_link_that_is_unknown_beside_a_slow_worker_is_that_of_its_host():
    probes = probed_hosts(3)
    scale(probes["node1"]["workers"][0]["matmul"], 0.3)
    probes["node2"]["links"][0]["waited"] = [0.6] * 7
    scale(probes["node2"]["links"][0]["bandwidth"], 0.01)
    found = probed_outliers(reports(probes))
    assert found == [("probe matmul", "fail", ["node1"]), ("probe bandwidth", "unknown", ["node2"])]


def test_a_host_that_was_not_probed():
    found = probed_outliers({**reports(probed_hosts(3)), "node9": report()})
    assert found == [("probe", "unknown", ["node9"])]


def test_workers_without_a_peer_are_unknown():
    found = probed_outliers(reports({"a": probe(workers=1)}))
    assert sorted(found) == [("comparison", "unknown", ["a"]), ("probe", "unknown", ["a"])]


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
    """The comparison ends without an error, whatever numbers a failed worker leaves in the lists."""
    probes = probed_hosts(3)
    for key in ("matmul", "memory", "disk", "waited", "throttled"):
        probes["node1"]["workers"][0][key] = numbers
    probes["node1"]["links"][0]["bandwidth"] = numbers
    assert isinstance(parsed(report(probe=probes["node1"]).text()), Report)
    assert probed_outliers(reports(probes)) is not None


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("workers", "matmul", [10**400] * 7),
        ("workers", "memory", []),
        ("workers", "waited", [0.0] * 6),
        ("links", "waited", []),
    ],
)
def test_a_probe_that_lost_numbers_is_refused(kind, name, value):
    """A report without a link's `waited` or a worker's `memory` is refused; the first ended in a traceback, and the
    second counted as fast.
    """
    told = json.loads(report(probe=probe(2)).text())
    assert read_report(json.dumps(told)).probe
    told["probe"][kind][0][name] = value
    with pytest.raises(ReportError, match="its findings or its probe cannot be read"):
        read_report(json.dumps(told))
