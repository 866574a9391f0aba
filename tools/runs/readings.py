"""This module reads the files that a run writes into its folder while it trains. The module needs no MindSpore.

`read_metrics` and `read_evaluations` read metrics/rank_N.jsonl and metrics/held_out.jsonl, and `Follower` follows such
a file while it grows. `load_run` reads everything that reports need: the steps of each start of the workers
(`Part`), the attempts, and the times of saves and evaluations.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from plugins.errors import DataError, TC3Error
from plugins.held_out_loss.plan import held_out_file
from plugins.lines import OF, Newest, Span, as_span, spans_file
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs.attempts import Attempt, Plan, of_the_run, read_attempts, recipe_file
from tools.runs.places import Numbering, begin_of, begins_anew, tokens_of, translated
from tools.schema.stages import loss_rank

CURVE = "loss.png"  # of a run's folder: the loss curve that a launch draws
USUAL_OF = 100  # steps after a part's first whose median is its usual step
COLUMNS = ("step", "time", "seconds", "loss", "global_norm")  # of a part
_DAY = 86_400.0  # seconds that two hosts' clocks may be apart
_MOST_STEPS = 10**12
_NO_FLOAT = 10**300  # a whole number above it may be too large for a float
_MOST_LOSS = 700.0  # whose exponential a number can hold


@dataclass
class Readings:
    """A `Readings` holds the training steps that one rank has recorded: `steps[n]` is the record of step n. If a
    resumed run repeats steps, the new records replace the old records of these steps.

    After a change of the global batch all steps are counted as those of the part that was read last: an older record
    gets the number of the step that now trains on its samples, and the first record of a number is kept.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    total_steps: int | None = None
    start_step: int = 0  # steps done before the part that was read last
    limit: int = 0  # steps up to this one were trained with another global batch, and numbered otherwise
    numbering: Numbering = field(default_factory=Numbering)
    _begins: bool = False  # whether the next step is the first of a part
    _older: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # (place, record) of other numberings

    def add(self, record: dict[str, Any]) -> None:
        """Add one line of a metrics file: the record of a step, or the header that the workers write at each start."""
        if "total_steps" in record:
            self.total_steps = record["total_steps"]
            self.start_step = record.get("start_step", 0)
            self._begins = True
        elif "step" in record:
            before, begins, self._begins = self.numbering.unit or 1, self._begins, False
            if self.numbering.see(record["step"], record.get("tokens"), begins):
                self._number_anew(before, self.numbering.unit or 1)
            if begins:
                self._cut(self.numbering.unit or 1)
            self.steps[record["step"]] = record

    def _number_anew(self, before: float, now: float) -> None:
        """Give all records, of which the newest have the unit `before`, their numbers in a part with the unit `now`."""
        self._older += [(step * before, record) for step, record in self.steps.items() if step > self.limit]
        self.limit, self.steps = self.start_step, {}
        for place, record in self._older:
            number = math.ceil(translated(place, 1, now))
            self.steps.setdefault(number, {**record, "step": number})

    def _cut(self, unit: float) -> None:
        """Remove the records of steps that a part which begins after `start_step` makes again."""
        self.limit = min(self.limit, self.start_step)
        self._older = [(place, old) for place, old in self._older if place <= self.start_step * unit]
        self.steps = {step: old for step, old in self.steps.items() if step <= self.start_step}

    @property
    def last(self) -> dict[str, Any]:
        """Return the record of the newest step; return an empty dict before the first step."""
        return self.steps[max(self.steps)] if self.steps else {}

    def tokens_per_second(self) -> float | None:
        """Return the median number of tokens per second over the steps since the last start of the workers. The first
        step after the start does not count, because it includes compiling the graph.
        """
        numbers = [step for step in sorted(self.steps) if step > self.start_step][1:]
        speeds = [
            self.steps[n]["tokens"] / self.steps[n]["seconds"] for n in numbers if self.steps[n].get("seconds", 0) > 0
        ]
        return median(speeds) if speeds else None


def read_metrics(file: Path) -> Readings:
    """Return all readings in the metrics file of one rank, without digests of samples; return none without a file."""
    readings = Readings()
    for record in Follower(file).records():
        readings.add({name: value for name, value in record.items() if name != "samples"})
    return readings


def read_held_out(run_dir: Path) -> dict[float, float]:
    """Return the held-out losses of a run by training step, from the records that `read_evaluations` returns."""
    return {step: evaluation.loss for step, evaluation in read_evaluations(run_dir).items()}


@dataclass(frozen=True)
class Evaluation:
    """An `Evaluation` is the loss on held-out documents after a training step: the mean loss, and the loss of each
    listed corpus. The field `step` may be a fraction if a resume with another global batch numbered the steps anew.
    """

    step: float
    loss: float
    corpora: dict[str, float] = field(default_factory=dict)


def read_evaluations(run_dir: Path, run: Run | None = None) -> dict[float, Evaluation]:
    """Return the evaluations of a run by training step, from the file that `plugins.held_out_loss` writes. A resumed
    run evaluates the step of its checkpoint first, and this record replaces all records of the same and of later steps,
    because the run repeats those steps. In the result each step has the number that the newest attempt gives it.

    Args:
        run: the content of `run_dir`, if it was read before. Its `notes` get a sentence if the numbering of an
            evaluation's steps is unknown, so that the numbering of the previous evaluation is assumed.
    """
    records = Follower(held_out_file(run_dir)).records()
    lines = [(one, _name_of(record)) for record in records if (one := evaluation_of(record))]
    run = run or (load_run(run_dir) if lines else None)
    unit = now = run.parts[-1].unit if run and run.parts else 1
    kept, unsure = dict[float, Evaluation](), False
    for one, name in lines:
        found = run.unit_of(name) if run else unit
        unit, unsure = found or unit, unsure or not found
        step = translated(one.step, unit, now)
        kept = {other: old for other, old in kept.items() if other < step} | {step: replace(one, step=step)}
    if run and unsure:
        run.notes.append("the global batch was changed, and it is unknown how the steps of all held-out losses count")
    return kept


def evaluation_of(record: dict[str, Any]) -> Evaluation | None:
    """Return the held-out losses in one record of an evaluation file; return None if the record does not have the
    expected form.
    """
    corpora = record.get("corpora", {})
    step = record.get("step")
    if type(step) is not int or not 0 <= step <= _MOST_STEPS or not _is_number(record.get("held_out_loss")):
        return None
    known = isinstance(corpora, dict) and all(map(_is_number, corpora.values()))
    return Evaluation(step, record["held_out_loss"], corpora if known else {})


def perplexity(loss: float | None) -> float | None:
    """Return the perplexity, which is the exponential of a loss in nats; return infinity if it is too large for a
    float, and None if the loss is None.
    """
    if loss is None or math.isnan(loss):
        return None
    return math.exp(loss) if loss < _MOST_LOSS else math.inf


def loss_in_words(loss: float | None) -> str:
    """Return a loss and its perplexity as text."""
    known = perplexity(loss)
    if loss is None or known is None or loss == math.inf:
        return "not finite"
    return f"{loss:.4f}, perplexity {f'{known:,.4g}' if known < 1000 else f'{known:,.0f}' if known < 1e9 else 'huge'}"


class Follower:
    """A `Follower` reads the complete lines that were appended to a JSON-lines file since the last call. A `Follower`
    leaves out lines that an old attempt wrote after a newer attempt had begun.
    """

    def __init__(self, file: Path, newest: int | None = None):
        """Follow `file`, which need not exist yet; of what it holds now, read only the `newest` bytes (None: all)."""
        self.file = file
        skipped = file.stat().st_size - newest if newest is not None and file.exists() else 0
        self.offset = max(0, skipped)
        self.newest = Newest()

    def new_records(self) -> list[dict[str, Any]]:
        """Return the records added since the last call, without lines that are not JSON (such as a cut last line)."""
        return list(self.records())

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one by one the records added since the last call, so that files larger than memory can be read."""
        if not self.file.exists():
            return
        with self.file.open("rb") as lines:
            lines.seek(self.offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                record = _parse(line)
                if isinstance(record, dict) and not self.newest.is_late(record):
                    yield record


class Steps(Follower):
    """A `Steps` reads the new lines of a metrics file at each call; lines that do not have the expected form, which
    would lead to wrong tables that look right, are left out and listed in `faults`.
    """

    def __init__(self, file: Path):
        super().__init__(file)
        self.faults: list[str] = []

    @property
    def left_out(self) -> str:
        """Return in words how many lines were left out, and why the first one was left out; return "" if none was."""
        count, more = len(self.faults), f", and {len(self.faults) - 1} more" * (len(self.faults) > 1)
        return f"{count} record{'s' * (count > 1)} left out ({self.faults[0]}{more})" if count else ""

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were added to the metrics file since the last call and have the expected form."""
        latest = _DAY + max(time.time(), self.file.stat().st_mtime if self.file.exists() else 0.0)
        for record in super().records():
            if fault := _fault_of(record, latest):
                self.faults.append(fault)
            else:
                yield record


def _fault_of(record: dict[str, Any], latest: float) -> str | None:
    """Return what keeps a line, with a time up to `latest`, from being a step's or a header's; None if nothing does."""
    for name, least in (("total_steps", 0), ("start_step", 0), ("step", 1)):
        value = record.get(name)
        if value is not None and (type(value) is not int or not least <= value <= _MOST_STEPS):
            return f"{name} is {_short(value)}, which is not the number of a step"
    for name in ("time", "seconds", "tokens"):
        value = record.get(name)
        if value is not None and not (_is_number(value) and 0 <= value < 1e15):
            return f"{name} is {_short(value)}, which is not a number"
        if name == "time" and value is not None and value > latest:
            return f"time is {_short(value)}, which is in the future by the clock of this host"
    for name in ("loss", "global_norm"):  # infinity and NaN are what a run can come to
        if not _is_number(record.get(name, 0.0)) and record[name] is not None:
            return f"{name} is {_short(record[name])}, which is not a number"
    return None


def _is_number(value: Any) -> bool:
    """Return whether a value out of JSON is a number that a float can hold, or NaN or infinity."""
    return isinstance(value, float) or (type(value) is int and abs(value) < _NO_FLOAT)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 30 else f"{text[:30]}..."


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@dataclass
class Part:
    """A `Part` holds the steps that a run made after one start of its workers; each column (such as the loss) is an
    array with one value for each step.

    Args:
        start_step: the number of steps that were done before this part.
        began: the time at which the training of this part began, in seconds since 1970 (None for runs of older
            versions, which did not record this time).
        attempt: the name of the attempt that wrote the part; None if its lines name none.
        unit: what a step counts in places, by which steps of several parts are compared (`tools.runs.places`).
        tokens: the tokens of a step; None if its records do not state them.
        left: the place from which a later part, which has made no step yet, began; None if there is no such part.
        skipped: the steps whose gradients overflowed under the loss scale, so that the weights were not updated; these
            steps have no gradient norm.
        recorded: the columns in which a step has a value, which may be NaN.
    """

    start_step: int
    began: float | None = None
    total_steps: int | None = None
    attempt: str | None = None
    unit: float = 1
    tokens: float | None = None
    left: float | None = None
    columns: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    skipped: set[int] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of one step; missing values become NaN."""
        overflow = record.get("overflow") is True
        self.tokens = self.tokens or record.get("tokens")
        if overflow:
            self.skipped.add(record["step"])
        for name, column in self.columns.items():
            value = None if overflow and name == "global_norm" else number(record.get(name))
            if value is not None:
                self.recorded.add(name)
            column.append(math.nan if value is None else value)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> array:
        return self.columns[name]

    def place(self, step: float) -> float:
        """Return the place in the data after `step` steps, which can be compared with places of other parts."""
        return step * self.unit

    @property
    def begin(self) -> float:
        """Return the place after which this part began to train."""
        return self.place(self.start_step)

    @property
    def timed(self) -> bool:
        """Return whether the records of the steps in this part of the run state the time of each step."""
        return bool(self["time"]) and not any(math.isnan(time) for time in self["time"])

    @property
    def moment(self) -> float | None:
        """Return the time at which this part of the run began to train, if this time is recorded."""
        return self.began if self.began is not None else self["time"][0] - self["seconds"][0] if self.timed else None

    def usual(self) -> float | None:
        """Return the median number of seconds of a step in this part of the run. The first step does not count, because
        it includes compiling the graph.
        """
        seconds = [value for value in self["seconds"][1 : USUAL_OF + 1] if value > 0]
        return median(seconds) if seconds else None


@dataclass
class Run:
    """A `Run` holds the content of a run's folder; the content of a file that does not exist is empty or None."""

    folder: Path
    recipe: Recipe | None
    parts: list[Part]
    spans: list[Span]
    attempts: list[Attempt]
    notes: list[str] = field(default_factory=list)  # what of its records cannot be used

    def usual(self, part: Part | None = None) -> float | None:
        """Return the median number of seconds of a step in one part of the run, or in the newest part with enough steps
        if the requested part has too few steps.
        """
        own = part.usual() if part else None
        return own if own else next((found for one in reversed(self.parts) if (found := one.usual())), None)

    @property
    def alike(self) -> bool:
        """Return whether plugins.batch_ramp grows the run's batch, so that all steps of the run keep their numbers."""
        return bool(self.recipe and View(self.recipe).ramp.stages)

    def unit_of(self, attempt: str | None) -> float | None:
        """Return by how much a step of the attempt with a given name advances the place in the data (None: unknown)."""
        units = {part.unit for part in self.parts}
        only = next(iter(units), 1) if len(units) < 2 else None
        own = next((part.unit for part in self.parts if attempt and part.attempt == attempt), None)
        plan = next((each.plan for each in self.attempts if each.plan and each.plan.name == attempt), None)
        return own or only if own or self.alike or plan is None or plan.start is None else self._tokens(plan)

    def begin_of(self, attempt: Attempt) -> float | None:
        """Return the place in the data from which an attempt that has made no step yet trains (None: unknown)."""
        if (plan := attempt.plan) is None:
            return None
        before = {part.unit for part in self.parts if (part.moment or 0.0) <= plan.time}
        return begin_of(plan, None if plan.start is None else self._tokens(plan), before, self.alike)

    def _tokens(self, plan: Plan) -> float | None:
        """Return the tokens of a step of `plan`: of an attempt with the same batch or, more slowly, of its recipe."""
        alike = {each.plan.name for each in self.attempts if each.plan and plan.batch == each.plan.batch > 0}
        own = next((part.unit for part in self.parts if part.attempt in alike), None)
        return own or tokens_of(read_recipe(recipe_file(self.folder, plan)))

    def unit_at(self, time: float) -> float:
        """Return by how many places in the data one step moves on at a given time, in seconds since 1970."""
        begun = [part for part in self.parts if part.moment is not None and part.moment <= time]
        return (begun or self.parts)[-1 if begun else 0].unit if self.parts else 1


def metrics_of(folder: Path, recipe: Recipe | None) -> Path:
    """Return the path of a metrics file that holds the run's loss: only some ranks compute the loss."""
    own = folder / "metrics" / f"rank_{loss_rank(View(recipe)) if recipe else 0}.jsonl"
    return own if own.exists() or recipe else next(iter(sorted((folder / "metrics").glob("rank_*.jsonl"))), own)


def recipe_of(folder: Path) -> Recipe | None:
    """Return the recipe in RUN/recipe.yaml; return None if the file does not exist or cannot be read."""
    return read_recipe(folder / "recipe.yaml")


def read_recipe(file: Path) -> Recipe | None:
    """Return the recipe in a file; return None if the file does not exist or cannot be read."""
    try:
        return load_recipe(file)
    except (TC3Error, OSError):
        return None


def check_folder(folder: Path) -> None:
    """Raise DataError for a folder that is not the folder of a run.

    Raises:
        DataError: the folder does not exist, or holds no file that a run writes.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such run; give the folder that tc3 train --run-dir was given, or output/NAME"
        )
    if not any((folder / name).exists() for name in ("metrics", "attempts", "recipe.yaml")):
        raise DataError(f"{folder}: this is not a run's folder (it has no metrics/, no attempts/ and no recipe.yaml)")


def load_run(folder: Path) -> Run:
    """Read the files of a run's folder that reports about the run need, and return their content.

    Raises:
        DataError: as in `check_folder`.
    """
    check_folder(folder)
    recipe = recipe_of(folder)
    spans = [span for record in Follower(spans_file(folder)).records() if (span := as_span(record))]
    run = Run(folder, recipe, [], spans, of_the_run(read_attempts(folder)))
    planned = {attempt.plan.name for attempt in run.attempts if attempt.plan}
    run.parts = read_parts(metrics_of(folder, recipe), run.notes, run.alike, planned)
    return run


def number(value: Any) -> float | None:
    """Return a number that was read from JSON, including NaN and infinity; return None for any other value."""
    return value if _is_number(value) else None


def header_of(record: dict[str, Any]) -> tuple[int, float | None, int | None]:
    """Return from a start's header: the steps done before, the time at which training began, and the total steps."""
    start, total, time = (number(record.get(name)) for name in ("start_step", "total_steps", "time"))
    return int(start or 0), time, int(total) if total else None


def _name_of(record: dict[str, Any]) -> str | None:
    """Return the name of the attempt that wrote a line; None if the line names none."""
    name = record.get(OF)
    return name if isinstance(name, str) else None


def read_parts(
    file: Path, notes: list[str] | None = None, alike: bool = False, planned: Collection[str] = ()
) -> list[Part]:
    """Return the parts of a metrics file, one for each start of the workers, the oldest first; a part without any step
    is left out.

    Args:
        notes: a list to which sentences about lines that no run writes are added, and a sentence if the records do not
            say whether the parts number their steps alike.
        alike: whether it is known that the parts number their steps alike.
        planned: the names of the attempts whose plans say where these attempts begin.
    """
    parts: list[Part] = []
    steps, numbering = Steps(file), Numbering(alike)
    units: list[float | None] = []
    for record in steps.records():
        if "total_steps" in record:
            parts.append(Part(*header_of(record), attempt=_name_of(record)))
            units.append(numbering.unit)  # of the steps before it, until its first step states its tokens
        elif isinstance(record.get("step"), int):
            if not parts or (len(parts[-1]) and begins_anew(record, parts[-1]["step"][-1], parts[-1].tokens)):
                parts.append(Part(record["step"] - 1, attempt=_name_of(record)))
                units.append(None)
            numbering.see(record["step"], record.get("tokens"), begins=not len(parts[-1]))
            units[-1] = numbering.unit
            parts[-1].add(record)
    first = next((unit for unit in units if unit), 1)
    for part, unit in zip(parts, units, strict=True):
        part.unit = unit or first
    if steps.faults and notes is not None:
        notes.append(f"{file}: {steps.left_out}")
    kept = [part for part in parts if len(part)]
    empty = [at for at, part in enumerate(parts) if not len(part) and part.attempt not in planned]
    if (numbering.unsure or empty) and len(parts) > 1 and notes is not None:
        notes.append(
            "some records do not state the tokens of a step, so that it is unknown whether all starts number their "
            "steps alike; they are taken to do so"
        )
    for at, part in enumerate(parts):
        part.left = min((parts[later].begin for later in empty if later > at), default=None)
    return kept
