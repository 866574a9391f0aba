"""The command: what it prints and how it exits."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from plugins.errors import RecipeError
from tests.tools.check.test_check import SHIPPED
from tests.tools.check.test_mutations import ROOT
from tools.check.cli import check

MINI = str(ROOT / "recipes" / "mini" / "pretrain.yaml")


def run(*arguments):
    return CliRunner().invoke(check, list(arguments))


def test_a_clean_recipe_prints_its_sizes():
    result = run("--no-build", MINI)
    assert result.exit_code == 0, result.output
    for word in ("2,170,752", "tokens per step", "1,024", "FLOPs per token", "clean"):
        assert word in result.output


def test_findings_exit_with_one():
    result = run("--no-build", str(SHIPPED))
    assert result.exit_code == 1
    assert "parallel_speed_up_4M.json" in result.output and "2 errors" in result.output


def test_json_is_one_object():
    result = run("--no-build", "--json", "--token-budget", "1000000", MINI, str(SHIPPED))
    content = json.loads(result.stdout)
    assert (result.exit_code, content["clean"]) == (1, False)
    assert [report["clean"] for report in content["recipes"]] == [True, False]
    assert content["recipes"][0]["table"]["steps"] == 977
    assert {"severity", "file", "line", "key", "wrong", "right", "source"} == set(content["recipes"][1]["findings"][0])


def test_only_cards_and_layouts_are_left_out(tmp_path):
    """A recipe whose name only ends like that of a card is checked."""
    for name in ("scorecard.yaml", "card.yaml", "a.layout.yaml"):
        (tmp_path / name).write_text("sed: 1\n", "utf-8")
    result = run("--no-build", *map(str, sorted(tmp_path.iterdir())))
    assert result.exit_code == 1 and "scorecard.yaml:1: error: sed" in result.output
    assert "/card.yaml" not in result.output and ".layout.yaml" not in result.output


def test_no_recipe_is_a_usage_error():
    assert run().exit_code == 2


@pytest.mark.parametrize(
    ("text", "word"), [(None, "no such recipe"), ("- a\n", "mapping"), ("a: [\n", "not valid YAML")]
)
def test_a_file_that_is_no_recipe(text, word, tmp_path):
    """`launch.cli.main` turns the error into one line and exit code 2."""
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text, "utf-8")
    result = run(str(recipe))
    assert isinstance(result.exception, RecipeError) and word in str(result.exception)


def test_warnings_refuse_when_strict(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    text = (ROOT / "recipes" / "mini" / "pretrain.yaml").read_text("utf-8")
    recipe.write_text(text.replace('./output/data/stdlib"', './nowhere/data"'), "utf-8")
    assert run("--no-build", str(recipe)).exit_code == 0
    assert run("--no-build", "--strict", str(recipe)).exit_code == 1


@pytest.mark.slow
def test_every_file_under_recipes_is_clean():
    files = sorted(str(path) for path in (ROOT / "recipes").glob("**/*.yaml"))
    result = run("--no-build", *files)
    assert result.exit_code == 0, [line for line in result.output.splitlines() if " error: " in line]


def test_a_fragment_is_checked_for_its_keys(tmp_path):
    (tmp_path / "base").mkdir()
    fragment = tmp_path / "base" / "part.yaml"
    fragment.write_text("runner_config:\n  batch_sise: 4\n", "utf-8")
    result = run(str(fragment))
    assert result.exit_code == 1 and "'batch_size'" in result.output and "1 error" in result.output


def test_the_schema_is_printed():
    assert json.loads(run("--schema").stdout)["$schema"].endswith("2020-12/schema")


def test_checking_imports_no_mindformers():
    asked = "from tools.check.check import check_recipe"
    code = f"import sys; {asked}; check_recipe({MINI!r}); print('mindformers' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


def test_a_token_budget_with_a_unit():
    result = run("--no-build", "--json", "--token-budget", "1M", MINI)
    assert json.loads(result.stdout)["recipes"][0]["table"]["steps"] == 977
    assert run("--no-build", "--token-budget", "10Q", MINI).exit_code == 2


def test_overrides_are_checked_too():
    result = run("--no-build", "--set", "model.model_config.num_experts_per_tok=40", MINI)
    assert result.exit_code == 1 and "cannot choose 40 of 16 experts" in result.output
    refused = run("--no-build", "--set", "optimizer.eps=.nan", MINI).exception
    assert isinstance(refused, RecipeError) and "not a finite number" in str(refused)


def test_a_build_that_is_interrupted_leaves_no_process(monkeypatch):
    from tools.check import build

    started = []

    def interrupt(process, *_, **__):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(build.subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build.built_by_mindformers([])
    assert started[0].wait(timeout=300) == -9


def test_checking_starts_nothing_heavy():
    heavy = "matplotlib scipy transformers tokenizers pandas torch highspy mindspore datasets"
    code = (
        f"import sys; sys.argv = ['tc3', 'check', '--no-build', {MINI!r}]\nfrom launch.cli import main\ntry: main()\n"
        f"except SystemExit: pass\nprint([name for name in {heavy!r}.split() if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
