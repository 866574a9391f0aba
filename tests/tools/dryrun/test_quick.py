from pathlib import Path

import pytest

from tools.check.check import check_recipe
from tools.check.view import View
from tools.dryrun.layout import WEIGHT
from tools.dryrun.quick import compose, layer_shares, quick_plan
from tools.dryrun.stages import stages_of
from tools.model.architecture import DENSE, MOE
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
NAMES = [f"telechat3_{size}/{kind}" for size in ("105b", "438b", "1119b") for kind in ("pretrain_4k", "context_128k")]
LARGE = "telechat3_105b/pretrain_4k.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_the_small_recipe_is_one_that_mindformers_takes(name):
    plan = quick_plan(load_recipe(RECIPES / f"{name}.yaml"))
    small = plan.jobs[0].recipe
    assert check_recipe(small).errors == []
    assert small["model"]["model_config"]["num_hidden_layers"] == 3
    whole = load_recipe(RECIPES / f"{name}.yaml")["parallel_config"]
    for key in ("data_parallel", "model_parallel", "context_parallel", "expert_parallel"):
        assert small["parallel_config"][key] == whole[key]


def test_recompute_lists_become_one_setting():
    recipe = load_recipe(RECIPES / "telechat3_105b/pretrain_4k.yaml")
    changed = apply_overrides(recipe, ["recompute_config.recompute=[0, 0, 0, 3, 0, 0, 0, 0]"])
    assert quick_plan(changed).jobs[0].recipe["recompute_config"]["recompute"] is True


def small_of(loaded):
    small = quick_plan(loaded).jobs[0].recipe
    assert check_recipe(small).errors == []
    return small


def kinds_of(loaded):
    return [kind for stage in stages_of(View(small_of(loaded))) for kind in stage.kinds]


def test_layers_that_the_recipe_leaves_to_the_default():
    """MindFormers' class says three dense layers, so that the small model would have no other."""
    loaded = load_recipe(RECIPES / LARGE)
    del loaded["model"]["model_config"]["first_k_dense_replace"]
    assert kinds_of(loaded) == [DENSE, MOE, MOE]


def test_layers_that_the_recipe_lists():
    loaded = load_recipe(RECIPES / LARGE)
    loaded["model"]["model_config"] |= {"first_k_dense_replace": 0, "moe_layer_freq": [0, *[1] * 44]}
    assert kinds_of(loaded) == [DENSE, MOE, MOE]
    loaded["model"]["model_config"]["moe_layer_freq"] = [1] * 45
    assert kinds_of(loaded) == [MOE, MOE]


def test_a_recipe_that_says_nothing_of_recomputation():
    loaded = load_recipe(RECIPES / LARGE)
    del loaded["recompute_config"]
    small = small_of(loaded)
    assert not small.get("recompute_config")
    shares = layer_shares(small)
    assert shares[MOE] > shares[DENSE] > 0  # nothing is recomputed


@pytest.mark.parametrize(
    ("name", "layers"), [("pangu_ultra_moe_718b/pretrain_4k", 3), ("telechat3_36b/pretrain_8k", 2)]
)
def test_recipes_of_other_models(name, layers):
    assert small_of(load_recipe(RECIPES / f"{name}.yaml"))["model"]["model_config"]["num_hidden_layers"] == layers


def test_a_model_of_experts_with_dense_layers_only_stays_dense():
    loaded = load_recipe(RECIPES / LARGE)
    loaded["model"]["model_config"]["first_k_dense_replace"] = 45
    assert kinds_of(loaded) == [DENSE, DENSE]


def test_what_a_stage_excludes_becomes_one_setting():
    loaded = load_recipe(RECIPES / LARGE)
    loaded["recompute_config"]["select_recompute_exclude"] = {r"mlp\.mul": [0, 0, 0, 6, 0, 0, 0, 0]}
    assert small_of(loaded)["recompute_config"]["select_recompute_exclude"] == {r"mlp\.mul": True}


def weight(name, size):
    return {"name": name, "kind": WEIGHT, "dtype": "Float32", "shape": (size,), "slice": (size,), "shards": 1}


def test_stages_are_put_together_from_layers():
    plan = quick_plan(load_recipe(RECIPES / "telechat3_105b/pretrain_4k.yaml"))
    front = [weight("embedding.w", 1000), weight("decoder.layers.0.w", 10), weight("decoder.layers.1.w", 7)]
    back = [weight("embedding.w", 1000), weight("decoder.layers.2.w", 7), weight("output_layer.w", 500)]
    back.append(weight("mtp.layers.0.w", 50))
    results = [
        {"held": front, "graph": {"activations": [{"saved": 8, "forward": 1, "backward": 2}],
                                  "kept": {"embedding.w": 100, "decoder.layers.1.w": 3}}},
        {"held": back, "graph": {"activations": [{"saved": 10, "forward": 3, "backward": 4}],
                                 "kept": {"mtp.layers.0.w": 9}}},
    ]  # fmt: skip
    parts = compose(plan.stages, results, layer_shares(plan.jobs[0].recipe))
    sums = [sum(item.elements for item in held) for held, _ in parts]
    assert sums == [1000 + 10 + 5 * 7, *[6 * 7] * 4, *[7 * 7] * 2, 7 + 1000 + 500 + 50]
    assert [sum(graph["kept"].values()) for _, graph in parts] == [100 + 5 * 3, *[18] * 4, *[21] * 2, 3 + 9]
    assert [graph["activations"][0]["saved"] for _, graph in parts] == [24, *[24] * 4, *[28] * 2, 4 + 6]
    # where nothing is recomputed, a layer of experts keeps more than a dense one
    parts = compose(plan.stages, results, {"dense": 1.0, "moe": 3.0})
    assert [graph["activations"][0]["saved"] for _, graph in parts] == [2 + 5 * 6, *[36] * 4, *[42] * 2, 6 + 4]
