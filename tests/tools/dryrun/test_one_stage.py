"""One stage of a recipe: its layers and sizes are the recipe's own, and tc3 check finds nothing wrong with it."""

from pathlib import Path

import pytest

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.dryrun.one_stage import one_stage
from tools.dryrun.plan import stages_of
from tools.layout.resolve import resolve
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.view import View

ROOT = Path(__file__).parents[3]
SIZES = ("hidden_size", "n_routed_experts", "vocab_size", "seq_length", "num_attention_heads", "moe_intermediate_size")


def own(name):
    return resolve(load_recipe(ROOT / "recipes" / f"{name}.yaml"), layout="file")


@pytest.mark.parametrize(
    "name",
    ["telechat3_105b/pretrain_4k", "telechat3_438b/pretrain_4k_report", "telechat3_1119b/context_128k",
     "telechat3_36b/context_32k"],
)  # fmt: skip
def test_a_stage_has_the_fullest_stages_layers_and_all_its_devices(tmp_path, name):
    recipe = own(name)
    view = View(recipe)
    dump_recipe(one_stage(recipe, view.devices), tmp_path / "stage.yaml")
    stage = load_recipe(tmp_path / "stage.yaml")
    cut = View(stage)
    assert [str(one) for one in check_recipe(stage).errors] == []
    assert (cut.pp, cut.devices, cut.tp, cut.cp, cut.ep) == (1, view.devices // view.pp, view.tp, view.cp, view.ep)
    model, whole = stage["model"]["model_config"], recipe["model"]["model_config"]
    assert {key: model.get(key) for key in SIZES} == {key: whole.get(key) for key in SIZES}
    assert model["num_hidden_layers"] == max(len(one.kinds) for one in stages_of(view))
    assert recipe == own(name)  # it is not changed


def test_fewer_devices_are_fewer_data_parallel_ranks():
    cut = View(one_stage(own("telechat3_438b/pretrain_4k"), 64))
    assert (cut.devices, cut.dp, cut.tp, cut.ep) == (64, 32, 2, 16)
    assert cut.get(("parallel", "dataset_strategy"))[0][0] == 32
    with pytest.raises(RecipeError, match="one stage needs at least 16 devices, but only 8 are available"):
        one_stage(own("telechat3_438b/pretrain_4k"), 8)


def test_counts_of_recomputed_layers_are_those_of_the_stage():
    recipe = own("telechat3_438b/pretrain_4k")
    recipe["recompute_config"]["recompute"] = [[1, 2, 3, 4, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]]
    recipe["recompute_config"]["select_recompute"] = {r"mlp\.linear": [[1] * 8, [1] * 8]}
    cut = one_stage(recipe, 512)
    assert cut["recompute_config"]["recompute"] == [3]
    assert cut["recompute_config"]["select_recompute"] == {r"mlp\.linear": [2]}
