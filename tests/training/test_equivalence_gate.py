"""The gate of tests/golden/mini-pretrain.json as CI uses it: the mini recipe itself, one worker and two."""

import json
import subprocess

import pytest

from tests.training import runs

pytestmark = pytest.mark.slow


def test_the_mini_recipe_and_two_workers_reach_its_golden_numbers(tmp_path):
    command = [runs.TC3, "accuracy", "equivalence", "recipes/mini/pretrain.yaml"]
    arguments = ["--only", "data_parallel_2", "--json", "--work", str(tmp_path)]
    done = subprocess.run([*command, *arguments], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["golden"] == answer["without_golden_numbers"] == [] and answer["passed"]
    (row,) = answer["rows"]
    assert (row["name"], row["how"], row["status"]) == ("data_parallel_2", "trained", "pass")
    assert row["tensors"] > 200 and row["findings"] == []
