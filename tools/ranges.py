"""The numbers that are sane, once: what an option and a recipe's key may be, however small or large it is typed.

A number outside its range is a slip of the keyboard or a unit mistaken (bytes for GiB), and some of them would keep a
tool busy for hours or end it out of memory. The ranges are wide: the largest cluster that anybody has built fits in ten
times over. NaN and infinity are in none of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import click


class Range(NamedTuple):
    """What a number may be. Bounds belong to it, unless `above` says that the lower one does not.

    Attributes:
        low, high: the bounds, in the unit of the number.
        whole: whether it must be an integer.
        above: whether it must lie above `low`.
    """

    low: float
    high: float
    whole: bool = True
    above: bool = False

    def refusal(self, value: Any) -> str | None:
        """What is wrong with `value`, as the end of a sentence that names it; None if nothing is."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is not a number; {self.words}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"is not finite; {self.words}"
        if self.whole and value != int(value):
            return f"is not a whole number; {self.words}"
        inside = self.low < value <= self.high if self.above else self.low <= value <= self.high
        return None if inside else f"is out of range; {self.words}"

    @property
    def words(self) -> str:
        """``"a whole number from 1 to 1,000,000"``."""
        kind = "a whole number" if self.whole else "a number"
        start = f"above {_plain(self.low)} and at most" if self.above else f"from {_plain(self.low)} to"
        return f"it must be {kind} {start} {_plain(self.high)}"


def _plain(number: float) -> str:
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:g}"


# what options of the command line may be, by what they count
RANGES = {
    "devices": Range(1, 1_000_000),
    "global_batch_size": Range(1, 10_000_000),
    "layers": Range(1, 10_000),
    "micro_batches": Range(1, 100_000),
    "steps": Range(1, 1_000_000_000),
    "tokens": Range(1, 1e18),
    "vocab_size": Range(257, 10_000_000),
    "workers": Range(1, 4_096),
    "window": Range(1, 1_000_000),
    "reruns": Range(1, 1_000),
    "seed": Range(0, 2**32 - 1),
    "port": Range(1, 65_535),
    "rows": Range(1, 1_000),  # of a table, a ranking, a report
    "seconds": Range(0, 1_000_000, whole=False, above=True),
    "memory_gib": Range(0, 10_000, whole=False, above=True),
    "share": Range(0, 1, whole=False),
    "margin": Range(0, 0.9, whole=False),  # of a limit, that is to stay free
    "skew": Range(1, 1_000, whole=False),  # the busiest rank's load over the mean
}


class Number(click.ParamType):
    """A click type: a number of `RANGES`, as an int where the range is whole."""

    def __init__(self, name: str) -> None:
        self.range = RANGES[name]
        self.name = "integer" if self.range.whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Parse and hold against the range.

        Raises:
            click.BadParameter: not a number, not finite or out of range.
        """
        try:
            number = value if isinstance(value, int | float) else _parse(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number; {self.range.words}", param, ctx)
        refusal = self.range.refusal(number)
        if refusal:
            self.fail(f"{value} {refusal}", param, ctx)
        return int(number) if self.range.whole else float(number)


def _parse(text: str) -> int | float:
    """Digits stay exact: no detour over floating point for an integer."""
    try:
        return int(text)
    except ValueError:
        return float(text)
