"""Whether a run may start on probed hosts: the answer for a launch and for whoever restarts one, and as findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tools.doctor.checks import Finding, Verdict
from tools.doctor.probe.form import Probe
from tools.doctor.probe.outliers import Outlier, compared, outliers

WHY = "every step waits for the slowest worker"
SOURCE = "tools/doctor/probe/outliers.py; report, section 6"
MENDS = {
    "worker": "look at the end of dmesg and at npu-smi info; start without this host until it answers",
    "matmul": "compare clocks, temperature and cpu.max with a healthy worker's; until then start without this host",
    "memory": "compare the memory modules (dmidecode -t memory), NUMA binding and clocks with a healthy host's",
    "disk": "look at the file system (mount, iostat -x, dmesg), or choose another output_dir",
    "bandwidth": "look at the interface of the named end: ethtool, tc qdisc show, ip -s link",
    "latency": "look at the interface of the named end: ethtool, tc qdisc show, ip -s link",
    "throttled": "give the container more CPU (docker: --cpus, Kubernetes: resources.limits.cpu)",
    "waited": "end what else runs on its cores (top), or keep it away from them (tc3 affinity)",
}


@dataclass(frozen=True)
class Gate:
    """The verdict and its reasons: fail keeps a run from starting; warn and unknown are told."""

    verdict: Verdict
    reasons: list[str]


def gate(reports: Mapping[str, Probe]) -> Gate:
    """Hold the probes of hosts (name -> probe) against each other.

    fail: somebody is slower than their peers, or ended. unknown: nobody has a peer, so slow cannot be told. warn: a
    worker waited for its cores or was stopped by a limit, as others may have been. Otherwise ok.
    """
    found = findings(reports)
    order: tuple[Verdict, ...] = ("fail", "unknown", "warn", "ok")
    verdict = next(one for one in order if any(item.verdict == one for item in found))
    return Gate(verdict, [item.seen for item in found if item.verdict == verdict])


def findings(reports: Mapping[str, Probe]) -> list[Finding]:
    """The outliers as the doctor reports them, failing ones first; where none fails, what was compared."""
    found = outliers(reports)
    rows = [
        Finding("probe", item.verdict, _words(item), WHY, SOURCE, MENDS[item.measure])
        for item in sorted(found, key=lambda item: item.verdict)
    ]
    return rows if any(item.verdict == "fail" for item in found) else [*rows, _summary(reports)]


def _words(item: Outlier) -> str:
    return ", ".join(filter(None, (item.host, f"{item.who}: {item.seen}")))


def _summary(reports: Mapping[str, Probe]) -> Finding:
    """ok where every worker was compared, unknown where one had no peer."""
    count, workers = compared(reports), sum(len(report["workers"]) for report in reports.values())
    notes = "".join(
        f"; {note}" for note in dict.fromkeys(note for report in reports.values() for note in report["notes"])
    )
    if count < workers or not workers:
        alone = f"{workers - count} of {workers} worker{'s' * (workers != 1)} without a peer of the same kind"
        mend = "probe several workers (--workers) or hosts together"
        return Finding("probe", "unknown", f"{alone}: whether it is slow cannot be told{notes}", WHY, SOURCE, mend)
    return Finding("probe", "ok", f"{count} workers, none slower than its peers{notes}", WHY, SOURCE, "")
