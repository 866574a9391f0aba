"""What an evaluation writes back into the network, and when a run evaluates that was interrupted."""

import numpy as np
import pytest
from mindspore import Tensor

from plugins.held_out_loss.adapter import HeldOutLoss
from tests.plugins.held_out_loss.evaluation import Evaluated
from tools.runs.readings import read_held_out


class Held:
    """A parameter that notes what was written."""

    requires_grad = False

    def __init__(self, value):
        self.value, self.written = np.array(value), []

    def asnumpy(self):
        return self.value

    def set_data(self, value):
        self.written.append(value.asnumpy().tolist())


class Network:
    def __init__(self):
        self.load, self.placement = Held([1.0, 2.0]), Held([1, 0])

    def get_parameters(self):
        return [self.load, self.placement]

    def __call__(self, batch):
        self.load.value += 5
        return [Tensor([3.0])]


def test_counters_are_put_back_and_what_was_not_counted_is_not_written():
    evaluation, network = object.__new__(HeldOutLoss), Network()
    evaluation.batches = [(np.zeros(1),)]
    assert evaluation._loss(network) == 3.0
    assert network.load.written == [[1.0, 2.0]] and network.placement.written == []


@pytest.mark.parametrize("done", [0, 7, 20])
def test_a_resumed_part_evaluates_at_the_steps_of_an_uninterrupted_run(tmp_path, done):
    run = Evaluated(tmp_path, done, every=10)
    for step in range(done + 1, 34):
        run.step(step)
    run.end()
    assert sorted(read_held_out(tmp_path)) == sorted({done, *range(done // 10 * 10 + 10, 34, 10), 33})
