"""Runs that the other tests train against the golden numbers of tests/golden/training-tiny.json.

To renew what moved for a good reason: TC3_RENEW_GOLDEN=1 tests/run tests/training/test_golden.py

One test trains recipes/mini/pretrain.yaml against tests/golden/mini-pretrain.json and evaluates during the training.
The held-out loss runs the training graph, which counts the load of experts: it must put the counts back. Two workers
are compared with one in test_workers.py; the command with trainings by `tc3 train` is a check of the rehearsal in
tests/launch/firsthour/test_cli.py.
"""

import json
import os

import pytest
from click.testing import CliRunner

from tests.training import forked, runs
from tools.accuracy.cli import accuracy
from tools.accuracy.equivalence import golden_gate

pytestmark = pytest.mark.slow
TINY = str(runs.TINY.relative_to(runs.ROOT))
FILE = golden_gate.golden_file(golden_gate.GOLDEN, TINY)


def numbers(run_dir):
    return {"whole": runs.numbers(run_dir)}


def test_one_worker_reaches_its_golden_numbers(whole):
    if os.environ.get("TC3_RENEW_GOLDEN"):
        golden_gate.write_golden(FILE, TINY, numbers(whole))
    golden = golden_gate.read_golden(FILE)
    assert "whole" in golden and golden_gate.differences(golden, numbers(whole)) == []


def test_two_workers_reach_the_same_golden_numbers(whole_dp2):
    assert golden_gate.differences(golden_gate.read_golden(FILE), numbers(whole_dp2)) == []


def test_the_mini_recipe_reaches_its_golden_numbers_and_evaluating_changes_nothing(workers, tmp_path, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    words = ["equivalence", "recipes/mini/pretrain.yaml", "--only", "held_out_loss", "--json", "--work", str(tmp_path)]
    with forked.launches(workers):
        done = CliRunner(catch_exceptions=False).invoke(accuracy, words)
    assert done.exit_code == 0, done.output[-4000:]
    answer = json.loads(done.stdout)
    assert answer["golden"] == answer["without_golden_numbers"] == [] and answer["passed"]
    (row,) = answer["rows"]
    assert (row["name"], row["how"], row["status"]) == ("held_out_loss", "trained", "pass")
    assert row["tensors"] > 200 and row["findings"] == []
