"""Show a run's status: a table that stays in its place on a terminal, a line whenever it changes elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tools.runs.render import duration, share
from tools.runs.watch.status import Status

QUIET = 120.0  # seconds without anything new after which that is said
_LINE = 60.0  # seconds between lines, at most, off a terminal
Look = Callable[[], Status]


def follow(look: Look, console: Console, every: float, as_json: bool) -> int:
    """Show what `look` says every `every` seconds until the run is over; returns the exit code."""
    if as_json or not console.is_terminal:
        return _lines(look, console, every, as_json)
    shown = table(status := look())
    with Live(shown, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while status.over is None:
            time.sleep(every)
            status = look()
            live.update(table(status), refresh=True)
    return status.over


def _lines(look: Look, console: Console, every: float, as_json: bool) -> int:
    shown, said = "", 0.0
    while True:
        status = look()
        text = json_line(status) if as_json else line(status)
        moved = (status.state, status.attempt, status.phase) if not as_json else ()
        key = text if as_json else str(moved)
        if key != shown or time.monotonic() - said >= _LINE or status.over is not None:
            shown, said = key, time.monotonic()
            console.print(text, highlight=False, soft_wrap=True, markup=False)
        if status.over is not None:
            return status.over
        time.sleep(every)


def json_line(status: Status) -> str:
    """One JSON object."""
    return json.dumps(asdict(status))


def rows(status: Status) -> list[tuple[str, str]]:
    """What, and how it stands; what a run does not have is left out."""
    total = f" of {status.total_steps:,}" if status.total_steps else ""
    known = share(status.goodput) if status.goodput is None else f"{share(status.goodput)} of {_long(status)}"
    found = [
        ("run", f"{status.run}: {status.state}{_quiet(status)}"),
        ("attempt", _attempt(status)),
        ("phase", status.phase and f"{status.phase}, for {duration(status.phase_seconds)}"),
        ("step", f"{status.step:,}{total}"),
        ("loss", None if status.loss is None else f"{status.loss:.4f}"),
        (
            "speed",
            None if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f} tokens/s of all workers",
        ),
        ("goodput", known),
        ("checkpoint", _checkpoint(status)),
        ("slow ranks", "; ".join(status.slow_ranks) or None),
        ("failures", _failures(status)),
    ]
    return [(name, text) for name, text in found if text is not None]


def _long(status: Status) -> str:
    return duration(status.wall_seconds)


def _quiet(status: Status) -> str:
    tell = status.quiet >= QUIET and status.over is None
    return f", nothing new for {duration(round(status.quiet))}" if tell else ""


def _attempt(status: Status) -> str | None:
    if status.attempt is None:
        return None
    hosts = "unknown hosts" if status.hosts is None else f"{status.hosts} host{'s' * (status.hosts != 1)}"
    return f"{status.attempt} on {hosts}"


def _checkpoint(status: Status) -> str:
    """Its age counts to the last sign of the run."""
    if status.checkpoint_step is None:
        return "none yet"
    return f"step {status.checkpoint_step:,}, {duration(status.checkpoint_age)} old"


def _failures(status: Status) -> str | None:
    if status.failures is None:
        return None
    return f"{status.failures}" + (f", the last: {status.last_failure}" if status.last_failure else "")


def table(status: Status) -> Table:
    """For a terminal."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column()
    made.add_column(overflow="fold")  # an error is never cut off
    for name, text in rows(status):
        made.add_row(name, text)
    return made


def line(status: Status) -> str:
    """For a log."""
    (_, name), *rest = rows(status)
    return f"{name}: " + ", ".join(f"{what} {text}" for what, text in rest)
