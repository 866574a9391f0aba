"""Every recipe of the family shrinks to a mini that CPU trains; those of dense models reach golden losses.

To renew what moved for a good reason: TC3_RENEW_GOLDEN=1 tests/run tests/training/test_minis.py

The recipe of docs/your-own-model.md, whose mini is one of them, is what the page says.
"""

import functools
import json
import math
import os
import re
import subprocess

import pytest
from click.testing import CliRunner

from launch.cli import tc3
from tests.training import forked, runs
from tools.accuracy.equivalence import golden_gate
from tools.check.check import check_recipe, table_of
from tools.checkpoint.stored import read_whole
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

STAGES = ("pretrain_4k", "context_32k", "context_128k")
SIZES = ("105b", "438b", "1119b")
RECIPES = [runs.ROOT / f"recipes/telechat3_{size}/{stage}.yaml" for size in SIZES for stage in STAGES]
# one of each stage, with MTP layers and without: each compiles a graph of its own, most of the time that a mini takes;
# that of the first stage is the model of docs/your-own-model.md, which has sizes of its own
OWN = runs.ROOT / "docs/examples/moe_20b.yaml"
TRAINED = {
    "pretrain_4k": OWN,
    "context_32k": runs.ROOT / "recipes/telechat3_105b/context_32k.yaml",
    "context_128k": runs.ROOT / "recipes/telechat3_438b/context_128k.yaml",
}
DENSE = runs.ROOT / "recipes/telechat3_36b/context_32k.yaml"  # with plugins.yarn
# with plugins.output_biases: eight query heads share a head of keys and values, and each has its own
BIASED = [runs.ROOT / f"recipes/telechat2_{size}/pretrain_8k.yaml" for size in ("115b", "35b")]
SIZES_OF_OWN = {"lr_schedule.learning_rate"} | {
    f"model.model_config.{key}"
    for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size", "q_lora_rank")
}

EVALUATES = {f"plugins.held_out_loss.{key}" for key in ("data_path", "samples", "every")}  # as the other two do


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
@pytest.mark.parametrize("recipe", [*TRAINED.values(), DENSE], ids=name_of)
def test_trains_ten_steps(recipe, workers, corpus, tmp_path):
    run_dir = tmp_path / "run"
    evaluates = load_mini(recipe).get("plugins", {}).get("held_out_loss")
    how = f".data_path={corpus}" if recipe.parent.name == "telechat3_105b" else "=False"  # one is enough: it compiles
    more = [f"plugins.held_out_loss{how}"] if evaluates else []
    text = forked.train(workers, recipe, run_dir, corpus, *more, mini=True)
    steps = runs.steps(run_dir)
    assert sorted(steps) == list(range(1, 11)), text
    assert all(math.isfinite(step["loss"]) and not step["overflow"] for step in steps.values())
    assert all(0 < step["global_norm"] < 100 for step in steps.values())
    # the vocabulary of a mini is 2,048, and one MTP layer adds its share of the same loss
    model = load_recipe(run_dir / "recipe.yaml")["model"]["model_config"]
    expected = math.log(2048) * (1 + model.get("mtp_loss_factor", 0) * model["num_nextn_predict_layers"])
    assert steps[1]["loss"] == pytest.approx(expected, abs=0.3)
    if recipe == DENSE:
        assert off_golden(recipe, run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BIASED, ids=name_of)
def test_biases_reach_their_golden_losses(recipe, workers, corpus, tmp_path):
    """They begin as zeros, and change the losses from the second step on.

    One bias too many changes them by less than what is allowed, so that the checkpoint says which are trained.
    """
    forked.train(workers, recipe, tmp_path / "run", corpus, steps=3, mini=True)
    assert off_golden(recipe, tmp_path / "run") == []
    saved = read_whole(tmp_path / "run" / "checkpoint" / "iteration_00000003").arrays
    biases = {name for name in saved if name.startswith("decoder.layers.") and name.endswith(".bias")}
    outputs = ("self_attention.linear_proj", "mlp.linear_fc2")
    assert biases == {f"decoder.layers.{layer}.{output}.bias" for layer in range(2) for output in outputs}
    assert all(saved[f"adam_m.{name}"].any() for name in biases)


def off_golden(recipe, run_dir):
    """Return in which losses and norms a mini recipe differs from tests/golden; with TC3_RENEW_GOLDEN the golden file
    is written.
    """
    file = golden_gate.golden_file(golden_gate.GOLDEN, recipe)
    found = {"mini": runs.numbers(run_dir)}
    if os.environ.get("TC3_RENEW_GOLDEN"):
        golden_gate.write_golden(file, str(recipe), found)
    return golden_gate.differences(golden_gate.read_golden(file), found)


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each not in TRAINED.values()], ids=name_of)
def test_what_is_not_trained_says_nothing_that_a_trained_mini_does_not(recipe):
    own, trained = settings_of(recipe), TRAINED[recipe.stem]
    but = {"model.model_config.num_nextn_predict_layers"} | (SIZES_OF_OWN | EVALUATES if trained == OWN else set())
    assert {path for path, _ in own ^ settings_of(trained)} <= but
    new = own - set().union(*map(settings_of, TRAINED.values()))
    assert {path for path, _ in new} <= (SIZES_OF_OWN if trained == OWN else set())
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
    assert done.returncode == 2 and "give only one of the two" in done.stderr


def test_a_recipe_with_dispatch_becomes_four_workers_on_two_nodes():
    """Training of that kind is in test_expert_parallel.py."""
    mini = load_mini(runs.ROOT / "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml")
    assert mini["parallel_config"]["expert_parallel"] == mini["parallel_config"]["data_parallel"] == 4
    assert mini["model"]["model_config"]["npu_nums_per_device"] == 2
    assert check_recipe(mini).clean


PAGE = (runs.ROOT / "docs" / "your-own-model.md").read_text("utf-8")
# what commands print; what people type is in blocks of bash
BLOCKS = [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if not kind]
PARENT = runs.ROOT / "recipes" / "telechat3_105b" / "pretrain_4k.yaml"


def said(finding):
    """Return whether the page shows a finding, wherever a line of the page breaks."""
    return " ".join(str(finding).partition("error: ")[2].split()) in " ".join(PAGE.split())


def test_it_is_clean_but_for_data_that_is_not_here():
    checked = check_recipe(load_recipe(OWN))
    assert checked.errors == []
    assert ["data_path" in str(finding) for finding in checked.findings] == [True]


def test_its_sizes_are_those_of_the_page():
    view = View(load_recipe(OWN))
    table = table_of(view, convert(view, load_schema()))
    assert table["parameters_total"] == pytest.approx(20e9, rel=0.02)
    for number in (table["parameters_total"], table["parameters_active"], view.global_batch, view.devices):
        assert f"{number:,}" in PAGE


@pytest.mark.parametrize("key", sorted(set(re.findall(r"`([a-z_]+)`(?:, `[a-z_]+`)* \|", PAGE))))
def test_the_table_of_sizes_has_both_models_numbers(key):
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{key}`" in line)
    keys = re.findall(r"`([a-z_]+)`", row.split("|")[1])
    for path, cell in ((PARENT, 2), (OWN, 3)):
        model = load_recipe(path)["model"]["model_config"]
        assert row.split("|")[cell].strip() == ", ".join(str(model[name]) for name in keys)


def test_the_copy_with_only_its_sizes_changed_is_refused_as_the_page_says():
    own, copied = load_recipe(OWN), load_recipe(PARENT)
    layout = ("offset", "pp_interleave_num", "seq_length")
    model = {key: value for key, value in own["model"]["model_config"].items() if key not in layout}
    copied["model"]["model_config"].update(model)
    (error,) = check_recipe(copied).errors
    assert said(error)


def test_sequence_parallelism_is_refused_as_the_page_says():
    own = load_recipe(OWN)
    own["parallel_config"]["use_seq_parallel"] = True
    (error,) = check_recipe(own).errors
    assert said(error)


@pytest.mark.parametrize("command", ["check --no-build {own}", "recipe diff {parent} {own}"])
def test_excerpts_are_what_the_commands_print(command, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    paths = {"parent": PARENT.relative_to(runs.ROOT), "own": OWN.relative_to(runs.ROOT)}
    printed = CliRunner().invoke(tc3, command.format(**paths).split()).output
    lines = {"check": "│", "recipe": " -> "}[command.split()[0]]
    shown = [line for block in BLOCKS for line in block.splitlines() if lines in line and "┃" not in block]
    assert len(shown) >= 4 and [line for line in shown if line not in printed] == []


def test_its_mini_is_one_that_check_passes():
    mini = load_mini(OWN)
    assert check_recipe(mini).clean
    model = mini["model"]["model_config"]
    assert (model["n_routed_experts"], model["hidden_size"]) == (16, 128) and model["multi_latent_attention"]
