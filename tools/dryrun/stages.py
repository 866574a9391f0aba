"""Which pipeline stages have the same graph: those with the same layers by chunks, recomputed and swapped alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.model.architecture import model_of
from tools.recipe.view import MODEL, View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import EXCLUDE, RECOMPUTE, layers_of, swaps

SWAP = tuple((*MODEL, key) for key in ("layer_swap", "op_swap"))


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    Args:
        number: place in the pipeline.
        chunks: for each chunk its layers as (first layer, kinds of its layers).
        ends: what it holds beside layers: "embedding", "head" (with the MTP layers).
        recompute: what the recipe's settings of recomputation and swapping say of this stage.
    """

    number: int
    chunks: tuple[tuple[int, tuple[str, ...]], ...]
    ends: tuple[str, ...]
    recompute: tuple[Any, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Stages with equal signatures compile to the same graph, but for layer numbers, ranks and order of passes."""
        return tuple(kinds for _, kinds in self.chunks), self.ends, self.recompute

    @property
    def kinds(self) -> list[str]:
        """Kinds of all its layers."""
        return [kind for _, kinds in self.chunks for kind in kinds]


def stages_of(view: View) -> list[Stage]:
    """The pipeline's stages in order.

    Raises:
        RecipeError: the offset does not fit the layers; `tc3 check` says how.
    """
    built = convert(view, load_schema())
    layers = layers_of(view, built)
    if layers is None:
        raise RecipeError(f"{'.'.join(MODEL)}.offset: does not fit the layers and stages: see tc3 check")
    pattern = model_of(built.fields).pattern
    rows = [list(row) for row in layers]
    if view.scheduler == "zero_bubble_v" and len(rows) > 1:
        rows[1].reverse()  # `layers_of` counts in the order of MindFormers' tables; the model runs back up the pipeline
    found: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in rows[0]]
    first = 0
    for chunk, row in enumerate(rows):
        order = range(len(row))
        for stage in reversed(order) if _runs_back(view, chunk) else order:
            kinds = pattern[first : first + row[stage]]
            found[stage].append((first, kinds))
            first += row[stage]
    last = 0 if _runs_back(view, len(rows) - 1) else len(rows[0]) - 1
    return [
        Stage(
            number,
            tuple(chunks),
            (("embedding",) if number == 0 else ()) + (("head",) if number == last else ()),
            _settings(view, number, tuple(chunks)),
        )
        for number, chunks in enumerate(found)
    ]


def _runs_back(view: View, chunk: int) -> bool:
    """In zero_bubble_v the second chunk goes from the last stage to the first."""
    return view.scheduler == "zero_bubble_v" and chunk == 1


def _settings(view: View, stage: int, chunks: tuple[tuple[int, tuple[str, ...]], ...]) -> tuple[Any, ...]:
    """All that the recipe says of one stage's recomputation and swapping, as something to compare."""
    excluded = tuple(_setting(view.get(("recompute_config", key)), stage) for key in EXCLUDE)
    written = [view.get(("recompute_config", key)) for key in RECOMPUTE]
    if not swaps(view):
        return tuple(_setting(value, stage) for value in written) + excluded
    layers = {
        first + place: (chunk, place) for chunk, (first, kinds) in enumerate(chunks) for place in range(len(kinds))
    }
    written += [view.get(path) for path in SWAP]
    return tuple(_own_layers(value, layers) for value in written) + excluded


def _own_layers(value: Any, layers: Mapping[int, tuple[int, int]]) -> Any:
    """A setting that names layers, with those of one stage by their places in its chunks."""
    if isinstance(value, dict):
        return tuple(sorted((key, _own_layers(inner, layers)) for key, inner in value.items()))
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return tuple(layers[item] for item in sorted(value) if item in layers)
        return tuple(_own_layers(item, layers) for item in value)
    return value


def _setting(value: Any, stage: int) -> Any:
    """What of a recompute setting concerns one stage, as something to compare."""
    if isinstance(value, dict):
        return tuple(sorted((key, _setting(inner, stage)) for key, inner in value.items()))
    if isinstance(value, list) and value and not any(isinstance(item, str) for item in value):
        if any(isinstance(row, list) for row in value):
            return tuple(row[stage] if isinstance(row, list) else row for row in value)
        return value[stage] if stage < len(value) else None
    return tuple(value) if isinstance(value, list) else value
