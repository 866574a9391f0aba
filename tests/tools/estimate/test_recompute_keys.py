import os
from dataclasses import replace

import pytest
import yaml

from plugins.errors import RecipeError
from tests.tools.search.overlay.test_write import LARGE, MTP, PER_STAGE, read_back, with_selection
from tools.check.check import check_recipe
from tools.estimate.configuration import Recompute, even_layers
from tools.estimate.from_recipe import from_recipe, select_of
from tools.recipe.load import load_recipe
from tools.search.overlay.write import changed, overlay


def test_operator_patterns_stay(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(MTP)}\nrecompute_config:\n  select_comm_recompute: {{'.*\\.norm': True}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    config = from_recipe(recipe)
    assert overlay(recipe, config) == {}
    none = overlay(recipe, replace(config, recompute=replace(config.recompute, communication=None)))
    assert none == {"recompute_config": {"select_comm_recompute": {r".*\.norm": False}}}
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(MTP)}\nrecompute_config:\n  select_comm_recompute: ['.*\\.norm']\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    some = tuple(tuple(count - (count > 1) for count in row) for row in config.layers)
    partly = replace(config, recompute=replace(config.recompute, communication=some))
    path, child = read_back(recipe, partly, tmp_path)
    assert from_recipe(child) == partly
    assert child["recompute_config"]["select_comm_recompute"] == {r".*\.norm": list(some[0])}
    # a child's mapping cannot take the place of the list
    first, *_ = path.read_text().splitlines()
    assert first.startswith("# The whole of recipe.yaml: a child cannot turn its recompute_config.select_comm_recom")
    assert "base_config" not in yaml.safe_load(path.read_text())


@pytest.mark.parametrize("value", [None, "False", "True", PER_STAGE, r"{'mlp\.mul': True}", r"['mlp\.mul']"])
@pytest.mark.parametrize("all_layers", [True, False])
def test_selected_operators_save_memory(tmp_path, value, all_layers):
    recipe = load_recipe(with_selection(MTP, value, tmp_path))
    config = from_recipe(recipe)
    assert config.recompute.select is None, "MindFormers' own patterns free no byte"
    assert overlay(recipe, config) == {}
    table = config.layers if all_layers else ((1,) * config.pp,)
    asked = replace(config, recompute=replace(config.recompute, select=table))
    _, child = read_back(recipe, asked, tmp_path)
    assert from_recipe(child) == asked
    written = child["recompute_config"]["select_recompute"]
    assert r".*\.norm" in written
    if not all_layers:
        assert written[r".*\.norm"] == list(table[0])


@pytest.mark.parametrize(
    ("pattern", "saves"),
    [
        (r".*\.norm", True),
        (r"input_layernorm\.norm", True),
        (r".*layernorm", True),
        (r"mlp\.mul", False),
        (r"self_attention\.flash_attention", False),
        ("norm", False),
    ],
)
def test_which_patterns_save_memory(pattern, saves):
    assert select_of([pattern], ((3, 4),)) == (((3, 4),) if saves else None)
    assert select_of({pattern: [1, 2]}, ((3, 4),)) == (((1, 2),) if saves else None)


@pytest.mark.parametrize("key", ["recompute", "select_comm_recompute"])
def test_numbers_for_other_stages_are_refused(key):
    recipe = load_recipe(MTP)
    recipe["recompute_config"][key] = [1, 2, 3]
    with pytest.raises(RecipeError, match=r"recompute_config: .* do not fit the layers and stages"):
        from_recipe(recipe)


def test_no_layers_are_no_reason_to_write(tmp_path):
    recipe = load_recipe(with_selection(MTP, "False", tmp_path))
    config = from_recipe(recipe)
    none = ((0,) * config.pp,)
    assert overlay(recipe, replace(config, recompute=replace(config.recompute, select=none, communication=none))) == {}


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ({r"mlp\.mul": [1] * 8, r".*\.norm": True}, {r"mlp\.mul": False, r".*\.norm": False}),
        ({r"mlp\.mul": True}, {r"mlp\.mul": True}),
        ([r"mlp\.mul"], [r"mlp\.mul"]),
    ],
)
def test_exclusions_counted_for_other_stages_go(tmp_path, written, left):
    recipe = load_recipe(MTP)
    recipe["recompute_config"]["select_recompute_exclude"] = written
    config = from_recipe(recipe)
    assert overlay(recipe, config) == {}
    other = replace(config, pp=4, dp=2 * config.dp, layers=even_layers(45, 4, 1), recompute=Recompute())
    assert changed(recipe, other)["recompute_config"]["select_recompute_exclude"] == left


@pytest.mark.parametrize("key", ["select_recompute", "select_comm_recompute", "select_recompute_exclude"])
def test_a_single_pattern_is_written_as_zero_bubble_v_can_read_it(tmp_path, key):
    """MindFormers turns the second entry of a list round, and a list of one has none."""
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\nrecompute_config:\n  {key}: ['.*\\.norm']\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    config = replace(from_recipe(recipe), schedule="zero_bubble_v")
    assert config.chunks == 2 and overlay(recipe, from_recipe(recipe)) == {}
    _, child = read_back(recipe, config, tmp_path)
    assert child["recompute_config"][key] == {r".*\.norm": True}
    assert from_recipe(child) == config and not check_recipe(tmp_path / "child.yaml").errors
