"""This module finds the workers, links and disks that are slower than others of the same kind, on one host or on many.
The functions of this module have no side effects.

A `Probe` is the result of the speed test of `tc3 doctor --probe`, as in its JSON: each list holds one value per round.
`outliers` names slow workers, links and disks. `gate` says whether a run may start on probed hosts, for launches and
restarts; `findings` gives the same result in the form of the doctor's report.

Workers of one kind are compared by the time that a unit of work took. A worker is slow if both the median of its rounds
and its best round lie above the limit: the load of other processes comes and goes, and does not affect the best round;
worn or throttled hardware is slow in all rounds.

    limit = 1 + max(floor, z * 1.4826 * MAD / centre)

The centre is the lower median of the times, and MAD is the lower median of the absolute deviations from the centre:
with two workers the faster worker is the reference, and up to half of all workers may be slow (`plugins.robust`). z is
the quantile at which normal noise raises a false alarm among N workers in one of 100 probes (Bonferroni: 1 - 0.01 / N),
and at least 3.5, the value of Iglewicz and Hoaglin (1993, "How to detect and handle outliers"). The floors prevent
alarms by noise of a few percent, also where MAD is zero; they lie above the noise of probes on healthy hosts
(benchmarks/RESULTS.md). The floors for matrix products on cores, and for messages that cores copy, are large
(ON_CORES): the other hyper-thread of a core, or another virtual machine on the same hardware, can take up to half of a
core during a whole probe, and no counter of this host shows that.

If the share w of the time in which a worker waited is removed from its rate r, an error dw of w changes the result r /
(1 - w) by the share dw / (1 - w). Therefore a floor is divided by 1 - w, too, with the larger w of the worker and of
the centre (with two workers, the larger w of both). A message needs the workers at both ends of its link: its w is the
share of the time in which at least one of the two workers waited, and this time is not removed from its rate. A link
that seems slow is unknown if its two workers had a core at the same time for less than half of the time, because TCP
then gives no useful measurement.

`against` compares the workers of a host with the workers that `tc3 firsthour` measured on a cluster (`tc3 doctor
--probe --measured BUNDLE`). If all workers of one host are slow, no worker on this host is fast enough for a
comparison, so they are compared with the workers of the same kind in the results of `tc3 firsthour`. A worker is slow
if its median round and its best round both take longer than the median of those workers by more than the share that
`floors` gives. Disks are compared likewise, host by host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, median_high, median_low
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from plugins.errors import DataError
from plugins.robust import TO_SIGMA
from tools.doctor.checks import Finding, Verdict
from tools.measured import OUTCOMES, Bundle

FLOORS = {"matmul": 0.25, "memory": 0.35, "disk": 3.0, "bandwidth": 1.0, "latency": 2.0}  # of time, above the centre
ON_CORES = {"matmul": 0.75, "bandwidth": 3.0}  # at least, of workers without NPUs
UNITS = {"matmul": "GFLOP/s", "memory": "GB/s", "disk": "MB/s", "bandwidth": "GB/s", "latency": "us"}
WAITS, STOPPED = 0.2, 0.05  # shares of a worker's time from which on they are said
UNCLEAR = "they differ too much among each other to say whether this one is slow"
WHY = "every step waits for the slowest worker"
SOURCE = "tools/doctor/outliers.py; report, section 6"
MENDS = {
    "worker": "look at the end of dmesg and at npu-smi info; start without this host until it answers",
    "matmul": "compare clocks, temperature and cpu.max with a healthy worker's; until then start without this host",
    "memory": "compare the memory modules (dmidecode -t memory), NUMA binding and clocks with a healthy host's",
    "disk": "look at the file system (mount, iostat -x, dmesg), or choose another output_dir",
    "bandwidth": "look at the interface of the named end: ethtool, tc qdisc show, ip -s link",
    "latency": "look at the interface of the named end: ethtool, tc qdisc show, ip -s link",
    "throttled": "give the container more CPU (docker: --cpus, Kubernetes: resources.limits.cpu)",
    "waited": "end other processes on its cores (top shows them), or keep them away from these cores (tc3 affinity)",
}
_FALSE_ALARMS, _LEAST_Z = 0.01, 3.5  # false alarms of a probe by normal noise; the least z
_LEAST = 1e-12  # seconds that count for a time of 0
_MOST_LINK_WAITED = 0.5  # of a link's time in which not both ends had a core
_MOST_WAITED = 0.99  # of a worker's time waited: what it did in the rest says nothing
# whose links they are, as a slice of the ends; a latency is that of both directions
_SIDES = {"bandwidth": ((slice(0, 1), "sends"), (slice(1, 2), "receives")), "latency": ((slice(0, 2), "answers"),)}
Key = TypeVar("Key", bound=Hashable)
Ends = tuple[str, tuple[int, int]]  # host, (source, target)
_Rule = Callable[[Mapping[Any, "Times"], Mapping[Any, float]], dict[Any, tuple[float, float]]]


class Worker(TypedDict):
    """A `Worker` holds the speeds that the probe (the speed test of `tc3 doctor --probe`) measured for one worker.

    Attributes:
        place: the name of the host on which the worker ran; "" for this host.
        kind: the device and the number of cores; workers of one kind should be equally fast.
        cores: the cores to which the worker was bound, in Linux's form; "" if it was not bound.
        matmul: the rate of matrix products in GFLOP/s, over the time in which the worker could run.
        memory: the rate of copying in the host's memory in GB/s (10^9 bytes, read and written), over the same time.
        disk: the rate of a write with fsync in MB/s (10^6 bytes) on the disk of the checkpoints, while all workers of
            the host write.
        waited: the share of the time in which the worker was ready to run, but other processes used its cores.
        throttled: the share of the time in which a limit (cpu.max) stopped the worker's control group.
        failed: the reason why the worker ended early; "" for a worker that answered to the end.
    """

    rank: int
    place: str
    kind: str
    cores: str
    matmul: list[float]
    memory: list[float]
    disk: list[float]
    waited: list[float]
    throttled: list[float]
    failed: str


class Link(TypedDict):
    """A `Link` holds the speeds that the probe (the speed test of `tc3 doctor --probe`) measured from one worker to
    another. `source` and `target` are the positions of the two workers in the list of workers.

    Attributes:
        bandwidth: the bandwidth in GB/s of the fastest message of 1 MiB, with its acknowledgement.
        latency: half of the fastest round trip in microseconds; empty for the opposite direction, which has the same
            latency.
        failed: the reason why the link could not be measured; "" if it was measured.
        waited: the share of the time in which at least one of the two workers had no core: 1 - (1 - w) (1 - w') for the
            shares w and w' of the two workers.
    """

    source: int
    target: int
    bandwidth: list[float]
    latency: list[float]
    waited: list[float]
    failed: str


class Probe(TypedDict):
    """A `Probe` holds all speeds that `tc3 doctor --probe` measured on one host, or on several hosts that one host
    controls.
    """

    device: str
    rounds: int
    folder: str
    workers: list[Worker]
    links: list[Link]
    notes: list[str]


class Times(NamedTuple):
    """A `Times` holds the seconds that a unit of work took in the median round and in the best round of a
    measurement.
    """

    typical: float
    best: float


@dataclass(frozen=True)
class Outlier:
    """An `Outlier` names a worker, link or disk that is slow, its host, the measurement that shows this, and the
    measured values.
    """

    host: str
    who: str
    measure: str
    verdict: Literal["warn", "fail", "unknown"]
    seen: str


def slow(times: Mapping[Key, Times], floors: Mapping[Key, float]) -> dict[Key, tuple[float, float]]:
    """Return a pair for each slow worker, link or disk: its time divided by the median time of all, and the limit of
    this ratio. A worker, link or disk counts as slow if both its median time and its best time are above the limit.

    Args:
        floors: for each worker, link or disk the smallest difference that counts as slow, as a share of the median
            time.
    """
    typical, best = _ratios(times, floors)
    return {key: found for key, found in typical.items() if found[0] > found[1] and best[key][0] > best[key][1]}


def unclear(times: Mapping[Key, Times], floors: Mapping[Key, float]) -> dict[Key, tuple[float, float]]:
    """Return a pair, as `slow` does, for each worker whose time is above its floor but not above its limit: the workers
    differ too much from each other to say whether this worker is slow.
    """
    named, (typical, best) = slow(times, floors), _ratios(times, floors)
    return {
        key: found
        for key, found in typical.items()
        if key not in named and min(found[0], best[key][0]) > 1 + floors[key]
    }


def _ratios(times: Mapping[Key, Times], floors: Mapping[Key, float]) -> list[dict[Key, tuple[float, float]]]:
    """Return for the typical and for the best times: key -> (ratio to the median, limit of this ratio)."""
    if not times:
        return [{}, {}]
    z = max(_LEAST_Z, NormalDist().inv_cdf(1 - _FALSE_ALARMS / len(times)))
    found: list[dict[Key, tuple[float, float]]] = []
    for which in (0, 1):
        values = {key: pair[which] for key, pair in times.items()}
        centre = median_low(values.values()) or _LEAST
        spread = TO_SIGMA * median_low(abs(value - centre) for value in values.values()) / centre
        found.append({key: (value / centre, 1 + max(floors[key], z * spread)) for key, value in values.items()})
    return found


def floors(measure: str, waited: Mapping[Key, float], on_cores: bool = False) -> dict[Key, float]:
    """Return for each worker, link or disk the fraction by which it must be slower than the median to count as slow.
    The fraction to count as slow is larger if the compared workers waited longer for a core.
    """
    centre, least = median_high(waited.values()), ON_CORES.get(measure, 0.0) if on_cores else 0.0
    return {
        key: max(least, FLOORS[measure] / (1 - min(max(share, centre), _MOST_WAITED))) for key, share in waited.items()
    }


def _on_cores(reports: Iterable[Probe]) -> bool:
    return all(report["device"] == "CPU" for report in reports)


def outliers(reports: Mapping[str, Probe]) -> list[Outlier]:
    """Return the workers, links and disks that are slower than others of the same kind, among the probes of all hosts
    (name -> probe).

    The result also names workers whose fault shows without a comparison: workers that ended (fail), and workers that
    waited for their cores or were stopped by a CPU limit (warn).
    """
    found = [one for host, report in reports.items() for worker in report["workers"] for one in _alone(host, worker)]
    found += _slow_workers(reports, "matmul")
    found += _slow_workers(reports, "memory")
    found += _slow_disks(reports)
    found += _broken_links(reports)
    found += _slow_links(reports, "bandwidth")
    return found + _slow_links(reports, "latency")


def compared(reports: Mapping[str, Probe]) -> int:
    """Return the number of workers that can be compared with at least one other worker of the same kind."""
    kinds = [worker["kind"] for report in reports.values() for worker in report["workers"] if worker["matmul"]]
    return sum(kinds.count(kind) > 1 for kind in kinds)


def name(worker: Worker) -> str:
    """Return the name of a worker on its host."""
    return f"{worker['place']} worker {worker['rank']}".strip()


def _alone(host: str, worker: Worker) -> Iterable[Outlier]:
    """Return the findings about a worker that need no comparison with other workers."""
    if worker["failed"]:
        yield Outlier(host, name(worker), "worker", "fail", worker["failed"])
    if worker["throttled"] and (share := median(worker["throttled"])) > STOPPED:
        seen = f"was stopped {share:.0%} of its time by a limit of its control group (cpu.max, cfs_quota)"
        yield Outlier(host, name(worker), "throttled", "warn", seen)
    if worker["waited"] and (share := median(worker["waited"])) > WAITS:
        cores = f"its cores {worker['cores']}" if worker["cores"] else "a core"
        seen = (
            f"waited {share:.0%} of its time for {cores}: other processes run there, or a limit that tc3 cannot see "
            "stops the worker"
        )
        yield Outlier(host, name(worker), "waited", "warn", seen)


def waited_by(worker: Worker) -> float:
    """Return the share of its time for which a worker waited for its cores, as the median over all rounds."""
    return median(worker["waited"] or [0.0])


def times_of(measure: str, rounds: Sequence[float]) -> Times:
    """Return the median and the best time of a measurement's rounds; rates are first turned into times, and latencies
    are times already.
    """
    values = [number if measure == "latency" else 1 / number for number in rounds]
    return Times(median(values), min(values))


def _slower(
    measure: str, rounds: Mapping[Key, Sequence[float]], floors: Mapping[Key, float], peers: str, rule: _Rule = slow
) -> dict[Key, str]:
    """Return key -> description of the measured times, for each entry of `rounds` that the rule names."""
    found = rule({key: times_of(measure, numbers) for key, numbers in rounds.items()}, floors)
    why = f"; {UNCLEAR}" if rule is unclear else ""
    return {key: _seen(measure, rounds[key], *pair, len(rounds), peers) + why for key, pair in found.items()}


def _seen(measure: str, rounds: Sequence[float], ratio: float, limit: float, count: int, peers: str) -> str:
    return (
        f"{measure} {median(rounds):,.3g} {UNITS[measure]}: takes {ratio:.2f} times as long as the median of {count} "
        f"{peers} (limit {limit:.2f})"
    )


def _slow_workers(reports: Mapping[str, Probe], measure: Literal["matmul", "memory"]) -> list[Outlier]:
    """Compare workers with those of their kind on all hosts; a host whose workers are all slow is named once."""
    kinds: dict[str, dict[tuple[str, int], Sequence[float]]] = defaultdict(dict)
    for host, report in reports.items():
        for index, worker in enumerate(report["workers"]):
            if worker[measure]:
                kinds[worker["kind"]][host, index] = worker[measure]
    found = []
    for rounds in kinds.values():
        waited = {(host, index): waited_by(reports[host]["workers"][index]) for host, index in rounds}
        limits = floors(measure, waited, _on_cores(reports[host] for host, _ in rounds))
        named = _slower(measure, rounds, limits, "workers")
        for host in dict.fromkeys(host for host, _ in named):
            own = [key for key in rounds if key[0] == host]
            mine = [key for key in own if key in named]
            whole = len(mine) == len(own) > 1
            for key in mine[:1] if whole else mine:
                who = f"all {len(own)} workers" if whole else name(reports[host]["workers"][key[1]])
                found.append(Outlier(host, who, measure, "fail", named[key]))
        for (host, index), words in _slower(measure, rounds, limits, "workers", unclear).items():
            found.append(Outlier(host, name(reports[host]["workers"][index]), measure, "unknown", words))
    return found


def _slow_disks(reports: Mapping[str, Probe]) -> list[Outlier]:
    """Compare the disks of hosts; the workers of one host share its disk, so all their measurements count as those of
    one disk.
    """
    every = {host: [number for one in report["workers"] for number in one["disk"]] for host, report in reports.items()}
    rounds = {host: numbers for host, numbers in every.items() if numbers}
    named = _slower("disk", rounds, dict.fromkeys(rounds, FLOORS["disk"]), "hosts")
    return [Outlier(host, reports[host]["folder"], "disk", "fail", seen) for host, seen in named.items()]


def _broken_links(reports: Mapping[str, Probe]) -> list[Outlier]:
    found = []
    for host, link in ((host, link) for host, report in reports.items() for link in report["links"] if link["failed"]):
        source, target = (name(reports[host]["workers"][link[end]]) for end in ("source", "target"))
        found.append(Outlier(host, f"{source} to {target}", "bandwidth", "fail", link["failed"]))
    return found


def _slow_links(reports: Mapping[str, Probe], measure: Literal["bandwidth", "latency"]) -> list[Outlier]:
    """Compare links within a host with the links within all hosts, and links between hosts with each other."""
    groups: dict[bool, dict[Ends, Link]] = defaultdict(dict)
    for host, report in reports.items():
        for link in report["links"]:
            source, target = (report["workers"][link[end]] for end in ("source", "target"))
            if link[measure]:
                groups[source["place"] == target["place"]][host, (link["source"], link["target"])] = link
    return [one for links in groups.values() for one in _slow_ends(reports, measure, links)]


def _slow_ends(
    reports: Mapping[str, Probe], measure: Literal["bandwidth", "latency"], links: Mapping[Ends, Link]
) -> list[Outlier]:
    """Return a finding for each worker whose best link is slow, and then one for each link between other workers that
    is slow, or of which this is not clear.
    """
    times = {ends: times_of(measure, link[measure]) for ends, link in links.items()}
    waited = {ends: median(link["waited"]) for ends, link in links.items()}
    judged = {ends for ends, share in waited.items() if share <= _MOST_LINK_WAITED}
    on_cores = _on_cores(reports[host] for host, _ in links)
    found: list[Outlier] = []
    explained: set[Ends] = set()
    for side, verb in _SIDES[measure]:
        own: dict[tuple[str, int], list[Ends]] = defaultdict(list)
        for ends in times:
            for index in list(ends[1])[side]:
                own[ends[0], index].append(ends)
        best = {key: Times(*(min(times[ends][at] for ends in mine) for at in (0, 1))) for key, mine in own.items()}
        limits = floors(measure, {key: min(waited[ends] for ends in mine) for key, mine in own.items()}, on_cores)
        for key, pair in (slow(best, limits) if len(best) > 2 else {}).items():
            explained.update(own[key])
            fastest = min(own[key], key=lambda ends: times[ends].typical)
            words = _seen(measure, links[fastest][measure], *pair, len(best), "workers")
            who = name(reports[key[0]]["workers"][key[1]])
            told = not judged.isdisjoint(own[key])
            found.append(_slow_link(key[0], who, measure, told, f"{verb} slowly on all of its links: {words}"))
    rest = {ends: link[measure] for ends, link in links.items() if ends not in explained}
    limits_of_rest = floors(measure, {ends: waited[ends] for ends in rest}, on_cores) if rest else {}
    for rule in (slow, unclear):
        for ends, words in _slower(measure, rest, limits_of_rest, "links", rule).items():
            who = " to ".join(name(reports[ends[0]]["workers"][index]) for index in ends[1])
            if rule is slow:
                found.append(_slow_link(ends[0], who, measure, ends in judged, words))
            else:
                found.append(Outlier(ends[0], who, measure, "unknown", words))
    return found


def _slow_link(host: str, who: str, measure: str, told: bool, seen: str) -> Outlier:
    """Return a finding about a link that took long; without `told` it is unknown whether the link itself is slow."""
    if told:
        return Outlier(host, who, measure, "fail", seen)
    why = "for most of this time one of its workers had no core, so probe again without other processes there"
    return Outlier(host, who, measure, "unknown", f"{seen}; {why}")


@dataclass(frozen=True)
class Gate:
    """A `Gate` says whether a run may start on the probed hosts, with the reasons. Only the verdict "fail" keeps the
    run from starting; other verdicts are reported.
    """

    verdict: Verdict
    reasons: list[str]


def gate(reports: Mapping[str, Probe]) -> Gate:
    """Return whether a run may start on the hosts whose probes are given (name -> probe), after a comparison of these
    probes.

    The verdict is "fail" if a worker, link or disk is slower than others of its kind, or a worker ended. The verdict is
    "unknown" if a worker has no other worker of its kind, or if it cannot be told whether a worker or link is slow. The
    verdict is "warn" if a worker waited for its cores or was stopped by a CPU limit. Otherwise the verdict is "ok".
    """
    found = findings(reports)
    order: tuple[Verdict, ...] = ("fail", "unknown", "warn", "ok")
    verdict = next(one for one in order if any(item.verdict == one for item in found))
    return Gate(verdict, [item.seen for item in found if item.verdict == verdict])


def findings(reports: Mapping[str, Probe]) -> list[Finding]:
    """Return the slow workers, links and disks in the form in which `tc3 doctor` reports findings. If no worker, link
    or disk has the verdict "fail", also return a finding that says how many workers were compared.
    """
    found = outliers(reports)
    rows = [
        Finding("probe", item.verdict, f"{item.host}, {item.who}: {item.seen}".removeprefix(", "), WHY, SOURCE, mend)
        for item in sorted(found, key=lambda item: item.verdict)
        for mend in [MENDS[item.measure]]
    ]
    if any(item.verdict == "fail" for item in found):
        return rows
    return [*rows, _summary_finding(reports, surely=any(item.verdict == "unknown" for item in found))]


def _summary_finding(reports: Mapping[str, Probe], surely: bool) -> Finding:
    """Return a finding that is ok if every worker was compared with another one, and unknown if a worker had no peer;
    with `surely`, other findings are unknown.
    """
    count, workers = compared(reports), sum(len(report["workers"]) for report in reports.values())
    notes = "".join(
        f"; {note}" for note in dict.fromkeys(note for report in reports.values() for note in report["notes"])
    )
    if count < workers or not workers:
        alone = (
            f"{workers - count} of {workers} worker{'s' * (workers != 1)} cannot be compared, because there is no "
            "other worker of the same kind"
        )
        mend = "probe several workers (--workers) or several hosts together"
        return Finding("probe", "unknown", f"{alone}{notes}", WHY, SOURCE, mend)
    words = f"none of the {count} workers is {'surely ' * surely}slower than the others"
    return Finding("probe", "ok", f"{words}{notes}", WHY, SOURCE, "")


Measure = Literal["matmul", "memory", "disk"]
MEASURES: tuple[Measure, ...] = ("matmul", "memory", "disk")


def probes_of(bundle: Bundle) -> dict[str, Probe]:
    """Return the probe (speed test) of each host from a bundle, which is a file with the results of `tc3 firsthour`.

    Raises:
        DataError: `tc3 firsthour` has probed no host.
    """
    rows: Sequence[Mapping[str, Any]] = bundle.json(OUTCOMES) or ()
    found = next((row["evidence"].get("probes") for row in rows if row["check"] == "devices"), None)
    if not found:
        wrong = f"the bundle has no speed tests of hosts; run tc3 firsthour read {bundle.path} to see why"
        raise DataError(f"{bundle.path}: {wrong}")
    return dict(found)


def against(probe: Probe, bundle: Bundle) -> list[Finding]:
    """Return the findings about a host's probe, compared with the probes that `tc3 firsthour` has measured.

    Raises:
        DataError: `tc3 firsthour` has probed no host.
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
            found += _slower_than(worker, peers, measure, on_cores)
    found += [_finding("unknown", f"the bundle has no worker of the kind {kind}") for kind in sorted(unknown)]
    compared = sum(bool(worker["kind"] not in unknown and worker["matmul"]) for worker in probe["workers"])
    if compared and not any(item.verdict == "fail" for item in found):
        found.append(_finding("ok", f"{compared} workers are as fast as {len(known)} that were measured"))
    return found


def _slower_than(worker: Worker, peers: Sequence[Worker], measure: Measure, on_cores: bool) -> Iterator[Finding]:
    """Yield a finding if a worker is slower than the workers of its kind that `tc3 firsthour` measured."""
    rates = [median(peer[measure]) for peer in peers if peer[measure]]
    if not worker[measure] or not rates:
        return
    centre = 1 / median(rates)
    floor = FLOORS["disk"] if measure == "disk" else floors(measure, {0: waited_by(worker)}, on_cores)[0]
    own = times_of(measure, worker[measure])
    if min(own.typical, own.best) > (1 + floor) * centre:
        seen = f"{name(worker)}: {measure} {median(worker[measure]):,.3g} {UNITS[measure]}"
        seen += f", but the first hour measured {1 / centre:,.3g}"
        yield _finding("fail", f"{seen}; it takes {own.typical / centre:.2f} times as long", measure)


def _finding(verdict: Literal["ok", "fail", "unknown"], seen: str, measure: str = "") -> Finding:
    return Finding("probe", verdict, seen, WHY, SOURCE, MENDS[measure] if measure else "")
