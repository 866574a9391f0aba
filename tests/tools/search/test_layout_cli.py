"""`tc3 search layout`."""

import json
import os

import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from tools.auto.layout_file import read_layout
from tools.check.check import check_recipe
from tools.estimate.memory.error import known_errors
from tools.search.layout_cli import layout

LARGE = os.path.abspath("recipes/telechat3_438b/pretrain_4k.yaml")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base_config: {LARGE}\nmodel: {{model_config: {{offset: auto}}}}\n")
    return path


def run(*words):
    return CliRunner().invoke(layout, [str(word) for word in words])


def test_it_makes_what_a_launch_reads(recipe):
    result = run(recipe, "--effort", "2")
    assert result.exit_code == 0, result.stderr
    assert "layout (Megatron)      E" in result.stdout and "no layout is more than" in result.stdout
    path = recipe.with_suffix(".layout.yaml")
    assert f"written: {path}" in result.stderr
    assert check_recipe(recipe).clean
    assert path.read_text().startswith("# What `offset: auto` stands for. Made by `tc3 search layout")


def test_json_and_another_place(recipe, tmp_path):
    out = tmp_path / "elsewhere" / "layout.yaml"
    change = "context.max_device_memory=58GB"
    result = run(recipe, "--effort", "1", "--json", "--out", out, "--set", change)
    found = json.loads(result.stdout)
    assert found["path"] == str(out) and found["offset"] == read_layout(out).offset
    assert found["predicted"]["cap_gib"] == 58 and max(found["predicted"]["stage_gib"]) <= 58 * (
        1 - known_errors().margin
    )
    assert found["layout"].startswith("E")
    assert change in out.read_text().splitlines()[0]
    assert not recipe.with_suffix(".layout.yaml").exists()


def test_nothing_fits(recipe):
    result = run(recipe, "--effort", "1", "--set", "context.max_device_memory=20GB")
    assert result.exit_code == 1
    assert "no plan keeps memory_cap 18." in result.stderr
    assert "18.5 GiB (20.0 less a margin of 7.3 %)" in result.stderr  # the estimator's known error
    assert "--memory-margin takes a smaller one" in result.stderr
    assert not recipe.with_suffix(".layout.yaml").exists()


def test_a_margin_of_ones_own(recipe, tmp_path):
    words = ["--effort", "1", "--json", "--out", tmp_path / "l.yaml", "--memory-margin", "0.2"]
    found = json.loads(run(recipe, *words, "--set", "context.max_device_memory=50GB").stdout)["predicted"]
    assert found["memory_margin"] == 0.2 and max(found["stage_gib"]) <= 0.8 * 50
    assert found["fits"] == "37 of 37" and "--memory-margin 0.2" in (tmp_path / "l.yaml").read_text()


def test_a_layout_file_is_made_anew_and_nothing_else_replaced(recipe, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("anything: 1\n")
    result = run(recipe, "--effort", "1", "--out", mine)
    assert isinstance(result.exception, DataError) and "--force" in str(result.exception)
    assert mine.read_text() == "anything: 1\n"
    assert run(recipe, "--effort", "1", "--out", mine, "--force").exit_code == 0
    assert run(recipe, "--effort", "1", "--out", mine).exit_code == 0
