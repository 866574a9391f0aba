"""This module finds gaps in the records of a run: missing steps, ranks that recorded less than others, and steps that
only one of two runs has. Only runs without a gap are called equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from plugins.errors import RecipeError
from plugins.sealed_checkpoint.router_state import MUON_MOMENT
from plugins.step_record.plan import BIAS, IDS, KEY, LOAD, MOMENTS, Settings, without_update
from plugins.step_record.plan import STATE as PREFIXES
from tools.accuracy.diagnose import forms
from tools.accuracy.equivalence.runs import weight_of
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.readings import Readings

COPY = "copy the metrics/ folders of all hosts into this folder again"
NUMBERS = ("lm_loss", "mtp_loss", "loss", "global_norm", "learning_rate")
ALWAYS = ("loss", "learning_rate")  # of these, that every run has
STATE = "weights, gradients and routers"
_LISTED = 20  # steps that do not follow each other, at most
_MANY = 10**5  # missing steps that are not listed one by one
NAMED = ("state", "parts", "weights", "loads", "biases")  # keys of a state that hold an object of values by name
FITTED = ("rate", "decay", "rest", "square")  # of a weight's update: all are recorded, or none is
SOMETIMES = {"modules", "skipped"}  # of a state: only the first line of one CPU process, and a step without an update
_STEP = {*forms.NUMBERS, "overflow"}  # keys of a step that every run writes
_HEADER = {"total_steps", "start_step"}
Line = Mapping[str, Any]


class Side(Protocol):
    """A `Side` holds those attributes of `evidence.Side` in which a gap can be found."""

    recipe: Recipe
    steps: dict[int, dict[str, Any]]
    total_steps: int | None
    samples: dict[int, dict[int, dict[str, Any]]]
    starts: list[Any]
    states: dict[int, Any]
    first: int
    notes: list[str]
    end: dict[str, list[Any]]
    ended: int


def take_out(side: Side, metrics: Mapping[int, Readings], headers: Mapping[int, list[Mapping[str, Any]]]) -> list[str]:
    """Remove from `side` what only some ranks recorded, and return a sentence for each gap; `headers` holds for each
    rank the first line of each part of its metrics.
    """
    return [
        *_steps(side),
        *_ranks(side, metrics),
        *_numbers(side),
        *_skipped(side),
        *_starts(side, len(metrics)),
        *_states(side, len(metrics)),
        *_of_metrics(headers, metrics),
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
        yield f"{listed(missing)} missing from its metrics; {COPY}"


def _ranks(side: Side, metrics: Mapping[int, Readings]) -> Iterator[str]:
    everywhere = {step for readings in metrics.values() for step in readings.steps}
    last = max(everywhere) if _going_on(side) else None  # the ranks of such a run may be a step apart
    for rank, readings in metrics.items():
        if missing := everywhere - readings.steps.keys() - {last}:
            yield f"{listed(missing)} missing from the metrics of rank {rank}; {COPY}"
    for step in [step for step in side.samples if any(step not in each.steps for each in metrics.values())]:
        del side.samples[step]  # those that some ranks read would look like other samples


def _numbers(side: Side) -> Iterator[str]:
    """Yield a sentence for each value of the metrics, or digest of the samples, that some steps lack."""
    for name in NUMBERS:
        known = name in ALWAYS or any(record.get(name) is not None for record in side.steps.values())
        missing = {step for step, record in side.steps.items() if name in record and record[name] is None}
        if known and missing:
            yield f"the {name} of {listed(missing, verb='')} is missing from its metrics"
    last = max(side.steps) if _going_on(side) else None
    read = {step for step, record in side.steps.items() if "samples" in record}
    if side.samples and (missing := read - side.samples.keys() - {last}):
        yield f"the samples of {listed(missing, verb='')} are not recorded by all ranks"


def _skipped(side: Side) -> Iterator[str]:
    """Take out the gradients and updates of steps that the loss scale skipped, of which nothing is known."""
    skipped = set()
    for step, state in side.states.items():
        if side.steps.get(step, {}).get("overflow") or any(line.get("skipped") for line in state.lines.values()):
            skipped.add(step)
            for line in state.lines.values():
                line.update(skipped=True, weights=without_update(line["weights"]))
    if skipped:
        yield (
            f"{listed(skipped, verb=' was| were')} skipped, because gradients overflowed the loss scale: nothing was "
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
        yield f"the {STATE} of {listed(partly, verb='')} are not recorded by all ranks; {COPY}"
    asked = _asked(side)
    if not asked:
        return
    if not side.starts and not partly:
        yield f"the state from which it started is not recorded, although {KEY} asks for it"
    begin = side.starts[-1].step if side.starts else side.first - 1
    wanted = range(begin + 1, min(begin + asked, max(side.steps) - going_on) + 1)
    if missing := set(wanted) - side.states.keys() - partly:
        yield f"the {STATE} of {listed(missing, verb='')} are not recorded, although {KEY} asks for them"


def _lacking(side: Side) -> Iterator[str]:
    """Remove the recorded states in which the line of a rank lacks a key."""
    names: dict[tuple[int, int, str], set[str]] = defaultdict(set)  # of a rank's lines since the same start
    for step, state in side.states.items():
        for rank, line in state.lines.items():
            for key in NAMED:
                names[rank, _since(side.starts, step), key] |= line.get(key, {}).keys()
    found: dict[tuple[str, int], str] = {}
    kinds = (
        ("start", ", from which it started,", side.starts, forms.START_OF_STATE.keys()),
        ("step", "", side.states.values(), forms.STATE.keys() - SOMETIMES),
    )
    for kind, started, states, wanted in kinds:
        for state in states:
            for rank, line in state.lines.items():
                keys = {*(wanted - line.keys()), *_by_itself(line)}
                for key in NAMED if kind == "step" else ():
                    more = names[rank, _since(side.starts, state.step), key] - line.get(key, {}).keys()
                    keys |= {f"{key}.{name}" for name in more if key in line and not _of_other_stage(line, key, name)}
                if keys:
                    lacks = f"the state after step {state.step}{started} lacks {_some(sorted(keys))} on rank {rank}"
                    found.setdefault((kind, state.step), lacks)
    side.starts = [start for start in side.starts if ("start", start.step) not in found]
    for _, step in found.keys() & {("step", step) for step in side.states}:
        del side.states[step]
    yield from found.values()


def _going_on(side: Side) -> bool:
    """Return whether the run has not made, or not recorded, all its steps."""
    return not side.total_steps or max(side.steps) + printed_every(side.recipe) <= side.total_steps


def _asked(side: Side) -> int:
    """Return the number of steps that the recipe asks to record since the last start of the run."""
    written = View(side.recipe).get(tuple(KEY.split(".")))
    try:
        return Settings.read({} if written is True else written).steps if written else 0
    except RecipeError:  # no run starts with this
        return 0


def listed(steps: Iterable[int], verb: str = " is| are") -> str:
    """Return steps as text, such as "steps 3 to 7 are"; `verb` holds the form of the verb for one step and for several
    steps.
    """
    found = sorted(steps)
    one, _, many = verb.partition("|")
    if len(found) == 1:
        return f"step {found[0]}{one}"
    whole = found == [*range(found[0], found[-1] + 1)] and len(found) > 2
    if not whole and len(found) > _LISTED:
        return f"{len(found):,} steps (the first is step {found[0]}){many}"
    return f"steps {f'{found[0]} to {found[-1]}' if whole else ', '.join(map(str, found))}{many}"


def tell_steps(a: Side, b: Side) -> bool:
    """Return whether one run has recorded steps that the other has not, and note that these are not compared."""
    if a.steps.keys().isdisjoint(b.steps):
        b.notes.append(
            f"no step is in both runs: A has {min(a.steps)} to {max(a.steps)}, B {min(b.steps)} to {max(b.steps)}; "
            "compare runs that share steps"
        )
        return True
    found = False
    for side, other in ((a, b), (b, a)):
        if more := side.steps.keys() - other.steps.keys():
            side.notes.append(f"{listed(more)} not in the other run, so nothing of this is compared")
        # of runs that have not recorded their state at all, another note says so
        if states := (side.states.keys() - other.states.keys() - more if other.states else ()):
            what = f"the {STATE} of {listed(states, verb='')} are not recorded by the other run"
            side.notes.append(f"{what}, and so not compared")
        found |= bool(more or states)
    return found


def _of_metrics(headers: Mapping[int, list[Line]], metrics: Mapping[int, Readings]) -> Iterator[str]:
    """Yield a sentence for each key that some lines of a run's metrics lack."""
    steps = [record for readings in metrics.values() for record in readings.steps.values()]
    known = _STEP.union(*steps) & forms.STEP.keys()
    columns = {IDS}.union(*((record.get("samples") or {}).keys() for record in steps))
    for rank, readings in metrics.items():
        lacking: dict[str, list[int]] = defaultdict(list)
        for step, record in readings.steps.items():
            for key in known - record.keys():
                lacking[key].append(step)
            for column in columns - record["samples"].keys() if record.get("samples") else ():
                lacking[f"samples.{column}"].append(step)
        yield from _by_steps(f"the metrics of rank {rank}", lacking)
    known = _HEADER.union(*(line for lines in headers.values() for line in lines)) & forms.HEADER.keys()
    for rank, lines in headers.items():
        if lacks := sorted({key for line in lines for key in known - line.keys()}):
            yield f"the metrics of rank {rank} lack {_some(lacks)} at a start of the run"


def _by_steps(whose: str, lacking: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield a sentence for each group of steps that lack the same keys."""
    together: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for key, steps in lacking.items():
        together[tuple(steps)].append(key)
    for where, keys in together.items():
        more = f" and of {len(where) - 1} more step{'s' * (len(where) > 2)}" * (len(where) > 1)
        yield f"{whose} lack {_some(sorted(keys))} of step {where[0]}{more}"


def _some(keys: list[str]) -> str:
    return f"`{keys[0]}`" + (f" and {len(keys) - 1} more keys" if len(keys) > 1 else "")


def _since(starts: list[Any], step: int) -> int:
    return max((start.step for start in starts if start.step < step), default=0)


def _by_itself(line: Line) -> Iterator[str]:
    """Yield the keys that a recorded state lacks according to its other keys."""
    state, weights = line["state"], line.get("weights", {})
    for name in state:
        for end, key in ((LOAD, "loads"), (BIAS, "biases")):
            if name.endswith(end) and key in line and name.removesuffix(end) not in line[key]:
                yield f"{key}.{name.removesuffix(end)}"
    yield from (f"state.{name}{BIAS}" for name in line.get("biases", {}) if name + BIAS not in state)
    yield from _moments(line)
    for name, told in weights.items():
        if name not in state:
            yield f"state.{name}"
        updates = None if line.get("skipped") else line.get("updates")
        yield from (f"weights.{name}.{key}" for key in _of_update(told, updates))
    parts = line.get("parts") or {}
    for name in parts.keys() & state.keys():
        of = weight_of(name)
        group = [each for each in (of, *(prefix + of for prefix in PREFIXES)) if each in state]
        yield from (f"parts.{each}" for each in group if each not in parts and state[each][2] == state[name][2])


def _of_update(told: Line, updates: int | None) -> Iterator[str]:
    """Yield each missing key of one weight's update; `updates`: of the optimizer so far, None if unknown or skipped."""
    fitted = bool(told.keys() & {*FITTED})
    wanted = {"dimensions", *(FITTED * fitted), *(["gradient"] if fitted or updates == 1 else [])}
    yield from wanted - told.keys()
    if told.get("rate") is not None and told.get("decay", 0.0) is None:  # fitted together
        yield "decay"


def _of_other_stage(line: Line, key: str, name: str) -> bool:
    """Return whether `name` is an update of a weight that the rank does not train. After a resume the ranks of a
    pipeline hold weights of other stages, which are not among a rank's parts.
    """
    return key == "weights" and bool(line.get("parts")) and name not in line["parts"]


def _moments(line: Line) -> Iterator[str]:
    """Yield missing moments of the optimizer, and missing updates whose moments were recorded."""
    state, weights = line["state"], line.get("weights")
    one, two = MOMENTS
    for name in dict.fromkeys(map(weight_of, state)):
        if (one + name in state) != (two + name in state):
            yield f"state.{(two if one + name in state else one) + name}"
        moved = [state[each] for each in (one + name, MUON_MOMENT + name) if each in state and name in state]
        if weights is None or name in weights or _of_other_stage(line, "weights", name):
            continue
        if any(each[2] == state[name][2] for each in moved):
            yield f"weights.{name}"


def beside(a: Side, b: Side) -> Iterator[tuple[int, str]]:
    """Yield (0 or 1, a sentence) for each line of run `a` or `b` that lacks names which the same line of the other run
    has; both runs have the same configuration. States after a skipped step are left out.
    """
    for step in sorted(a.steps.keys() & b.steps.keys()):
        yield from _other(_known(a.steps[step]), _known(b.steps[step]), f"the metrics of step {step} lack")
    if [start.step for start in a.starts] != [start.step for start in b.starts]:
        return
    pairs = [(f"the start after step {one.step}", one, two) for one, two in zip(a.starts, b.starts, strict=True)]
    for step in sorted(a.states.keys() & b.states.keys()):
        one, two = a.states[step], b.states[step]
        if not any(line.get("skipped") for state in (one, two) for line in state.lines.values()):
            pairs.append((f"the state after step {step}", one, two))
    for what, one, two in pairs:
        for rank in sorted(one.lines.keys() & two.lines.keys()):
            mine, others = _paths(one.lines[rank]), _paths(two.lines[rank])
            yield from _other(mine, others, f"{what} lacks, on rank {rank},")
    if a.ended and a.ended == b.ended:
        yield from _other(a.end.keys(), b.end.keys(), "the outputs at the end lack")


def _other(mine: Iterable[str], others: Iterable[str], words: str) -> Iterator[tuple[int, str]]:
    for place, keys in enumerate((set(others) - set(mine), set(mine) - set(others))):
        if keys:
            yield place, f"{words} {_some(sorted(keys))} that the other run has"


def _paths(line: Line) -> set[str]:
    """Return the keys of a recorded state that are not null, with the names that they hold."""
    inner = (*NAMED, "modules", "effective")
    updates = ((name, key) for name, told in line.get("weights", {}).items() for key in _known(told))
    named = {f"{key}.{name}" for key in inner for name in line.get(key) or ()}
    return _known(line) | named | {f"weights.{name}.{key}" for name, key in updates}


def _known(record: Line) -> set[str]:
    return {key for key, value in record.items() if value is not None}
