"""Ranks of a run that are slower than their peers, by its probes (plugins.straggler_probe)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path

from plugins.errors import DataError
from plugins.straggler_probe.plan import Verdict, by_stage, slow_ranks
from plugins.straggler_probe.record import Record, read_run
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.readings import Follower

NEWEST = 200  # probes of a rank that a run is followed by
LOOK = 30.0  # seconds between two looks at them


@dataclass(frozen=True)
class Slow:
    """Sentences on slow ranks, and on what the probes do not tell; `compared`: ranks, None for a run without probes."""

    compared: int | None
    slow: list[str]
    unknown: list[str]


def slow_of(folder: Path, recipe: Recipe | None) -> Slow:
    """Of all probes of a run."""
    try:
        records = read_run(folder)
    except DataError as error:
        return Slow(None, [], [f"its probes cannot be read: {error}"])
    return _told(records, recipe)


def _told(records: list[Record], recipe: Recipe | None) -> Slow:
    if not records:
        return Slow(None, [], [])
    view = View(recipe) if recipe else None
    groups = by_stage(view.devices, view.pp) if view and view.parallel else None
    found: Verdict = slow_ranks(records, groups)
    slow = [f"rank {one.rank} on {one.host}: {one.seen}" for one in found.slow]
    unknown = [f"{one.kind} of ranks {_ranks(one.ranks)}: {one.why}" for one in found.unknown]
    return Slow(found.compared, slow, unknown)


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


class Probes:
    """The probes of a run that goes on: the newest `NEWEST` of each rank, looked at every `LOOK` seconds."""

    def __init__(self, folder: Path, recipe: Recipe | None):
        self.folder, self.recipe = folder, recipe
        self.files: dict[Path, tuple[Follower, deque[Record]]] = {}
        self.looked = -LOOK
        self.found = Slow(None, [], [])

    def look(self) -> Slow:
        """What they say, as of the last look."""
        if time.monotonic() - self.looked >= LOOK:
            self.looked = time.monotonic()
            for path in sorted((self.folder / "metrics").glob("probe_*.jsonl")):
                follower, newest = self.files.setdefault(path, (Follower(path), deque(maxlen=NEWEST)))
                for line in follower.records():
                    if record := _record(line):
                        while newest and newest[-1].step >= record.step:  # made again
                            newest.pop()
                        newest.append(record)
            self.found = _told([one for _, newest in self.files.values() for one in newest], self.recipe)
        return self.found


def _record(line: dict) -> Record | None:
    """A probe; None for a line that is none."""
    names = [field.name for field in fields(Record)]
    numbers = [line.get(name) for name in names if name not in ("host", "device", "data")]
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers) or line.keys() < set(names):
        return None
    record = Record(**{name: line[name] for name in names})
    return record if record.probe > 0 and record.seconds > 0 else None
