"""`tc3 search RECIPE`: what is written, and what dry runs say before."""

import json
import os

import pytest
from click.testing import CliRunner

from plugins.errors import DataError, RecipeError
from tests.tools.search.test_search import RECIPE, run
from tools.estimate.from_recipe import from_recipe
from tools.recipe.load import load_recipe
from tools.search.cli import search

pytestmark = pytest.mark.usefixtures("alone")


def test_verify_drops_what_fails(monkeypatch):
    from tools.search.ranking import verify

    seen = []

    def dry_run(path, full):
        seen.append(from_recipe(load_recipe(path)))
        return verify.DryRun(["stage 3 does not compile"] if len(seen) == 1 else [], [], [])

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    answer = json.loads(run("--top", 3, "--json", "--verify", 2).stdout)
    assert answer["verified"] == len(seen) == 2
    assert [one["problems"] for one in answer["failed"]] == [["stage 3 does not compile"]]
    assert len(answer["strategies"]) == 2
    assert answer["failed"][0]["step_s"] <= answer["strategies"][0]["step_s"]


def judged(monkeypatch, *good):
    """Dry runs that find something wrong, but for those of these numbers; returns the layouts tried."""
    from tools.search.ranking import verify

    seen = []

    def dry_run(path, full):
        seen.append(from_recipe(load_recipe(path)))
        return verify.DryRun([] if len(seen) in good else ["does not compile"], [], [])

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    return seen


def test_when_all_fail_the_next_are_verified(monkeypatch, tmp_path):
    seen, overlay = judged(monkeypatch, 3), tmp_path / "best.yaml"
    answer = json.loads(run("--top", 4, "--json", "--verify", 2, "--write", overlay).stdout)
    assert len(seen) == answer["verified"] == 3 and answer["best_is_verified"]
    assert from_recipe(load_recipe(overlay)) == seen[2]
    assert "# Its dry run compiles and fits." in overlay.read_text("utf-8")


def test_nothing_is_written_when_no_dry_run_passes(monkeypatch, tmp_path):
    judged(monkeypatch)
    result = run("--top", 3, "--verify", 1, "--write", tmp_path / "best.yaml")
    assert result.exit_code == 1 and "dry runs: 0 of 3" in result.stdout
    assert not (tmp_path / "best.yaml").exists()


def test_an_interrupted_dry_run_is_said(monkeypatch, tmp_path):
    from tools.search.ranking import verify

    def dry_run(path, full):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    result = run("--top", 2, "--verify", 1, "--write", tmp_path / "best.yaml")
    assert result.exit_code == 130 and "the best is not verified" in result.stderr
    assert "# NOT VERIFIED" in (tmp_path / "best.yaml").read_text("utf-8")


@pytest.fixture
def family(tmp_path):
    """A recipe, its base and the base's base."""
    for name, base in (("oldest", os.path.abspath(RECIPE)), ("parent", "oldest.yaml"), ("recipe", "parent.yaml")):
        (tmp_path / f"{name}.yaml").write_text(f"base_config: {base}\n", "utf-8")
    (tmp_path / "other").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", ["recipe.yaml", "parent.yaml", "oldest.yaml", "other/recipe.yaml"])
@pytest.mark.parametrize("option", ["--write", "--html"])
def test_no_file_of_the_recipe_is_written_over(monkeypatch, family, option, target):
    monkeypatch.setattr("tools.search.ranking.run.search", None)  # it is refused before the search
    before = {file: file.read_bytes() for file in family.glob("*.yaml")}
    words = [str(family / "recipe.yaml"), option, str(family / target)]
    with pytest.raises(RecipeError, match=f"{option} .*: is (the recipe itself|what .* inherits)"):
        CliRunner().invoke(search, words, catch_exceptions=False)
    assert {file: file.read_bytes() for file in family.glob("*.yaml")} == before


@pytest.mark.parametrize("words", [["--write", "best.yaml"], ["--verify", "1"]])
def test_a_recipe_without_layouts_is_refused_before_the_search(monkeypatch, words):
    monkeypatch.setattr("tools.search.ranking.run.search", None)
    command = ["recipes/mini/pretrain_dp2.yaml", "--devices", "8", *words]
    with pytest.raises(RecipeError, match=r"use_parallel: True and parallel.parallel_mode: 1"):
        CliRunner().invoke(search, command, catch_exceptions=False)


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    words = ["--top", 1, "--write", tmp_path / "file" / "best.yaml", "--html", tmp_path / "report.html"]
    with pytest.raises(DataError, match=r"best\.yaml: cannot be written"):
        run(*words)
    assert (tmp_path / "report.html").is_file()


def test_memory_of_the_command_line_is_written(tmp_path):
    overlay = tmp_path / "best.yaml"
    assert run("--top", 1, "--memory", 50, "--write", overlay).exit_code == 0
    written = load_recipe(overlay)["context"]
    assert (written["max_device_memory"], written["mempool_block_size"]) == ("50GB", "50GB")


def test_interrupted_dry_runs_keep_the_answer(monkeypatch):
    from tools.search.ranking import verify

    def dry_run(path, full):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.verify, "__defaults__", (False, dry_run))
    result = run("--top", 2, "--json", "--verify", 2)
    assert result.exit_code == 130 and len(json.loads(result.stdout)["strategies"]) == 2
