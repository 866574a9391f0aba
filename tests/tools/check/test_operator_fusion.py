"""Rules about `plugins.operator_fusion`."""

import pytest

from tools.check.check import check_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

FULL, CPU = "recipes/telechat3_438b/pretrain_4k.yaml", "recipes/mini/pretrain.yaml"


def findings(recipe, settings, *changes):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "operator_fusion": settings}
    found = check_recipe(recipe).findings
    return {item.key: (item.severity, f"{item.wrong}; {item.right}") for item in found if "fusion" in str(item)}


@pytest.mark.parametrize(
    ("settings", "key", "severity", "words"),
    [
        ({"level": "vector"}, "", "", ""),
        ({"level": False}, "", "", ""),
        (False, "", "", ""),
        ({"level": "vector", "disable": ["Exp", "SiLU"]}, "", "", ""),
        ({"level": "cube"}, "plugins.operator_fusion.level", "warning", "experimental"),
        ({"level": "vektor"}, "plugins.operator_fusion.level", "error", "did you mean 'vector'?"),
        ({"levle": "vector"}, "plugins.operator_fusion.levle", "error", "did you mean 'level'?"),
        ({"level": "vector", "disable": ["Matmul"]}, "plugins.operator_fusion.disable", "error", "'MatMul'"),
        ({"level": "vector", "disable": "Exp"}, "plugins.operator_fusion.disable", "error", "a list"),
        ({"disable": ["Exp"]}, "plugins.operator_fusion", "error", "write level"),
        (True, "plugins.operator_fusion", "error", "write level"),
    ],
)
def test_what_the_section_says(settings, key, severity, words):
    found = findings(FULL, settings)
    if not key:
        assert found == {}
        return
    assert found[key][0] == severity and words in found[key][1], found


def test_it_needs_the_jit_level_that_fuses():
    found = findings(FULL, {"level": "vector"}, "context.jit_config.jit_level=O0")
    severity, words = found["context.jit_config.jit_level"]
    assert severity == "error" and "needs 'O1'" in words


def test_on_a_cpu_it_does_nothing_and_that_is_said():
    assert findings(CPU, {"level": "vector"})["plugins.operator_fusion"][0] == "note"
    assert findings(CPU, {"level": "off"}) == {}
