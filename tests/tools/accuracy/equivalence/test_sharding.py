"""Recipes of executed strategies."""

import pytest

from launch.run.msrun import worker_count
from plugins.semi_auto_cpu.chosen import chosen
from tests.training.runs import ROOT
from tools.accuracy.equivalence import strategies
from tools.accuracy.equivalence.matrix import choose
from tools.accuracy.equivalence.sharding import BIAS_CALLBACK, EXECUTED_ROWS, USUAL, Sharding, derive_sharded
from tools.check.check import check_recipe
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

RECIPES = [
    str(ROOT / "recipes/mini/pretrain.yaml"),
    str(ROOT / "recipes/mini/pretrain_pp2.yaml"),
    str(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml"),
]
SHARDINGS = {name: sharding for name, _, sharding in EXECUTED_ROWS}


@pytest.mark.parametrize("path", RECIPES)
def test_every_executed_recipe_is_sound_and_has_the_same_data_and_weights(path, tmp_path):
    base = strategies.one_worker(path)
    batch = strategies.batch_of(base)
    for name, sharding in SHARDINGS.items():
        changed, alone = (derive_sharded(base, each, 3, "corpus") for each in (sharding, sharding.alone))
        assert chosen(changed) and chosen(alone)
        assert worker_count(changed) == sharding.workers and worker_count(alone) == 1
        for each, recipe in ((sharding, changed), (sharding.alone, alone)):
            parts = each.dp * each.micro * recipe["runner_config"]["gradient_accumulation_steps"]
            assert recipe["runner_config"]["batch_size"] * parts == batch
        for recipe in (changed, alone):
            dump_recipe(recipe, tmp_path / "recipe.yaml")
            assert check_recipe(load_recipe(tmp_path / "recipe.yaml")).errors == [], name
        for key in ("seed", "optimizer", "lr_schedule", "train_dataset", "runner_wrapper", "checkpoint"):
            assert changed.get(key) == alone.get(key), (name, key)
        layout = ("batch_size", "offset", "pp_interleave_num", "npu_nums_per_device")
        models = [recipe["model"]["model_config"] for recipe in (changed, alone)]
        same, other = ({key: value for key, value in model.items() if key not in layout} for model in models)
        assert same == other, name


def test_names_of_baselines_tell_models_apart():
    seen = {}
    for sharding in SHARDINGS.values():
        assert seen.setdefault(sharding.against, sharding.alone) == sharding.alone
    assert Sharding(tp=2).against == "one_process" and len(seen) == 8


def test_two_usual_ones_are_executed_unless_more_are_asked_for():
    executed = [case.name for case in choose(()) if case.how == strategies.EXECUTED]
    assert executed == list(USUAL) and set(USUAL) <= SHARDINGS.keys()
    assert [case.name for case in choose(("executed",))] == list(SHARDINGS)
    assert [case.name for case in choose(("executed_cp2",))] == ["executed_cp2"]


def test_an_auxiliary_loss_under_data_parallelism_is_taken_sample_by_sample_on_both_sides():
    sharding = SHARDINGS["executed_moe_ep2_aux"]
    base = strategies.one_worker(RECIPES[0])
    for each in (sharding, sharding.alone):
        recipe = derive_sharded(base, each, 3, "corpus")
        assert recipe["runner_config"]["batch_size"] == 1 and recipe["model"]["model_config"]["moe_aux_loss_coeff"] > 0
        (bias,) = (callback for callback in recipe["callbacks"] if callback["type"] == BIAS_CALLBACK)
        assert bias["gradient_accumulation_steps"] == recipe["runner_config"]["gradient_accumulation_steps"] > 1
    assert sharding.against == "one_process_moe_sample_by_sample"


def test_a_batch_that_cannot_be_shared_is_told():
    assert SHARDINGS["executed_pp2_micro4"].misfit(6) == "6 samples of a step cannot be cut into 4"
    assert SHARDINGS["executed_pp2_micro4"].misfit(8) == ""
