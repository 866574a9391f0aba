"""When a run evaluates that was interrupted."""

import pytest

from tests.plugins.held_out_loss.evaluation import Evaluated
from tools.runs.readings import read_held_out


@pytest.mark.parametrize("done", [0, 7, 20])
def test_a_resumed_part_evaluates_at_the_steps_of_an_uninterrupted_run(tmp_path, done):
    run = Evaluated(tmp_path, done, every=10)
    for step in range(done + 1, 34):
        run.step(step)
    run.end()
    assert sorted(read_held_out(tmp_path)) == sorted({done, *range(done // 10 * 10 + 10, 34, 10), 33})
