"""A run's folder as data: the steps of each start of its workers, its attempts, its saves and evaluations."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plugins.errors import DataError, TC3Error
from plugins.lines import Span, as_span, spans_file
from tools.recipe.load import Recipe, load_recipe
from tools.runs.attempts import Attempt, read_attempts
from tools.runs.readings import Follower, Steps, loss_rank

USUAL_OF = 100  # steps after a part's first whose median is its usual step
COLUMNS = ("step", "time", "seconds", "loss", "global_norm")


@dataclass
class Part:
    """The steps of one start of the workers, the columns of `COLUMNS` as arrays of one number a step.

    Args:
        start_step: steps done before it.
        began: when its training began, seconds since 1970 (None: a run from before that was written).
    """

    start_step: int
    began: float | None = None
    total_steps: int | None = None
    columns: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})

    def add(self, record: dict[str, Any]) -> None:
        """Take in one step's record; what it lacks is NaN."""
        for name, column in self.columns.items():
            value = number(record.get(name))
            column.append(math.nan if value is None else value)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> array:
        return self.columns[name]

    @property
    def timed(self) -> bool:
        """Whether it says when its steps were made."""
        return bool(self["time"]) and not any(math.isnan(time) for time in self["time"])

    @property
    def moment(self) -> float | None:
        """When its training began, as far as it says."""
        return self.began if self.began is not None else self["time"][0] - self["seconds"][0] if self.timed else None

    def usual(self) -> float | None:
        """Median seconds of its steps; its first one, which compiles, is left out."""
        seconds = [value for value in self["seconds"][1 : USUAL_OF + 1] if value > 0]
        return median(seconds) if seconds else None


@dataclass
class Run:
    """What a run's folder holds; what is not there is empty or None."""

    folder: Path
    recipe: Recipe | None
    parts: list[Part]
    spans: list[Span]
    attempts: list[Attempt]
    notes: list[str] = field(default_factory=list)  # what of its records cannot be used

    def usual(self, part: Part | None = None) -> float | None:
        """Seconds of a usual step of `part`, or of the newest part that can tell."""
        own = part.usual() if part else None
        return own if own else next((found for one in reversed(self.parts) if (found := one.usual())), None)


def metrics_of(folder: Path, recipe: Recipe | None) -> Path:
    """The metrics file that stands for the run: of the rank that knows the loss."""
    own = folder / "metrics" / f"rank_{loss_rank(recipe) if recipe else 0}.jsonl"
    return own if own.exists() or recipe else next(iter(sorted((folder / "metrics").glob("rank_*.jsonl"))), own)


def recipe_of(folder: Path) -> Recipe | None:
    """RUN/recipe.yaml; None where it is not there or cannot be read."""
    try:
        return load_recipe(folder / "recipe.yaml")
    except (TC3Error, OSError):
        return None


def check_folder(folder: Path) -> None:
    """Refuse what is no run.

    Raises:
        DataError: there is no such folder, or nothing in it that a run writes.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run; give the folder that tc3 train --run-dir was given, or output/NAME")
    if not any((folder / name).exists() for name in ("metrics", "attempts", "recipe.yaml")):
        raise DataError(f"{folder}: not a run's folder (it has no metrics/, no attempts/ and no recipe.yaml)")


def read_run(folder: Path) -> Run:
    """Everything that the reports need.

    Raises:
        DataError: as `check_folder`.
    """
    check_folder(folder)
    recipe = recipe_of(folder)
    spans = [span for record in Follower(spans_file(folder)).records() if (span := as_span(record))]
    notes: list[str] = []
    return Run(folder, recipe, read_parts(metrics_of(folder, recipe), notes), spans, read_attempts(folder), notes)


def number(value: Any) -> float | None:
    """A number out of JSON, NaN and infinity too; None for anything else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def header_of(record: dict[str, Any]) -> tuple[int, float | None, int | None]:
    """(steps done before, when its training began, total steps) of the line that begins a part."""
    start, total, time = (number(record.get(name)) for name in ("start_step", "total_steps", "time"))
    return int(start or 0), time, int(total) if total else None


def read_parts(file: Path, notes: list[str] | None = None) -> list[Part]:
    """The parts of a metrics file, the oldest first; parts that made no step are left out.

    Args:
        notes: is told of lines that no run writes.
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
    return [part for part in parts if len(part)]
