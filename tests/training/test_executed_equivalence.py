"""A layout that splits the model, executed on two processes against one, and one of its collectives left out."""

import json
import os
import subprocess

import pytest

from plugins.semi_auto_cpu.exchange.disturbance import VARIABLE
from tests.training import runs

pytestmark = pytest.mark.slow
NAME = "executed_tp2_sp"
COMMAND = [runs.TC3, "accuracy", "equivalence", "tests/training/tiny.yaml", "--only", NAME, "--json"]


def execute(work, steps, fault=""):
    """Exit code, and the only row."""
    environment = {**os.environ, **({VARIABLE: fault} if fault else {})}
    command = [*COMMAND, "--steps", str(steps), "--work", str(work)]
    done = subprocess.run(command, cwd=runs.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    (row,) = json.loads(done.stdout)["rows"]
    return done.returncode, row


def test_tensor_and_sequence_parallelism_equal_one_process(tmp_path):
    code, row = execute(tmp_path, steps=3)
    assert (code, row["how"], row["status"]) == (0, "executed", "pass"), row
    assert row["tensors"] > 100 and row["used"] < 1 and row["findings"] == []
    assert not list(tmp_path.rglob("*.safetensors")), "checkpoints are deleted when they were read"


def test_a_reduction_that_is_left_out_is_caught_and_named(tmp_path):
    code, row = execute(tmp_path, steps=2, fault="skip:AllReduce")
    assert (code, row["status"]) == (1, "fail")
    first = row["findings"][0]
    assert (first["phase"], first["step"], first["module"]) == ("forward", 1, "loss"), row["findings"][:3]
    assert any(finding["detail"] == "copies differ" for finding in row["findings"])
