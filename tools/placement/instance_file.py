"""Read a pipeline-balance instance (JSON, schema pp-balance/1) and judge a solution of it.

The file gives P stages, V chunks, M micro-batches, `schedule`, `memory_cap`, `static_mem`[P], `head` and `tail`
({fwd, bwd} added to the first and the last chunk) and `body`: layer types in model order with `count`, `fwd`, `bwd`,
`param_mem` and recompute `options` of `extra_bwd` and `act_mem`. The keys of `_NOTES`, and all that begin with `about`,
are notes; any other key is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError, RecipeError, did_you_mean, not_json, refuse_unknown
from tools.pipeline.schedules import check_schedule
from tools.placement.instance import Instance, LayerType, Option

SCHEMA = "pp-balance/1"
_MOST = {"P": 1_000, "V": 100, "M": 100_000}  # more is a slip of the keyboard, and would never end
_KEYS = ("schema", "name", "P", "V", "M", "schedule", "memory_cap", "static_mem", "head", "tail", "body")
_NOTES = ("doc", "units", "source", "provenance", "sapp", "best_known", "lower_bound_trivial", "solution_layout")
_PASSES = 1_000_000
_LARGEST = 1e15
# the schema's names; with one chunk all of them are 1F1B
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_1f1b_less_memory")


def read_instance(path: Path) -> Instance:
    """Read the instance in `path`.

    Raises:
        DataError: no such file, not JSON, or a value that is missing or wrong; names file and key path.
    """
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {not_json(error)}") from None
    root = _Place(path, "", content)
    schema = root.key("schema")
    if schema.value != SCHEMA:
        schema.refuse(f"want {SCHEMA!r}")
    root.only(*_KEYS, *_NOTES)
    stages, chunks, micro_batches = (root.key(name).whole(most) for name, most in _MOST.items())
    if stages * chunks * micro_batches > _PASSES:
        passes = f"{stages * chunks * micro_batches:,} passes, of which at most {_PASSES:,} can be simulated"
        root.key("M").refuse(f"P x V x M is {passes}")
    static = root.key("static_mem").items()
    if len(static) != stages:
        root.key("static_mem").refuse(f"{len(static)} stages; P is {stages}")
    return Instance(
        name=root.key("name").text(),
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        schedule=_schedule(root.key("schedule"), stages, chunks, micro_batches),
        cap=root.key("memory_cap").number(),
        # what other stages hold more may stand in the layers: static memory can be negative
        static=np.array([place.number(least=-math.inf) for place in static]),
        head=_both(root.key("head")),
        tail=_both(root.key("tail")),
        types=tuple(_layer_type(place) for place in root.key("body").items()),
    )


def with_margin(instance: Instance, share: float) -> Instance:
    """The instance with a share of its cap left free."""
    return replace(instance, cap=(1 - share) * instance.cap)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of JSON, of which the parser would keep the last of two values in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in a mapping")
    return found


def _schedule(place: _Place, stages: int, chunks: int, micro_batches: int) -> str:
    name = place.text()
    if name not in SCHEDULES:
        place.refuse(f"want one of {', '.join(SCHEDULES)}{did_you_mean(name, list(SCHEDULES))}")
    if chunks == 1:
        return "1f1b"
    # the schema's warm-up, (V-1)P + ..., says nothing of rounds that are not full
    if micro_batches % stages:
        place.refuse(f"with V {chunks} M must be a multiple of P: {micro_batches} is not one of {stages}")
    try:
        check_schedule(name, stages, chunks, micro_batches)
    except RecipeError as error:
        place.refuse(str(error))
    return name


def _layer_type(place: _Place) -> LayerType:
    place.only("name", "count", "fwd", "bwd", "param_mem", "options")
    options = []
    for option in place.key("options").items():
        option.only("name", "extra_bwd", "act_mem")
        numbers = option.key("extra_bwd").number(), option.key("act_mem").number()
        options.append(Option(option.key("name").text(), *numbers))
    times = place.key("fwd").number(), place.key("bwd").number()
    count, memory = place.key("count").whole(10_000), place.key("param_mem").number()
    return LayerType(place.key("name").text(), count, *times, memory, tuple(options))


def _both(place: _Place) -> tuple[float, float]:
    place.only("fwd", "bwd")
    return place.key("fwd").number(), place.key("bwd").number()


class _Place:
    """A value of the file and where it stands."""

    def __init__(self, path: Path, where: str, value: Any):
        self.path, self.where, self.value = path, where, value

    def refuse(self, want: str) -> None:
        """Raise `DataError` with file, key path, value and what would be right."""
        shown = json.dumps(self.value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}..."
        raise DataError(f"{self.path}: {self.where or 'the whole file'}: {shown}: {want}")

    def key(self, name: str) -> _Place:
        """The value of a key, which must be there."""
        if not isinstance(self.value, dict):
            self.refuse("want a mapping")
        where = f"{self.where}.{name}" if self.where else name
        if name not in self.value:
            raise DataError(f"{self.path}: {where}: is missing{did_you_mean(name, list(self.value))}")
        return _Place(self.path, where, self.value[name])

    def only(self, *known: str) -> None:
        """Refuse keys that are neither `known` nor notes."""
        keys = [key for key in self.value if not key.startswith("about")] if isinstance(self.value, dict) else []
        refuse_unknown(f"{self.path}: {self.where}{'.' * bool(self.where)}", keys, known, DataError)

    def items(self) -> list[_Place]:
        """The values of a list, which must not be empty."""
        if not isinstance(self.value, list) or not self.value:
            self.refuse("want a list that is not empty")
        return [_Place(self.path, f"{self.where}[{index}]", value) for index, value in enumerate(self.value)]

    def text(self) -> str:
        return self._checked(lambda value: isinstance(value, str) and bool(value), "want a text")

    def whole(self, most: int) -> int:
        want = f"want 1, 2, 3, ... up to {most:,}"
        return self._checked(lambda v: isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= most, want)

    def number(self, least: float = 0.0) -> float:
        def good(value: Any) -> bool:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return number and least <= value <= _LARGEST and value >= -_LARGEST

        return float(self._checked(good, "want a number" if least < 0 else "want a number, 0 or more"))

    def _checked(self, good: Callable[[Any], bool], want: str) -> Any:
        if not good(self.value):
            self.refuse(want)
        return self.value


@dataclass(frozen=True)
class Judgement:
    """A solution's simulated step time, peak memory per stage, and the stages over the cap (stage -> by how much)."""

    time: float
    peak: np.ndarray
    over: dict[int, float]


def judge(instance: Instance, solution: list) -> Judgement:
    """Simulate a solution n[type][v][s][option] as the schema's `doc` says.

    Raises:
        DataError: its shape is wrong, it does not place every layer once, or types leave the model's order.
    """
    want = [(instance.chunks, instance.stages, len(kind.options)) for kind in instance.types]
    try:
        parts = [np.asarray(part) for part in solution]
    except (TypeError, ValueError):
        parts = []
    if [part.shape for part in parts] != want or any(part.dtype.kind != "i" for part in parts):
        raise DataError(f"solution of {instance.name}: want whole numbers n[type][v][s][option] of shapes {want}")
    plan = instance.from_solution(solution)[None]
    if not instance.well_formed(plan)[0]:
        raise DataError(
            f"solution of {instance.name}: want every layer placed once, types in the model's order, "
            "no inner chunk empty"
        )
    peak = instance.peak_memory(plan)[0]
    over = {int(stage): float(peak[stage] - instance.cap) for stage in np.flatnonzero(~instance.kept(peak))}
    return Judgement(float(instance.step_times(plan)[0]), peak, over)
