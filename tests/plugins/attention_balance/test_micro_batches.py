"""The fact that `plan.delivery_order(gathered=...)` stands on, asked of MindSpore's own compiler."""

import json

import pytest

from plugins.attention_balance.settings import OWN_BATCHES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "own", "rows"),
    [
        ("pipeline", "0", [[1], [3], [5], [7]]),
        ("pipeline", "1", [[4], [5], [6], [7]]),
        ("accumulation", "1", [[1], [3], [5], [7]]),
    ],
)
def test_rows_that_rank_1_of_2_computes(forks, tmp_path, kind, own, rows):
    worker = "tests.plugins.attention_balance.micro_batches_worker"
    done = forks.python("-m", worker, kind, 1, cwd=tmp_path, **{OWN_BATCHES: own})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == rows
