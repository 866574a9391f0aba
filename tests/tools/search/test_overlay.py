"""What an overlay writes, read back: the configuration it was made from, in a recipe that `tc3 check` accepts."""

import os
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.check import check_recipe
from tools.recipe.load import load_recipe
from tools.search.configuration import Recompute, even_layers
from tools.search.from_recipe import from_recipe
from tools.search.overlay import overlay, write_overlay

LARGE = "recipes/telechat3_438b/pretrain_4k.yaml"
PLUGGED = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"
DENSE = "recipes/telechat3_36b/pretrain_8k.yaml"
MTP = "recipes/telechat3_105b/pretrain_4k.yaml"


def read_back(recipe, config, folder, notes=()):
    path = folder / "child.yaml"
    write_overlay(recipe, config, path, notes)
    return path, load_recipe(path)


@pytest.mark.parametrize("file", [LARGE, PLUGGED, DENSE, MTP])
def test_a_recipe_as_it_is_needs_no_key(file):
    recipe = load_recipe(file)
    assert overlay(recipe, from_recipe(recipe)) == {}


@st.composite
def configured(draw):
    """A recipe and another configuration of its devices' model that it can express."""
    file = draw(st.sampled_from([LARGE, PLUGGED, DENSE, MTP]))
    recipe = load_recipe(file)
    now = from_recipe(recipe)
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 16, 64]))
    pp, chunks = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (2, 3)]))
    if not now.model.experts:
        ep = 1
    else:
        ep = draw(st.sampled_from([width for width in (1, 2, 4, 8, 16, 32) if width <= dp * tp]))
    modes = ["global"] if ep == 1 else ["global", "deduplicated"] + (["hierarchical"] if ep >= 8 else [])
    layers = even_layers(now.model.layers, pp, chunks)
    layers = draw(shifted(layers))
    return recipe, replace(
        now,
        tp=tp,
        dp=dp,
        pp=pp,
        ep=ep,
        layers=layers,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        batch=draw(st.sampled_from([1, 2])),
        micro_batches=draw(st.sampled_from([8, 9, 32])),
        sequence_parallel=tp > 1,
        ep_mode=draw(st.sampled_from(modes)) if now.model.experts else now.ep_mode,
        overlap_ep=now.overlap_ep and ep > 1,
        recompute=Recompute(
            full=draw(tables(layers)),
            select=draw(tables(layers)),
            communication=draw(tables(layers)),
            replay_tp=now.recompute.replay_tp,
        ),
        shard_optimizer=draw(st.booleans()),
        shard_gradients=draw(st.booleans()),
    )


@st.composite
def shifted(draw, layers):
    rows = [list(row) for row in layers]
    for _ in range(draw(st.integers(0, 3))):
        chunk, stage, other = (draw(st.integers(0, len(rows[0]) * len(rows) - 1)) for _ in range(3))
        (a, b), (c, d) = divmod(stage, len(rows[0])), divmod(other, len(rows[0]))
        if rows[a][b] > 1 and chunk % 2:
            rows[a][b] -= 1
            rows[c][d] += 1
    return tuple(map(tuple, rows))


@st.composite
def tables(draw, layers):
    if draw(st.booleans()):
        return draw(st.sampled_from([None, layers]))
    return tuple(tuple(draw(st.integers(0, count)) for count in row) for row in layers)


@settings(max_examples=30, deadline=None)
@given(configured())
def test_a_written_overlay_is_the_configuration(tmp_path_factory, case):
    recipe, config = case
    path, child = read_back(recipe, config, tmp_path_factory.mktemp("overlay"))
    assert from_recipe(child) == config
    errors = [finding for finding in check_recipe(path).findings if finding.severity == "error"]
    # batches that no layout of these degrees can help
    assert not [finding for finding in errors if "plugins" not in finding.key], errors


def test_only_what_differs_is_written(tmp_path):
    recipe = load_recipe(LARGE)
    config = from_recipe(recipe)
    layers = ((4, 4, 4, 4, 3, 3, 3, 3), (3, 3, 3, 3, 4, 4, 3, 3))
    full = ((1,) * 8, (0,) * 8)
    config = replace(config, layers=layers, recompute=replace(config.recompute, full=full))
    path, _ = read_back(recipe, config, tmp_path, ["a first line", "and two\nmore"])
    lines = path.read_text().splitlines()
    assert lines[:3] == ["# a first line", "# and two", "# more"]
    written = yaml.safe_load(path.read_text())
    base = written.pop("base_config")
    assert os.path.samefile(tmp_path / base, LARGE)
    assert written == {
        "model": {"model_config": {"offset": [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]]}},
        "recompute_config": {"recompute": [[1] * 8, [0] * 8]},
    }
    assert [file.name for file in tmp_path.iterdir()] == ["child.yaml"]


def test_shared_values_change_together(tmp_path):
    recipe = load_recipe(LARGE)
    config = from_recipe(recipe)
    child = overlay(recipe, replace(config, dp=128, tp=4))
    assert child == {
        "parallel_config": {"data_parallel": 128, "model_parallel": 4},
        "parallel": {"dataset_strategy": [[128, 1]] * 4},
    }


def test_shared_values_of_other_sections_change_too(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\n"
        "runner_config: {batch_size: &batch 1}\n"
        "train_dataset: {batch_size: *batch}\n"
        "parallel_config: {micro_batch_num: &micro 64}\n"
        "callbacks: [{type: TopkBiasBalanceCallback, micro_batch_num: *micro}]\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    child = overlay(recipe, replace(from_recipe(recipe), batch=2, micro_batches=32))
    assert child == {
        "runner_config": {"batch_size": 2},
        "train_dataset": {"batch_size": 2},
        "parallel_config": {"micro_batch_num": 32},
        "callbacks": [{"type": "TopkBiasBalanceCallback", "micro_batch_num": 32}],
    }


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
    with pytest.raises(RecipeError, match="says nothing of layers"):
        overlay(recipe, replace(config, recompute=replace(config.recompute, communication=some)))


def test_what_was_set_on_the_command_line_is_written_too(tmp_path):
    recipe = load_recipe(LARGE)
    recipe["seed"] = 7
    _, child = read_back(recipe, from_recipe(recipe), tmp_path)
    assert child["seed"] == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "interleaved_1f1b_less_memory"}, "no key does"),
        ({"ep_mode": "deepep"}, "want one of global"),
    ],
)
def test_what_mindformers_cannot_say(changes, words):
    recipe = load_recipe(LARGE)
    with pytest.raises(RecipeError, match=words):
        overlay(recipe, replace(from_recipe(recipe), **changes))


def test_one_device_has_no_layout():
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    with pytest.raises(RecipeError, match="use_parallel"):
        overlay(recipe, replace(from_recipe(recipe), dp=2))
