"""Rules about `plugins.grouped_gradient`."""

import pytest

from tools.check.check import check_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

FULL, CPU = "recipes/telechat3_438b/pretrain_4k.yaml", "recipes/mini/pretrain.yaml"


def findings(recipe, settings, *changes):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "grouped_gradient": settings}
    found = check_recipe(recipe).findings
    return {item.key: (item.severity, f"{item.wrong}; {item.right}") for item in found if "grouped_g" in str(item)}


@pytest.mark.parametrize(
    ("recipe", "settings", "change", "key", "severity", "words"),
    [
        (FULL, {}, "seed=1", "plugins.grouped_gradient", "warning", "nobody has run it on an NPU"),
        (CPU, {}, "seed=1", "plugins.grouped_gradient", "note", "a CPU has no such operator"),
        (FULL, {"mode": 1}, "seed=1", "plugins.grouped_gradient.mode", "error", "no such setting"),
        (FULL, True, "seed=1", "plugins.grouped_gradient", "error", "write plugins.grouped_gradient: {}"),
        (FULL, {}, "context.jit_config.jit_level=O2", "context.jit_config.jit_level", "error", "not with O2"),
    ],
)
def test_what_is_said(recipe, settings, change, key, severity, words):
    found = findings(recipe, settings, change)
    assert found[key][0] == severity and words in found[key][1], found


def test_nothing_is_said_where_it_is_off():
    assert findings(FULL, False) == {}
