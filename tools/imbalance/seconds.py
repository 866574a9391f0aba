"""A step of the recipe in seconds, by the estimator of `tc3 search`, and how many of them uneven samples add."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.errors import RecipeError
from tools.estimate.efficiency import UNKNOWN, cluster, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.recipe.load import Recipe
from tools.recipe.view import View

_STRETCHED = ("compute", "recompute", "bubble")  # parts of a step that last longer where samples are uneven


@dataclass(frozen=True)
class Seconds:
    """A predicted step whose samples are one document each, so that all cost the same.

    Args:
        cluster: it runs on.
        step: seconds; stretched: those of them in which devices compute, or wait for others that do.
        error: how far such predictions are off, in words.
    """

    cluster: str
    step: float
    stretched: float
    error: str

    def added(self, over_even: float) -> float:
        """Seconds that uneven samples add, where a step computes `over_even` times as long as one of even samples."""
        return (over_even - 1) * self.stretched


def seconds_of(recipe: Recipe, cluster_name: str) -> Seconds | str:
    """The step of a recipe in which nothing is `auto`, or why it is not predicted.

    Raises:
        RecipeError: there is no such cluster.
    """
    hardware = cluster(cluster_name)
    if View(recipe).on_cpu:
        return "it runs on CPU workers"
    try:
        step = TimeModel(hardware).step(from_recipe(recipe), simulated=True)
    except RecipeError as error:
        return str(error)
    known, parts = known_error(hardware), step.by_part
    stretched = sum(parts[name] for name in _STRETCHED)
    return Seconds(hardware.name, step.total, stretched, known.words if known else UNKNOWN)
