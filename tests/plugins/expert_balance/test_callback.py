"""Where the callback stands among MindFormers' own, and what it is told."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mindformers.core.callback.callback import CheckpointMonitor, MFLossMonitor, TopkBiasBalanceCallback
from mindformers.tools.register import MindFormerConfig
from mindformers.trainer.base_trainer import BaseTrainer
from mindspore.train.callback import Callback

from plugins.expert_balance import adapter, settings
from plugins.expert_balance.callback import Alone, ExpertBalance, Experts
from plugins.expert_balance.copies import none
from plugins.expert_balance.plan import Prediction
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


@pytest.mark.parametrize(("ranks", "rows"), [(1, (2, 4)), (2, (1, 2))])
def test_tokens_are_counted_by_the_batch_of_the_step_where_it_grows(monkeypatch, ranks, rows):
    """A router tells shares of its tokens; a rank's step is one batch, of more rows in a later stage."""
    recipe = {
        "use_parallel": ranks > 1,
        "parallel_config": {"data_parallel": ranks},
        "parallel": {"parallel_mode": 0},
        "runner_config": {"batch_size": 4 // ranks},
        "plugins": {"batch_ramp": {"stages": [[1, 2]]}},
    }
    samples = adapter._rows(MindFormerConfig(**recipe))
    assert (samples.batch_at(1), samples.batch_at(2)) == rows

    def held(values):
        return SimpleNamespace(asnumpy=lambda: np.array(values))

    callback, told = object.__new__(ExpertBalance), []
    layer = Experts(1, SimpleNamespace(expert_load=held([0.5, 0.25, 0.25, 0.0])), held(range(4)), [])
    known = {"done": 0, "layers": [layer], "ranks": Alone(), "samples": samples, "pairs": 8, "held": none(1, 1, 0)}
    known |= {"prediction": Prediction(0.5), "settings": settings.read({"every": 0, "routers": False})}
    for name, value in known.items():
        setattr(callback, name, value)
    monkeypatch.setattr(callback, "_record", lambda step, tokens, *more: told.append(tokens.tolist()))
    for step in (1, 2):
        params = SimpleNamespace(cur_step_num=step, train_network=None)
        callback.on_train_step_end(SimpleNamespace(original_args=lambda params=params: params))
    assert told == [[[4 * each, 2 * each, 2 * each, 0]] for each in rows]


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
