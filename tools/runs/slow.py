"""This module finds the ranks of a run that are slower than other ranks, from the records of plugins.straggler_probe:
`slow_of` reads all records of a run, and `Probes` follows the newest records of a run that is in progress.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import DataError
from plugins.straggler_probe.plan import RECOVERED, Verdict, by_stage, slow_ranks
from plugins.straggler_probe.record import Record, read_run, record_of
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.readings import Follower

NEWEST = 200  # probes of a rank that a run is followed by
LOOK = 30.0  # seconds between two looks at the probes


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
