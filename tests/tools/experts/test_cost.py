"""The command and the picture."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import TC3Error
from tests.tools.check.test_mutations import ROOT
from tools.check.check import check_recipe
from tools.experts.cost import ep_report
from tools.recipe.load import load_recipe

LARGE = str(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml")


def run(*arguments):
    return CliRunner().invoke(ep_report, list(arguments))


def test_text():
    result = run(LARGE, "--ep", "16,64")
    assert result.exit_code == 0, result.output
    for word in (
        "EP 16 on 2 x 8",
        "EP 64 on 8 x 8",
        "modelled, not measured",
        "hierarchical_ep",
        "chunks",
        "break-even",
    ):
        assert word in result.stdout
    assert "inter_node.latency_s" in result.stdout and "peak_flops.fp32" not in result.stdout
    # how far the estimator is off is said wherever its seconds are
    assert "on 25 published runs" in result.stdout and "the recipe as it is written: hierarchical" in result.stdout


def test_a_degree_that_is_written_twice_is_reported_once():
    reports = json.loads(run(LARGE, "--ep", "32,16,32", "--json").stdout)["reports"]
    assert [report["expert_parallel"] for report in reports] == [32, 16]


def test_long_steps_are_not_cut_where_nobody_looks_at_a_terminal():
    result = run(LARGE, "--set", "parallel_config.micro_batch_num=1024")
    assert result.exit_code == 0 and "\u2026" not in result.stdout, result.output
    seconds = next(
        line.split("\u2502")[1].split()[0] for line in result.stdout.splitlines() if line.startswith("step ")
    )
    assert float(seconds) > 100


@pytest.mark.parametrize("name", ["telechat3_438b", "telechat3_105b"])
def test_what_it_says_to_use_is_sound_and_takes_the_predicted_time(name, tmp_path):
    """`tc3 check` refused it beside MindFormers' own dispatcher without redundancy, which these recipes name."""
    file = ROOT / "recipes" / name / "pretrain_4k.yaml"
    said = run(str(file), "--json")
    (report,) = json.loads(said.stdout)["reports"]
    (used,) = [line for line in run(str(file)).stdout.splitlines() if line.startswith("use: ")]
    keys = yaml.safe_load(used.removeprefix("use: "))
    assert keys == report["overlay"] and keys["plugins"] == report["plugins"]
    child = tmp_path / "child.yaml"
    child.write_text(yaml.safe_dump({"base_config": str(file), **keys}))
    assert [str(error) for error in check_recipe(child).errors] == []
    (after,) = json.loads(run(str(child), "--json").stdout)["reports"]
    assert (
        after["recipe"]["step_seconds"]
        == report["modes"][report["plugins"]["hierarchical_ep"]["mode"]]["step_seconds"][1]
    )


def test_a_degree_for_a_recipe_that_writes_none(tmp_path):
    recipe = load_recipe(LARGE)
    del recipe["parallel_config"]["expert_parallel"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    none = run(str(tmp_path / "recipe.yaml"))
    assert type(none.exception).__name__ == "RecipeError" and "try --ep" in str(none.exception)
    ours, theirs = (
        json.loads(run(file, "--ep", "16", "--json").stdout) for file in (str(tmp_path / "recipe.yaml"), LARGE)
    )
    assert ours["reports"] == theirs["reports"]


def test_json_is_one_object_on_stdout(tmp_path):
    picture = tmp_path / "deep" / "streams.svg"
    result = run(LARGE, "--json", "--skew", "1", "--picture", str(picture))
    content = json.loads(result.stdout)
    assert content["modelled"] is True and content["skew"] == 1 and content["hardware"]["name"] == "atlas_800t_a2"
    (report,) = content["reports"]
    assert (report["expert_parallel"], report["nodes"], report["rank_tokens"]) == (16, 2, 2048)
    assert list(report["modes"]) == ["global", "hierarchical", "deduplicated"]
    for mode in report["modes"].values():
        assert mode["step_seconds"][1] <= mode["step_seconds"][0]
        assert mode["exposed_fraction"][0] == pytest.approx(1)
    assert report["plugins"]["hierarchical_ep"]["mode"] in report["modes"]
    assert str(picture) in result.stderr
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "between nodes" in picture.read_text("utf-8")


def test_the_picture_of_the_same_numbers_is_the_same_file(tmp_path):
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert run(LARGE, "--picture", str(file)).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ep", "64", "--set", "parallel_config.data_parallel=4"], "--ep 64: .*expert_parallel"),
        (["--cluster", "h10"], "did you mean 'h100'"),
        (["--hardware", "h10"], "did you mean 'h100'"),  # the option's old name
        (["--cluster", "atlas_900_a3"], "npu_nums_per_device"),
        (["--picture", "streams.pdf"], ".svg or .png"),
        (["--set", "parallel_config.expert_paralel=8"], "did you mean"),
    ],
)
def test_user_errors(arguments, word):
    """`launch.cli.main` turns them into one line and exit code 2."""
    result = run(LARGE, *arguments)
    assert isinstance(result.exception, TC3Error)
    with pytest.raises(TC3Error, match=word):
        raise result.exception


@pytest.mark.parametrize("arguments", [["--ep", "16,x"], ["--skew", "0.5"], ["--ep", "16,32", "--picture", "a.svg"]])
def test_usage_errors(arguments):
    assert run(LARGE, *arguments).exit_code == 2


def test_nothing_heavy_is_imported():
    code = "import sys, tools.experts.cost; print([m for m in ('mindspore', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
