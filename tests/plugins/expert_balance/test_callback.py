"""Where the callback stands among MindFormers' own, and what it is told."""

from dataclasses import replace

import numpy as np
import pytest
from mindformers.core.callback.callback import CheckpointMonitor, MFLossMonitor, TopkBiasBalanceCallback
from mindformers.trainer.base_trainer import BaseTrainer
from mindspore.train.callback import Callback

from plugins.expert_balance import adapter
from plugins.expert_balance.callback import ExpertBalance
from plugins.expert_balance.copies import none
from plugins.expert_balance.record import Moved, Record
from plugins.hierarchical_ep import adapter as hierarchical_ep
from plugins.hierarchical_ep.settings import read


def test_it_runs_after_the_loss_and_before_the_loads_are_cleared_and_the_step_is_saved():
    kinds = [Callback, CheckpointMonitor, TopkBiasBalanceCallback, ExpertBalance, MFLossMonitor]
    given = [object.__new__(kind) for kind in kinds]
    found = [type(each) for each in BaseTrainer.sort_callbacks(given)]
    assert found == [MFLossMonitor, ExpertBalance, TopkBiasBalanceCallback, CheckpointMonitor, Callback]


@pytest.mark.parametrize(("mode", "nodes"), [("global", 1), ("hierarchical", 1), ("deduplicated", 2)])
def test_nodes_come_first_where_a_token_goes_once_to_each(monkeypatch, mode, nodes):
    dispatch = read({"mode": mode}, expert_parallel=4, devices_per_node=2, experts=16, rank=0)
    monkeypatch.setattr(hierarchical_ep, "_current", [dispatch])
    assert adapter._nodes({"plugins": {"hierarchical_ep": {"mode": mode}}}) == nodes
    assert adapter._nodes({"plugins": {"hierarchical_ep": False}}) == 1


HOMES, COPIES = np.array([[1, 0, 2, 3]]), np.array([[2, 1]])
LAST = Record(
    *(6, 2, (1,), np.full((1, 4), 10), np.arange(4)[None], (None,)),
    moved=Moved(HOMES, 2, 8, 0.1, 0.1, COPIES),
    copies=none(1, 2, 1),
)


@pytest.mark.parametrize(
    ("records", "held", "homes", "known"),
    [
        ([LAST], none(1, 2, 1), HOMES, True),
        ([], none(1, 2, 1), HOMES, False),
        ([replace(LAST, step=5)], none(1, 2, 1), HOMES, False),  # the line of the checkpoint's step is missing
        ([LAST], none(1, 2, 2), HOMES, False),  # another number of spare slots
        ([LAST], none(1, 2, 1), np.arange(4)[None], False),  # the checkpoint has other homes, such as restored ones
    ],
)
def test_a_resume_takes_the_copies_of_the_step_that_it_goes_on_from_or_none(monkeypatch, records, held, homes, known):
    callback = object.__new__(ExpertBalance)
    callback.held, callback.done = held, 6
    monkeypatch.setattr(callback, "_placements", lambda: homes)
    found = callback._last_copies(records)
    assert np.array_equal(found, COPIES[None] if known else held[None][:0])
