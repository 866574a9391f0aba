"""Rules about the `plugins:` section of EP recipes."""

import pytest

from tools.check import check_recipe
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
