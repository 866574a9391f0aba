"""One compile: a recipe and a rank."""

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
    """

    recipe: Recipe
    rank: int
    stage: int
