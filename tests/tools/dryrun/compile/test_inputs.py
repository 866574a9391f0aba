"""What a rank reads for a step, and whether every rank reads all of it."""

import pytest

from tests.tools.check.test_rules import MINI, SEMI, change
from tools.dryrun.compile.inputs import shapes_of
from tools.dryrun.jobs import resized
from tools.recipe.view import LOADER, View

STRATEGY = ("parallel", "dataset_strategy")
ROWS = SEMI["runner_config"]["batch_size"] * 8  # of a rank of four: 8 micro-batches


def rows(recipe):
    return {shape[0] for shape, _ in shapes_of(View(recipe)).values()}


def without_strategy(recipe, **loader):
    plain = change(recipe, (("train_dataset", "input_columns"), ["input_ids", "labels"]), (LOADER, loader))
    del plain["parallel"]["dataset_strategy"]
    return plain


@pytest.mark.parametrize(
    ("recipe", "times"),
    [
        (SEMI, 1),
        (change(SEMI, (STRATEGY, "full_batch")), 4),
        (without_strategy(SEMI, type="HFDataLoader"), 4),
        (without_strategy(SEMI, type="HFDataLoader", create_attention_mask=True), 1),
        (without_strategy(SEMI, type="HFDataLoader", handler=[{"type": "PackingHandler"}]), 1),
        (without_strategy(SEMI, type="BlendedMegatronDatasetDataLoader", config={}), 1),
    ],
)
def test_a_rank_reads_its_rows_or_those_of_all(recipe, times):
    assert rows(recipe) == {ROWS * times}
    assert View(recipe).full_batch == (times > 1)


def test_a_length_that_the_recipe_leaves_out_is_that_of_mindformers():
    recipe = change(SEMI)
    recipe["model"] = {**recipe["model"], "model_config": dict(recipe["model"]["model_config"])}
    del recipe["model"]["model_config"]["seq_length"]
    assert shapes_of(View(recipe))["input_ids"][0] == (ROWS, 4096)


def test_full_batch_is_for_split_models():
    assert not View(change(MINI, (STRATEGY, "full_batch"))).full_batch


def test_another_number_of_devices_keeps_what_is_no_list():
    assert resized(load("full_batch"), 64)["parallel"]["dataset_strategy"] == "full_batch"
    assert resized(load(None), 64)["parallel"]["dataset_strategy"][0] == [8, 1]


def load(strategy):
    from tools.recipe.load import load_recipe

    recipe = load_recipe("tests/tools/dryrun/compile/ascend.yaml")
    recipe["parallel_config"].update(data_parallel=4, model_parallel=8, pipeline_stage=1)
    recipe["parallel"]["dataset_strategy"] = strategy or [[4, 1]] * 5
    return recipe
