"""`tc3 search layout`."""

import json
import os

import pytest
from click.testing import CliRunner

from tools.check import check_recipe
from tools.search.layout_cli import layout
from tools.search.layout_file import read_layout

LARGE = os.path.abspath("recipes/telechat3_438b/pretrain_4k.yaml")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base_config: {LARGE}\nmodel: {{model_config: {{offset: auto}}}}\n")
    return path


def run(*words):
    return CliRunner().invoke(layout, [str(word) for word in words])


def test_it_makes_what_a_launch_reads(recipe):
    result = run(recipe, "--time-limit", "1.5")
    assert result.exit_code == 0, result.stderr
    assert "layout (Megatron)      E" in result.stdout and "no layout is more than" in result.stdout
    path = recipe.with_suffix(".layout.yaml")
    assert f"written: {path}" in result.stderr
    assert check_recipe(recipe).clean
    assert path.read_text().startswith("# What `offset: auto` stands for. Made by `tc3 search layout")


def test_json_and_another_place(recipe, tmp_path):
    out = tmp_path / "elsewhere" / "layout.yaml"
    change = "context.max_device_memory=58GB"
    result = run(recipe, "--time-limit", "1", "--json", "--out", out, "--set", change)
    found = json.loads(result.stdout)
    assert found["path"] == str(out) and found["offset"] == read_layout(out).offset
    assert found["predicted"]["cap_gib"] == 58 and found["layout"].startswith("E")
    assert change in out.read_text().splitlines()[0]
    assert not recipe.with_suffix(".layout.yaml").exists()


def test_nothing_fits(recipe):
    result = run(recipe, "--time-limit", "1", "--set", "context.max_device_memory=20GB")
    assert result.exit_code == 1
    assert "no plan keeps memory_cap 20" in result.stderr
    assert not recipe.with_suffix(".layout.yaml").exists()
