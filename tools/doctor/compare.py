"""This module finds the differences between hosts: hosts without a report, checks that fail, and versions or clocks
that most other hosts do not have.

The module computes outliers from the answers of the hosts, without side effects. The value that most hosts have counts
as right, because there is no other reference; if no value is that of more than half of the hosts, all values are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import click

from tools.doctor.ask import Answer, Trouble, skews
from tools.doctor.checks import CHECKS, COLOURS, Finding, Verdict
from tools.doctor.outliers import MENDS, findings
from tools.doctor.outliers import outliers as slower
from tools.doctor.report import Report
from tools.process.host import shorten

SKEW = 0.1  # seconds, as the check `clock` allows
ALONE = "comparison"  # what is unknown where only one host has a report
ORDER: Sequence[Verdict] = ("fail", "warn", "unknown")
_SAME = "install the same package on every host"
# fact, or what it begins with -> (verdict where a host has another value, what to do)
_MEANING: dict[str, tuple[Verdict, str]] = {
    "code": ("fail", "use one checkout on a disk that all hosts share, or run git pull on that host"),
    "mindspore": ("fail", "pip install -e . there"),
    "mindformers": ("fail", "pip install -e . there"),
    "Python": ("warn", _SAME),
    "driver": ("warn", _SAME),
    "firmware": ("warn", _SAME),
    "CANN": (
        "fail",
        "install one CANN release on every host, because collectives between two releases are not supported",
    ),
    "NPUs": ("fail", "run npu-smi info on that host; leave the host out if it lacks an NPU"),
    "kernel": ("warn", _SAME),
    "cores": ("warn", "run lscpu on that host, and look at the cpuset of its job"),
    "packet size": ("warn", "ip link set CARD mtu N (as the switch, on every host)"),
    "recipe": ("fail", "copy the same recipe and bases to every host"),
    "data": ("fail", "copy the corpus again, or mount the same disk on all hosts"),
}


@dataclass(frozen=True)
class Outlier:
    """An `Outlier` names the hosts that differ from most other hosts in one respect, the usual value of the other
    hosts, and a remedy.
    """

    what: str
    verdict: Verdict
    hosts: Sequence[str]
    seen: str
    usual: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Comparison:
    """A `Comparison` holds the differences between hosts with the worst first, the checks that have the same verdict on
    every host, and the facts that are equal on all hosts.
    """

    outliers: Sequence[Outlier]
    everywhere: Mapping[Verdict, Sequence[str]] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)


def compare(answers: Mapping[str, Answer]) -> Comparison:
    """Return the differences between the hosts of a cluster."""
    reports = {host: answer.told for host, answer in answers.items() if isinstance(answer.told, Report)}
    names = dict.fromkeys(name for report in reports.values() for name in report.facts)
    facts = [item for name in names for item in _fact(name, reports)]
    found = [*_troubles(answers), *_clocks(answers), *facts, *_probes(reports), *_first_hour(reports)]
    if len(reports) == 1:
        found.append(Outlier(ALONE, "unknown", list(reports), "no other host has a report to compare this one with"))
    everywhere: dict[Verdict, list[str]] = {}
    checks = dict.fromkeys(item.check for report in reports.values() for item in report.findings)
    checks.pop("probe", None)  # each host's own view of it; `_probes` sees all of them, `_first_hour` the rest
    for name in checks:
        outliers, same = _check(name, reports)
        found += outliers
        if same:
            everywhere.setdefault(same, []).append(name)
    found.sort(key=lambda item: ORDER.index(item.verdict))
    return Comparison(found, everywhere, _common(reports))


def _grouped(values: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return (value, its hosts), the most frequent one first."""
    counts = Counter(values.values())
    return [(value, [host for host in values if values[host] == value]) for value, _ in counts.most_common()]


def _troubles(answers: Mapping[str, Answer]) -> list[Outlier]:
    """Return the hosts without a report, grouped by the reason; in the reasons a placeholder replaces the host's own
    name, so that equal reasons are equal texts.
    """
    troubles = {host: answer.told for host, answer in answers.items() if isinstance(answer.told, Trouble)}
    found = []
    for words, hosts in _grouped({host: trouble.words.replace(host, "HOST") for host, trouble in troubles.items()}):
        first = troubles[hosts[0]]
        one = first.words if len(hosts) == 1 else words
        found.append(Outlier(first.what, "fail", hosts, one, mend=first.mend))
    return found


def _fact(name: str, reports: Mapping[str, Report]) -> list[Outlier]:
    """Return the hosts that have another value of a fact than most hosts, and the hosts that do not report the fact."""
    told = {host: report.facts.get(name) for host, report in reports.items()}
    known = {host: value for host, value in told.items() if value is not None}
    silent = [host for host, value in told.items() if value is None]
    groups = _grouped(known)
    most = bool(groups) and 2 * len(groups[0][1]) > len(known)
    usual = (
        f"{len(groups[0][1])} of {len(told)} hosts have {groups[0][0]}" if most else "no value is common to most hosts"
    )
    verdict, mend = next((meaning for key, meaning in _MEANING.items() if name.startswith(key)), ("warn", _SAME))
    others = groups[1:] if most else groups
    found = [Outlier(name, verdict, hosts, value, usual, mend) for value, hosts in others]
    if silent:
        found.append(Outlier(name, "unknown", silent, "not told", usual if groups else "no host tells"))
    return found


def _common(reports: Mapping[str, Report]) -> dict[str, str]:
    tables = [report.facts for report in reports.values()]
    first = tables[0] if tables else {}
    return {name: value for name, value in first.items() if value and all(t.get(name) == value for t in tables)}


def _check(name: str, reports: Mapping[str, Report]) -> tuple[list[Outlier], Verdict | None]:
    """Return the hosts grouped by the verdict of one check (failing hosts in any case, other verdicts only if they
    differ), and the verdict if it is the same on all hosts.
    """
    items = {host: item for host, report in reports.items() for item in report.findings if item.check == name}
    verdicts = Counter(item.verdict for item in items.values())
    same = next(iter(verdicts)) if len(verdicts) == 1 and len(items) == len(reports) else None
    found = []
    for verdict in ORDER:
        hosts = [host for host, item in items.items() if item.verdict == verdict]
        if hosts and (verdict == "fail" or same is None):
            seen = Counter(items[host].seen for host in hosts).most_common()
            words = seen[0][0] + (f"; there are {len(seen) - 1} other answers" if len(seen) > 1 else "")
            usual = f"{verdicts['ok']} of {len(reports)} hosts ok"
            found.append(Outlier(name, verdict, hosts, words, usual, _mend(name)))
    if missing := [host for host in reports if host not in items]:
        found.append(Outlier(name, "unknown", missing, "not in its report", f"{verdicts['ok']} ok"))
    return found, same


def _mend(name: str) -> str:
    return CHECKS[name].mend if name in CHECKS else ""


def _clocks(answers: Mapping[str, Answer]) -> list[Outlier]:
    """Return the hosts whose clock differs from the median clock by more than the allowed difference plus the error of
    the measurement.

    A difference that the round trip hides is unknown, and so is a clock that nobody measured.
    """
    measured = skews(answers)
    middle = median(skew.ahead for skew in measured.values()) if measured else 0.0
    off = {host: skew.ahead - middle for host, skew in measured.items()}
    wrong = [host for host, skew in measured.items() if abs(off[host]) - skew.error > SKEW]
    hidden = [host for host, skew in measured.items() if abs(off[host]) + skew.error > SKEW and host not in wrong]
    found = []
    if wrong:
        usual = f"within {SKEW:g} s of the middle one"
        found.append(Outlier("clocks", "fail", wrong, _range(off[host] for host in wrong), usual, _mend("clock")))
    if hidden:
        worst = max(measured[host].error for host in hidden)
        words = (
            f"{_range(off[host] for host in hidden)}, with an uncertainty of {worst:.3f}: the round trip is too "
            "long for an exact answer"
        )
        found.append(Outlier("clocks", "unknown", hidden, words))
    silent = [host for host, answer in answers.items() if isinstance(answer.told, Report) and host not in measured]
    if silent:
        found.append(Outlier("clocks", "unknown", silent, "not measured (a list of hosts for --nodes measures them)"))
    return found


def _range(seconds: Iterable[float]) -> str:
    """Return one difference as text, such as ``+1.204 s``, or the smallest and the largest of several differences."""
    values = sorted(seconds)
    least, most = f"{values[0]:+.3f}", f"{values[-1]:+.3f}"
    return f"{least} s" if least == most else f"{least} to {most} s"


def _probes(reports: Mapping[str, Report]) -> list[Outlier]:
    """Return the workers, links and disks that are slower than those of all hosts, and the hosts without a probe if
    other hosts have one.
    """
    probes = {host: report.probe for host, report in reports.items() if report.probe is not None}
    if not probes:
        return []
    found = []
    for item in slower(probes):
        seen, mend = f"{item.who}: {item.seen}", MENDS[item.measure]
        found.append(Outlier(f"probe {item.measure}", item.verdict, [item.host], seen, mend=mend))
    summary = findings(probes)[-1]  # of all workers, unless one failed
    if summary.verdict == "unknown" and not any(item.verdict == "fail" for item in found):
        found.append(Outlier("probe", "unknown", list(probes), summary.seen, mend=summary.mend))
    if silent := [host for host in reports if host not in probes]:
        found.append(Outlier("probe", "unknown", silent, "not probed", f"{len(probes)} of {len(reports)} hosts are"))
    return found


def _first_hour(reports: Mapping[str, Report]) -> list[Outlier]:
    """Return the hosts whose own report says (`--measured`) that they are slower than the workers that `tc3 firsthour`
    measured, because hosts that are all slow have no faster peer among each other.
    """
    told: dict[Verdict, dict[str, list[Finding]]] = {}
    for host, report in reports.items():
        own = findings({"": report.probe}) if report.probe is not None else []
        for item in report.findings:
            if item.check == "probe" and item.verdict != "ok" and item not in own:
                told.setdefault(item.verdict, {}).setdefault(host, []).append(item)
    found = []
    for verdict, hosts in told.items():
        first, *others = (item for items in hosts.values() for item in items)
        words = first.seen + (f"; and {len(others)} more finding{'s' * (len(others) > 1)}" if others else "")
        found.append(Outlier("probe first hour", verdict, list(hosts), words, mend=first.mend))
    return found


# A comparison of hosts, for people and for machines.


def text(answers: Mapping[str, Answer], comparison: Comparison) -> str:
    """Return the comparison of hosts as text: first the differences with the worst first, then the facts that all hosts
    have in common.
    """
    reported = sum(isinstance(answer.told, Report) for answer in answers.values())
    lines = [f"{len(answers)} host{'s' * (len(answers) > 1)}, {reported} with a report"]
    width = max([len(item.what) for item in comparison.outliers], default=0)
    lines += [line for item in comparison.outliers for line in _lines(item, width)]
    for verdict in ORDER:
        if names := comparison.everywhere.get(verdict):
            lines.append(f"{verdict} on every host: {', '.join(names)}")
    if facts := ", ".join(f"{name} {value}" for name, value in comparison.common.items()):
        lines.append(f"the same everywhere: {facts}")
    counts = [(verdict, sum(item.verdict == verdict for item in comparison.outliers)) for verdict in ORDER]
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts if count) or "no outlier"])


def _lines(item: Outlier, width: int) -> list[str]:
    verdict, indent = click.style(f"{item.verdict:8s}", fg=COLOURS[item.verdict]), " " * (8 + width + 2)
    count = f"{len(item.hosts)} hosts, " if len(item.hosts) > 1 else ""
    lines = [f"{verdict}{item.what:{width}s}  {count}{shorten(item.hosts)}: {item.seen}"]
    lines += [f"{indent}{item.usual}"] if item.usual else []
    return [*lines, *([f"{indent}mend: {item.mend}"] if item.mend else [])]


def as_json(answers: Mapping[str, Answer], comparison: Comparison) -> dict[str, Any]:
    """Return the comparison of hosts as values fit for JSON, with the names of all hosts and the measured differences
    of their clocks in seconds.
    """
    return {
        "hosts": {host: isinstance(answer.told, Report) for host, answer in answers.items()},
        "clocks": {host: asdict(answer.skew) for host, answer in answers.items() if answer.skew is not None},
        **asdict(comparison),
    }
