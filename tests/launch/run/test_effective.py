"""Which keys `--steps` changes."""

import pytest

from launch.run.effective import steps_overrides
from plugins.errors import RecipeError
from tools.recipe.load import Recipe, load_recipe


def test_steps_of_instructions_are_what_the_last_handler_takes():
    recipe = load_recipe("recipes/mini/finetune.yaml")
    assert steps_overrides(recipe, 5) == ["train_dataset.data_loader.handler.2.n=20", "lr_schedule.total_steps=5"]
    assert steps_overrides(recipe, None) == []


@pytest.mark.parametrize("handlers", [[], [{"type": "PackingHandler"}], [{"type": "take"}], None])
def test_without_it_the_data_decides_and_steps_cannot_be_set(handlers):
    data = {"data_loader": {"type": "HFDataLoader", "handler": handlers}}
    recipe = Recipe({"train_dataset": data, "runner_config": {"batch_size": 4}})
    with pytest.raises(RecipeError, match=r"--steps needs .*a last handler `take`"):
        steps_overrides(recipe, 5)
