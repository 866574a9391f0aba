"""Every dispatch mode can be written into a recipe, and the recipe that has it is read as that mode."""

from dataclasses import replace

import pytest

from plugins.hierarchical_ep.plan import MODES
from tests.tools.search.overlay.test_write import LARGE
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.training_graph import kept
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.search.overlay.dispatch import dispatch_values


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_comes_back_from_the_recipe(mode):
    recipe = load_recipe(LARGE)
    config = replace(from_recipe(recipe), ep_mode=mode)
    for (*section, last), value in dispatch_values(View(recipe), config).items():
        place = recipe
        for key in section:
            place = place.setdefault(key, {})
        place[last] = value
    assert from_recipe(recipe).ep_mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_keeps_activations(mode):
    config = replace(from_recipe(load_recipe(LARGE)), ep_mode=mode)
    assert kept(config, "moe") > kept(config, "dense") / config.tp > 0
