"""Rules about the `plugins:` section of EP recipes."""

import pytest
import yaml

from tools.check.check import check_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

OVERLAP = "recipes/mini/pretrain_ep4_overlap.yaml"
FULL = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"


def errors(recipe, *changes):
    """key -> what is wrong."""
    found = check_recipe(apply_overrides(load_recipe(recipe), changes)).errors
    return {finding.key: f"{finding.wrong}; {finding.right}" for finding in found}


@pytest.mark.parametrize("recipe", [OVERLAP, FULL])
def test_shipped_recipes_pass(recipe):
    assert errors(recipe) == {}


@pytest.mark.parametrize(
    ("recipe", "change", "key", "words"),
    [
        (OVERLAP, "parallel_config.expert_parallel=2", "parallel_config.expert_parallel", "all workers"),
        (OVERLAP, "plugins.ep_overlap.chunks=[3,1]", "plugins.ep_overlap.chunks", "use 1 to 2"),
        (OVERLAP, "plugins.ep_overlap.chunks=[1]", "plugins.ep_overlap.chunks", "neither auto"),
        (OVERLAP, "plugins.hierarchical_ep.mode=fast", "plugins.hierarchical_ep.mode", "fast"),
        (OVERLAP, "model.model_config.npu_nums_per_device=3", "plugins.hierarchical_ep", "use 3 or 6"),
        (FULL, "parallel_config.expert_parallel=1", "plugins.hierarchical_ep", "nothing to dispatch"),
        (FULL, "model.model_config.moe_token_dispatcher_type=alltoall_deredundency",
         "model.model_config.moe_token_dispatcher_type", "takes this place"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(recipe, change, key, words):
    found = errors(recipe, change)
    assert key in found and words in found[key], found


def test_overlap_needs_the_dispatch_that_it_cuts():
    recipe = load_recipe(OVERLAP)
    recipe["plugins"]["hierarchical_ep"] = False
    found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
    assert "which is off" in found["plugins.ep_overlap"]
    assert "no kernels" in found["parallel_config.expert_parallel"]


def test_a_held_out_loss_is_for_data_parallel_ranks():
    on = 'plugins.held_out_loss={"data_path": "x", "samples": 32768, "every": 5}'
    recipe = load_recipe(FULL)
    recipe["plugins"]["held_out_loss"] = {"data_path": "x", "samples": 32768, "every": 5}
    found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
    assert "data-parallel ranks alone" in found["plugins.held_out_loss"]
    assert errors("recipes/mini/pretrain_dp2.yaml", on) == {}


def test_one_checkpoint_kept_is_enough():
    """It is removed once the next one is sealed."""
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["checkpoint"]["save_max"] = 1
    assert "checkpoint.save_max" not in {item.key for item in check_recipe(recipe).findings}


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (None, "", ""),
        (False, "", ""),
        ({"stop_after": 5}, "", ""),
        ({"stop_after": 0}, "plugins.finite_loss.stop_after", "a number of steps from 1 on"),
        ({"stop_afer": 5}, "plugins.finite_loss.stop_afer", "stop_after"),
        (True, "plugins.finite_loss", "write `stop_after: 1` under it"),
    ],
)
def test_after_how_many_steps_that_are_not_finite_a_run_stops(settings, key, words):
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    if settings is not None:
        recipe["plugins"]["finite_loss"] = settings
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in check_recipe(recipe).errors}
    assert words in found[key] if key else found == {}, found


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({}, "", ""),
        (False, "", ""),
        ({"every": 20, "work": 2}, "", ""),
        ({"every": 0}, "plugins.straggler_probe.every", "steps between probes, from 1 on"),
        ({"work": 1.5}, "plugins.straggler_probe.work", "a number of pieces of work, from 1 on"),
        ({"evry": 5}, "plugins.straggler_probe.evry", "did you mean 'every'"),
        (True, "plugins.straggler_probe", "write every, work under it"),
    ],
)
def test_how_often_ranks_are_probed(settings, key, words):
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["plugins"]["straggler_probe"] = settings
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in check_recipe(recipe).errors}
    assert words in found[key] if key else found == {}, found


@pytest.mark.parametrize(
    ("recipe", "changes", "key", "words"),
    [
        (OVERLAP, [], "", ""),
        (FULL, [], "", ""),
        (OVERLAP, ["model.model_config.moe_aux_loss_coeff=0.0"], "model.model_config.moe_aux_loss_coeff", "above 0"),
        (OVERLAP, ["model.model_config.moe_router_load_balancing_type=gbs_aux_loss"],
         "model.model_config.moe_router_load_balancing_type", "'seq_aux_loss'"),
        (FULL, ["parallel_config.expert_parallel=1", "plugins.hierarchical_ep=False", "plugins.ep_overlap=False"],
         "parallel_config.expert_parallel", "share"),
    ],
)  # fmt: skip
def test_the_auxiliary_loss_of_a_group_needs_one_to_widen(recipe, changes, key, words):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"]["group_aux_loss"] = True
    report = check_recipe(recipe)
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in report.errors}
    assert words in found[key] if key else found == {}, found


def test_the_auxiliary_loss_of_a_group_has_nothing_to_set():
    recipe = load_recipe(OVERLAP)
    recipe["plugins"]["group_aux_loss"] = {"ranks": 4}
    found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
    assert "write True" in found["plugins.group_aux_loss"]


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([], "", ""),
        (["plugins.spike_guard.window=3"], "plugins.spike_guard.window", "a number of steps from 4 on"),
        (["plugins.spike_guard.threshold=-1.0"], "plugins.spike_guard.threshold", "standard deviations above 0"),
        (["plugins.spike_guard.skipped=[[8, 4]]"], "plugins.spike_guard.skipped", "[[first, stop], ...]"),
        (["plugins.finite_loss={stop_after: 3}"], "plugins.spike_guard", "takes its place"),
        (
            ["runner_config.epochs=2"],
            "plugins.spike_guard",
            "runner_config.epochs: a second pass would begin elsewhere",
        ),
        (["train_dataset.data_loader.shuffle=True"], "plugins.spike_guard", "data_loader.shuffle: which samples"),
    ],
)
def test_what_the_spike_guard_needs(changes, key, words):
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["plugins"].update(
        spike_guard={"window": 64, "threshold": 16.0, "skip": 1, "rollbacks": 3, "skipped": []}, finite_loss={}
    )
    for change in changes:
        where, _, value = change.partition("=")
        *path, last = where.split(".")
        section = recipe
        for name in path:
            section = section[name]
        section[last] = yaml.safe_load(value)
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in check_recipe(recipe).errors}
    assert words in found.get(key, "") if key else found == {}, found


def test_labels_of_packed_conversations_are_those_of_the_next_token():
    for name in ("mini/finetune", *(f"telechat3_{size}/finetune_4k" for size in ("105b", "438b", "1119b"))):
        recipe = load_recipe(f"recipes/{name}.yaml")
        assert {finding.key for finding in check_recipe(recipe).errors} == set(), name
        recipe["plugins"]["packed_labels"] = False
        (finding,) = check_recipe(recipe).errors
        assert finding.key == "train_dataset.data_loader.handler.1"
        assert "the one after the next" in finding.wrong and "plugins.packed_labels: {}" in finding.right
        assert "packing_handler.py:" in finding.source


def test_what_the_plugin_for_labels_cannot_mend_is_named():
    packing = "train_dataset.data_loader.handler.1"
    found = errors("recipes/mini/finetune.yaml", f"{packing}.pack_strategy=truncate")
    assert "lengths of conversations where their ends are read" in found["plugins.packed_labels"]
    on = load_recipe("recipes/mini/pretrain.yaml")
    on["plugins"]["packed_labels"] = {}
    assert "of an HFDataLoader" in {each.key: each.wrong for each in check_recipe(on).errors}["plugins.packed_labels"]
