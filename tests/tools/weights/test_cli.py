"""`tc3 weights` as a user calls it: what is printed, exit codes."""

import json

import pytest
from click.testing import CliRunner

from tests.inputs.builders import checkpoints
from tools.weights.cli import weights


@pytest.fixture
def run(tmp_path, monkeypatch):
    checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(weights, words)


A, B, NAN = (f"{name}/iteration_00000002" for name in ("a", "b", "nan"))


def test_inspect_says_what_there_is(run):
    result = run("inspect", A)
    assert result.exit_code == 0 and "MindFormers, step 2, files of 2 ranks" in result.output
    assert "weights: 8 numbers" in result.output and "4 x 2" in result.output and "2 x 1" in result.output


def test_inspect_as_json(run):
    result = json.loads(run("inspect", A, "--values", "--json").output)
    (group,) = result["groups"]
    assert (result["step"], result["fault"], group["pattern"], group["elements"]) == (2, None, "linear.weight", 8)
    assert group["values"]["norm"] == pytest.approx(sum(i * i for i in range(8)) ** 0.5)


def test_equal_and_different_checkpoints_have_their_exit_codes(run):
    equal, different = run("inspect", A, "--diff", B), run("inspect", A, "--diff", NAN)
    assert (equal.exit_code, different.exit_code) == (0, 1)
    assert "equal, bit by bit: 1 tensors" in equal.output and "linear.weight: |B - A| / |A| = nan" in different.output
    assert json.loads(run("inspect", A, "--diff", B, "--json").output)["equal"] is True
    (change,) = json.loads(run("inspect", A, "--diff", NAN, "--json").output)["changes"]
    assert change == {"name": "linear.weight", "relative": None, "largest": None}


def test_a_broken_seal_is_exit_code_one(run, tmp_path):
    (tmp_path / A / "seal_rank_1.json").unlink()
    result = run("inspect", A)
    assert result.exit_code == 1 and "the save did not finish" in result.output


def test_average_writes_what_can_be_inspected(run):
    assert "1 tensors, each the average of 2" in run("average", A, B, "--to", "mean").output
    assert run("inspect", A, "--diff", "mean").exit_code == 0
