"""This module finds keys that single lines of a run's records lack: keys that a run always writes, names that the other
lines of the same rank have, and names that the same line of another run of the same configuration has.

A comparison looks only at what both runs have recorded, so a key that one line lacks would hide what it held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from plugins.sealed_checkpoint.router_state import MUON_MOMENT
from plugins.step_record.plan import BIAS, IDS, LOAD, MOMENTS
from plugins.step_record.plan import STATE as PREFIXES
from tools.accuracy.diagnose import forms
from tools.runs.readings import Readings

NAMED = ("state", "parts", "weights", "loads", "biases")  # keys of a state that hold an object of values by name
FITTED = ("rate", "decay", "rest", "square")  # of a weight's update: all are recorded, or none is
SOMETIMES = {"modules", "skipped"}  # of a state: only the first line of one CPU process, and a step without an update
_STEP = {*forms.NUMBERS, "overflow"}  # keys of a step that every run writes
_HEADER = {"total_steps", "start_step"}
Line = Mapping[str, Any]


class Side(Protocol):
    """A `Side` has those attributes of `evidence.Side` in which a key can be lacking."""

    starts: list[Any]
    states: dict[int, Any]
    steps: dict[int, dict[str, Any]]
    end: dict[str, list[Any]]
    ended: int


def of_metrics(headers: Mapping[int, list[Line]], metrics: Mapping[int, Readings]) -> Iterator[str]:
    """Yield a sentence for each key that some lines of a run's metrics lack.

    Args:
        headers: rank -> the first lines of its parts. metrics: the metrics of each rank.
    """
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
        yield from _listed(f"the metrics of rank {rank}", lacking)
    known = _HEADER.union(*(line for lines in headers.values() for line in lines)) & forms.HEADER.keys()
    for rank, lines in headers.items():
        if lacks := sorted({key for line in lines for key in known - line.keys()}):
            yield f"the metrics of rank {rank} lack {_some(lacks)} at a start of the run"


def _listed(whose: str, lacking: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield a sentence for each group of steps that lack the same keys."""
    together: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for key, steps in lacking.items():
        together[tuple(steps)].append(key)
    for where, keys in together.items():
        more = f" and {len(where) - 1} more" * (len(where) > 1)
        yield f"{whose} lack {_some(sorted(keys))} of step {where[0]}{more}"


def _some(keys: list[str]) -> str:
    """Return the first of the keys, and how many more there are."""
    return f"`{keys[0]}`" + (f" and {len(keys) - 1} more keys" if len(keys) > 1 else "")


def of_states(starts: list[Any], states: Mapping[int, Any]) -> dict[tuple[str, int], str]:
    """Return a dictionary (kind of line, step) -> sentence about each recorded state in which the line of a rank lacks
    a key; the kind is "start" or "step".
    """
    found: dict[tuple[str, int], str] = {}
    names: dict[tuple[int, int, str], set[str]] = defaultdict(set)  # of a rank's lines since the same start
    for step, state in states.items():
        for rank, line in state.lines.items():
            for key in NAMED:
                names[rank, _since(starts, step), key] |= line.get(key, {}).keys()
    for start in starts:
        for rank, line in start.lines.items():
            keys = [*(forms.START_OF_STATE.keys() - line.keys()), *_by_itself(line)]
            _tell(found, "start", start.step, rank, keys)
    for step, state in states.items():
        for rank, line in state.lines.items():
            keys = [*(forms.STATE.keys() - SOMETIMES - line.keys()), *_by_itself(line)]
            for key in NAMED:
                more = names[rank, _since(starts, step), key] - line.get(key, {}).keys()
                keys += [f"{key}.{name}" for name in more if key in line]
            _tell(found, "step", step, rank, keys)
    return found


def _tell(found: dict[tuple[str, int], str], kind: str, step: int, rank: int, keys: list[str]) -> None:
    if keys:
        started = ", from which it started," if kind == "start" else ""
        lacks = f"the state after step {step}{started} lacks {_some(sorted(set(keys)))} on rank {rank}"
        found.setdefault((kind, step), lacks)


def _since(starts: list[Any], step: int) -> int:
    """Return the last step before a step after which the run started; since then its lines have the same names."""
    return max((start.step for start in starts if start.step < step), default=0)


def _by_itself(line: Line) -> Iterator[str]:
    """Yield the keys that a recorded state lacks according to its other keys."""
    state, weights = line["state"], line.get("weights", {})
    for name in state:
        for end, key in ((LOAD, "loads"), (BIAS, "biases")):
            if name.endswith(end) and key in line and name.removesuffix(end) not in line[key]:
                yield f"{key}.{name.removesuffix(end)}"
    yield from (f"state.{name}{BIAS}" for name in line.get("biases", {}) if name + BIAS not in state)
    yield from _moments(state, weights, "weights" in line)
    for name, told in weights.items():
        if name not in state:
            yield f"state.{name}"
        updates = None if line.get("skipped") else line.get("updates")
        yield from (f"weights.{name}.{key}" for key in _of_update(told, updates))
    parts = line.get("parts") or {}
    for name in parts.keys() & state.keys():
        of = _weight(name)
        group = [each for each in (of, *(prefix + of for prefix in PREFIXES)) if each in state]
        yield from (f"parts.{each}" for each in group if each not in parts and state[each][2] == state[name][2])


def _of_update(told: Line, updates: int | None) -> Iterator[str]:
    """Yield the keys that the recorded update of a weight lacks.

    Args:
        updates: the number of updates that the optimizer has made; None if it is not recorded, or the step was skipped.
    """
    fitted = bool(told.keys() & {*FITTED})
    wanted = {"dimensions", *(FITTED * fitted), *(["gradient"] if fitted or updates == 1 else [])}
    yield from wanted - told.keys()
    if told.get("rate") is not None and told.get("decay", 0.0) is None:  # fitted together
        yield "decay"


def _weight(name: str) -> str:
    """Return the weight to which a weight's or a moment's name belongs."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def _moments(state: Line, weights: Line, updated: bool) -> Iterator[str]:
    """Yield what is lacking of the optimizer's moments and of the updates that they made."""
    one, two = MOMENTS
    for name in dict.fromkeys(map(_weight, state)):
        if (one + name in state) != (two + name in state):
            yield f"state.{(two if one + name in state else one) + name}"
        moved = [state[each] for each in (one + name, MUON_MOMENT + name) if each in state and name in state]
        if updated and name not in weights and any(each[2] == state[name][2] for each in moved):
            yield f"weights.{name}"


def beside(a: Side, b: Side) -> Iterator[tuple[int, str]]:
    """Yield (0 for run A or 1 for run B, sentence) for each line of a run that lacks names which the same line of the
    other run has. States after a step that the loss scale skipped are left out: they have no updates.

    The two runs must be of the same configuration and layout.
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
    """Return the keys of a record whose values are not null."""
    return {key for key, value in record.items() if value is not None}
