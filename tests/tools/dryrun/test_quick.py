from pathlib import Path

import pytest

from tools.check.check import check_recipe
from tools.dryrun.layout import WEIGHT
from tools.dryrun.quick import compose, layer_shares, quick_plan
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
NAMES = [f"telechat3_{size}/{kind}" for size in ("105b", "438b", "1119b") for kind in ("pretrain_4k", "context_128k")]


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
