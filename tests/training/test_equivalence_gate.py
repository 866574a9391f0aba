"""The gate of tests/golden/mini-pretrain.json as CI uses it: the mini recipe itself, and evaluating on the way.

The held-out loss runs the training graph, which counts the load of experts: it must put the counts back. Two workers
are compared with one in test_two_workers.py.
"""

import json
import subprocess

import pytest

from tests.training import runs

pytestmark = pytest.mark.slow


def test_the_mini_recipe_reaches_its_golden_numbers_and_evaluating_changes_nothing(tmp_path):
    command = [runs.TC3, "accuracy", "equivalence", "recipes/mini/pretrain.yaml"]
    arguments = ["--only", "held_out_loss", "--json", "--work", str(tmp_path)]
    done = subprocess.run([*command, *arguments], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["golden"] == answer["without_golden_numbers"] == [] and answer["passed"]
    (row,) = answer["rows"]
    assert (row["name"], row["how"], row["status"]) == ("held_out_loss", "trained", "pass")
    assert row["tensors"] > 200 and row["findings"] == []
