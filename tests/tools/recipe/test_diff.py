"""These tests check which differences between two recipes are found, and what they mean for training."""

from pathlib import Path

import pytest
import yaml

from tools.recipe.diff import ABSENT, GROUPS, TABLE, UNCLASSIFIED, batch_of, compare, meaning_of
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.name != "card.yaml")
MINI, DP2 = (load_recipe(ROOT / "recipes" / "mini" / name) for name in ("pretrain.yaml", "pretrain_dp2.yaml"))


def diff(before, after):
    """{path: (before, after)} of two plain dicts."""
    return {change.path: (change.before, change.after) for change in compare(Recipe(before), Recipe(after)).changes}


def changed(*overrides):
    """The comparison of the mini recipe with itself, changed."""
    return compare(MINI, apply_overrides(MINI, overrides))


def groups(comparison):
    """{path: group}."""
    return {change.path: change.meaning.group for change in comparison.changes}


def test_a_recipe_is_the_same_as_itself_and_as_its_flat_copy():
    assert compare(MINI, MINI).changes == []
    assert diff({"a": 1, "b": [1, {"c": None}]}, {"b": [1.0, {"c": None}], "a": 1.0}) == {}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, {"a.b": (1, 2)}),
        ({"a": {"b": 1}}, {}, {"a.b": (1, ABSENT)}),
        ({"a": None}, {"a": {"b": {"c": 1}}}, {"a.b.c": (ABSENT, 1)}),
        ({"a": {}}, {}, {"a": ({}, ABSENT)}),
        ({"a": 1}, {"a": True}, {"a": (1, True)}),
        ({"a": ""}, {"a": None}, {"a": ("", None)}),
        ({"a": {"b": 1}}, {"a": 5}, {"a": ({"b": 1}, 5)}),
        ({"x": ["1", "p"]}, {"x": ["1", "q"]}, {"x.1": ("p", "q")}),
        ({"x": [[1, 2], [3, 4]]}, {"x": [[1, 2], [9, 4]]}, {"x.1.0": (3, 9)}),
        ({"x": [1, 2]}, {"x": [1, 2, 3]}, {"x": ([1, 2], [1, 2, 3])}),
        ({"x": 0}, {"x": [0, 1]}, {"x": (0, [0, 1])}),
        ({"x": [1, 2, 3]}, {"x": [4, 5, 6]}, {"x": ([1, 2, 3], [4, 5, 6])}),  # many places: the whole list
        ({"x": [{"a": 1}]}, {"x": [{"a": 2}]}, {"x.0.a": (1, 2)}),
    ],
)
def test_the_difference_stands_at_its_full_path(before, after, found):
    assert diff(before, after) == found


def test_callbacks_are_compared_by_type():
    monitor, saver = {"type": "MFLossMonitor", "per_print_times": 1}, {"type": "CheckpointMonitor", "prefix": "a"}
    assert diff({"callbacks": [saver]}, {"callbacks": [monitor, {**saver, "prefix": "b"}]}) == {
        "callbacks.CheckpointMonitor.prefix": ("a", "b"),
        "callbacks.MFLossMonitor.type": (ABSENT, "MFLossMonitor"),
        "callbacks.MFLossMonitor.per_print_times": (ABSENT, 1),
    }
    order = diff({"callbacks": [monitor, saver]}, {"callbacks": [saver, monitor]})
    assert order == {"callbacks": (["MFLossMonitor", "CheckpointMonitor"], ["CheckpointMonitor", "MFLossMonitor"])}
    twice = compare(Recipe(callbacks=[saver, saver]), Recipe(callbacks=[saver, {**saver, "prefix": "b"}])).changes
    assert [(change.path, change.meaning.group) for change in twice] == [
        ("callbacks.CheckpointMonitor#2.prefix", "nothing")
    ]


def test_a_value_shared_by_an_anchor_is_one_difference_told_where_it_means_most():
    (change,) = changed("callbacks.1.expert_num=8").changes
    assert change.path == "model.model_config.n_routed_experts" and change.meaning.group == "numbers"
    assert change.also == ("callbacks.TopkBiasBalanceCallback.expert_num",)


@pytest.mark.parametrize(
    ("override", "group", "phrase"),
    [
        ("optimizer.weight_decay=0.01", "numbers", "changes training"),
        ("optimizer.betas=[0.9, 0.99]", "numbers", "changes training"),
        ("seed=1", "numbers", "another random stream"),
        ("train_dataset.data_loader.config.eod_mask_loss=true", "numbers", "which tokens count"),
        ("model.model_config.compute_dtype=float16", "numbers", "another precision"),
        ("model.model_config.moe_aux_loss_coeff=0.1", "numbers", "changes the loss"),
        ("model.model_config.hidden_dropout=0.1", "numbers", "regularisation"),
        ("runner_wrapper.max_grad_norm=2.0", "numbers", "clipping"),
        ("checkpoint.load_path=x", "numbers", "starts from other weights"),
        ("parallel_config.expert_parallel=2", "layout", "splits the model"),
        ("model.model_config.offset=[0, 0]", "layout", "moves layers"),
        ("recompute_config.recompute=[1, 2]", "layout", "trades memory for time"),
        ("parallel.enable_parallel_optimizer=true", "layout", "shards the optimizer"),
        ("model.model_config.moe_token_dispatcher_type=alltoall_deredundency", "layout", "routes tokens"),
        ("context.max_device_memory=4GB", "layout", "memory of a device"),
        ("train_dataset.num_parallel_workers=2", "layout", "hosts"),
        ("output_dir=x", "nothing", "where files go"),
        ("callbacks.0.per_print_times=5", "nothing", "printed"),
        ("checkpoint.save_interleaved_steps=5", "nothing", "checkpoints are saved"),
        ("plugins.held_out_loss.every=5", "nothing", "does not train"),
    ],
)
def test_each_difference_says_what_it_means(override, group, phrase):
    (change,) = changed(override).changes
    assert change.meaning.group == group and phrase in change.meaning.phrase


def test_spreading_the_same_global_batch_is_layout_and_another_global_batch_is_numbers():
    same = compare(MINI, DP2)
    assert same.before.samples == same.after.samples == 8 and same.after.devices == 2
    assert groups(same)["parallel_config.data_parallel"] == "layout"
    assert groups(same)["runner_config.batch_size"] == "numbers"
    phrases = {change.path: change.meaning.phrase for change in same.changes}
    assert phrases["parallel_config.data_parallel"].endswith("the global batch stays")
    other = compare(MINI, apply_overrides(DP2, ["runner_config.batch_size=8"]))
    assert groups(other) == {
        **{"use_parallel": "numbers", "parallel_config.data_parallel": "numbers"},
        **{"parallel.dataset_strategy": "layout", "output_dir": "nothing"},
    }
    assert other.changes[0].meaning.phrase.endswith("the global batch changes")
    assert (other.after.samples, other.after.tokens) == (16, 16 * 128)


def test_micro_batches_count_only_in_a_pipeline():
    mesh = {"data_parallel": 4, "model_parallel": 8, "pipeline_stage": 8, "micro_batch_num": 256}
    recipe = {"use_parallel": True, "parallel_config": mesh, "runner_config": {"batch_size": 1}}
    recipe["model"] = {"model_config": {"seq_length": 4096}}
    assert batch_of(Recipe(recipe)) == (256, 1024, 1024 * 4096)
    assert batch_of(Recipe({**recipe, "parallel_config": {**mesh, "pipeline_stage": 1}})) == (32, 4, 4 * 4096)
    assert batch_of(Recipe()) == (1, 1, 4096), "MindFormers' own default of seq_length"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_key_of_every_recipe_is_classified(path):
    """Mend by naming the key in tools/recipe/meaning.yaml."""
    changes = compare(Recipe(), load_recipe(path)).changes
    assert changes and [change.path for change in changes if UNCLASSIFIED in change.meaning.phrase] == []


def test_an_unknown_key_is_on_the_safe_side():
    assert meaning_of(("model", "model_config", "new_thing")) == ("numbers", UNCLASSIFIED)
    assert meaning_of(("optimizer",)).phrase == meaning_of(("a", "b", "c")).phrase == UNCLASSIFIED


def test_the_most_specific_pattern_wins():
    assert meaning_of(("optimizer", "weight_decay")).group == "numbers"
    assert meaning_of(("optimizer", "swap")).group == "layout"
    assert meaning_of(("callbacks", "CheckpointMonitor", "type")).group == "nothing"
    assert meaning_of(("callbacks", "Other", "type")).group == "numbers"
    assert meaning_of(("train_dataset_task", "dataset_config", "seed")) == meaning_of(("train_dataset", "seed"))


def test_the_table_is_well_formed():
    entries = yaml.safe_load(TABLE.read_text())["meanings"]
    assert {entry["group"] for entry in entries} == {*GROUPS, "micro", "mesh"}
    assert all(set(entry) == {"group", "means", "paths"} and entry["paths"] for entry in entries)
    assert all("**" not in path or path.endswith(".**") for entry in entries for path in entry["paths"])
