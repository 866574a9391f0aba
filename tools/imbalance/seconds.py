"""A step of the recipe in seconds, by the estimator of `tc3 search`, and how many of them uneven samples add.

    step = even + (ratio - 1) * stretched

`even` is a step whose samples all cost what the corpus's samples cost on average, documents apart; `ratio` is what
devices compute and wait in a step, pipeline included, over that of an even one; `stretched` are the seconds of `even`
that grow by it. Communication, gradients and the optimizer take as long whatever the samples cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plugins.errors import RecipeError
from tools.estimate.efficiency import UNKNOWN, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.hardware import Hardware
from tools.recipe.load import Recipe
from tools.recipe.view import View

_STRETCHED = ("compute", "recompute", "bubble")  # parts of a step that last longer where samples are uneven


@dataclass(frozen=True)
class Seconds:
    """A predicted step.

    Args:
        cluster: it runs on.
        whole: seconds of a step whose samples are one document each, as tc3 search has it.
        even: seconds of a step whose samples all cost what the corpus's samples cost on average.
        stretched: those of `even` in which devices compute, or wait for others that do.
        error: how far such predictions are off, in words.
    """

    cluster: str
    whole: float
    even: float
    stretched: float
    error: str

    def step(self, over_even: float) -> float:
        """Seconds of a step that computes `over_even` times as long as one of even samples."""
        return self.even + (over_even - 1) * self.stretched


def seconds_of(recipe: Recipe, hardware: Hardware, attended: float = 1.0) -> Seconds | str:
    """The step of a recipe in which nothing is `auto`, or why it is not predicted.

    Args:
        attended: pairs of tokens that attend to each other over those of samples of one document.
    """
    if View(recipe).on_cpu:
        return "it runs on CPU workers"
    try:
        config, times = from_recipe(recipe), TimeModel(hardware)
        whole = times.step(config, simulated=True)
        even = times.step(replace(config, attended=attended), simulated=True)
    except RecipeError as error:
        return str(error)
    known, parts = known_error(hardware), even.by_part
    stretched = sum(parts[name] for name in _STRETCHED)
    return Seconds(hardware.name, whole.total, even.total, stretched, known.words if known else UNKNOWN)
