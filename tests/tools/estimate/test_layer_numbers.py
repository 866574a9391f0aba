"""Overlays of recipes that swap activations: numbers of layers where MindFormers wants numbers, not counts."""

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.search.overlay.test_write import LARGE, MTP, read_back, tables
from tools.check.check import check_recipe
from tools.estimate.configuration import Recompute, even_layers
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_numbers import numbers_of, places, table_of_numbers
from tools.estimate.recompute_keys import not_empty
from tools.recipe.load import load_recipe
from tools.search.overlay.write import overlay

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
    with pytest.raises(ValueError, match="6 is not the number of one of the 6 layers"):
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
