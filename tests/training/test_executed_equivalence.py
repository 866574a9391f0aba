"""A layout that splits the model, executed on two processes against one. Faults in it: test_executed_faults.py."""

import json

import pytest
from click.testing import CliRunner

from tests.training import forked, runs
from tools.accuracy.cli import accuracy

NAME = "executed_tp2_sp"
WORDS = ["equivalence", str(runs.TINY), "--only", NAME, "--steps", "3", "--json"]


@pytest.mark.slow
def test_tensor_and_sequence_parallelism_equal_one_process(workers, tmp_path):
    with forked.launches(workers):
        done = CliRunner(catch_exceptions=False).invoke(accuracy, [*WORDS, "--work", str(tmp_path)])
    assert done.exit_code == 0, done.output[-4000:]
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["how"], row["status"]) == ("executed", "pass"), row
    assert row["tensors"] > 100 and row["used"] < 1 and row["findings"] == []
    assert not list(tmp_path.rglob("*.safetensors")), "checkpoints are deleted when they were read"
