"""Rung 6's recipes where a layout splits the model; what is made of their losses is in test_ladder.py."""

from pathlib import Path

import pytest

from tools.accuracy.align.devices import split_model
from tools.accuracy.align.recipe import shortened
from tools.check.check import check_recipe
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.view import View

RECIPES = Path(__file__).parents[4] / "recipes"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("telechat3_105b/pretrain_4k", "4 processes (tp2 pp2 ep2)"),
        ("telechat3_438b/pretrain_4k", "4 processes (tp2 pp2 ep2)"),
        ("telechat3_1119b/pretrain_4k_ep_overlap", "4 processes (tp2 pp2 ep2)"),
        ("mini/pretrain_3d", "8 processes (tp2 pp2 dp2 ep2)"),
        ("mini/pretrain_cp2", "2 processes (cp2)"),
        ("mini/pretrain_pp2_interleaved", "2 processes (pp2)"),
    ],
)
def test_a_layout_and_one_process_are_sound_recipes_of_the_same_step(name, layout, tmp_path):
    sides = split_model([RECIPES / f"{name}.yaml"], (), None, 3)
    assert sides.about.startswith(f"the sharded graph on {layout} and 1 process; without the auxiliary loss")
    views = []
    for place, recipe in enumerate(sides.recipes):
        dump_recipe(shortened(recipe, 3), tmp_path / f"{place}.yaml")
        short = load_recipe(tmp_path / f"{place}.yaml")
        wrong = [finding for finding in check_recipe(short).errors if "data_path" not in str(finding)]
        assert wrong == []  # a corpus may not be there
        views.append(View(short))
    ours, theirs = views
    assert ours.sharded_on_cpu and theirs.sharded_on_cpu and theirs.devices == 1
    assert ours.global_batch == theirs.global_batch
    for key in ("num_hidden_layers", "n_routed_experts", "seq_length", "compute_dtype"):
        assert ours.get(("model", "model_config", key)) == theirs.get(("model", "model_config", key))


def test_a_degree_that_is_set_on_the_command_line_counts():
    mini = RECIPES / "mini" / "pretrain.yaml"
    assert split_model([mini], (), None, 3) is None
    assert split_model([RECIPES / "mini" / "pretrain_dp2.yaml"], (), None, 3) is None
    assert split_model([RECIPES / "mini" / "pretrain_tp2.yaml"], ("parallel_config.model_parallel=1",), None, 3) is None
