"""Seconds of a step whose experts load devices so unevenly, by the one estimator (`tools.estimate`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from plugins.errors import RecipeError
from plugins.expert_balance.record import Record
from tools.estimate.efficiency import UNKNOWN, cluster, known_error
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.recipe.load import Recipe
from tools.recipe.view import View

_GRAIN = 200  # of max/mean, parts of 1: steps are predicted for so many values


@dataclass(frozen=True)
class Seconds:
    """Predicted steps.

    Args:
        cluster: they run on. even: seconds where all devices have as much.
        of: seconds for a max/mean. error: how far such predictions are off, in words.
    """

    cluster: str
    even: float
    of: Callable[[float], float]
    error: str

    def waits(self, ratios: np.ndarray) -> float:
        """Seconds of a step that wait for the fullest device, the mean over steps.

        Args:
            ratios: [steps, layers] max/mean. A step is taken to be as uneven in every layer as on average: the
                estimator's step grows in proportion.
        """
        return float(np.mean([self.of(ratio) - self.even for ratio in ratios.mean(1)]))


def seconds_of(recipe: Recipe | None, records: list[Record], cluster_name: str) -> Seconds | str:
    """Predictions for a run, or why there are none.

    Raises:
        RecipeError: there is no such cluster.
    """
    hardware = cluster(cluster_name)
    if recipe is None:
        return "there is no recipe beside the log; --recipe names one"
    if View(recipe).on_cpu:
        return "it runs on CPU workers, which no estimator knows; --recipe takes that of a cluster with as many experts"
    try:
        config = from_recipe(recipe)
        if (config.ep, config.model.experts) != (records[0].devices, records[0].tokens.shape[1]):
            return (
                f"the log is of {records[0].tokens.shape[1]} experts on {records[0].devices} devices, the recipe of "
                f"{config.model.experts} on {config.ep}"
            )
        times = TimeModel(hardware)

        @lru_cache(maxsize=4096)
        def step(parts: int) -> float:
            return times.step(replace(config, skew=max(parts / _GRAIN, 1.0)), simulated=True).total

        even = step(_GRAIN)
    except RecipeError as error:
        return str(error)
    known = known_error(hardware)
    return Seconds(hardware.name, even, lambda ratio: step(round(ratio * _GRAIN)), known.words if known else UNKNOWN)
