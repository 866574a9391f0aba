"""Small recipes for Ascend: one family has the same weights and batch, and each member is sound and compiles."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import tc3
from plugins.errors import RecipeError
from tests.forks import forked_compiles
from tools.check.check import check_recipe
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini_ascend import ON_CPU, ascend_minis
from tools.recipe.view import View

ROOT = Path(__file__).parents[3]
RECIPES = [
    "telechat3_105b/pretrain_4k_report", "telechat3_438b/pretrain_4k", "telechat3_1119b/pretrain_4k_ep_overlap",
    "telechat3_1119b/context_128k", "telechat3_36b/context_32k", "telechat2_115b/pretrain_8k",
    "telechat3_105b/pretrain_4k_muon", "xing4_29b/pretrain_4k",
]  # fmt: skip
SIZES = ("num_hidden_layers", "hidden_size", "n_routed_experts", "vocab_size", "seq_length", "num_attention_heads")


def family(name, counts=(2, 8, 64)):
    return ascend_minis(load_recipe(ROOT / "recipes" / f"{name}.yaml"), "corpus", 12, counts)


@pytest.mark.parametrize("name", RECIPES)
def test_a_family_has_one_model_and_one_batch_and_each_member_is_sound(tmp_path, name):
    own, found = View(load_recipe(ROOT / "recipes" / f"{name}.yaml")), family(name)
    models, batches = set(), set()
    for count, flat in found.items():
        dump_recipe(flat, tmp_path / "small.yaml")
        recipe = load_recipe(tmp_path / "small.yaml")
        assert [str(one) for one in check_recipe(recipe).errors] == []
        view = View(recipe)
        model = recipe["model"]["model_config"]
        models.add(tuple(model.get(key) for key in SIZES))
        batches.add((view.global_batch, view.samples))
        assert view.devices == max(1, count)
        if count == ON_CPU:
            assert view.on_cpu and model["compute_dtype"] == "float32"
        else:
            assert not view.on_cpu
            assert model["compute_dtype"] == own.get(("model", "model_config", "compute_dtype"))
            assert view.ep <= (model.get("n_routed_experts") or 1)
    assert (len(models), len(batches)) == (1, 1)


def test_degrees_that_do_not_fill_a_number_of_devices_leave_it_out():
    assert set(family("telechat3_36b/context_32k", (2, 8, 1024))) == {ON_CPU, 1, 2, 8}


def test_a_recipe_for_a_cpu_has_no_small_recipe_for_ascend():
    with pytest.raises(RecipeError, match=r"context\.device_target: this recipe is for a CPU"):
        family("mini/pretrain")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_small_recipes_compile_for_virtual_ascend_devices(forks, tmp_path, count):
    file = tmp_path / "small.yaml"
    dump_recipe(family("telechat3_105b/pretrain_4k", (2,))[count], file)
    with forked_compiles(forks, tmp_path / "cache"):
        done = CliRunner(catch_exceptions=False).invoke(tc3, ["dryrun", str(file), "--json", "--ranks", "0"])
    report = json.loads(done.stdout)
    assert report["stages"][0]["memory"]["limit"] > 0, done.stderr
    assert "error" not in report and report["problems"] == []
