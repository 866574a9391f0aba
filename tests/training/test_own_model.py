"""docs/your-own-model.md: its recipe is what the page says. Its mini trains in test_minis.py."""

import re

import pytest
from click.testing import CliRunner

from launch.cli import tc3
from tests.training import runs
from tools.check.check import check_recipe, table_of
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

PAGE = (runs.ROOT / "docs" / "your-own-model.md").read_text("utf-8")
# what commands print; what people type is in blocks of bash
BLOCKS = [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if not kind]
RECIPE = runs.ROOT / "docs" / "examples" / "moe_20b.yaml"
PARENT = runs.ROOT / "recipes" / "telechat3_105b" / "pretrain_4k.yaml"


def said(finding):
    """Return whether the page shows a finding, wherever a line of the page breaks."""
    return " ".join(str(finding).partition("error: ")[2].split()) in " ".join(PAGE.split())


def test_it_is_clean_but_for_data_that_is_not_here():
    checked = check_recipe(load_recipe(RECIPE))
    assert checked.errors == []
    assert ["data_path" in str(finding) for finding in checked.findings] == [True]


def test_its_sizes_are_those_of_the_page():
    view = View(load_recipe(RECIPE))
    table = table_of(view, convert(view, load_schema()))
    assert table["parameters_total"] == pytest.approx(20e9, rel=0.02)
    for number in (table["parameters_total"], table["parameters_active"], view.global_batch, view.devices):
        assert f"{number:,}" in PAGE


@pytest.mark.parametrize("key", sorted(set(re.findall(r"`([a-z_]+)`(?:, `[a-z_]+`)* \|", PAGE))))
def test_the_table_of_sizes_has_both_models_numbers(key):
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{key}`" in line)
    keys = re.findall(r"`([a-z_]+)`", row.split("|")[1])
    for path, cell in ((PARENT, 2), (RECIPE, 3)):
        model = load_recipe(path)["model"]["model_config"]
        assert row.split("|")[cell].strip() == ", ".join(str(model[name]) for name in keys)


def test_the_copy_with_only_its_sizes_changed_is_refused_as_the_page_says():
    own, copied = load_recipe(RECIPE), load_recipe(PARENT)
    layout = ("offset", "pp_interleave_num", "seq_length")
    model = {key: value for key, value in own["model"]["model_config"].items() if key not in layout}
    copied["model"]["model_config"].update(model)
    (error,) = check_recipe(copied).errors
    assert said(error)


def test_sequence_parallelism_is_refused_as_the_page_says():
    own = load_recipe(RECIPE)
    own["parallel_config"]["use_seq_parallel"] = True
    (error,) = check_recipe(own).errors
    assert said(error)


@pytest.mark.parametrize("command", ["check --no-build {own}", "recipe diff {parent} {own}"])
def test_excerpts_are_what_the_commands_print(command, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    paths = {"parent": PARENT.relative_to(runs.ROOT), "own": RECIPE.relative_to(runs.ROOT)}
    printed = CliRunner().invoke(tc3, command.format(**paths).split()).output
    lines = {"check": "│", "recipe": " -> "}[command.split()[0]]
    shown = [line for block in BLOCKS for line in block.splitlines() if lines in line and "┃" not in block]
    assert len(shown) >= 4 and [line for line in shown if line not in printed] == []


def test_its_mini_is_one_that_check_passes():
    mini = load_mini(RECIPE)
    assert check_recipe(mini).clean
    model = mini["model"]["model_config"]
    assert (model["n_routed_experts"], model["hidden_size"]) == (16, 128) and model["multi_latent_attention"]
