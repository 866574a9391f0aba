"""Every recipe of the family shrinks to a mini that CPU trains."""

import functools
import json
import math
import subprocess

import pytest

from tests.training import runs
from tools.check.check import check_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini

STAGES = ("pretrain_4k", "context_32k", "context_128k")
SIZES = ("105b", "438b", "1119b")
RECIPES = [runs.ROOT / f"recipes/telechat3_{size}/{stage}.yaml" for size in SIZES for stage in STAGES]
# one of each stage, with MTP layers and without: each compiles a graph of its own, most of the time that a mini takes
TRAINED = [runs.ROOT / f"recipes/telechat3_{name}.yaml" for name in
           ("105b/pretrain_4k", "105b/context_32k", "438b/context_128k")]  # fmt: skip


def name_of(recipe):
    return f"{recipe.parent.name}-{recipe.stem}"


@functools.cache
def settings_of(recipe):
    """(key path, value) of all that a recipe's mini says, but for its folder's name."""
    mini = load_mini(recipe)
    mini.pop("output_dir")
    # multi-latent attention has no key-value heads of its own
    assert mini["model"]["model_config"]["multi_latent_attention"]
    mini["model"]["model_config"].pop("num_key_value_heads")
    return set(flat(mini))


def flat(section, path=""):
    """(key path, value as JSON) of each leaf."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", json.dumps(value)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRAINED, ids=name_of)
def test_trains_ten_steps(recipe, corpus, tmp_path):
    run_dir = tmp_path / "run"
    text = runs.train(recipe, run_dir, corpus, "--mini")
    steps = runs.steps(run_dir)
    assert sorted(steps) == list(range(1, 11)), text
    assert all(math.isfinite(step["loss"]) and not step["overflow"] for step in steps.values())
    assert all(0 < step["global_norm"] < 100 for step in steps.values())
    # the vocabulary of a mini is 2,048, and one MTP layer adds its share of the same loss
    model = load_recipe(run_dir / "recipe.yaml")["model"]["model_config"]
    expected = math.log(2048) * (1 + model["mtp_loss_factor"] * model["num_nextn_predict_layers"])
    assert steps[1]["loss"] == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each not in TRAINED], ids=name_of)
def test_what_is_not_trained_says_nothing_that_a_trained_mini_does_not(recipe):
    own = settings_of(recipe)
    (alike,) = (settings_of(each) for each in TRAINED if each.stem == recipe.stem)
    assert {path for path, _ in own ^ alike} <= {"model.model_config.num_nextn_predict_layers"}
    assert own <= set().union(*map(settings_of, TRAINED))
    assert check_recipe(load_mini(recipe)).clean


def test_the_derived_recipe_can_be_read_and_saved(tmp_path):
    """`tc3 recipe show --mini` prints what `tc3 train --mini` trains."""
    recipe = RECIPES[4]
    shown = subprocess.run(
        [runs.TC3, "recipe", "show", str(recipe), "--mini"], cwd=runs.ROOT, capture_output=True, text=True, check=True
    )
    (tmp_path / "mini.yaml").write_text(shown.stdout)
    mini = load_recipe(tmp_path / "mini.yaml")
    assert mini["context"]["device_target"] == "CPU"
    assert mini["model"]["model_config"]["position_embedding_type"] == "yarn"
    assert mini["train_dataset"]["data_loader"]["config"]["reset_attention_mask"] is True


def test_script_and_mini_exclude_each_other():
    command = [runs.TC3, "train", str(RECIPES[0]), "--mini", "--script"]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "choose one" in done.stderr


def test_a_recipe_with_dispatch_becomes_four_workers_on_two_nodes():
    """Training of that kind is in test_expert_parallel.py."""
    mini = load_mini(runs.ROOT / "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml")
    assert mini["parallel_config"]["expert_parallel"] == mini["parallel_config"]["data_parallel"] == 4
    assert mini["model"]["model_config"]["npu_nums_per_device"] == 2
    assert check_recipe(mini).clean
