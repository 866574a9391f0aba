"""This module computes all values that `tc3 runs report` prints about one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from plugins.errors import CheckpointError, DataError
from plugins.lines import Span
from plugins.robust import deviation
from plugins.spike_guard.ledger import Entry, read_ledger
from plugins.spike_guard.plan import Settings
from tools.checkpoint.scan import iterations, newest_saved
from tools.files.atomic import real_path
from tools.recipe.view import View
from tools.runs.attempts import Attempt
from tools.runs.failures import Failure, failures, has_failed, untold
from tools.runs.goodput import Frame, Ledger, ledger, missing
from tools.runs.places import END, translated
from tools.runs.readings import Evaluation, Part, Run, load_run, metrics_of, perplexity, read_evaluations
from tools.runs.slow import Slow, slow_of

# Steps of a run whose loss or global norm jumps far above the steps before, or is not finite.

# as plugins.spike_guard would judge them, but all steps at once: a window also holds the spikes before
WINDOW, THRESHOLD = Settings().window, Settings().threshold
_LEAST = 8  # steps before, of which a spread says anything
_LEAST_SPREAD = 0.01  # of a logarithm: steps that differ by less than 1 % are alike
JUDGED = ("loss", "global_norm")


@dataclass(frozen=True)
class Spike:
    """A `Spike` is a sudden high value of a metric: at `step`, the metric `name` had the value `value`, which is
    `above` standard deviations higher than in the preceding steps. The field `above` is None if the value is not
    finite.
    """

    step: int
    name: str
    value: float
    above: float | None
    stands: bool


def spikes(parts: list[Part], cuts: Sequence[float]) -> list[Spike]:
    """Return the spikes of all parts of a run (a part begins at each start of the workers), in the order in which the
    steps were made. A step that was skipped because of the loss scale has no gradient norm; a missing norm does not
    count as a spike.

    Args:
        cuts: for each part of the run, the place behind which later parts trained again (`tools.runs.places`).
    """
    found = []
    for at, part in enumerate(parts):
        steps = np.asarray(part["step"])
        skipped = np.isin(steps, list(part.skipped))
        # of earlier parts what still stood when this one began
        stood = [min(later.begin for later in parts[index + 1 : at + 1]) for index in range(at)]
        for name in JUDGED:
            before = [
                np.asarray(one[name])[np.asarray(one["step"]) * one.unit <= last]
                for one, last in zip(parts, stood, strict=False)
            ]
            known = np.concatenate([*before, []])[-WINDOW:]
            values = np.asarray(part[name])
            above = _above(np.concatenate([known, values]))[len(known) :]
            # a part without any value is one that does not record it, or whose rank has none: no NaN of training
            turned_nan = np.isnan(values) & (name in part.recorded) & ~(skipped & (name == "global_norm"))
            for index in np.flatnonzero((above > THRESHOLD) | np.isinf(values) | turned_nan):
                score = float(above[index]) if math.isfinite(values[index]) else None
                step = int(steps[index])
                found.append(Spike(step, name, float(values[index]), score, part.place(step) <= cuts[at]))
    return found


def _above(values: np.ndarray) -> np.ndarray:
    """Return how many robust standard deviations the logarithm of each value lies above the `WINDOW` values before
    it.
    """
    with np.errstate(all="ignore"):
        logs = np.log(np.where(values > 0, values, np.nan))
    logs[~np.isfinite(logs)] = np.nan
    padded = np.concatenate([np.full(WINDOW, np.nan), logs])
    result = np.full(len(values), -np.inf)
    size = 1 << 14  # at a time, for memory's sake
    for first in range(0, len(values), size):
        stop = min(first + size, len(values))
        windows = np.lib.stride_tricks.sliding_window_view(padded[first : stop + WINDOW - 1], WINDOW)
        enough = np.isfinite(windows).sum(1) >= _LEAST
        if enough.any():
            rows, own = windows[enough], logs[first:stop][enough]
            median = np.nanmedian(rows, 1)
            spread = deviation(rows, median[:, None], 1)
            result[first:stop][enough] = (own - median) / np.maximum(spread, _LEAST_SPREAD)
    return np.nan_to_num(result, nan=-np.inf)


# How often a run fails, and how often it should save: estimates with their uncertainty.
#
# * Mean time between failures: running time over failures, with the two-sided interval of a Poisson count over a fixed
#   time (F. Garwood, Biometrika 28, 1936; NIST/SEMATECH e-Handbook, 8.4.5.1), which few failures make wide.
# * Interval between saves: J. W. Young, CACM 17 (1974): sqrt(2 C M); J. T. Daly, FGCS 22 (2006), eq. 37: its higher
#   order. C: seconds that a save stops the training; M: mean time between failures.
# * What an interval T costs, as a share of the time: C / T for saving and T / 2M for steps made again (first order).

CONFIDENCE = 0.9


@dataclass(frozen=True)
class Mtbf:
    """An `Mtbf` is a run's estimated mean time between failures in seconds (None if there was no failure) with its
    confidence interval; `high` is None if there is no upper bound.
    """

    failures: int
    running: float
    estimate: float | None
    low: float
    high: float | None


@dataclass(frozen=True)
class Saving:
    """A `Saving` holds the interval between checkpoint saves that a run used and the best interval, in seconds of
    training. For each of the two intervals, a `Saving` also holds the share of the run's time that saves take.
    """

    cost: float
    used: float
    best: float
    low: float
    high: float | None
    cost_used: float
    cost_best: float


def mtbf(failures: int, running: float) -> Mtbf | None:
    """Return the mean time between failures of a run that had a given number of failures in `running` seconds; return
    None if the run did not train.
    """
    if running <= 0:
        return None
    tail = (1 - CONFIDENCE) / 2
    # most and fewest failures that would be expected in that time, were the truth at the interval's ends
    most = _mean_with(failures, tail)
    if not failures:
        return Mtbf(0, running, None, running / most, None)
    return Mtbf(failures, running, running / failures, running / most, running / _mean_with(failures - 1, 1 - tail))


def _mean_with(count: int, probability: float) -> float:
    """Return the mean of a Poisson variable that is at most `count` with `probability` (NIST/SEMATECH e-Handbook,
    8.4.5.1).

    P(N <= count) is the regularized upper incomplete gamma function Q(count + 1, mean).
    """
    from scipy.special import gammainccinv

    return float(gammainccinv(count + 1, probability))


def young(cost: float, between: float) -> float:
    """Return the best interval between checkpoint saves by Young's formula, in seconds of training."""
    return math.sqrt(2 * cost * between)


def daly(cost: float, between: float) -> float:
    """Return the best interval between checkpoint saves by Daly's formula, in seconds of training; if a save takes at
    least twice the mean time between failures, return the mean time between failures.
    """
    if cost >= 2 * between:
        return between
    share = math.sqrt(cost / (2 * between))
    return young(cost, between) * (1 + share / 3 + share**2 / 9) - cost


def overhead(cost: float, interval: float, between: float) -> float:
    """Return the share of the time that is lost if a checkpoint is saved every `interval` seconds: by the saves, and by
    repeating steps after failures (to first order).
    """
    return cost / interval + interval / (2 * between)


def saving(cost: float, used: float, found: Mtbf) -> Saving | None:
    """Return a comparison of the interval between checkpoint saves that the run used with the best interval; return
    None if the run had no failure or the cost of a save was not measured.
    """
    if found.estimate is None or cost <= 0 or used <= 0:
        return None
    best = daly(cost, found.estimate)
    return Saving(
        cost,
        used,
        best,
        daly(cost, found.low),
        daly(cost, found.high) if found.high else None,
        overhead(cost, used, found.estimate),
        overhead(cost, best, found.estimate),
    )


SECOND = 1_000_000  # microseconds
GOES_ON = "between attempts"
GONE = "unknown"  # the state of a run whose folder is not there


@dataclass(frozen=True)
class Checkpoints:
    """A `Checkpoints` holds the time that saving checkpoints costs a run. The field `seconds` is the median time for
    which training stops for a save; `every` is the number of seconds of training between two saves.
    """

    saves: int
    seconds: float | None
    every: float | None
    steps: int | None
    newest: int | None
    at_risk: int | None
    best: Saving | None
    why: str = ""


@dataclass(frozen=True)
class Beside:
    """A `Beside` holds the usual step time of a run in seconds, the step time that is predicted for a measured cluster,
    and the ratio of these two times.
    """

    usual: float
    predicted: float
    ratio: float


@dataclass(frozen=True)
class Study:
    """A `Study` holds all values that `tc3 runs report` prints about one run. The field `ledger` divides the run's time
    by kind of work; if the time cannot be divided, `ledger` is a sentence that says why.
    """

    run: Run
    state: str
    ledger: Ledger | str
    failures: list[Failure]
    mtbf: Mtbf | None
    checkpoints: Checkpoints
    spikes: list[Spike]
    slow: Slow
    skipped: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    name: str = ""  # in tables and pictures
    evaluation: Evaluation | None = None  # the last one
    beside: Beside | None = None  # the step of a measured cluster, if one was given


def studies(folders: Sequence[Path]) -> list[Study]:
    """Return the studies of several runs, named by their folders, or by the whole paths if two folders have the same
    name.
    """
    names = [real_path(folder).name for folder in folders]
    short = len(set(names)) == len(names)
    found = [study(folder) for folder in folders]
    return [replace(one, name=name if short else str(one.run.folder)) for one, name in zip(found, names, strict=True)]


def study(folder: Path) -> Study:
    """Read the folder of one run and return its study.

    Raises:
        DataError: as in `load_run`.
    """
    run = load_run(folder)
    time = missing(metrics_of(folder, run.recipe)) or ledger(run)
    failed = failures(run)
    known = time if isinstance(time, Ledger) else None
    running = sum(frame.end - frame.begin for frame in known.frames) / SECOND if known else 0.0
    told = bool(run.attempts) or (len(run.parts) == 1 and _state(run) == "done")  # else: why it ended stands nowhere
    count, lost = sum(one.counts for one in failed), untold(run)
    found = mtbf(count, running) if told and (count or not lost) else None
    slow, held_out = slow_of(folder, run.recipe), read_evaluations(folder, run)
    skipped, notes = _skipped(folder)
    notes = [*run.notes, *_change(run), *(known.notes if known else []), *notes]
    if lost:
        which = f"attempt{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        notes.append(f"no record says how {which} ended, so there may have been more failures")
    saves, jumps = _checkpoints(run, found), spikes(run.parts, _cuts(run.parts, known.frames if known else []))
    last, name = held_out[max(held_out)] if held_out else None, real_path(folder).name
    return Study(run, _state(run), time, failed, found, saves, jumps, slow, skipped, notes, name, last)


def _change(run: Run) -> list[str]:
    """Return a sentence about the numbers of steps if a resume changed the global batch."""
    units = sorted({part.unit for part in run.parts})
    return [
        f"the global batch was changed: the run has steps of {', '.join(f'{unit:,}' for unit in units)} tokens, which "
        "are numbered anew after each change, and each step has the number that its own attempt gave it"
    ] * (len(units) > 1)


def _cuts(parts: Sequence[Part], frames: Sequence[Frame]) -> list[float]:
    """Return for each part the place behind which a later part trained again, or a later attempt that has made no step
    yet is to train again.
    """
    planned = {id(part): frame.cut for frame in frames for part in frame.parts}
    own = [min(planned.get(id(part), END), END if part.left is None else part.left) for part in parts]
    return [min([cut, *(later.begin for later in parts[at + 1 :])]) for at, cut in enumerate(own)]


def _state(run: Run) -> str:
    """Return one of done, given up, left (preempted), interrupted, failed, unfinished; unknown without attempts."""
    if run.attempts:
        return state_of(run.attempts[-1])
    total = max((part.total_steps or 0 for part in run.parts), default=0)
    return "done" if total and run.parts[-1]["step"][-1] >= total else "unknown"


def state_of(attempt: Attempt) -> str:
    """Return the state of an attempt of a run in one or two words, such as "done", "failed" or "given up"."""
    decision = attempt.verdict.decision if attempt.verdict else None
    if decision:
        return {"done": "done", "give up": "given up", "leave": "left"}.get(decision, GOES_ON)
    outcomes = {end.outcome for end in attempt.ends.values()}
    for outcome in ("failed", "interrupted", "preempted", "done"):
        if outcome in outcomes:
            return outcome
    return "unfinished"


def _checkpoints(run: Run, found: Mtbf | None) -> Checkpoints:
    view = View(run.recipe) if run.recipe else None
    spans = [span for span in run.spans if span.kind == "save"]
    saves = _saves(spans)
    usual, now = run.usual(), run.parts[-1].unit if run.parts else 1
    wanted = view.number(("checkpoint", "save_interleaved_steps"), 0) if view else 0
    steps = wanted or _between(sorted({translated(span.step, run.unit_at(span.end), now) for span in spans})) or None
    seconds = median(seconds for _, seconds in saves) if saves else None
    every = steps * usual if steps and usual else None
    newest = _newest(run, view)
    risk = _at_risk(run, newest) if newest is not None else None
    best = saving(seconds, every, found) if seconds and every and found else None
    return Checkpoints(len(saves), seconds, every, steps, newest, risk, best, _why_unknown(seconds, every, found, best))


def _at_risk(run: Run, newest: int) -> int | None:
    """Return how many steps were trained since the newest checkpoint, of step `newest`, as the newest steps are
    counted; None if the global batch was changed and no record says when this checkpoint was saved.
    """
    last = run.parts[-1] if run.parts else None
    if last is None:
        return 0
    saved = [run.unit_at(span.end) for span in run.spans if span.sealed and span.step == newest]
    units = {part.unit for part in run.parts} if not saved else {saved[-1]}
    if len(units) > 1:
        return None
    return max(0, math.ceil(last["step"][-1] - translated(newest, units.pop(), last.unit)))


def _saves(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """Return the step of each save, and the seconds for which training stood still. A save in the background has two
    spans, of which only the second is sealed; a later attempt may save a step once more.
    """
    found: list[tuple[int, float]] = []
    for before, span in zip([None, *spans], spans, strict=False):
        took = span.end - span.begin
        if before and span.sealed and not before.sealed and before.step == span.step:
            found[-1] = span.step, found[-1][1] + took
        else:
            found.append((span.step, took))
    return found


def _between(steps: Sequence[float]) -> int | None:
    """Return steps between saves, the median."""
    apart = [later - step for step, later in pairwise(steps)]
    return round(median(apart)) if apart else None


def _newest(run: Run, view: View | None) -> int | None:
    """Return the step of the newest complete checkpoint that is there; if the folder of checkpoints holds none at all,
    as on another machine, that of the one that was sealed last. None if there is none, or if it cannot be read.
    """
    place = _saves_of(run.folder, view) if view else None
    if place and iterations(place):
        try:
            there = newest_saved(place)
        except CheckpointError:  # which of them a resume would take is unknown, and no reason to report nothing else
            return None
        return there.step if there else None
    return next((span.step for span in reversed(run.spans) if span.sealed), None)


def _saves_of(folder: Path, view: View) -> Path | None:
    """Return the folder of a run's checkpoints: where the recipe says, or in `folder` if the run saved into its own
    folder. (If this folder was moved, another run may have taken the path that the recipe names.)
    """
    place, before = (view.get(key) for key in (("checkpoint", "save_path"), ("output_dir",)))
    if not isinstance(place, str):
        return None
    own = isinstance(before, str) and Path(before).is_absolute() and Path(place).is_relative_to(before)
    return folder / Path(place).relative_to(str(before)) if own else Path(place)


def _why_unknown(seconds: float | None, every: float | None, found: Mtbf | None, best: Saving | None) -> str:
    """Return why there is no best interval; empty where there is."""
    if best:
        return ""
    if seconds is None:
        return "no save was measured"
    if every is None:
        return "the usual time of a step, or the number of steps between two saves, is unknown"
    if found is None:
        return "the number of failures of the run is unknown"
    return "no failure was seen" if found.estimate is None else "a save took no time"


def _skipped(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return the ledger of samples that the spike guard left out; what is wrong with it."""
    try:
        return read_ledger(folder), []
    except DataError as error:
        return [], [f"the samples that were left out are unknown: {error}"]


def content(found: Study) -> dict[str, Any]:
    """Return the study of a run as values fit for JSON: seconds, steps, words, and null for unknown values."""
    time = found.ledger if isinstance(found.ledger, Ledger) else None
    checkpoints = asdict(found.checkpoints)
    return {
        "run": str(found.run.folder),
        "state": found.state,
        "goodput": time.goodput if time else None,
        "wall_seconds": time.wall / SECOND if time else None,
        "seconds": {kind: value / SECOND for kind, value in time.totals().items()} if time else None,
        "unknown": None if time else found.ledger,
        "kept_steps": time.kept_steps if time else None,
        "lost_steps": time.lost_steps if time else None,
        "usual_step_seconds": found.run.usual(),
        "measured": asdict(found.beside) if found.beside else None,
        "attempts": [_attempt(found, time, frame) for frame in time.frames] if time else [],
        "failures": [_failure(one) for one in found.failures],
        "mtbf": asdict(found.mtbf) if found.mtbf else None,
        "checkpoints": checkpoints,
        "held_out": _held_out(found.evaluation) if found.evaluation else None,
        "spikes": [_spike(one) for one in found.spikes],
        "skipped": [{"step": one.step, "first": one.first, "why": one.why} for one in found.skipped],
        "slow_ranks": asdict(found.slow),
        "notes": found.notes,
    }


def _held_out(last: Evaluation) -> dict[str, Any]:
    corpora = {name: _loss(loss) for name, loss in last.corpora.items()}
    return {"step": last.step, **_loss(last.loss), "corpora": corpora}


def _loss(loss: float) -> dict[str, float | None]:
    """Return a loss for JSON, which has no infinity."""
    both = {"loss": loss, "perplexity": perplexity(loss)}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in both.items()}


def _attempt(found: Study, time: Ledger, frame: Any) -> dict[str, Any]:
    attempt = frame.attempt
    steps = [step for part in frame.parts for step in (part["step"][0], part["step"][-1])]
    return {
        "attempt": frame.number,
        "begin": frame.begin / SECOND,
        "end": frame.end / SECOND,
        "hosts": attempt.plan.hosts if attempt and attempt.plan else None,
        "resume": attempt.plan.resume if attempt and attempt.plan else None,
        "first_step": int(steps[0]) if steps else None,
        "last_step": int(steps[-1]) if steps else None,
        "state": ("failed" if has_failed(attempt) else state_of(attempt)) if attempt else None,
        "decision": attempt.verdict.decision if attempt and attempt.verdict else None,
        "why": attempt.verdict.why if attempt and attempt.verdict else None,
        "seconds": {kind: value / SECOND for kind, value in time.totals(frame.number).items() if value},
    }


def _failure(one: Failure) -> dict[str, Any]:
    record = asdict(one) | {"name": one.name, "log": str(one.log) if one.log else None}
    record["found"] = asdict(one.found)
    return record


def _spike(one: Spike) -> dict[str, Any]:
    """Return a spike for JSON, which has neither NaN nor infinity."""
    finite = one.above is not None
    return asdict(one) | {"value": one.value if finite else None, "finite": finite}
