"""This module finds which ranks are slower than their peers, and by how much. The module uses only Python and NumPy.

Peers are ranks of one group, such as a pipeline stage, with the same type of device and the same work in a probe. Four
measures of a rank are compared with those of its peers at the same step (`KINDS`):

* device: the time of a piece of work without communication, as a logarithm;
* data: the share of the rank's time in which the rank waited for its batches;
* host: the share of the rank's time in which the rank was ready to run, but other processes had its cores;
* limit: the share of the rank's time in which a limit of its control group (cpu.max, cfs_quota) had stopped it.

The module computes these steps for each measure and group:

1. it computes the difference between a rank and the median of the other ranks, at each probe;
2. it subtracts the lasting difference among healthy ranks, which is the median of the rank's first probes, but at most
   four standard deviations over all ranks, so that a rank that is slow from the start is found, too;
3. it computes the standard deviation of the noise from differences of successive probes: a rank that becomes slow adds
   one such difference, which does not change their median;
4. it runs the sequential test below, with limits in units of this deviation, plus the error that step 2 may have for
   the unluckiest of all ranks, and no lower than a floor;
5. for each rank that the test names it computes since when, until when, and how slow the rank was, in the median of
   those probes.

The sequential test finds values that rose and stay high, with a stated rate of false alarms over a whole run. For each
rank and probe it uses only whether the value lies above a limit. The value of a healthy rank lies above the limit at
most with the probability `usual`, and that of a slow rank with the probability `slow`. With L the ratio of both
likelihoods of the observation, the statistic of Shiryaev and Roberts sums the evidence over all probes k at which the
rank may have become slow:

    R[k] = (1 + R[k - 1]) * L[k] = sum over j <= k of L[j] * ... * L[k]

For healthy ranks the mean of L is at most 1, so R[k] - k never rises in the mean, and by Doob's inequality

    P(R reaches A within K probes) <= K / A

whatever the noise is like below and above the limit (Pollak, 1985, "Optimal detection of a change in distribution";
Shin, Ramdas and Rinaldo, 2022, "E-detectors", have the general case). The mean of several such statistics is such a
statistic, too: a low limit finds a small change after many probes, a high limit finds a large change after three. The
test assumes `usual`, and that the probes of a healthy rank lie above the limit independently of each other. One long
pause counts as one probe.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from plugins.robust import TO_SIGMA, deviation
from plugins.settings import WATCHES, Section, setting
from plugins.straggler_probe.record import Record


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says when a rank is probed, and with how much work."""

    KEY = "plugins.straggler_probe"
    RIGHT = f"write every, work under it (or {{}} for the defaults), or {KEY}: False"
    CHANGE = WATCHES

    every: int = setting(5, "steps between probes", "write steps between probes, from 1 on", least=1)
    work: int = setting(
        1,
        "pieces of work in a round of a probe; use more if probes vary much",
        "write a number of pieces of work, from 1 on",
        least=1,
    )


Kind = Literal["device", "data", "host", "limit"]
ALARM = 0.05  # chance that a run names any healthy rank, by any measure
LEAST = 64  # probes of which that is said at least, so that looking at a run that has just begun names nobody lightly
WITHIN = 4.0  # standard deviations of it among healthy ranks
_OF_MEDIAN = 1.2533  # the standard error of a median over that of a mean
RECOVERED = 5  # probes after the slow ones
# the least that counts, as a share of the time of the work (device) or of all time (the others)
FLOORS: dict[Kind, float] = {"device": 0.02, "data": 0.02, "host": 0.05, "limit": 0.05}
# idle cores of a virtual machine differ by up to 57 % for seconds, and workers on CPU share theirs with everything
FLOORS_ON_CPU: dict[Kind, float] = {"device": 0.75, "data": 0.25, "host": 0.35, "limit": 0.15}


class Level(NamedTuple):
    """A `Level` is one limit of the sequential test, in standard deviations of the noise. A healthy rank lies above the
    limit in at most the share `usual` of its probes, and a slow rank in the share `slow`.
    """

    limit: float
    usual: float
    slow: float


# normal noise lies above 1.5 and 3 of its standard deviations in 6.7 and 0.13 %; the rest is for rare pauses
LEVELS = (Level(1.5, 0.08, 0.6), Level(3.0, 0.004, 0.7))


def threshold(tests: int, probes: int, alarm: float) -> float:
    """Return the natural logarithm of tests * probes / alarm. The logarithm of a series' evidence must reach this
    number before the rank of the series is named as slow.

    Args:
        tests: the number of series that are tested.
        probes: the number of probes of each series.
        alarm: the chance that any healthy series is named.
    """
    return math.log(tests * probes / alarm)


def ratios(values: np.ndarray, limit: float, level: Level) -> np.ndarray:
    """Return ln L [K, N], the logarithm of the likelihood ratio of a slow to a healthy rank, for each of `values` [K,
    N] (K probes, N ranks); the result is 0 where a value is missing (NaN).
    """
    above = math.log(level.slow / level.usual)
    below = math.log((1 - level.slow) / (1 - level.usual))
    return np.where(np.isnan(values), 0.0, np.where(values > limit, above, below))


def evidence(values: np.ndarray, limits: Sequence[float]) -> np.ndarray:
    """Return ln R [K, N], the evidence that a rank is slow at each probe, for `values` [K, N]. The evidence R is the
    mean of the likelihood ratios over `LEVELS`; `limits` holds the limit of each level.
    """
    parts = []
    for level, limit in zip(LEVELS, limits, strict=True):
        ratio = ratios(values, limit, level)
        total, rows = np.full(values.shape[1], -np.inf), []
        for row in ratio:
            total = np.logaddexp(0.0, total) + row
            rows.append(total)
        parts.append(np.array(rows))
    return np.logaddexp.reduce(parts, axis=0) - math.log(len(LEVELS))


def fewest(enough: float) -> int:
    """Return the smallest number of probes after which the test can name a rank as slow, if the rank is slow in all of
    them; `enough` is the evidence that `threshold` returns.
    """
    always = np.full((math.ceil(enough), 1), math.inf)
    return 1 + int(np.argmax(evidence(always, [0.0] * len(LEVELS)) >= enough))


def span(values: np.ndarray, limit: float, level: Level, alarm: int) -> tuple[int, int]:
    """Return the first and the last probe in which a rank was slow, from its series `values` [K], which raised an alarm
    at probe `alarm`.

    These are the most likely first and last probe: between them the product of all L is the largest.
    """
    total = np.concatenate([[0.0], np.cumsum(ratios(values, limit, level))])  # total[k] is that before probe k
    begin = alarm - int(total[alarm::-1].argmin())
    return begin, begin + int(total[begin + 1 :].argmax())


FIRST, ENOUGH = 24, 8  # probes that tell what differs for good; ranks whose spread of it says something


@dataclass(frozen=True)
class SlowRank:
    """A `SlowRank` is a rank that is slower than its peers.

    Args:
        slower: how much slower the rank is: relative to its peers' time for the work (device: 0.05 is 5 % slower), or
            the share of its time that it lost in addition to its peers' losses (data, host, limit).
        since, until: the first and the last step in which probes showed it; until None: it lasted to the end.
        seen: a description in words.
    """

    rank: int
    host: str
    kind: Kind
    slower: float
    since: int
    until: int | None
    seen: str


@dataclass(frozen=True)
class Unknown:
    """An `Unknown` lists ranks for which it cannot be decided by one measure whether they are slow, with the reason."""

    kind: Kind
    ranks: tuple[int, ...]
    why: str


class Verdict(NamedTuple):
    """A `Verdict` is the result of comparing the ranks of a run: the slow ranks (the slowest of each kind first), the
    ranks of which nothing is known, and the number of compared ranks.
    """

    slow: list[SlowRank]
    unknown: list[Unknown]
    compared: int


def by_stage(ranks: int, stages: int) -> dict[int, int]:
    """Return a dictionary rank -> pipeline stage; MindSpore assigns consecutive ranks to a stage."""
    return {rank: rank * stages // ranks for rank in range(ranks)}


def slow_ranks(records: Iterable[Record], groups: Mapping[int, Hashable] | None = None) -> Verdict:
    """Return the ranks of a run that are slower than their peers. In a run without slow ranks, the probability that
    this function names a rank is at most `ALARM`.

    This probability holds for one call of the function, and for any number of calls within the first `LEAST` probes of
    a run; with calls throughout the run, the same probability is added whenever the number of probes has doubled.

    Args:
        records: the records of all ranks, see `record.read_run`.
        groups: rank -> group of ranks that do the same work, see `by_stage`; a rank without a group has no peers. None:
            all ranks do the same work.
    """
    peers = _peers(records, groups)
    if not peers:
        return Verdict([], [], 0)
    probes = max(LEAST, len({row.step for series in peers.values() for rows in series.values() for row in rows}))
    tests = len(KINDS) * sum(len(series) for series in peers.values())
    limit = threshold(tests, probes, ALARM)
    least = fewest(limit)
    slow: list[SlowRank] = []
    silent: dict[tuple[Kind, str], set[int]] = defaultdict(set)
    compared: set[int] = set()
    for (_, device, _), series in peers.items():
        for kind in KINDS:
            known = {own: rows for own, rows in series.items() if not _unseen(kind, rows)}
            for own in series.keys() - known:
                silent[kind, _unseen(kind, series[own])].add(own.rank)
            if len({own.rank for own in known}) < 2:
                silent[kind, "no other rank does the same work"] |= {own.rank for own in known}
                continue
            ranks_at = Counter(row.step for rows in known.values() for row in rows)
            few = {own.rank for own, rows in known.items() if sum(ranks_at[row.step] > 1 for row in rows) < least}
            silent[kind, f"fewer than {least} probes beside those of others cannot show a slow rank"] |= few
            compared |= {own.rank for own in known} - few
            slow += _of_group(kind, FLOORS_ON_CPU[kind] if device == "CPU" else FLOORS[kind], known, limit)
    unknown = [Unknown(kind, tuple(sorted(ranks)), why) for (kind, why), ranks in silent.items() if ranks]
    order = {kind: place for place, kind in enumerate(KINDS)}
    slow.sort(key=lambda one: (order[one.kind], -one.slower, one.rank))
    unknown.sort(key=lambda one: (order[one.kind], one.ranks))
    return Verdict(slow, unknown, len(compared))


class Own(NamedTuple):
    """An `Own` identifies one series of probes: the probes of one rank on one host. A rank that moved to a spare host
    starts a new series of probes.
    """

    rank: int
    host: str


Series = dict[Own, list[Record]]


def _peers(records: Iterable[Record], groups: Mapping[int, Hashable] | None) -> dict[tuple, Series]:
    """Return group, device and work -> the series of each rank, by step."""
    found: dict[tuple, Series] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=lambda record: (record.rank, record.step)):
        group = 0 if groups is None else groups.get(record.rank, ("alone", record.rank))
        found[group, record.device, record.work][Own(record.rank, record.host)].append(record)
    return found


def _device(record: Record) -> float:
    return float(np.log(record.probe))


def _data(record: Record) -> float | None:
    return None if record.data is None else record.data / record.seconds


def _host(record: Record) -> float:
    """Return the share of the time in which a rank's threads waited for a core; the kernel adds up the waits of
    threads that wait at once, and counts the time of a CPU limit among them.
    """
    return max(0.0, record.waited - record.stopped) / max(record.seconds, record.cpu + record.waited)


def _limit(record: Record) -> float:
    return min(1.0, record.stopped / record.seconds)


KINDS: dict[Kind, Callable[[Record], float | None]] = {"device": _device, "data": _data, "host": _host, "limit": _limit}


def _unseen(kind: Kind, rows: Sequence[Record]) -> str:
    """Return why a measure of a rank's probes is unknown; "" if it is known."""
    if any(KINDS[kind](row) is None for row in rows):
        return "the host does not see its waits for batches"
    if kind == "host" and not any(row.cpu for row in rows):
        return "the kernel does not count how long its threads run and wait"
    return ""


def _of_group(kind: Kind, floor: float, series: Series, enough: float) -> list[SlowRank]:
    """Do steps 1 to 5 of the test for the ranks of one group, and return its slow ranks."""
    steps = sorted({record.step for rows in series.values() for record in rows})
    row = {step: place for place, step in enumerate(steps)}
    values = np.full((len(steps), len(series)), np.nan)
    for column, rows in enumerate(series.values()):
        for record in rows:
            values[row[record.step], column] = KINDS[kind](record)
    excess, limit, reached = tested(values, float(np.log1p(floor)) if kind == "device" else floor, enough)
    found = []
    for column in np.flatnonzero(reached.any(axis=0)):
        own = list(series)[column]
        begin, end = _lasts(excess[:, column], int(reached[:, column].argmax()), limit)
        slower = float(np.nanmedian(excess[begin:, column] if end is None else excess[begin : end + 1, column]))
        slower = float(np.expm1(slower)) if kind == "device" else slower
        until = None if end is None else steps[end]
        seen = _words(kind, slower, steps[begin], until)
        found.append(SlowRank(own.rank, own.host, kind, slower, steps[begin], until, seen))
    return found


def tested(values: np.ndarray, floor: float, enough: float) -> tuple[np.ndarray, float, np.ndarray]:
    """Compare each of `values` [K, N] (K probes, N ranks) with the other ranks. Return by how much each value is above
    the other ranks' values, the lowest limit of the sequential test, and for each probe whether the evidence that the
    rank is slow is sufficient.

    Args:
        floor: the smallest limit.
        enough: see `threshold`.
    """
    excess = above_others(values)
    spread = noise(excess)
    excess, error = without_lasting(excess, spread)
    limits = [max(level.limit * spread + error, floor) for level in LEVELS]
    return excess, min(limits), evidence(excess, limits) >= enough


def above_others(values: np.ndarray) -> np.ndarray:
    """Return `values` [K, N] minus, for each value, the median of the other ranks' values at the same probe; the result
    is NaN where the value or all other values are missing.
    """
    out = np.full(values.shape, np.nan)
    for place, row in enumerate(values):
        here = np.flatnonzero(~np.isnan(row))
        if len(here) < 2:
            continue
        order = np.argsort(row[here], kind="stable")
        ranked = row[here][order]
        at, others = np.arange(len(here)), len(here) - 1
        high = ranked[others // 2 + (at <= others // 2)]  # the others without the one at `at`, counted from 0
        low = ranked[(others - 1) // 2 + (at <= (others - 1) // 2)]
        out[place, here[order]] = ranked - (low + high) / 2
    return out


def without_lasting(excess: np.ndarray, spread: float) -> tuple[np.ndarray, float]:
    """Return `excess` [K, N] without the lasting differences between healthy ranks, and the largest error that the
    estimate of these differences is likely to have among all ranks.

    With few ranks the lasting differences cannot be estimated, so nothing is subtracted.
    """
    ranks = excess.shape[1]
    if ranks < ENOUGH:
        return excess, 0.0
    first = np.array([_median(column[~np.isnan(column)][:FIRST]) for column in excess.T])
    most = WITHIN * float(deviation(first))
    error = NormalDist().inv_cdf(1 - 1 / ranks) * _OF_MEDIAN * spread / np.sqrt(min(FIRST, len(excess)))
    return excess - np.clip(first, -most, most), float(error)


def noise(excess: np.ndarray) -> float:
    """Return the standard deviation of the noise in `excess` [K, N], computed over all ranks from the differences of a
    rank's successive probes, between which other ranks may have been probed.
    """
    changes = np.concatenate([np.abs(np.diff(column[~np.isnan(column)])) for column in excess.T])
    return TO_SIGMA / math.sqrt(2) * _median(changes)


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _lasts(excess: np.ndarray, alarm: int, limit: float) -> tuple[int, int | None]:
    """Return the first and the last slow probe of a series [K] that raised an alarm at probe `alarm`; the last one is
    None if the rank is still slow.
    """
    begin, end = span(excess, limit, LEVELS[0], alarm)
    return begin, None if np.count_nonzero(~np.isnan(excess[end + 1 :])) < RECOVERED else end


def _words(kind: Kind, slower: float, since: int, until: int | None) -> str:
    what = {
        "device": f"a fixed piece of work takes {1 + slower:.2f} times as long as on its peers",
        "data": f"waits {slower:.0%} of its time more for its batches than its peers",
        "host": f"is ready, but others have its cores, for {slower:.0%} of its time more than its peers",
        "limit": f"is stopped by a limit of its control group for {slower:.0%} of its time more than its peers",
    }[kind]
    when = f"since step {since}" if until is None else f"from step {since} to {until}"
    return f"{what}, {when}"
