"""What an evaluation runs and writes back, and when a run evaluates that was interrupted."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Parameter, Tensor

from plugins.cpu_backend import model
from plugins.held_out_loss import adapter
from plugins.held_out_loss.adapter import HeldOutLoss
from tests.plugins.held_out_loss.evaluation import Evaluated
from tests.plugins.sinking import fetching
from tools.runs.readings import read_held_out


class Network:
    """Its loss is the first element of a batch; each pass counts a load."""

    def __init__(self):
        self.load = Parameter(Tensor([1.0, 2.0]), name="load", requires_grad=False)
        self.placement = Parameter(Tensor([1, 0]), name="placement", requires_grad=False)

    def get_parameters(self):
        return [self.load, self.placement]

    def __call__(self, batch):
        self.load.set_data(self.load + 5)
        return Tensor([float(batch[0])]), Tensor([2.0])


def evaluated(network, *losses, weights=None, micro=1, share=1.0, per_token=False):
    """The held-out loss of one corpus's batches with these losses on one rank."""
    return corpora(network, [losses], [weights], micro, share, per_token)[0]


def corpora(network, losses, weights, micro=1, share=1.0, per_token=False):
    """The held-out loss of each corpus."""
    evaluation = object.__new__(HeldOutLoss)
    evaluation.corpora = [[(np.array([loss], np.float32),) for loss in batches] for batches in losses]
    given = zip(losses, weights, strict=True)
    evaluation.weights = [np.array(own or [1 / len(batches)] * len(batches)) for batches, own in given]
    evaluation.micro, evaluation.share, evaluation.forward = micro, share, network
    return evaluation._losses(SimpleNamespace(network=network, calculate_per_token_loss=per_token))


def test_counters_are_put_back_and_what_was_not_counted_is_not_written(monkeypatch):
    network, written = Network(), []
    assign = adapter.ops.assign
    monkeypatch.setattr(adapter.ops, "assign", lambda param, value: (written.append(param.name), assign(param, value)))
    assert evaluated(network, 3.0) == 3.0
    assert network.load.asnumpy().tolist() == [1.0, 2.0] and written == ["load"]


def test_frozen_weights_are_not_copied(monkeypatch):
    network = Network()
    monkeypatch.setattr(adapter, "frozen", {"placement"})
    monkeypatch.setattr(network.placement, "asnumpy", lambda: pytest.fail("it was read"))
    assert evaluated(network, 3.0) == 3.0 and network.load.asnumpy().tolist() == [1.0, 2.0]


def test_where_the_batch_grows_routers_expect_the_samples_of_an_evaluation_while_it_runs(monkeypatch):
    """A router cuts its scores by the number of samples, which a batch of another size need not be divisible by."""
    router, seen = SimpleNamespace(dp=3, ones_dp=None), []
    monkeypatch.setattr(model, "cells_of", lambda *_: [router])
    monkeypatch.setattr(HeldOutLoss, "ramped", True)
    monkeypatch.setattr(Network, "__call__", lambda *_: (seen.append(router.dp), (Tensor([6.0]), Tensor([2.0])))[1])
    assert evaluated(Network(), 3.0) == 6.0
    assert seen == [1] and router.dp == 3 and router.ones_dp.shape == (1, 3, 1)


def test_batches_weigh_what_they_count():
    assert evaluated(Network(), 2.0, 6.0, weights=[0.75, 0.25]) == 3.0


def test_each_corpus_has_the_loss_of_its_own_batches():
    assert corpora(Network(), [[2.0, 6.0], [5.0]], [[0.75, 0.25], None]) == [3.0, 5.0]


def test_the_record_of_a_list_has_the_loss_of_each_corpus(tmp_path):
    Evaluated(tmp_path / "one", 0, every=1)
    Evaluated(tmp_path / "two", 0, every=1, names=["a", "b"], held_out=(2.0, 4.0))
    line = (tmp_path / "one" / "metrics" / "held_out.jsonl").read_text()
    assert json.loads(line) == {"step": 0, "held_out_loss": 3.0}
    line = (tmp_path / "two" / "metrics" / "held_out.jsonl").read_text()
    assert json.loads(line) == {"step": 0, "held_out_loss": 3.0, "corpora": {"a": 2.0, "b": 4.0}}


def test_a_loss_is_divided_by_what_it_was_added_up_over():
    assert evaluated(Network(), 8.0, micro=4) == 2.0
    assert evaluated(Network(), 8.0, micro=4, per_token=True) == 4.0, "by its tokens"


def test_a_rank_without_the_loss_adds_nothing():
    assert evaluated(Network(), np.nan, share=0.0) == 0.0


def test_in_sink_mode_the_train_step_is_evaluated_and_not_the_cell_that_fetches_training_data(tmp_path):
    run = Evaluated(tmp_path, 0, every=1)
    first = run.params.train_network
    run.params.train_network = fetching(first)  # as `Model.train` has it after the beginning
    run.step(1)
    assert run.evaluated == [first, first]


@pytest.mark.parametrize("done", [0, 7, 20])
def test_a_resumed_part_evaluates_at_the_steps_of_an_uninterrupted_run(tmp_path, done):
    run = Evaluated(tmp_path, done, every=10)
    for step in range(done + 1, 34):
        run.step(step)
    run.end()
    assert sorted(read_held_out(tmp_path)) == sorted({done, *range(done // 10 * 10 + 10, 34, 10), 33})
