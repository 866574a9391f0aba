"""The fact that `plan.delivery_order(gathered=...)` stands on, asked of MindSpore's own compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.attention_balance.settings import OWN_BATCHES

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "own", "rows"),
    [
        ("pipeline", "0", [[1], [3], [5], [7]]),
        ("pipeline", "1", [[4], [5], [6], [7]]),
        ("accumulation", "1", [[1], [3], [5], [7]]),
    ],
)
def test_rows_that_rank_1_of_2_computes(tmp_path, kind, own, rows):
    command = [sys.executable, "-m", "tests.plugins.attention_balance.micro_batches_worker", kind, "1"]
    environment = {**os.environ, OWN_BATCHES: own, "PYTHONPATH": str(ROOT), "LOCAL_DEFAULT_PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == rows
