"""`plugins.spike_guard` of a recipe, and what of the rest of the recipe it does not go together with. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.settings import section_of, whole_number
from plugins.spike_guard.skip import Ranges, normal

KEY = "plugins.spike_guard"
SETTINGS = ("window", "threshold", "skip", "rollbacks", "skipped")
LOADER = "BlendedMegatronDatasetDataLoader"
_LOADER = "train_dataset.data_loader"
_LEAST_WINDOW = 4  # good steps of which a median and a spread say anything


@dataclass(frozen=True)
class Settings:
    """What a recipe says, with the values of one that says nothing.

    window: good steps that a step is compared with; threshold: robust standard deviations above them that make a
    spike; skip: steps whose samples are left out, the one of the spike the last of them; rollbacks: how often a run
    goes back within a window of steps; skipped: samples that are left out from the beginning, see `skip`.

    How rarely these alarm in clean runs: `benchmarks/cluster/spike_guard.py`.
    """

    window: int = 64
    threshold: float = 16.0
    skip: int = 1
    rollbacks: int = 3
    skipped: Ranges = ()


def read(settings: Any) -> Settings:
    """`{window: n, threshold: x, skip: n, rollbacks: n, skipped: [[first, stop], ...]}`, all optional.

    Raises:
        RecipeError: an unknown key, or a value that is no such thing.
    """
    usual = Settings()
    section = section_of(KEY, settings, SETTINGS, f"write `rollbacks: 3` under it, or {KEY}: False to leave it off")
    steps = f"write a number of steps from {_LEAST_WINDOW} on"
    window = whole_number(KEY, section, "window", steps, _LEAST_WINDOW, usual.window)
    skip = whole_number(KEY, section, "skip", "write a number of steps, 1 for that of the spike alone", 1, usual.skip)
    rollbacks = whole_number(KEY, section, "rollbacks", "write how often a run may go back", 1, usual.rollbacks)
    return Settings(window, _threshold(section, usual.threshold), skip, rollbacks, _skipped(section))


def _threshold(section: Mapping[str, Any], usual: float) -> float:
    value = section.get("threshold", usual)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise RecipeError(f"{KEY}.threshold: {value!r}; write a number of standard deviations above 0, such as {usual}")
    return float(value)


def _skipped(section: Mapping[str, Any]) -> Ranges:
    value = section.get("skipped") or []
    right = "write [[first, stop], ...], counted in samples from 0 on, as RUN/skipped.json has them"
    if not isinstance(value, (list, tuple)):
        raise RecipeError(f"{KEY}.skipped: {value!r}; {right}")
    for number, pair in enumerate(value):
        whole = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(each) is int for each in pair)
        if not (whole and 0 <= pair[0] < pair[1]):
            raise RecipeError(f"{KEY}.skipped[{number}]: {pair!r}; {right}")
    return normal(value)


def check(recipe: Mapping[str, Any]) -> Settings:
    """The settings of a recipe whose `plugins.spike_guard` is on.

    Raises:
        RecipeError: settings that are wrong, or a recipe in which the plugin cannot leave samples out, or cannot see.
    """
    settings = read(_at(recipe, KEY))
    if _at(recipe, f"{_LOADER}.type") != LOADER:
        wrong = f"{KEY} leaves out samples of {LOADER}, not of {_at(recipe, f'{_LOADER}.type')!r}"
        raise RecipeError(f"{_LOADER}.type: {wrong}; leave the plugin out")
    if _at(recipe, f"{_LOADER}.shuffle"):
        raise RecipeError(f"{_LOADER}.shuffle: which samples a step has would not be known to {KEY}; write False")
    if _at(recipe, "context.mode") in (1, "PYNATIVE_MODE"):
        raise RecipeError(f"context.mode: {KEY} is for graph mode; PyNative builds its loader another way; write 0")
    if (_at(recipe, "runner_config.epochs") or 1) != 1:
        again = "a second pass would begin elsewhere when samples are left out of the first"
        raise RecipeError(f"runner_config.epochs: {again} ({KEY}); write 1, and more samples in {_LOADER}.sizes")
    if (_at(recipe, "runner_config.sink_size") or 1) > 1:
        raise RecipeError(f"runner_config.sink_size: {KEY} sees one step of so many; write 1")
    if (_at(recipe, "plugins.finite_loss.stop_after") or 1) != 1:
        raise RecipeError(f"plugins.finite_loss.stop_after: {KEY} goes back at once and takes its place; leave it out")
    for callback in _at(recipe, "callbacks") or []:
        if callback.get("type") == "MFLossMonitor" and (callback.get("per_print_times") or 1) != 1:
            raise RecipeError(f"callbacks: MFLossMonitor's per_print_times hides steps from {KEY}; write 1")
    return settings


def _at(recipe: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for key in path.split("."):
        if not isinstance(recipe, Mapping) or key not in recipe:
            return None
        recipe = recipe[key]
    return recipe
