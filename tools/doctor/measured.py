"""This module compares the workers of a host with those that a cluster's first hour measured (`tc3 doctor --probe
--measured BUNDLE`).

Workers of one host that are all slow have no faster peer to show it; the hour's workers of the same kind are their
peers then. A worker is slow if its median round and its best round both take longer than the median of the hour's
workers of its kind by more than the floor of `tools.doctor.outliers.floors`. Disks are compared likewise, host by host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from plugins.errors import DataError
from tools.doctor.checks import Finding
from tools.doctor.outliers import FLOORS, MENDS, SOURCE, UNITS, WHY, Probe, Worker, floors, name, times_of, waited_by
from tools.measured.bundle import OUTCOMES, Bundle

Measure = Literal["matmul", "memory", "disk"]
MEASURES: tuple[Measure, ...] = ("matmul", "memory", "disk")


def probes_of(bundle: Bundle) -> dict[str, Probe]:
    """Return host -> probe of a first hour.

    Raises:
        DataError: the hour has probed no host.
    """
    rows: Sequence[Mapping[str, Any]] = bundle.json(OUTCOMES) or ()
    found = next((row["evidence"].get("probes") for row in rows if row["rung"] == "devices"), None)
    if not found:
        raise DataError(f"{bundle.path}: the bundle has no probes; tc3 firsthour read {bundle.path} says why")
    return dict(found)


def against(probe: Probe, bundle: Bundle) -> list[Finding]:
    """Return what a host's probe says beside the probes of a first hour.

    Raises:
        DataError: the hour has probed no host.
    """
    known = [worker for one in probes_of(bundle).values() for worker in one["workers"]]
    on_cores = probe["device"] == "CPU"
    found: list[Finding] = []
    unknown: set[str] = set()
    for worker in probe["workers"]:
        peers = [one for one in known if one["kind"] == worker["kind"]]
        if not any(peer["matmul"] for peer in peers):
            unknown.add(worker["kind"])
            continue
        for measure in MEASURES:
            found += _slower(worker, peers, measure, on_cores)
    found += [_finding("unknown", f"the bundle has no worker of the kind {kind}") for kind in sorted(unknown)]
    compared = sum(worker["kind"] not in unknown for worker in probe["workers"])
    if compared and not any(item.verdict == "fail" for item in found):
        found.append(_finding("ok", f"{compared} workers are as fast as {len(known)} that were measured"))
    return found


def _slower(worker: Worker, peers: Sequence[Worker], measure: Measure, on_cores: bool) -> Iterator[Finding]:
    """Yield a finding if a worker is slower than the hour's workers of its kind."""
    rates = [median(peer[measure]) for peer in peers if peer[measure]]
    if not worker[measure] or not rates:
        return
    centre = 1 / median(rates)
    floor = FLOORS["disk"] if measure == "disk" else floors(measure, {0: waited_by(worker)}, on_cores)[0]
    own = times_of(measure, worker[measure])
    if min(own.typical, own.best) > (1 + floor) * centre:
        seen = f"{name(worker)}: {measure} {median(worker[measure]):,.3g} {UNITS[measure]}, where the first hour had "
        yield _finding("fail", f"{seen}{1 / centre:,.3g}; it takes {own.typical / centre:.2f} times as long", measure)


def _finding(verdict: Literal["ok", "fail", "unknown"], seen: str, measure: str = "") -> Finding:
    return Finding("probe", verdict, seen, WHY, SOURCE, MENDS[measure] if measure else "")
