"""One compile: a recipe, a rank, and what of its graph is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from tools.recipe.load import Recipe


@dataclass(frozen=True)
class Job:
    """What a process of its own compiles.

    Args:
        recipe: flat; with the number of micro-batches (and in a quick run the layers) to compile.
        rank: global rank.
        stage: its pipeline stage.
        graph: whether the graph's text is wanted: collectives, activations and FLOPs come from it.
    """

    recipe: Recipe
    rank: int
    stage: int
    graph: bool = True
