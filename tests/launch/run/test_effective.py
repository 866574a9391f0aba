"""Which keys `--steps` changes."""

import pytest

from launch.run.effective import steps_overrides
from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides


def test_steps_of_instructions_are_what_the_last_handler_takes():
    recipe = load_recipe("recipes/mini/finetune.yaml")
    found = steps_overrides(recipe, 5)
    assert found[:2] == ["train_dataset.data_loader.handler.2.n=20", "lr_schedule.total_steps=5"]
    assert steps_overrides(recipe, None) == []


@pytest.mark.parametrize("handlers", [[], [{"type": "PackingHandler"}], [{"type": "take"}], None])
def test_without_it_the_data_decides_and_steps_cannot_be_set(handlers):
    data = {"data_loader": {"type": "HFDataLoader", "handler": handlers}}
    recipe = Recipe({"train_dataset": data, "runner_config": {"batch_size": 4}})
    with pytest.raises(RecipeError, match=r"--steps needs .*a last handler `take`"):
        steps_overrides(recipe, 5)


@pytest.mark.parametrize(
    ("steps", "warmup"),
    [(3, ["lr_schedule.warmup_steps=1"]), (19, ["lr_schedule.warmup_steps=1"]), (20, []), (300, [])],
)
def test_a_warm_up_longer_than_all_steps_becomes_its_share_of_them(steps, warmup, capsys):
    recipe = load_recipe("recipes/mini/pretrain.yaml")  # 20 of 300 steps
    found = steps_overrides(recipe, steps)
    assert [each for each in found if "warmup" in each] == warmup
    said = f"{steps} steps: a warm-up of 1, not 20 steps" if warmup else ""
    assert capsys.readouterr().err.startswith(said)
    flat = apply_overrides(recipe, found)
    assert [line for line in check_recipe(flat).errors if "warmup" in str(line)] == []


def test_a_warm_up_that_the_user_sets_stays():
    given = ("lr_schedule.warmup_steps=50",)
    recipe = apply_overrides(load_recipe("recipes/mini/pretrain.yaml"), given)
    assert not any("warmup" in each for each in steps_overrides(recipe, 20, given))
