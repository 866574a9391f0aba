"""This module finds gaps in the records of a run: steps that its metrics skip, ranks that recorded less than others,
and recorded states that are missing. Two runs are called equal only if the records of both runs have no gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from plugins.errors import RecipeError
from plugins.step_record.plan import KEY, Settings, without_update
from tools.accuracy.diagnose import lacking
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.readings import Readings

COPY = "copy the metrics/ folders of all hosts into this folder again"
NUMBERS = ("lm_loss", "mtp_loss", "loss", "global_norm", "learning_rate")
STATE = "weights, gradients and routers"
_MANY = 10**5  # missing steps that are not listed one by one


class Side(Protocol):
    """A `Side` is the type of a run's records here: it has those attributes of `evidence.Side` in which a gap can be
    found.
    """

    recipe: Recipe
    steps: dict[int, dict[str, Any]]
    total_steps: int | None
    samples: dict[int, dict[int, dict[str, Any]]]
    starts: list[Any]
    states: dict[int, Any]
    first: int


def take_out(side: Side, metrics: Mapping[int, Readings], headers: Mapping[int, list[Mapping[str, Any]]]) -> list[str]:
    """Remove from a run's records the steps and values that not all ranks recorded, and return a sentence for each such
    gap.

    Args:
        side: the records of the run.
        metrics: the metrics of each rank. headers: rank -> the first lines of the parts of its metrics.
    """
    return [
        *_steps(side),
        *_ranks(side, metrics),
        *_numbers(side),
        *_skipped(side),
        *_starts(side, len(metrics)),
        *_states(side, len(metrics)),
        *lacking.of_metrics(headers, metrics),
        *_lacking(side),
    ]


def printed_every(recipe: Recipe) -> int:
    """Return the interval, in steps, at which a run of this recipe writes a step into its metrics file."""
    monitors = [each for each in recipe.get("callbacks") or [] if each.get("type") == "MFLossMonitor"]
    runner = recipe.get("runner_config") or {}
    sunk = runner.get("sink_size", 1) if runner.get("sink_mode") else 1
    return max([1, sunk, *(each.get("per_print_times") or 1 for each in monitors)])


def _steps(side: Side) -> Iterator[str]:
    last, every = max(side.steps), printed_every(side.recipe)
    if side.total_steps and _going_on(side):
        yield f"step {last} of {side.total_steps} is its last: it is still training, or ended early"
    expected = range(side.first, last + 1)
    if every == 1 and len(expected) > len(side.steps) + _MANY:  # of a number that was changed, they fill no memory
        yield f"{len(expected) - len(side.steps):,} of the steps up to {last} are missing from its metrics; {COPY}"
    elif every == 1 and (missing := set(expected) - side.steps.keys()):
        yield f"{_listed(missing)} missing from its metrics; {COPY}"


def _ranks(side: Side, metrics: Mapping[int, Readings]) -> Iterator[str]:
    everywhere = {step for readings in metrics.values() for step in readings.steps}
    last = max(everywhere) if _going_on(side) else None  # the ranks of such a run may be a step apart
    for rank, readings in metrics.items():
        if missing := everywhere - readings.steps.keys() - {last}:
            yield f"{_listed(missing)} missing from the metrics of rank {rank}; {COPY}"
    for step in [step for step in side.samples if any(step not in each.steps for each in metrics.values())]:
        del side.samples[step]  # those that some ranks read would look like other samples


def _numbers(side: Side) -> Iterator[str]:
    """Yield what only some steps have: a number of the metrics, or the digests of the samples."""
    for name in NUMBERS:
        known = any(record.get(name) is not None for record in side.steps.values())
        missing = {step for step, record in side.steps.items() if name in record and record[name] is None}
        if known and missing:
            yield f"the {name} of {_listed(missing, verb='')} is missing from its metrics"
    last = max(side.steps) if _going_on(side) else None
    read = {step for step, record in side.steps.items() if "samples" in record}
    if side.samples and (missing := read - side.samples.keys() - {last}):
        yield f"the samples of {_listed(missing, verb='')} are not recorded by all ranks"


def _skipped(side: Side) -> Iterator[str]:
    """Take out gradients and updates of steps that the loss scale skipped; older versions recorded wrong ones."""
    skipped = set()
    for step, state in side.states.items():
        if side.steps.get(step, {}).get("overflow") or any(line.get("skipped") for line in state.lines.values()):
            skipped.add(step)
            for line in state.lines.values():
                line.update(skipped=True, weights=without_update(line["weights"]))
    if skipped:
        yield (
            f"{_listed(skipped, verb=' was| were')} skipped, because gradients overflowed the loss scale: nothing was "
            "updated, and the gradients are unknown"
        )


def _starts(side: Side, ranks: int) -> Iterator[str]:
    partly = [start for start in side.starts if len(start.lines) < ranks]
    side.starts = [start for start in side.starts if start not in partly]
    for start in partly:
        if not any(each.step == start.step for each in side.starts):
            yield f"the state after step {start.step}, from which it started, is not recorded by all ranks; {COPY}"


def _states(side: Side, ranks: int) -> Iterator[str]:
    partly = {step for step, state in side.states.items() if len(state.lines) < ranks}
    # a rank completes the record of a step when the next step begins
    going_on = _going_on(side)
    if going_on and partly and max(partly) == max(side.states):
        del side.states[max(partly)]
        partly.remove(max(partly))
    for step in partly:
        del side.states[step]
    if partly:
        yield f"the {STATE} of {_listed(partly, verb='')} are not recorded by all ranks; {COPY}"
    asked = _asked(side)
    if not asked:
        return
    if not side.starts and not partly:
        yield f"the state from which it started is not recorded, although {KEY} asks for it"
    begin = side.starts[-1].step if side.starts else side.first - 1
    wanted = range(begin + 1, min(begin + asked, max(side.steps) - going_on) + 1)
    if missing := set(wanted) - side.states.keys() - partly:
        yield f"the {STATE} of {_listed(missing, verb='')} are not recorded, although {KEY} asks for them"


def _lacking(side: Side) -> Iterator[str]:
    """Remove the recorded states in which the line of a rank lacks a key."""
    found = lacking.of_states(side.starts, side.states)
    side.starts = [start for start in side.starts if ("start", start.step) not in found]
    for _, step in found.keys() & {("step", step) for step in side.states}:
        del side.states[step]
    yield from found.values()


def _going_on(side: Side) -> bool:
    """Return whether the run has not made, or not recorded, all its steps."""
    return not side.total_steps or max(side.steps) + printed_every(side.recipe) <= side.total_steps


def _asked(side: Side) -> int:
    """Return how many steps of the run's last part its recipe asks to record."""
    written = View(side.recipe).get(tuple(KEY.split(".")))
    try:
        return Settings.read({} if written is True else written).steps if written else 0
    except RecipeError:  # no run starts with this
        return 0


def _listed(steps: Iterable[int], verb: str = " is| are") -> str:
    """Return the steps in words, with the verb in the right number."""
    found = sorted(steps)
    one, _, many = verb.partition("|")
    if len(found) == 1:
        return f"step {found[0]}{one}"
    whole = found == [*range(found[0], found[-1] + 1)] and len(found) > 2
    return f"steps {f'{found[0]} to {found[-1]}' if whole else ', '.join(map(str, found))}{many}"
