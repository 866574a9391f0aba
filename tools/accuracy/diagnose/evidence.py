"""This module reads the step records of a run (plugins/step_record) for `tc3 accuracy diagnose`, and combines the
statistics of each tensor over all ranks: parts are added up, and copies count once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

from plugins.errors import DataError, TC3Error
from plugins.lines import OF, Newest
from plugins.step_record.plan import IDS, record_file
from tools.accuracy.diagnose import forms
from tools.accuracy.diagnose.gaps import take_out
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs.readings import Readings
from tools.schema.stages import loss_rank

COUNTERS = ("expert_bias", "expert_load", "fi_accu")  # of a router, moved by no gradient; not every save lists them
ALIKE = ("global_norm", "learning_rate")  # numbers of a step that are the same on every rank
RECORD = "tc3 train RECIPE --set plugins.step_record.steps=3"  # what makes a run comparable


@dataclass
class State:
    """A `State` holds the tensor statistics of all ranks after one step, or when the run started or was resumed."""

    step: int
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)

    def tensors(self, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a dictionary name -> tensor; `parts` maps rank -> name -> (shape of the whole, offset of the rank's
        part).
        """
        found: dict[str, Tensor] = {}
        listed = {name for ours in parts.values() for name in ours}
        for rank, line in sorted(self.lines.items()):
            ours = parts.get(rank) or {}
            for name, (digest, square, shape) in line["state"].items():
                whole, offset = ours.get(name, (shape, [0]))
                if _trained(name) in listed - ours.keys():
                    continue  # of another stage: this rank has the object, and does not train it
                if list(shape) == list(whole):
                    offset = [0]  # not cut yet, or not at all
                tensor = found.setdefault(name, Tensor(tuple(whole)))
                part = tensor.parts.setdefault(tuple(offset), {})
                tensor.elements += 0 if part else prod(shape)
                part[rank] = digest, square
        return found


@dataclass
class Tensor:
    """A `Tensor` holds what all ranks recorded of one tensor: offset of a part -> rank -> (digest, sum of squares)."""

    shape: tuple[int, ...]
    parts: dict[tuple[int, ...], dict[int, tuple[str, float]]] = field(default_factory=dict)
    elements: int = 0  # of the distinct parts

    @property
    def complete(self) -> bool:
        """Return whether the recorded parts cover all elements of the tensor."""
        return self.elements == prod(self.shape)

    @property
    def norm(self) -> float:
        """Return the L2 norm of the whole tensor."""
        return sum(next(iter(copies.values()))[1] for copies in self.parts.values()) ** 0.5

    @property
    def not_finite(self) -> tuple[int, ...]:
        """Return the ranks whose copy of a part has a NaN or an infinity."""
        copies = [each for part in self.parts.values() for each in part.items()]
        return tuple(sorted(rank for rank, (_, square) in copies if not isfinite(square)))

    @property
    def differing(self) -> tuple[int, ...]:
        """Return the ranks whose copy of a part differs from that of the first rank."""
        wrong = []
        for copies in self.parts.values():
            first = next(iter(copies.values()))[0]
            wrong += [rank for rank, (digest, _) in copies.items() if digest != first]
        return tuple(sorted(wrong))

    @property
    def digests(self) -> dict[int, str]:
        """Return for each rank the digest of the part of this tensor that the rank holds."""
        return {rank: digest for copies in self.parts.values() for rank, (digest, _) in copies.items()}


@dataclass
class Side:
    """A `Side` holds all records of one run."""

    name: str
    recipe: Recipe
    steps: dict[int, dict[str, Any]]  # for each step the metrics of the rank that knows the loss
    total_steps: int | None = None
    samples: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # step -> rank -> column -> digests
    starts: list[State] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # after each recorded step
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)  # rank -> tensor -> [whole shape, its offset]
    notes: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)  # a sentence for each gap in the records of the run
    first: int = 1  # the number of the first step that the metrics of the run should have
    software: dict[str, str] = field(default_factory=dict)  # the versions of packages since the last resume
    folder: Path = Path()  # the folder of the record
    end: dict[str, list[Any]] = field(default_factory=dict)  # each module's sketch with the final weights, if recorded
    ended: int = 0  # the step of `end`
    alike: dict[int, dict[str, dict[int, float]]] = field(default_factory=dict)  # step -> one of `ALIKE` -> rank -> it
    held: bool = False  # whether the outputs of the run's modules were compared with a forward pass in NumPy

    @property
    def effective(self) -> dict[str, Any]:
        """Return the settings of the built model and optimizer, as recorded when the run started."""
        return next((line.get("effective") or {} for start in self.starts for line in start.lines.values()), {})

    @property
    def starts_known(self) -> bool:
        """Return whether the run recorded the weights with which its training began."""
        names = [name for start in self.starts for line in start.lines.values() for name in line["state"]]
        return any(name.endswith(".weight") for name in names)

    @property
    def unmoved(self) -> State | None:
        """Return the weights that step 1 recorded if its learning rate was 0, because they are then the initial
        weights; otherwise return None.
        """
        if 1 not in self.states or self.steps.get(1, {}).get("learning_rate") != 0:
            return None
        kept = State(0)
        for rank, line in self.states[1].lines.items():
            weights = {name: told for name, told in line["state"].items() if name in line["weights"]}
            kept.lines[rank] = {**line, "state": weights}
        return kept

    def modules(self, step: int) -> dict[str, list[Any]]:
        """Return the sketch (a digest and projections) of each module's output in a step, in forward order."""
        lines = self.states[step].lines.values() if step in self.states else ()
        return next((line["modules"] for line in lines if line.get("modules")), {})

    def ids(self, step: int) -> list[str] | None:
        """Return the digests of all samples of a step as one list without duplicates, those of rank 0 first. Return
        None if a rank did not record the digests.
        """
        ranks = self.samples.get(step, {})
        if not ranks or any(IDS not in columns for columns in ranks.values()):
            return None
        return list(dict.fromkeys(each for rank in sorted(ranks) for each in ranks[rank][IDS]))

    def columns(self, step: int) -> dict[str, frozenset[tuple[str, str]]]:
        """Return for each column of a step's batch, such as `labels`, pairs (digest of a sample, digest of its entry in
        the column).
        """
        found: dict[str, set[tuple[str, str]]] = {}
        for columns in self.samples.get(step, {}).values():
            ids = columns[IDS]
            for name, rows in columns.items():
                rows = [rows] * len(ids) if isinstance(rows, str) else rows
                if name != IDS and len(rows) == len(ids):
                    found.setdefault(name, set()).update(zip(ids, rows, strict=True))
        return {name: frozenset(pairs) for name, pairs in found.items()}

    def updates(self, step: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield (weight, rank, recorded update) for each part of a weight in a step; if several ranks hold copies of a
        part, only the first copy is yielded.
        """
        state, parts, seen = self.states[step], self.parts, set()
        for rank, line in sorted(state.lines.items()):
            for name, told in line["weights"].items():
                ours = parts.get(rank) or {}
                if ours and name not in ours:
                    continue
                part = name, tuple(ours.get(name, ([], [0]))[1])
                if part not in seen:
                    seen.add(part)
                    yield name, rank, told

    def gradients(self, step: int) -> dict[str, float]:
        """Return for each weight the L2 norm of its whole gradient in a step, after clipping."""
        return self._norms(step, "gradient")

    def moves(self, step: int) -> dict[str, float]:
        """Return for each weight the L2 norm of its change in a step, over all parts of the weight."""
        return self._norms(step, "square")

    def _norms(self, step: int, key: str) -> dict[str, float]:
        """Return weight -> root of what its parts add up to, where each part is recorded."""
        squares: dict[str, float] = {}
        unknown = set()
        for name, _, told in self.updates(step):
            if told.get(key) is None:
                unknown.add(name)
            squares[name] = squares.get(name, 0.0) + (told.get(key) or 0.0)
        return {name: square**0.5 for name, square in squares.items() if name not in unknown}


def _trained(name: str) -> str:
    """Return the weight that tells whether a rank uses a tensor: a counter's is its router's."""
    router, _, last = name.rpartition(".")
    return f"{router}.weight" if last in COUNTERS else name


def read_side(folder: Path) -> Side:
    """Return all records of the run in `folder`; raise DataError if the run has recorded no step, or if a record is
    damaged.
    """
    recipe = _recipe_of(folder)
    view = View(recipe)
    read = {rank: _metrics(folder / "metrics" / f"rank_{rank}.jsonl") for rank in range(view.devices)}
    metrics = {rank: readings for rank, (readings, _) in read.items()}
    headers = {rank: lines for rank, (_, lines) in read.items()}
    renumbered, resized = _left_out(metrics, headers)
    limit = max(renumbered, resized)
    changed = "number of ranks" if resized > renumbered else "global batch"
    since = f" since a resume changed the {changed}" * (limit > 0)
    empty = [rank for rank, readings in metrics.items() if not readings.steps]
    if len(empty) == len(metrics):
        raise DataError(
            f"{folder}: the run has not recorded a step{since or ' yet'}, because it still compiles or has failed; "
            f"`tc3 runs report {folder}` says which"
        )
    if empty:
        raise DataError(
            f"{folder}: rank {empty[0]} of {len(metrics)} has not recorded a step{since}; copy the metrics/ folders of "
            "all hosts into this folder"
        )
    readings = metrics[loss_rank(view)]
    side = Side(str(folder), recipe, readings.steps, readings.total_steps, folder=folder / "metrics")
    parts = headers[loss_rank(view)]
    side.software = next((line["software"] for line in reversed(parts) if line.get("software")), {})
    side.first = int(max(1 + parts[0].get("start_step", 0) if parts else 1, 1 + limit))
    for rank, each in metrics.items():
        for step, record in each.steps.items():
            if record.get("samples"):
                side.samples.setdefault(step, {})[rank] = record["samples"]
            for name in ALIKE:
                if record.get(name) is not None:
                    side.alike.setdefault(step, {}).setdefault(name, {})[rank] = record[name]
    experts: dict[str, int] = {}
    for rank in metrics:
        _read_states(side, record_file(folder, rank), rank, experts)
    side.states = {step: state for step, state in side.states.items() if state.lines and step > limit}
    side.starts = [start for start in side.starts if start.lines and start.step >= resized]
    for state in side.states.values():
        side.parts = {rank: line.get("parts") or {} for rank, line in state.lines.items()} | side.parts
    recorded = bool(side.states)
    side.gaps = take_out(side, metrics, headers)
    if limit:
        anew = ", so that steps are numbered anew" * (limit == renumbered)
        whole = f"a resume changed the {changed}{anew} from step {limit + 1} on"
        side.gaps.append(f"{whole}; all steps before it are left out")
    _notes(side, recorded)
    return side


def _recipe_of(folder: Path) -> Recipe:
    file = folder / "recipe.yaml"
    if not file.is_file():
        raise DataError(
            f"{folder}: this is not the folder of a run, because it has no recipe.yaml; give the folder that tc3 train "
            "--run-dir was given"
        )
    try:
        return load_recipe(file)
    except TC3Error as error:
        raise DataError(
            f"{folder}: the recipe.yaml of this run cannot be read ({error}); train again into a new folder"
        ) from error


def _left_out(metrics: Mapping[int, Readings], headers: Mapping[int, list[Mapping[str, Any]]]) -> tuple[float, float]:
    """Take out of all metrics the steps with another global batch than the newest ones, or with another number of
    ranks, which compare with no other step. Return the last step of each kind; 0 if there is none.
    """
    newest = max(metrics.values(), key=lambda readings: readings.limit)
    unit, resized = newest.numbering.unit, 0.0
    for lines in headers.values():
        begins = [inf, *(line.get("start_step", 0) for line in reversed(lines[1:]))]
        ends = reversed([*accumulate(begins, min)])  # a later part may begin before an earlier one
        others = (line.get("world_size", len(metrics)) != len(metrics) for line in lines)
        resized = max([resized, *(end for end, other in zip(ends, others, strict=False) if other)])
    for readings in metrics.values():
        behind = newest.limit > 0 and readings.numbering.unit != unit  # this rank has no step of the newest batch yet
        last = inf if behind else max(newest.limit, resized)
        readings.steps = {step: record for step, record in readings.steps.items() if step > last}
    return newest.limit, resized


def _metrics(file: Path) -> tuple[Readings, list[Mapping[str, Any]]]:
    """Return the steps in a metrics file, and the first lines of its parts."""
    readings = Readings()
    headers: list[Mapping[str, Any]] = []
    for number, line in _lines(file):
        forms.check_form(line, forms.STEP if "step" in line else forms.HEADER, file, number)
        if "step" not in line and line.keys().isdisjoint(forms.HEADER.keys() - forms.STEP.keys()):
            raise DataError(f"{file}: line {number} is not a record of a step; train again into a new folder")
        if "step" not in line:
            headers.append(line)
        readings.add(line)
    return readings, headers


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line of a file, but for an unfinished last line, and late ones."""
    if not file.exists():
        return
    text, newest = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), Newest()
    for number, line in enumerate(text, 1):
        if not line.endswith("\n") and number == len(text):
            return
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("the line must hold one JSON object")
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{file}: line {number} is damaged ({error}); train again, or copy the file again"
            ) from error
        if not newest.is_late(record):
            record.pop(OF, None)  # two runs never have the same attempts
            yield number, record


def _read_states(side: Side, file: Path, rank: int, experts: dict[str, int]) -> None:
    for number, line in _lines(file):
        form, needed = forms.STATE, {"step", "state", "weights", "loads"}
        if "start" in line:
            form, needed = forms.START_OF_STATE, {"step", "state"}
        elif "end" in line:
            form, needed = forms.END_OF_STATE, {"step", "state", "modules"}
        forms.check_form(line, form, file, number)
        forms.check_lengths(line, experts, file, number)
        if not needed <= line.keys():
            raise DataError(f"{file}: line {number} is not a record of a step; train again into a new folder")
        if line.get("end"):
            side.end, side.ended = line.get("modules") or {}, line["step"]
        elif line.get("start"):
            for state in [*side.states.values(), *side.starts]:
                if state.step > line["step"]:  # the run went back, and makes these steps again
                    state.lines.pop(rank, None)
            started = next((each for each in side.starts if rank not in each.lines and each.step == line["step"]), None)
            if started is None:
                side.starts.append(started := State(line["step"]))
            started.lines[rank] = line
        else:
            side.states.setdefault(line["step"], State(line["step"])).lines[rank] = line


def _notes(side: Side, recorded: bool) -> None:
    """Note what the folder cannot tell, a line each; `recorded`: whether it has states, perhaps all with gaps."""
    side.notes += side.gaps
    if not recorded:
        side.notes.append(f"no weights, gradients or routers are recorded; record them with `{RECORD}`")
    elif side.states and not side.starts_known and not side.unmoved:
        side.notes.append(
            "the weights that it started from are unknown: a sharded run makes them when it compiles its graph; the "
            "first step's losses and gradients depend on them"
        )
    if not side.samples:
        side.notes.append(
            "the samples of its steps are unknown (sink mode, or an older run); for a few steps set "
            "runner_config.sink_mode=False"
        )
