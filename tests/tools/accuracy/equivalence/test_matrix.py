"""The matrix and its command."""

import json
import re

import pytest
from click.testing import CliRunner

from launch.run.msrun import worker_count
from plugins.errors import DataError
from tests.tools.accuracy.equivalence.recorded import record, spoil_backward
from tests.training.runs import ROOT
from tools.accuracy.cli import accuracy
from tools.accuracy.equivalence import runs, strategies
from tools.accuracy.equivalence.matrix import FAIL, NONE, PASS, Matrix, Row, as_html, equivalence, failure_lines, share
from tools.accuracy.equivalence.sharding import Sharding
from tools.accuracy.equivalence.trained import describe_ranks
from tools.files.locks import only_process_in
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

MINI = str(ROOT / "recipes/mini/pretrain.yaml")


@pytest.fixture
def broken():
    """The error of each run that fails."""
    return {"recompute": runs.RunFailedError("no kernel")}


@pytest.fixture
def trained(monkeypatch, broken):
    """Runs that train nothing: the recipe's workers record what they always record."""
    seen = []

    def train(recipe, run_dir):
        seen.append(run_dir.name)
        if run_dir.name in broken:
            raise broken[run_dir.name]
        return record(run_dir, worker_count(recipe), spoil_backward if "global" in run_dir.name else None)

    monkeypatch.setattr("tools.accuracy.equivalence.matrix.train", train)
    return seen


def test_runs_are_compared_with_their_own_baselines(trained, tmp_path):
    names = ("data_parallel_2", "attention_balance", "recompute", "expert_parallel_4_global", "bfloat16")
    matrix = equivalence(MINI, names, 2, tmp_path)
    assert trained == [
        "baseline", "data_parallel_2", "expert_parallel_4_global", "recompute", "documents_apart", "attention_balance",
    ]  # fmt: skip
    assert {row.case.name: row.status for row in matrix.rows} == {
        "data_parallel_2": PASS, "attention_balance": PASS, "recompute": FAIL, "expert_parallel_4_global": FAIL,
        "bfloat16": NONE,
    }  # fmt: skip
    assert not matrix.passed and "2 fail, 1 not compared" in matrix.summary()
    failed = {row.case.name: failure_lines(row) for row in matrix.with_status(FAIL)}
    assert failed["recompute"] == ["the training of recompute failed: no kernel"]
    assert failed["expert_parallel_4_global"][0].startswith("backward of step 1, layers.1.experts: gradient norm, all")
    page = as_html(matrix, ["a line"])
    assert "differences found" in page and "a line" in page and "rounding would hide" in page


def test_a_baseline_that_fails_is_trained_once(trained, broken, tmp_path):
    broken["baseline"] = broken.pop("recompute")
    matrix = equivalence(MINI, ("baseline", "data_parallel_2", "recompute", "attention_balance"), 2, tmp_path)
    assert trained == ["baseline", "documents_apart", "attention_balance"]
    assert [(row.case.name, row.status) for row in matrix.rows] == [
        ("baseline", FAIL), ("data_parallel_2", FAIL), ("recompute", FAIL), ("attention_balance", PASS)
    ]  # fmt: skip
    assert {row.reason for row in matrix.with_status(FAIL)} == {"the training of baseline failed: no kernel"}
    done = invoke(MINI, "--only", "baseline", "--work", tmp_path, "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["rows"][0]["status"] == FAIL


def test_a_run_without_its_record_is_one_failing_row(trained, broken, tmp_path):
    del broken["recompute"]
    broken["data_parallel_2"] = DataError("rank 1 of 2 ranks did not record its results")
    matrix = equivalence(MINI, ("data_parallel_2", "recompute"), 2, tmp_path)
    assert [row.status for row in matrix.rows] == [FAIL, PASS]
    assert matrix.rows[0].reason == f"the training of data_parallel_2 failed: {broken['data_parallel_2']}"


@pytest.mark.parametrize(
    ("keys", "names", "why"),
    [
        ({"n_routed_experts": 7}, ("expert_parallel_4_global", "executed_moe_ep2"), "7 "),
        ({"num_attention_heads": 3}, ("executed_tp2",), "3 heads cannot be divided over 2"),
        ({"moe_router_enable_expert_bias": False}, ("executed_moves_ep2",), "counts the tokens of each expert only if"),
    ],
)
def test_a_strategy_that_the_model_cannot_have_is_no_failure(monkeypatch, tmp_path, keys, names, why):
    monkeypatch.setattr("tools.accuracy.equivalence.runs.launch", lambda *_: pytest.fail("this was started"))
    recipe = load_recipe(MINI)
    recipe["model"]["model_config"].update(keys)
    for callback in recipe["callbacks"]:
        if callback["type"] == "TopkBiasBalanceCallback":
            callback["expert_num"] = recipe["model"]["model_config"]["n_routed_experts"]
            callback["balance_via_topk_bias"] = recipe["model"]["model_config"]["moe_router_enable_expert_bias"]
    dump_recipe(recipe, tmp_path / "mine.yaml")
    matrix = equivalence(str(tmp_path / "mine.yaml"), names, 2, tmp_path / "work")
    assert [row.status for row in matrix.rows] == [NONE] * len(names) and not matrix.passed
    assert all(row.reason.startswith("this recipe cannot be trained so: ") and why in row.reason for row in matrix.rows)


def invoke(*arguments):
    return CliRunner().invoke(accuracy, ["equivalence", *map(str, arguments)])


def test_golden_numbers_are_renewed_and_then_hold(trained, tmp_path):
    folders = ("--golden", tmp_path / "golden", "--work", tmp_path / "work")
    only = ("--only", "data_parallel_2", "--steps", 2)
    assert invoke(MINI, *only, *folders, "--update").exit_code == 0
    done = invoke(MINI, *only, *folders, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["passed"] is True
    file = tmp_path / "golden/mini-pretrain.json"
    file.write_text(file.read_text().replace('"loss": 3.0', '"loss": 3.1'))
    moved = invoke(MINI, *only, *folders, "--html", tmp_path / "page.html")
    assert moved.exit_code == 1
    assert "golden: baseline: step 1 loss: 3, golden 3.1 (off by 0.032, allowed 0.0001)" in moved.stdout
    assert "differences found" in (tmp_path / "page.html").read_text()


def test_a_run_without_golden_numbers_is_told_and_fails_nothing(trained, tmp_path):
    folders = ("--golden", tmp_path / "golden", "--work", tmp_path / "work")
    only = ("--only", "data_parallel_2", "--steps", 2)
    assert invoke(MINI, *only, *folders, "--update").exit_code == 0
    file = tmp_path / "golden/mini-pretrain.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"runs": {"whole": content["runs"]["baseline"]}}))
    done = invoke(MINI, *only, *folders, "--json")
    assert done.exit_code == 0 and "baseline: no golden numbers yet" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["passed"] and answer["golden"] == []
    assert answer["without_golden_numbers"] == ["baseline", "data_parallel_2"]


def test_the_numbers_of_another_recipe_of_this_name_are_left_alone(trained, tmp_path):
    theirs = tmp_path / "mini" / "pretrain.yaml"
    theirs.parent.mkdir()
    theirs.write_text(f"base_config: {MINI}\n")
    only = ("--only", "baseline", "--steps", 2, "--work", tmp_path / "work")
    done = invoke(theirs, *only, "--json")
    assert done.exit_code == 0 and "no golden numbers for this recipe; --golden FOLDER" in done.stderr
    assert json.loads(done.stdout)["golden_file"] is None
    folder = ("--golden", tmp_path / "golden", "--update")
    assert invoke(theirs, *only, *folder).exit_code == 0
    for arguments, words in (
        ((theirs, *only, "--update"), "--update: "),
        ((MINI, *only, *folder), "--golden: "),
        ((MINI, *only, *folder[:2]), "--golden: "),
    ):
        error = str(invoke(*arguments).exception)
        assert error.startswith(words) and "holds the golden numbers of" in error and "\n" not in error


def test_a_recipe_without_golden_numbers_is_told(trained, monkeypatch, tmp_path):
    monkeypatch.setattr("tools.accuracy.equivalence.golden_gate.GOLDEN", tmp_path)
    done = invoke(MINI, "--only", "data_parallel_2", "--steps", 2, "--work", tmp_path / "work", "--json")
    assert done.exit_code == 0 and "--update writes them" in done.stderr
    assert json.loads(done.stdout)["golden_file"] is None


def test_numbers_of_a_strategy_that_differs_are_not_kept(trained, tmp_path):
    only = ("--only", "expert_parallel_4_global", "--steps", 2, "--update")
    done = invoke(MINI, *only, "--golden", tmp_path / "golden", "--work", tmp_path / "work")
    assert done.exit_code == 1 and "not written" in done.stderr
    assert not (tmp_path / "golden").exists()


def test_the_baseline_alone_is_checked_against_its_golden_numbers(trained, tmp_path):
    folders = ("--golden", tmp_path / "golden", "--work", tmp_path / "work")
    assert invoke(MINI, "--only", "baseline", *folders, "--update").exit_code == 0
    assert invoke(MINI, "--only", "baseline", *folders).exit_code == 0
    assert trained == ["baseline", "baseline"]


def test_a_second_command_in_the_folder_of_the_runs_is_refused(trained, tmp_path):
    with only_process_in(tmp_path / "work", "tc3 accuracy equivalence", "--work"):
        second = invoke(MINI, "--only", "baseline", "--work", tmp_path / "work")
    assert isinstance(second.exception, DataError) and trained == []
    words = r"work: another tc3 accuracy equivalence is at work in this folder \(pid \d+\); wait for its end, or choose"
    assert re.search(f"{words} another --work$", str(second.exception))


def test_samples_that_cannot_be_cut_are_told(tmp_path):
    base = strategies.one_worker(MINI)
    base["runner_config"]["batch_size"] = base["model"]["model_config"]["batch_size"] = 6
    dump_recipe(base, tmp_path / "six.yaml")
    matrix = equivalence(str(tmp_path / "six.yaml"), ("executed_pp2_micro4",), 2, tmp_path)
    assert [(row.status, row.reason) for row in matrix.rows] == [(NONE, "6 samples of a step cannot be cut into 4")]
    assert not matrix.passed


@pytest.mark.parametrize(
    ("ranks", "mesh", "text"),
    [
        ([0], Sharding(), "the only rank"),
        ([0, 1], Sharding(dp=2), "all ranks"),
        ([2, 3], Sharding(dp=2, tp=2), "ranks 2-3 (dp 1)"),
        ([1, 3], Sharding(dp=2, tp=2), "ranks 1, 3 (tp 1)"),
        ([5], Sharding(pp=2, dp=2, tp=2), "rank 5 (pp 1, dp 0, tp 1)"),
        ([0, 3], Sharding(dp=2, tp=2), "ranks 0, 3"),
    ],
)
def test_ranks_are_named_by_what_they_share(ranks, mesh, text):
    assert describe_ranks(ranks, mesh) == text


def test_a_dry_run_starts_nothing(trained):
    done = invoke(MINI, "--only", "recompute,executed_pp2", "--dry-run")
    assert done.exit_code == 0 and done.stdout == "recompute: trained\nexecuted_pp2: executed\n"
    assert trained == []


def test_the_list_says_why(tmp_path):
    done = invoke("--list")
    assert done.exit_code == 0
    for case in strategies.CASES:
        assert case.name in done.stdout
    assert "bfloat16: its rounding would hide" in done.stdout and "…" not in done.stdout


def test_shares_are_readable():
    assert [share(value) for value in (0.17, 0.005, 2e-6, 0.0)] == ["17%", "0%", "2e-06", "0e+00"]


def test_an_infinite_error_is_json():
    case = strategies.CASES[0]
    row = Row(case, FAIL, used=float("inf"))
    assert json.loads(json.dumps(row.as_json()))["used"] == "inf"
    assert Matrix("x", 2, [row]).passed is False
