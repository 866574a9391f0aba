"""This module turns the measurements of a check of `tc3 firsthour` into findings that name the host and the device. The
functions of this module are pure, so that a simulated cluster is judged by the same rules as a real one.

`tools.doctor.compare` judges hosts, and `tools.doctor.outliers` judges workers and disks; this module also judges what
these two do not check: the memory of devices, links between devices of different hosts, and operators that differ
between devices. A link or a network port is slow by the rule of `tools.doctor.outliers.slow`, with the floor `LINK`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from launch.firsthour.checks import Finding, Outcome
from tools.accuracy.operators.run import NOT_RUNNABLE
from tools.doctor.ask import Answer, Skew, Trouble, parsed
from tools.doctor.checks import CHECKS
from tools.doctor.compare import ALONE, compare
from tools.doctor.outliers import MENDS, ON_CORES, UNCLEAR, Times, compared, outliers, slow, unclear
from tools.doctor.report import Report
from tools.hardware.units import GIB

LINK = 0.25  # a device's link takes at least this share longer than others (assumed: no link of an NPU was measured)
SAME_MEMORY = 1 << 26  # bytes by which the memory of equal devices may differ
# facts and checks that the check `versions` judges; all others are those of the check `hosts`
VERSIONS = (
    *("tc3", "code", "Python", "mindspore", "mindformers", "driver", "firmware", "CANN", "NPUs", "kernel", "recipe"),
    *("data", "clock", "disk", "disk_write", "free_ports", "python_packages", "checkpoint_room", "packet"),
)
_OWN_NAME = re.compile(r"(\S+) (?:is (\S+(?:, \S+)*)|leads nowhere)")  # as the check `host_name` of tc3 doctor says it
_SPECIAL = " special "
Place = tuple[str, int]


def hosts_evidence(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Return the reports that the hosts gave to tc3 doctor as plain values."""
    return {
        host: {
            "report": answer.told.text() if isinstance(answer.told, Report) else None,
            "trouble": asdict(answer.told) if isinstance(answer.told, Trouble) else None,
            "skew": [answer.skew.ahead, answer.skew.error] if answer.skew else None,
        }
        for host, answer in answers.items()
    }


def answers_of(evidence: Mapping[str, Any]) -> dict[str, Answer]:
    """Return the reports of the hosts from the plain values that `hosts_evidence` returned."""
    found = {}
    for host, one in evidence.items():
        told = Trouble(**one["trouble"]) if one["trouble"] else parsed(one["report"])
        found[host] = Answer(told, Skew(*one["skew"]) if one["skew"] else None)
    return found


def own_names(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the names that the hosts have by their own reports, and the addresses of these names; the file given by
    --nodes may use other names for the same hosts.
    """
    evidence = next((one.evidence for one in outcomes if one.check == "hosts"), {})
    reports = [answer.told for answer in answers_of(evidence).values() if isinstance(answer.told, Report)]
    seen = [item.seen for report in reports for item in report.findings if item.check == "host_name"]
    found = [_OWN_NAME.fullmatch(words) for words in seen]
    return [name for match in found if match for name in (match[1], *(match[2] or "").split(", ")) if name]


def judge_hosts(evidence: Mapping[str, Any], hosts: Sequence[str], versions: bool) -> list[Finding]:
    """Compare the hosts' reports (`hosts_evidence`) by the rules of `tc3 doctor`. Return the findings of the check
    `versions` if `versions` is set, and otherwise those of the check `hosts`. A difference between hosts is reported
    for each host; nothing that needs a second host, such as the comparison of clocks, is reported for a single host.
    """
    answers, alone = answers_of(evidence), len(hosts) == 1
    comparison = compare(answers)
    silent = [host for host, answer in answers.items() if isinstance(answer.told, Trouble)]
    words = "the node gave no report, so nothing of it is compared"
    found = [Finding("unknown", "report", words, host) for host in silent if versions]
    for item in comparison.outliers:
        if (
            item.what.startswith(VERSIONS) != versions
            or item.what.startswith("probe")
            or (alone and item.what in ("clocks", ALONE))
        ):
            continue
        for host in [""] if len(item.hosts) == len(hosts) and not alone else item.hosts:
            found.append(Finding(item.verdict, item.what, item.seen, host, None, item.mend))
    for verdict, names in comparison.everywhere.items():
        for name in names:
            known = any(one.what == name for one in found)
            if verdict != "ok" and name.startswith(VERSIONS) == versions and not known:
                found.append(
                    Finding(
                        verdict, name, f"{verdict} on every node", "", None, CHECKS[name].mend if name in CHECKS else ""
                    )
                )
    told = [name for verdict, names in comparison.everywhere.items() if verdict != "unknown" for name in names]
    told += [name for name in comparison.common if name != "tc3"]  # no report of another tc3 is read
    judged = sum(name.startswith(VERSIONS) == versions for name in told)
    count = len(answers) - len(silent)
    if judged and (alone or count > 1) and not any(item.verdict == "fail" for item in found):
        words = f"{judged} checks and facts are known" + f" and the same on {count} nodes" * (count > 1)
        found.append(Finding("ok", "nodes", words))
    return found


def judge_devices(evidence: Mapping[str, Any]) -> list[Finding]:
    """Judge the measured speeds of workers, disks and links, and the memory of the devices; return the findings.

    Args:
        evidence: "probes": host -> probe of the doctor; "memory": [host, device, bytes] of each device, or nothing
            where it is unknown; "links": [{"source": [host, device], "target": ..., "gbytes": [GB/s by round]}].
    """
    probes = evidence["probes"]
    on_cores = all(probe["device"] == "CPU" for probe in probes.values())
    found = [
        Finding(item.verdict, item.measure, item.seen, item.host, _device(item.who), MENDS[item.measure])
        for item in outliers(probes)
    ]
    links = _links(evidence["links"], on_cores)
    surely = "surely " * any(item.verdict == "unknown" for item in (*found, *links))
    found += [*_memories(evidence["memory"]), *links]
    measured = any(row["source"][0] != row["target"][0] and row["gbytes"] for row in evidence["links"])
    if len(probes) > 1 and not measured:
        words = "none was measured by itself; the check `collectives` times the groups of ranks that use them"
        found.append(Finding("unknown", "links between nodes", words))
    workers, count = sum(len(probe["workers"]) for probe in probes.values()), compared(probes)
    if any(item.verdict == "fail" for item in found):
        return found
    if count < workers:
        words = f"{workers - count} of {workers} cannot be compared, because no other worker is of the same kind"
        found.append(Finding("unknown", "devices", words))
    if count:
        words = f"{count} workers on {len(probes)} nodes, none {surely}slower than its peers"
        found.append(Finding("ok", "devices", words))
    return found


def _device(who: str) -> int | None:
    """Return the number of the worker in a text of tc3 doctor such as "worker 3" or "worker 3 to worker 5"."""
    words = who.split()
    return int(words[1]) if len(words) > 1 and words[0] == "worker" and words[1].isdigit() else None


def _memories(rows: Iterable[Sequence[Any]]) -> list[Finding]:
    """Return findings about devices with less memory than most devices have."""
    memory = {(host, int(device)): int(size) for host, device, size in rows}
    if not memory:
        words = "no device tells how much memory it has"
        return [Finding("unknown", "memory of devices", words)]
    sizes = Counter(memory.values())
    alike = {size: sum(sizes[other] for other in sizes if abs(other - size) <= SAME_MEMORY) for size in sizes}
    usual = max(sizes, key=lambda size: (alike[size], size))  # of two equally frequent ones the larger
    return [
        Finding(
            "fail", "memory of devices", f"{size / GIB:.1f} GiB, where most devices have {usual / GIB:.1f}", host,
            device, "reset the device; if it stays smaller, start without it or lower context.max_device_memory",
        )
        for (host, device), size in memory.items()
        if usual - size > SAME_MEMORY
    ]  # fmt: skip


def _links(rows: Sequence[Mapping[str, Any]], on_cores: bool) -> list[Finding]:
    """Return findings about ports that are slow on every link, and then about single slow links; links inside nodes and
    links between nodes are judged separately.
    """
    found: list[Finding] = []
    for inside in (True, False):
        times = {}
        for row in rows:
            ends = (_place(row["source"]), _place(row["target"]))
            if (ends[0][0] == ends[1][0]) == inside and row["gbytes"]:
                rates = row["gbytes"]
                times[ends] = Times(1 / median(rates), 1 / max(rates))
        found += _slow_links(times, on_cores, inside)
    return found


def _slow_links(times: Mapping[tuple[Place, Place], Times], on_cores: bool, inside: bool) -> list[Finding]:
    floor = ON_CORES["bandwidth"] if on_cores else LINK
    own: dict[Place, list[tuple[Place, Place]]] = defaultdict(list)
    for ends in times:
        for place in ends:
            own[place].append(ends)
    best = {place: Times(*(min(times[ends][at] for ends in mine) for at in (0, 1))) for place, mine in own.items()}
    where = "inside the node" if inside else "between nodes"
    mend = MENDS["bandwidth"]
    found, explained = [], set()
    for place, (ratio, _) in (slow(best, dict.fromkeys(best, floor)) if len(best) > 2 else {}).items():
        explained.update(own[place])
        seen = f"{ratio:.1f} times as long as others on each of its {len(own[place])} links {where}"
        found.append(Finding("fail", "network port", seen, *place, mend))
    rest = {ends: pair for ends, pair in times.items() if ends not in explained}
    for (source, target), (ratio, _) in slow(rest, dict.fromkeys(rest, floor)).items():
        seen = f"{ratio:.1f} times as long as other links {where}, to {target[0]}, device {target[1]}"
        found.append(Finding("fail", "link", seen, *source, mend))
    for (source, target), (ratio, _) in unclear(rest, dict.fromkeys(rest, floor)).items():
        seen = f"{ratio:.1f} times as long as other links {where}, to {target[0]}, device {target[1]}; {UNCLEAR}"
        found.append(Finding("unknown", "link", seen, *source, mend))
    return found


def _place(value: Sequence[Any]) -> Place:
    return str(value[0]), int(value[1])


def _spread(errors: Iterable[float]) -> str:
    """Return words for the different errors of the devices; all of them are named if they are few."""
    found = [f"{error:.3g}" for error in sorted(set(errors))]
    few = f"errors {', '.join(found)}"
    return few if len(found) <= 4 else f"{len(found)} different errors from {found[0]} to {found[-1]}"


def judge_operators(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the findings about operators: those out of tolerance, and devices whose results differ from those of most
    devices.

    Args:
        rows: for each host and device "host", "device", "results": operator and check -> [status, error,
            detail], and "shipped": what tc3 accuracy ops --shipped says of the host's golden results, or None.
    """
    found: list[Finding] = []
    mend = "take the device out; compare CANN, firmware and precision modes with the other devices"
    kinds = Counter(name for row in rows for name in row["results"])
    checks = sum(_status(row, name) != NOT_RUNNABLE for row in rows for name in row["results"])
    for row in rows:
        for special in (False, True):  # infinities, NaN and denormals apart: no training should meet them
            names = [name for name, result in row["results"].items() if result[0] == "fail"]
            wrong = [name for name in names if (_SPECIAL in name) == special]
            if wrong:
                more = f"; {len(wrong) - 1} more check{'s' * (len(wrong) > 2)} failed" if len(wrong) > 1 else ""
                seen = f"{wrong[0]}: {row['results'][wrong[0]][2]}{more}"
                found.append(
                    Finding("warn" if special else "fail", "operators", seen, row["host"], row["device"], mend)
                )
    missing = {name for name in kinds if all(_status(row, name) == NOT_RUNNABLE for row in rows)}
    absent = sorted({" ".join(name.split()[:2]) for name in missing})
    if absent:
        found.append(Finding("warn", "operators", f"no kernel on these devices: {', '.join(absent)}"))
    for row in rows:
        if lacking := [name for name in kinds if name not in missing and _status(row, name) == NOT_RUNNABLE]:
            more = f" and {len(lacking) - 1} more check{'s' * (len(lacking) > 2)}" if len(lacking) > 1 else ""
            words = f"{lacking[0]}{more}: computed on other devices, but not on this one"
            found.append(Finding("unknown", "operators", words, row["host"], row["device"], mend))
    named = {(item.where, item.device) for item in found if item.verdict == "fail"}
    split = []
    for name in (name for name in kinds if name not in missing):
        known = [row for row in rows if _status(row, name) != NOT_RUNNABLE]
        errors = {(row["host"], row["device"]): row["results"][name][1] for row in known}
        usual, count = Counter(errors.values()).most_common(1)[0]
        for place, error in errors.items():
            if error != usual and 2 * count > len(errors) and place not in named:
                named.add(place)
                seen = f"{name}: error {error:.3g}, where {count} of {len(errors)} devices have {usual:.3g}"
                found.append(Finding("warn", "operators", seen, *place, "compare firmware with the other devices"))
        if 2 * count <= len(errors) and len({error for place, error in errors.items() if place not in named}) > 1:
            split.append(f"{name}: {_spread(errors.values())}")
    if split:
        more = f" (also in {len(split) - 1} more check{'s' * (len(split) > 2)})" if len(split) > 1 else ""
        words = f"{split[0]}: the devices compute different results, and no result is that of most devices{more}"
        found.append(Finding("warn", "operators", words, remedy="compare firmware and processors of the devices"))
    found += _golden(rows)
    if not checks:
        found.append(Finding("unknown", "operators", "no operator was computed on any device"))
    elif not any(item.verdict == "fail" for item in found):
        found.append(Finding("ok", "operators", f"{checks} checks on {len(rows)} devices, all within the tolerance"))
    return found


def _golden(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return findings about hosts whose own golden results differ from the stored ones, because their devices were
    judged by wrong results.
    """
    hosts = {row["host"]: row["shipped"] for row in rows if row["shipped"]}
    found = []
    for host, one in hosts.items():
        if one["differences"]:
            first, *rest = one["differences"]
            more = f" (further golden results that differ: {len(rest)})" if rest else ""
            mend = "compare NumPy and the processor with other hosts"
            found.append(Finding("fail", "golden results", f"{first}{more}", host, None, mend))
    if hosts and not found:
        one = next(iter(hosts.values()))
        words = f"{one['compared']} golden results of {len(hosts)} hosts are as shipped on {one['made']}"
        found.append(Finding("ok", "golden results", words))
    return found


def results_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return a dictionary (operator, type, shape, phase) -> (status, error, detail), made from the rows of tc3 accuracy
    ops.
    """
    return {
        f"{row['op']} {row['dtype']} {tuple(row['shape'])} {row['phase']} {row['tensor']}": [
            row["status"], float(row["error"]), row["detail"]
        ]
        for row in rows
    }  # fmt: skip


def _status(row: Mapping[str, Any], name: str) -> str:
    return str(row["results"][name][0]) if name in row["results"] else NOT_RUNNABLE
