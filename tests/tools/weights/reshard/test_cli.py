"""`tc3 weights reshard` as a user calls it."""

import json

import pytest
from click.testing import CliRunner

from tests.tools.weights.reshard.drawn import LAYOUTS, ONE, draw
from tests.training.runs import ROOT
from tools.weights.cli import weights

RECIPES = ROOT / "recipes"


def called(*words):
    done = CliRunner().invoke(weights, ["reshard", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def one(tmp_path):
    draw(tmp_path / "run" / "checkpoint" / "iteration_00000003")
    return tmp_path / "run" / "checkpoint" / "iteration_00000003"


def test_a_plan_then_the_files(one, tmp_path):
    recipe = LAYOUTS["zero"]
    assert "would hold" in called(one, tmp_path / "to", "--recipe", recipe, "--dry-run")
    assert not (tmp_path / "to").exists()
    text = called(one, tmp_path / "to", "--recipe", recipe)
    folder = tmp_path / "to" / "checkpoint" / "iteration_00000003"
    assert f"{folder} holds 87 tensors of {one}, laid out for 2 ranks instead of 1" in text
    assert f"go on with it: tc3 train {recipe} --resume {folder}" in text
    assert len(list(folder.glob("*.safetensors"))) == len(list(folder.glob("seal_*"))) * 2 == 4


def test_values_of_the_recipe_are_changed(one, tmp_path):
    words = ["--recipe", ONE, "--set", "parallel_config.model_parallel=4", "--dry-run", "--json"]
    assert json.loads(called(one, tmp_path / "to", *words))["ranks"] == {"from": 1, "to": 4}


@pytest.mark.parametrize(("model", "devices", "size"), [("438b", 4096, 12 * 438e9), ("1119b", 8192, 12 * 1119e9)])
def test_full_sizes_are_planned_by_their_recipes(model, devices, size):
    folder = RECIPES / f"telechat3_{model}"
    words = [folder / "pretrain_4k.yaml", "to", "--recipe", folder / "pretrain_4k_searched.yaml", "--dry-run", "--json"]
    found = json.loads(called(*words))
    assert found["ranks"] == {"from": devices, "to": devices} and found["files"] == 2 * devices
    assert found["bytes"] == pytest.approx(size, rel=0.01), "weights and two moments in fp32"
    assert 0 < found["changing"] <= found["bytes"] <= found["loading"] <= found["online"]
    assert found["largest_rank"] >= found["bytes"] / devices
