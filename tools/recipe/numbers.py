"""Numbers of a recipe that no training can mean: NaN, infinity, what lies outside `tools.ranges`.

Some of them would keep every tool busy for hours (a billion layers); the rest train something else in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from plugins.errors import RecipeError
from tools.ranges import RANGES, Range, recipe_range

# YAML 1.1 reads 1e-3 as text; people mean a number
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_MEMORY = re.compile(r"(\d+(\.\d+)?)GB")
_INTEGERS = 2**63  # MindSpore's integers have 64 bits
_DEGREES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


class Refusal(NamedTuple):
    """One number: where it stands, what is wrong with it, what would be right."""

    path: tuple[Any, ...]
    value: Any
    wrong: str
    right: str

    @property
    def size(self) -> bool:
        """Whether others calculate with it: it should be a whole number."""
        span = recipe_range(_words(self.path))
        return span is None or span.whole


def refuse_numbers(recipe: Mapping[str, Any]) -> None:
    """Raise for the first number that is none.

    Raises:
        RecipeError: with file, line, key path and what would be right.
    """
    for path, _, wrong, right in bad_numbers(recipe):
        mark = getattr(recipe, "marks", {}).get(path)
        place = str(mark) if mark else getattr(recipe, "source", "")
        key = ".".join(map(str, path))
        raise RecipeError(f"{place + ': ' if place else ''}{key}: {wrong}; {right}")


def bad_numbers(recipe: Mapping[str, Any]) -> Iterator[Refusal]:
    """Every number of a recipe that is refused, in the order of its keys; the number of devices at last."""
    bad = list(bad_leaves(recipe))
    yield from bad or bad_devices(recipe)


def bad_leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[Refusal]:
    """Every refused number at or below `path`, where `node` stands."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from bad_leaves(value, (*path, key))
    elif problem := number_problem(path, node):
        yield Refusal(path, node, *problem)


def bad_devices(recipe: Mapping[str, Any]) -> Iterator[Refusal]:
    """The product of the parallel degrees, where it is no cluster."""
    degrees = recipe.get("parallel_config")
    written = [degrees.get(key) for key in _DEGREES] if isinstance(degrees, dict) else []
    sizes = [size for size in written if type(size) is int]
    if not RANGES["devices"].holds(math.prod(sizes)):
        wrong = f"{' x '.join(map(str, sizes))} = {math.prod(sizes):,} devices are out of range"
        yield Refusal(("parallel_config",), None, wrong, RANGES["devices"].words)


def number_problem(path: tuple[Any, ...], value: Any) -> tuple[str, str] | None:
    """What is wrong with a value as a number, and what would be right; None for what is fine, or no number."""
    span = recipe_range(_words(path))
    if isinstance(value, str):
        return _text_problem(value, span) if span else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number", span.words if span else "write a number"
    if span is None:
        large = isinstance(value, int) and abs(value) >= _INTEGERS
        return (f"{_short(value)} does not fit into 64 bits", "write a smaller number") if large else None
    return None if span.holds(value) else (f"{_short(value)} is out of range", span.words)


def _words(path: tuple[Any, ...]) -> list[str]:
    return [key for key in path if isinstance(key, str)]


def _text_problem(text: str, span: Range) -> tuple[str, str] | None:
    """Text where a number belongs: one that YAML takes for text, or a size of memory. Other words pass."""
    if memory := _MEMORY.fullmatch(text):
        return None if span.holds(float(memory[1])) else (f"{_short(text)} is out of range", f"{span.words}, in GB")
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return f"{_short(text)} is not a finite number", span.words
    return f"{_short(text)!r} is text, not a number", f"write {as_yaml(text)}"


def as_yaml(text: str) -> str:
    """A number as YAML 1.1 reads one: ``1e-8`` becomes ``1.0e-8``; others as they are, without quotes."""
    text = text.strip()
    if not EXPONENT.fullmatch(text):
        return f"{text} without quotes"
    mantissa, _, power = text.lower().partition("e")
    dot = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{dot}e{power if power[0] in '+-' else '+' + power} (YAML 1.1 takes {text} for text)"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"{text[:12]}... ({len(text)} digits)"
