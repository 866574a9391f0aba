"""This module reads a run's folder as data: the files that the run writes while it trains. The module needs no
MindSpore.

`read_metrics` and `read_evaluations` read metrics/rank_N.jsonl and metrics/held_out.jsonl, and `Follower` follows such
a file while it grows. `slow_of` and `Probes` find the ranks of a run that are slower than other ranks, from the records
of plugins.straggler_probe. `load_run` reads everything that reports need: the steps of each start of the workers
(`Part`), the attempts, and the times of saves and evaluations.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plugins.errors import DataError, TC3Error
from plugins.held_out_loss.plan import held_out_file
from plugins.lines import Newest, Span, as_span, spans_file
from plugins.straggler_probe.plan import RECOVERED, Verdict, by_stage, slow_ranks
from plugins.straggler_probe.record import Record, read_run, record_of
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs.attempts import Attempt, read_attempts
from tools.schema.stages import loss_rank

NEWEST = 200  # probes of a rank that a run is followed by
LOOK = 30.0  # seconds between two looks at the probes
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
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    total_steps: int | None = None
    start_step: int = 0  # steps done before the part that was read last
    world_size: int = 1

    def add(self, record: dict[str, Any]) -> None:
        """Add one line of a metrics file: the record of a step, or the header that the workers write at each start."""
        if "total_steps" in record:
            self.total_steps = record["total_steps"]
            self.start_step = record.get("start_step", 0)
            self.world_size = record.get("world_size", 1)
            self.steps = {step: old for step, old in self.steps.items() if step <= self.start_step}
        elif "step" in record:
            self.steps[record["step"]] = record

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
    """Return all readings in the metrics file of one rank; return empty readings if the file does not exist."""
    readings = Readings()
    for record in Follower(file).new_records():
        readings.add(record)
    return readings


def read_held_out(run_dir: Path) -> dict[int, float]:
    """Return the held-out losses of a run by training step, from the records that `read_evaluations` returns."""
    return {step: evaluation.loss for step, evaluation in read_evaluations(run_dir).items()}


@dataclass(frozen=True)
class Evaluation:
    """An `Evaluation` is the loss on held-out documents after a training step: the mean loss, and the loss of each
    listed corpus.
    """

    step: int
    loss: float
    corpora: dict[str, float] = field(default_factory=dict)


def read_evaluations(run_dir: Path) -> dict[int, Evaluation]:
    """Return the evaluations of a run by training step, from the file that `plugins.held_out_loss` writes. If a resumed
    run repeats steps, the new records replace the older records of these steps.
    """
    kept: dict[int, Evaluation] = {}
    for one in filter(None, map(evaluation_of, Follower(held_out_file(run_dir)).records())):
        kept = {step: before for step, before in kept.items() if step < one.step} | {one.step: one}
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
        """Return the records that were added since the last call; a line that is not JSON (the last line of a killed
        run) is left out.
        """
        return list(self.records())

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one by one the records that were added since the last call, so that files larger than memory can be
        read.
        """
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
    """A `Steps` reads the new lines of a metrics file at each call; lines that do not have the expected form are left
    out and listed in `faults`.

    Such lines (with a text in place of a number, a negative time or a time in the future) would lead to wrong tables
    that look right.
    """

    def __init__(self, file: Path):
        super().__init__(file)
        self.faults: list[str] = []

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were added to the metrics file since the last call and have the expected form."""
        for record in super().records():
            if fault := _fault_of(record):
                self.faults.append(fault)
            else:
                yield record


def _fault_of(record: dict[str, Any]) -> str | None:
    """Return what keeps a line from being a step's or a header's; None where nothing does."""
    for name, least in (("total_steps", 0), ("start_step", 0), ("step", 1)):
        value = record.get(name)
        if value is not None and (type(value) is not int or not least <= value <= _MOST_STEPS):
            return f"{name} is {_short(value)}, which is not the number of a step"
    for name in ("time", "seconds", "tokens"):
        value = record.get(name)
        if value is not None and not (_is_number(value) and 0 <= value < 1e15):
            return f"{name} is {_short(value)}, which is not a number"
        if name == "time" and value is not None and value > time.time() + _DAY:
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


@dataclass(frozen=True)
class Slow:
    """A `Slow` holds the results of a run's straggler probes (speed tests of ranks during training). A `Slow` holds
    sentences about slow ranks, sentences about the limits of the probes, and the number of compared ranks.
    """

    compared: int | None
    slow: list[str]
    unknown: list[str]


def slow_of(folder: Path, recipe: Recipe | None) -> Slow:
    """Return the results of all straggler probes of a run about slow ranks."""
    try:
        records = read_run(folder)
    except DataError as error:
        return Slow(None, [], [f"its probes cannot be read: {error}"])
    return _slow_in_words(records, recipe)


def _slow_in_words(records: list[Record], recipe: Recipe | None) -> Slow:
    if not records:
        return Slow(None, [], [])
    view = View(recipe) if recipe else None
    groups = by_stage(view.devices, view.pp) if view and view.parallel else None
    ranks = view.devices if view else 0
    # the recipe is that of the newest attempt: other ranks ended where the run went on with fewer
    present = [record for record in records if not ranks or record.rank < ranks]
    found: Verdict = slow_ranks(present if groups else records, groups)
    slow = [f"rank {one.rank} on {one.host}: {one.seen}" for one in found.slow]
    unknown = [f"{one.kind} of {_ranks(one.ranks)}: {one.why}" for one in found.unknown]
    return Slow(found.compared, slow, [*unknown, *_unprobed(present, ranks)])


def _ranks(ranks: Sequence[int]) -> str:
    shown, more = ", ".join(map(str, ranks[:8])), len(ranks) - 8
    return f"ranks {shown}{f' and {more} more' if more > 0 else ''}"


def _unprobed(records: list[Record], ranks: int) -> Iterator[str]:
    """Yield sentences about those ranks of a run of which all probes, or the newest ones, are missing."""
    steps = sorted({record.step for record in records})
    last = {record.rank: record.step for record in sorted(records, key=lambda record: record.step)}
    if lost := sorted(set(range(ranks)) - last.keys()):
        yield f"{_ranks(lost)}: their probes are missing"
    for step in steps[: -RECOVERED - 1]:
        if ended := sorted(rank for rank, newest in last.items() if newest == step):
            yield f"{_ranks(ended)}: their probes after step {step:,} are missing"


class Probes:
    """A `Probes` reads the straggler probes of a run that is in progress: it judges the newest `NEWEST` probes of each
    rank, and reads new probes every `LOOK` seconds.
    """

    def __init__(self, folder: Path, recipe: Recipe | None):
        self.folder, self.recipe = folder, recipe
        self.files: dict[Path, tuple[Follower, deque[Record]]] = {}
        self.looked = -LOOK
        self.found = Slow(None, [], [])

    def look(self) -> Slow:
        """Read new straggler probes if `LOOK` seconds have passed, and return the results of the newest probes about
        slow ranks.
        """
        if time.monotonic() - self.looked >= LOOK:
            self.looked = time.monotonic()
            for path in sorted((self.folder / "metrics").glob("probe_*.jsonl")):
                follower, newest = self.files.setdefault(path, (Follower(path), deque(maxlen=NEWEST)))
                for line in follower.records():
                    with suppress(DataError):  # a line that is none
                        record = record_of(line, str(path))
                        while newest and newest[-1].step >= record.step:  # made again
                            newest.pop()
                        newest.append(record)
            self.found = _slow_in_words([one for _, newest in self.files.values() for one in newest], self.recipe)
        return self.found


@dataclass
class Part:
    """A `Part` holds the steps that a run made after one start of its workers; each column (such as the loss) is an
    array with one value for each step.

    Args:
        start_step: the number of steps that were done before this part.
        began: the time at which the training of this part began, in seconds since 1970 (None for runs of older
            versions, which did not record this time).
        left: the step from which a later part, which has made no step yet, began; None if there is no such part.
        skipped: the steps whose gradients overflowed under the loss scale, so that the weights were not updated; these
            steps have no gradient norm.
        recorded: the columns in which a step has a value, which may be NaN.
    """

    start_step: int
    began: float | None = None
    total_steps: int | None = None
    left: int | None = None
    columns: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    skipped: set[int] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of one step; missing values become NaN."""
        overflow = record.get("overflow") is True
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


def metrics_of(folder: Path, recipe: Recipe | None) -> Path:
    """Return the path of a metrics file that holds the run's loss: only some ranks compute the loss."""
    own = folder / "metrics" / f"rank_{loss_rank(View(recipe)) if recipe else 0}.jsonl"
    return own if own.exists() or recipe else next(iter(sorted((folder / "metrics").glob("rank_*.jsonl"))), own)


def recipe_of(folder: Path) -> Recipe | None:
    """Return the recipe in RUN/recipe.yaml; return None if the file does not exist or cannot be read."""
    try:
        return load_recipe(folder / "recipe.yaml")
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
    notes: list[str] = []
    return Run(folder, recipe, read_parts(metrics_of(folder, recipe), notes), spans, read_attempts(folder), notes)


def number(value: Any) -> float | None:
    """Return a number that was read from JSON, including NaN and infinity; return None for a value that is not a
    number.
    """
    return value if _is_number(value) else None


def header_of(record: dict[str, Any]) -> tuple[int, float | None, int | None]:
    """Return the content of the header that the workers write into a metrics file at each start: the number of steps
    done before, the time at which training began, and the total number of steps.
    """
    start, total, time = (number(record.get(name)) for name in ("start_step", "total_steps", "time"))
    return int(start or 0), time, int(total) if total else None


def read_parts(file: Path, notes: list[str] | None = None) -> list[Part]:
    """Return the parts of a metrics file, one for each start of the workers, the oldest first; a part without any step
    is left out.

    Args:
        notes: a list to which sentences about lines that no run writes are added.
    """
    parts: list[Part] = []
    steps = Steps(file)
    for record in steps.records():
        if "total_steps" in record:
            parts.append(Part(*header_of(record)))
        elif isinstance(record.get("step"), int):
            if not parts or (len(parts[-1]) and record["step"] <= parts[-1]["step"][-1]):  # a header that a kill broke
                parts.append(Part(record["step"] - 1))
            parts[-1].add(record)
    if steps.faults and notes is not None:
        count, more = len(steps.faults), f", and {len(steps.faults) - 1} more" * (len(steps.faults) > 1)
        notes.append(f"{file}: {count} record{'s' * (count > 1)} left out ({steps.faults[0]}{more})")
    kept = [part for part in parts if len(part)]
    for at, part in enumerate(parts):
        part.left = min((later.start_step for later in parts[at + 1 :] if not len(later)), default=None)
    return kept
