"""Other schedules beside 1F1B: their table, and which layout `--write` writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.estimate.configuration import Configuration
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.search.ranking.by_schedule import BySchedule, Scheduled
from tools.search.ranking.entry import Entry
from tools.search.ranking.run import Found
from tools.search.ranking.swap_price import swap_words
from tools.search.report.text import notes

HEADS = ("schedule", "layout", "recompute", "step s", "to 1", "GiB", "bubble", "MindFormers 1.9.0")
_LEFT = ("schedule", "layout", "recompute", "MindFormers 1.9.0")


def print_schedules(found: BySchedule, first: Entry, times: TimeModel, console: Console) -> None:
    """Print the table, and what swapping would cost `first`."""
    console.print("\nschedules, each with its fastest layout (predicted; all simulated with the same times of passes):")
    table = Table(box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head in _LEFT else "right", no_wrap=head not in _LEFT)
    for row in rows_of(found, first):
        table.add_row(*row)
    console.print(table)
    for line in swap_words(first.config, times):
        console.print(f"- {line}")


def to_write(found: Found, others: BySchedule, path: Path) -> tuple[Configuration, Path, list[str]]:
    """What `write_overlay` takes: the fastest that runs of the schedules asked for, of 1F1B where none was."""
    one = others.writable
    if one is None or one.entry is None:
        return found.best.config, path, notes(found)
    words = f"Schedule {one.schedule}; the fastest layout of 1F1B, interleaved or not, was predicted at "
    own = replace(found, entries=[one.entry])
    return one.entry.config, path, [*notes(own), f"{words}{found.entries[0].seconds:.2f} s."]


def rows_of(found: BySchedule, first: Entry) -> list[list[str]]:
    """For a table: the schedules by time, `first` (of 1F1B, interleaved or not) among them."""
    own = Scheduled(first.config.schedule, first, "")
    timed = [(one.entry, one) for one in (own, *found.every) if one.entry]
    rows = [
        [
            one.schedule,
            entry.layout,
            entry.recompute,
            f"{entry.seconds:.2f}",
            f"{100 * (entry.seconds / first.seconds - 1):+.1f} %",
            f"{entry.peak / GIB:.1f}",
            f"{100 * entry.parts['bubble'] / entry.seconds:.1f} %",
            one.runs,
        ]
        for entry, one in sorted(timed, key=lambda pair: pair[0].seconds)
    ]
    return rows + [[one.schedule, one.why, "", "", "", "", "", one.runs] for one in found.every if not one.entry]
