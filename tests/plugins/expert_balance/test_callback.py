"""Where the callback stands among MindFormers' own, and what it is told."""

import pytest
from mindformers.core.callback.callback import CheckpointMonitor, MFLossMonitor, TopkBiasBalanceCallback
from mindformers.trainer.base_trainer import BaseTrainer
from mindspore.train.callback import Callback

from plugins.expert_balance import adapter
from plugins.expert_balance.callback import ExpertBalance
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
