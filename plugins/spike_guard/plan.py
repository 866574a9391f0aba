"""This module decides which steps are spikes and how a run continues after a spike, and reads `plugins.spike_guard` of
a recipe. The module uses only Python and NumPy.

Loss and global norm are compared with the last good steps on a logarithmic scale, on which their noise is almost
constant. The trend of these steps is the median of the slopes between any two of them (Theil and Sen); it is
extrapolated only if it falls, because a loss is not expected to keep rising. A value is a spike if it lies more than
`threshold` robust standard deviations (1.4826 times the median absolute deviation from the trend) above the trend; a
value below the trend is never a spike. No step is judged until the window is full.

`SPIKE` and `NO_MORE` are words in a run's last message, by which the launch recognises that the run ended after a
spike, and whether the run may go on. `read` and `check` read the settings, and refuse other settings of the recipe that
contradict them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.batch_ramp.plan import Ramp
from plugins.errors import RecipeError
from plugins.finite_loss.plan import NORM
from plugins.lines import Newest
from plugins.robust import deviation
from plugins.settings import WATCHES, Section, graph_mode_only, setting, value_at
from plugins.spike_guard.ledger import Entry, Ranges, count, normal, originals

SPIKE = "spike: "  # begins the reason
NO_MORE = "does not go back again (plugins.spike_guard.rollbacks)"  # is in the reason of a run that is given up


KEY = "plugins.spike_guard"
LOADER = "BlendedMegatronDatasetDataLoader"
_LOADER = "train_dataset.data_loader"
_MOST = 10  # windows of steps that a resume reads, where one of the two values is rarely known
_LEAST_WINDOW = 4  # good steps of which a median and a spread say anything
JUDGED = ("loss", NORM)
_LEAST_SPREAD = 0.01  # of a logarithm: steps that differ by less than 1 % are alike


def _skipped(value: Any) -> Ranges:
    right = "write ranges [[first, stop], ...] of samples counted from 0, as in RUN/skipped.json"
    if not isinstance(value, (list, tuple)):
        raise RecipeError(f"{value!r} is not a list of ranges; {right}")
    for pair in value:
        whole = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(each) is int for each in pair)
        if not (whole and 0 <= pair[0] < pair[1]):
            raise RecipeError(f"{pair!r} is not a range; {right}")
    return normal(value)


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says what a spike is, and what happens after a spike. `benchmarks/cluster/spike_guard.py` measures
    how often these settings raise a false alarm in runs without spikes.
    """

    KEY = KEY
    RIGHT = f"write `rollbacks: 3` under it, or {KEY}: False to leave it off"
    CHANGE = WATCHES

    window: int = setting(
        64,
        "number of the last good steps with which each new step is compared",
        f"write a number of steps from {_LEAST_WINDOW} on",
        least=_LEAST_WINDOW,
    )
    threshold: float = setting(
        16.0,
        "a step is a spike if it lies this many robust standard deviations above the trend of these steps",
        "write a number of standard deviations above 0, such as 16.0",
        above=0,
    )
    skip: int = setting(
        1,
        "steps whose samples are left out, that of the spike is the last of them",
        "write a number of steps, 1 for the spike's step only",
        least=1,
    )
    rollbacks: int = setting(
        3,
        "how often a run goes back within a window of steps; then it ends, as without the guard",
        "write how often a run may go back",
        least=1,
    )
    skipped: Ranges = setting(
        (),
        "ranges of samples that are left out from the beginning",
        null=True,
        parse=_skipped,
        change=("numbers", "samples are left out"),
    )


read = Settings.read


def check(recipe: Mapping[str, Any]) -> Settings:
    """Return the settings of a recipe whose `plugins.spike_guard` is on.

    Raises:
        RecipeError: the settings are wrong, or the plugin cannot leave samples out in this recipe, or cannot read its
            loss.
    """
    settings = read(value_at(recipe, KEY))
    if value_at(recipe, f"{_LOADER}.type") != LOADER:
        raise RecipeError(
            f"{KEY} leaves out samples of {LOADER}, not of {value_at(recipe, f'{_LOADER}.type')!r}; leave the plugin "
            "out",
            f"{_LOADER}.type",
        )
    if value_at(recipe, f"{_LOADER}.shuffle"):
        raise RecipeError(
            f"if the data is shuffled, {KEY} cannot tell which samples a step reads; write False", f"{_LOADER}.shuffle"
        )
    graph_mode_only(recipe, KEY)
    if (value_at(recipe, "runner_config.epochs") or 1) != 1:
        raise RecipeError(
            f"if {KEY} leaves samples out of the first epoch, the second epoch would not begin at the first sample; "
            f"write 1, and ask for more samples with {_LOADER}.sizes",
            "runner_config.epochs",
        )
    if (value_at(recipe, "runner_config.sink_size") or 1) > 1:
        raise RecipeError(
            f"{KEY} needs the loss of every step, but with a sink_size above 1 MindFormers reports one loss for "
            "several steps; write 1",
            "runner_config.sink_size",
        )
    if (value_at(recipe, "plugins.finite_loss.stop_after") or 1) != 1:
        raise RecipeError(
            f"stop_after has no effect, because {KEY} rolls back at the first loss that is not finite; leave "
            "stop_after out",
            "plugins.finite_loss.stop_after",
        )
    for callback in value_at(recipe, "callbacks") or []:
        if callback.get("type") == "MFLossMonitor" and (callback.get("per_print_times") or 1) != 1:
            wrong = f"unless per_print_times is 1, MFLossMonitor reports only some steps, but {KEY} needs every step"
            raise RecipeError(f"{wrong}; write per_print_times: 1", "callbacks")
        if callback.get("type") == "CheckpointMonitor":
            _check_kept(settings, recipe, callback)
    return settings


def _check_kept(settings: Settings, recipe: Mapping[str, Any], callback: Mapping[str, Any]) -> None:
    """Raise RecipeError if the run keeps no checkpoint from before the steps that any spike leaves out, and would begin
    at step 1 again. `callback` is the recipe's CheckpointMonitor, whose older keys MindFormers reads where
    the section `checkpoint` has none.
    """
    keys = ("save_max", "keep_checkpoint_max", 5), ("save_interleaved_steps", "save_checkpoint_steps", 1)
    found = [value_at(recipe, f"checkpoint.{ours}") or callback.get(older) or default for ours, older, default in keys]
    kept, every = found
    if all(type(each) is int for each in found) and settings.skip > kept * every:
        raise RecipeError(
            f"{KEY}.skip leaves out the step of a spike and the {settings.skip - 1} steps before it, but the run keeps "
            f"{kept} checkpoints, one every {every} steps: all are newer than the first of these steps, so the run "
            f"would begin at step 1 again; write at least {-(-settings.skip // every)}, or a smaller {KEY}.skip",
            "checkpoint.save_max",
        )


def spreads_above(value: float, good: Sequence[float]) -> tuple[float, float]:
    """Return two numbers: how many robust standard deviations the logarithm of `value` lies above its prediction, and
    the predicted value. The prediction continues the trend of the logarithms of `good` by one step.

    Args:
        good: the values of the last good steps, the newest last; all are above 0.
    """
    logs = np.log(good)
    one, two = np.triu_indices(len(logs), 1)
    slope = min(float(np.median((logs[two] - logs[one]) / (two - one))), 0.0) if len(logs) > 1 else 0.0
    level = logs - slope * np.arange(len(logs))
    median = np.median(level)
    spread = max(float(deviation(level, median)), _LEAST_SPREAD)
    expected = float(median + slope * len(logs))
    return (math.log(value) - expected) / spread, math.exp(expected)


class Window:
    """A `Window` holds the loss and the gradient norm of the last good steps, and judges whether the values of a new
    step are a spike.

    Args:
        size: the number of steps in the window.
        threshold: see `Settings`.
    """

    def __init__(self, size: int, threshold: float):
        self.size, self.threshold = size, threshold
        self.good: dict[str, deque[float]] = {name: deque(maxlen=size) for name in JUDGED}

    def see(self, readings: Mapping[str, float | None]) -> str | None:
        """Judge the values of a step, which have the names of `JUDGED`; return a text that says which of these values
        is a spike.

        A spike is not added to the window. A value that is not known, not finite or not above 0 is not judged.
        """
        known = {name: value for name in JUDGED if (value := readings.get(name)) is not None and _judged(value)}
        for name, value in known.items():
            good = self.good[name]
            if len(good) < self.size:
                continue
            above, expected = spreads_above(value, good)
            if above > self.threshold:
                usual = f"{expected:.4g}, which the last {self.size} good steps led to"
                return f"{name} {value:.4g} is {above:.0f} standard deviations above {usual}"
        for name, value in known.items():
            self.good[name].append(value)
        return None


# tokens until the step's begin and end, whether it had more samples than a step has now, its values (None: an overflow)
_Step = tuple[int, int, bool, dict[str, float | None] | None]


def good_steps(lines: Iterable[str], done: int, size: int, ramp: Ramp, length: int) -> list[dict[str, float | None]]:
    """Return the losses and norms of the last steps up to step `done`, read from the lines of RUN/metrics/rank_N.jsonl,
    to fill a `Window` of `size` steps. The returned steps are the fewest that hold `size` values of the loss and of the
    norm, but at most ten times `size` steps.

    The lines of a resumed run, which begin with a header, replace the lines of the steps that the run repeats. Steps
    whose gradients overflowed are left out, as a `Guard` leaves them out during training. Steps before a resume with
    another global batch have other numbers, so the steps are compared by their samples. The norms of a step with more
    samples than the next step, and of all steps before it, are None: the mean of more gradients has less noise, and so
    a smaller norm, and norms of steps before that are no neighbours of the next norm.

    A rank that did not take part in the run for more than `size` steps, because the run went on with fewer hosts, has
    no lines of these steps. Its lines from before this time are no neighbours of the next step and are left out.

    Args:
        ramp: how many samples the steps of the run have now.
        length: the number of tokens of a sample.
    """
    steps: list[_Step] = []
    newest, start = Newest(), None
    now = ramp.batch_at(done + 1) * length
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if newest.is_late(record):
            continue
        if "start_step" in record:
            start = record["start_step"]  # the next line says in which batch this number counts
        elif "step" in record:
            own = None if ramp.stages else record.get("tokens")  # with a ramp steps keep their numbers
            counted = (
                Ramp((), own) if own else Ramp(tuple((end, n * length) for end, n in ramp.stages), ramp.full * length)
            )
            before = record["step"] - 1 if start is None else min(start, record["step"] - 1)
            begin, start = counted.samples_until(before), None
            while steps and steps[-1][1] > begin:
                steps.pop()
            values = {"loss": record.get("loss"), NORM: record.get("global_norm")}
            end, more = counted.samples_until(record["step"]), (own or 0) > now
            steps.append((begin, end, more, None if record.get("overflow") else values))
    last = ramp.samples_until(done) * length
    steps = _without_gaps([each for each in steps if each[1] <= last], last, size * now)
    larger = max((place for place, (*_, more, _) in enumerate(steps) if more), default=-1)
    known = [(place, values) for place, (*_, values) in enumerate(steps) if values]
    good = [{**values, NORM: None} if place <= larger else values for place, values in known]
    held = ([place for place, each in enumerate(good) if _judged(each[name])][-size:] for name in JUDGED)
    first = min((places[0] for places in held if places), default=len(good))
    return good[max(first, len(good) - _MOST * size) :]


def _without_gaps(steps: list[_Step], last: int, most: int) -> list[_Step]:
    """Return the steps after the last gap of more than `most` tokens, in which this rank took no part in the run;
    `last` is the number of tokens that are trained.
    """
    begins = [*(begin for begin, *_ in steps), last]
    gaps = [place for place, (_, end, *_) in enumerate(steps, 1) if begins[place] - end > most]
    return steps[max(gaps, default=0) :]


def _judged(value: float | None) -> bool:
    """Return whether a `Window` judges a value: it is known, finite and above 0."""
    return value is not None and 0 < value < math.inf


def what_follows(
    step: int, wrong: str, before: Sequence[Entry], settings: Settings, ramp: Ramp, skipped: Ranges
) -> tuple[Entry | None, str]:
    """Return the consequence of a spike at `step`: the ledger entry with the samples to leave out, and a sentence about
    this entry.

    Args:
        wrong: a description of the spike.
        before: the spikes after which this run has gone back.
        ramp: how many samples the steps of the run have.
        skipped: the samples that are already left out.

    Returns:
        The first value is None, and the second one says why, if the run does not go back to a checkpoint.
    """
    places = [steps_of(entry, ramp) for entry in before]
    same = [entry for entry, place in zip(before, places, strict=True) if step in place]
    other = f"; step {step} spiked before{_as_step(same[-1], step)}" if same else ""
    other += ", with other samples: they are not the cause" if same else ""
    near = sum(place[0] - settings.window <= step <= place[-1] + settings.window for place in places)
    if near >= settings.rollbacks:
        often = f"{near} time{'s' * (near > 1)} within {settings.window} steps"
        return None, f"{SPIKE}{wrong}{other}; the run has gone back {often}, and {NO_MORE}"
    first = max(step - settings.skip + 1, 1)
    samples = originals(ramp.samples_until(first - 1), ramp.samples_until(step), skipped)
    steps = f"step {step}" if first == step else f"steps {first} to {step}"
    return (
        Entry(step, first, wrong + other, samples),
        f"{SPIKE}{wrong}{other}; going back to before step {first}, without the samples of {steps}",
    )


def _as_step(entry: Entry, step: int) -> str:
    """Return in words which step, counted in another global batch, the step of an earlier spike was."""
    return "" if entry.step == step else f" (as step {entry.step} of another global batch)"


def steps_of(entry: Entry, ramp: Ramp) -> range:
    """Return the steps that now train on the samples on which the run had the spike `entry`. The result is the step of
    the spike itself, unless the run was resumed with another global batch after the spike.

    Args:
        ramp: how many samples the steps of the run have now.
    """
    left, steps = count(entry.samples), entry.step - entry.first + 1
    # a ramp may have been changed behind the checkpoint: where, the entry does not say
    if ramp.stages or ramp.samples_until(entry.step) - ramp.samples_until(entry.first - 1) == left:
        return range(entry.step, entry.step + 1)
    batch = left // steps  # without a ramp all steps of an entry have the same number of samples
    return range(ramp.steps_of((entry.step - 1) * batch) + 1, ramp.steps_of(entry.step * batch - 1) + 2)
