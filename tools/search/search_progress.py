"""A bar on stderr with the phase and the best step so far, when stderr is a terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_WORDS = {"ranking": "ranking the space", "placing": "placing layers", "verifying": "dry runs"}


class SpaceProgress:
    """Shows one phase after the other."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> SpaceProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, phase: str, done: int, of: int, best: float) -> None:
        """Tell how far a phase is, and the best step seconds so far (infinite: none)."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(_WORDS[phase], total=of)
        words = _WORDS[phase] + (f", best step {best:.2f} s" if math.isfinite(best) else "")
        self._bar.update(self._tasks[phase], completed=done, total=of, description=words)
