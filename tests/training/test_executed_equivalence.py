"""A layout that splits the model, executed on two processes against one. Faults in it: test_executed_faults.py."""

import json
import subprocess

import pytest

from tests.training import runs

NAME = "executed_tp2_sp"
COMMAND = [runs.TC3, "accuracy", "equivalence", "tests/training/tiny.yaml", "--only", NAME, "--steps", "3", "--json"]


@pytest.mark.slow
def test_tensor_and_sequence_parallelism_equal_one_process(tmp_path):
    done = subprocess.run([*COMMAND, "--work", str(tmp_path)], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["how"], row["status"]) == ("executed", "pass"), row
    assert row["tensors"] > 100 and row["used"] < 1 and row["findings"] == []
    assert not list(tmp_path.rglob("*.safetensors")), "checkpoints are deleted when they were read"
