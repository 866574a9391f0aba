"""Overlays of recipes that swap activations: numbers of layers where MindFormers wants numbers, not counts."""

import os
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tests.tools.search.test_overlay import LARGE, MTP, PER_STAGE, read_back, tables, with_selection
from tools.check.check import check_recipe
from tools.estimate.configuration import Recompute, even_layers, places
from tools.estimate.from_recipe import from_recipe, not_empty, numbers_of, select_of, table_of_numbers
from tools.estimate.memory.model import peak_memory
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.search.overlay import changed, overlay

SWAP = "model: {model_config: {swap: True, layer_swap: [{backward_prefetch: 1, layers: [0]}]}}\n"


def swapping(folder, recompute, file=MTP):
    """A recipe that swaps and recomputes."""
    path = folder / "recipe.yaml"
    path.write_text(f"base_config: {os.path.abspath(file)}\n{SWAP}recompute_config: {recompute}\n", "utf-8")
    assert not check_recipe(path).errors
    return load_recipe(path)


def test_numbers_by_hand():
    layers = ((2, 1), (1, 2))
    assert places(layers, "interleaved_1f1b") == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
    assert numbers_of(((1, 1), (0, 2)), layers, "interleaved_1f1b") == [0, 2, 4, 5]
    # zero_bubble_v's second chunk begins on the last stage
    assert numbers_of(((1, 1), (0, 2)), layers, "zero_bubble_v") == [0, 2, 3, 4]
    assert table_of_numbers([0, 2, 3, 4], layers, "zero_bubble_v") == ((1, 1), (0, 2))
    with pytest.raises(
        ValueError, match="6 is not the number of a layer; the layers of this model are numbered 0 to 5"
    ):
        table_of_numbers([6], layers, "1f1b")


def test_numbers_of_layers_are_read_as_numbers(tmp_path):
    recipe = swapping(tmp_path, "{recompute: [0, 1, 2, 44], select_recompute: {'.*\\.norm': [3, 4]}}")
    config = from_recipe(recipe)
    assert config.recompute.full == ((3, 0, 0, 0, 0, 0, 0, 1),)
    assert config.recompute.select == ((2, 0, 0, 0, 0, 0, 0, 0),)
    assert overlay(recipe, config) == {}


def test_a_list_that_counts_elsewhere_is_written_as_numbers(tmp_path):
    recipe = swapping(tmp_path, "{recompute: True, select_recompute: False}")
    config = from_recipe(recipe)
    some = tuple(tuple(min(2, count) for count in row) for row in config.layers)
    asked = replace(config, recompute=replace(config.recompute, full=some))
    _, child = read_back(recipe, asked, tmp_path)
    first = [sum(config.layers[0][:stage]) for stage in range(config.pp)]
    expected = [start + place for start, own in zip(first, some[0], strict=True) for place in range(own)]
    assert child["recompute_config"]["recompute"] == expected
    assert from_recipe(child) == asked
    assert check_recipe(tmp_path / "child.yaml").errors == []


@pytest.mark.parametrize("file", [MTP, LARGE])
@pytest.mark.parametrize("written", ["{recompute: False}", "{select_recompute: {'.*\\.norm': True}}"])
@settings(max_examples=3)
@given(data=st.data())
def test_what_is_written_passes_the_check_and_is_read_back(tmp_path_factory, file, written, data):
    folder = tmp_path_factory.mktemp("swap")
    recipe = swapping(folder, written, file)
    now = from_recipe(recipe)
    pp, chunks, schedule = data.draw(
        st.sampled_from([(4, 1, "1f1b"), (4, 2, "interleaved_1f1b"), (4, 2, "zero_bubble_v")])
    )
    layers = even_layers(now.model.layers, pp, chunks)
    full, select, again = (data.draw(tables(layers)) for _ in range(3))
    config = replace(
        now,
        dp=now.dp * now.pp // pp,
        pp=pp,
        layers=layers,
        schedule=schedule,
        recompute=Recompute(not_empty(full), not_empty(select), not_empty(again), replay_tp=now.recompute.replay_tp),
    )
    path, child = read_back(recipe, config, folder)
    assert from_recipe(child) == config
    assert check_recipe(path).errors == []
    assert overlay(child, config) == {}


def test_the_same_counts_of_other_layers_are_written_anew(tmp_path):
    recipe = swapping(tmp_path, "{recompute: [0, 6, 12, 18, 24, 30, 36, 42]}")
    config = from_recipe(recipe)
    assert config.layers[0][:2] == (6, 6) and overlay(recipe, config) == {}
    moved = replace(config, layers=((5, 7, *config.layers[0][2:]),))
    _, child = read_back(recipe, moved, tmp_path)
    assert child["recompute_config"]["recompute"][:3] == [0, 5, 12]


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
    with pytest.raises(RecipeError, match=rf"recompute_config.{key}: .* does not fit 8 stages"):
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


@pytest.mark.parametrize("key", ["recompute", "select_recompute", "select_comm_recompute"])
def test_a_table_of_zeros_recomputes_nothing(key):
    """The same run as False: a recipe with zeros was predicted with the memory in which a layer runs again."""
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    zeros = [[0] * 8] * View(recipe).chunks
    recipe["recompute_config"] = {"recompute": False}
    never = from_recipe(recipe)
    recipe["recompute_config"] = {"recompute": False, key: zeros if len(zeros) > 1 else zeros[0]}
    assert from_recipe(recipe) == never
    assert peak_memory(from_recipe(recipe)) == peak_memory(never)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("select_recompute", {r"mlp\.experts\.(mul": True}),
        ("select_recompute", {r".*\.norm": 3}),
        ("select_recompute", {r".*\.norm": -1}),
        ("select_recompute", [1, 2, 3]),
        ("select_recompute_exclude", [r"mlp\.(mul"]),
        ("select_recompute_exclude", {r"mlp\.mul": [1, 2]}),
        ("select_comm_recompute_exclude", [r"mlp\.(mul"]),
    ],
)
def test_what_a_check_refuses_of_recomputation_no_planner_reads(key, value):
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    recipe["recompute_config"] = dict(recipe["recompute_config"]) | {key: value}
    (error,) = check_recipe(recipe).errors
    with pytest.raises(RecipeError) as refused:
        from_recipe(recipe)
    assert str(refused.value) == f"{error.place}{error.words}"
