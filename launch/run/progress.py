"""Show a run's progress: a bar on a terminal; elsewhere a plain line every tenth of the way, and each minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools.runs.readings import Follower, Readings

COMPILING = "compiling…"  # until the first step is done
QUIET = 60.0  # seconds without a line, at most


class TrainingProgress:
    """Follows `RUN/metrics/rank_N.jsonl`. Use as a context; call `tick` a few times a second."""

    def __init__(self, run_dir: Path, console: Console, rank: int = 0):
        """Show what rank `rank` of the run writes from now on (not the steps before a resume) on `console`."""
        self.console = console
        self.readings = Readings()
        self.follower = Follower(run_dir / "metrics" / f"rank_{rank}.jsonl", from_end=True)
        self.started = time.monotonic()
        self.shown = -1  # tenths of the run printed so far
        self.said = self.started  # when the last line was printed
        self.bar = _bar(console) if console.is_terminal else None

    def __enter__(self) -> TrainingProgress:
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(COMPILING, total=None, note="")
        else:
            self.console.print(COMPILING)
        return self

    def __exit__(self, *error: object) -> None:
        self.tick()
        if self.bar:
            self.bar.stop()

    def tick(self) -> None:
        """Take in new steps and show them."""
        for record in self.follower.new_records():
            self.readings.add(record)
            if not self.bar and "step" in record:
                self._print_tenth(record)
        if not self.bar and time.monotonic() - self.said >= QUIET:
            self._say_something()
        if self.bar and self.readings.steps:
            last = self.readings.last
            self.bar.update(
                self.task,
                description="training",
                completed=last["step"],
                total=self.readings.total_steps,
                note=self._note(last),
            )

    def _say_something(self) -> None:
        """A line that shows that the run lives, or for how long it has not made a step."""
        if self.readings.steps:
            self._print_step(self.readings.last)
        else:
            self._print(f"{COMPILING} {time.monotonic() - self.started:.0f} s")

    def _print_tenth(self, record: dict[str, Any]) -> None:
        """One line for the first step, for each tenth of the way, and for the last step."""
        total = self.readings.total_steps
        tenth = 10 * record["step"] // total if total else record["step"] // 10
        if tenth > self.shown:
            first = f"  (first step after {time.monotonic() - self.started:.0f} s)" if self.shown < 0 else ""
            self.shown = tenth
            self._print_step(record, first)

    def _print_step(self, record: dict[str, Any], more: str = "") -> None:
        of = f"/{self.readings.total_steps}" if self.readings.total_steps else ""
        self._print(f"step {record['step']}{of}  {self._note(record)}{more}")

    def _print(self, line: str) -> None:
        self.said = time.monotonic()
        self.console.print(line, highlight=False)

    def _note(self, record: dict[str, Any]) -> str:
        speed = self.readings.tokens_per_second()
        return f"loss {record['loss']:.4f}" + (f"  {speed:,.0f} tokens/s (median)" if speed else "")


def _bar(console: Console) -> Progress:
    """The bar's columns: what, bar, steps, loss and speed, time gone, time to go."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )
