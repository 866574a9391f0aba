"""`tc3 recipe` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import RecipeError
from tools.recipe.cli import recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini

ROOT = Path(__file__).resolve().parents[3]
MINI, DP2 = (str(ROOT / "recipes" / "mini" / name) for name in ("pretrain.yaml", "pretrain_dp2.yaml"))


def call(*arguments):
    """(exit code, stdout) of `tc3 recipe ...`; a user error is raised, as main() turns it into code 2."""
    result = CliRunner().invoke(recipe, list(arguments))
    if isinstance(result.exception, RecipeError):
        raise result.exception
    return result.exit_code, result.stdout


def test_show_prints_yaml_or_json_and_nothing_else():
    code, out = call("show", DP2, "--set", "seed=7")
    assert code == 0 and yaml.safe_load(out) == {**load_recipe(DP2), "seed": 7}
    assert json.loads(call("show", DP2, "--json")[1]) == load_recipe(DP2)


def test_show_prints_the_mini_that_keeps_the_strategy():
    large = str(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml")
    for words, workers in (([], 4), (["--workers", "8"], 8)):
        code, out = call("show", large, "--mini", "--parallel", *words)
        assert code == 0 and yaml.safe_load(out) == load_mini(large, workers=workers)
    assert yaml.safe_load(out)["parallel_config"]["data_parallel"] == 2
    for words in (["--parallel"], ["--workers", "8"], ["--mini", "--workers", "8"]):
        assert call("show", large, *words)[0] == 2


def test_diff_groups_its_lines_and_says_the_batches():
    code, out = call("diff", MINI, DP2)
    assert code == 1
    header, numbers, layout, nothing = out.split("\n\n")
    assert header.splitlines() == [
        f"{MINI}      1 device, global batch 8, 1,024 tokens per step",
        f"{DP2}  2 devices, global batch 8, 1,024 tokens per step",
    ]
    assert numbers.splitlines()[0] == "changes the numbers: 1"
    assert "runner_config.batch_size 8 -> 4: " in numbers and "(also model.model_config.batch_size)" in numbers
    assert layout.startswith("changes the layout (values equal up to rounding): 3\n")
    assert (
        "  parallel_config.data_parallel 1 -> 2: spreads the batch over other devices; the global batch stays" in layout
    )
    assert nothing.splitlines() == [
        "changes nothing numerical: 1",
        "  output_dir ./output/mini -> ./output/mini_dp2: where files go",
    ]


def test_one_line_a_difference(tmp_path):
    changed = tmp_path / "changed.yaml"
    long = "x" * 500
    changed.write_text(
        f"base_config: {MINI}\noptimizer: {{weight_decay: 0.01}}\ntrainer: null\ncheckpoint: {{load_path: {long}}}\n"
    )
    out = call("diff", MINI, str(changed))[1]
    assert "\n  optimizer.weight_decay 0.1 -> 0.01: changes training\n" in out
    assert "\n  trainer.type CausalLanguageModelingTrainer -> absent: another trainer\n" in out
    assert f'\n  checkpoint.load_path "" -> {"x" * 120}...: starts from other weights or another step\n' in out
    assert long in call("diff", MINI, str(changed), "--json")[1]


def test_the_same_recipe_is_code_0(tmp_path):
    flat = tmp_path / "flat.yaml"
    flat.write_text(call("show", DP2)[1])
    code, out = call("diff", DP2, str(flat))
    assert code == 0 and out.endswith("\nthe same recipe\n")
    assert json.loads(call("diff", DP2, str(flat), "--json")[1])["same"] is True


def test_json_has_both_sides_and_every_group():
    result = json.loads(call("diff", MINI, DP2, "--json")[1])
    assert result["before"] == {"recipe": MINI, "devices": 1, "samples": 8, "tokens": 1024}
    assert set(result["changes"]) == {"numbers", "layout", "nothing"} and result["same"] is False
    (batch,) = result["changes"]["numbers"]
    assert (batch["path"], batch["before"], batch["after"]) == ("runner_config.batch_size", 8, 4)


def test_a_side_without_the_key_has_no_value(tmp_path):
    for name, text in (("a", "seed: 1\n"), ("b", "profile: false\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    changes = json.loads(call("diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "--json")[1])["changes"]
    assert "after" not in changes["numbers"][0] and "before" not in changes["nothing"][0]


@pytest.mark.parametrize("arguments", [["diff", MINI], ["show"], ["diff", MINI, DP2, "--jsn"]])
def test_wrong_usage_is_code_2(arguments):
    assert call(*arguments)[0] == 2


def test_a_recipe_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no such recipe \(did you mean"):
        call("diff", MINI, MINI.replace("pretrain", "pretrian"))


def test_it_does_not_import_mindspore():
    code = (
        "import sys\nfrom tools.recipe.cli import recipe\n"
        f"try: recipe(['diff', {MINI!r}, {DP2!r}])\nexcept SystemExit: pass\n"
        "print([name for name in ('mindspore', 'mindformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
