"""The measures of routers against loops over experts; alarms of planted troubles, and none of healthy routers.

Where the callback stands among MindFormers' own, and what it is told.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindformers.core.callback.callback import CheckpointMonitor, MFLossMonitor, TopkBiasBalanceCallback
from mindformers.tools.register import MindFormerConfig
from mindformers.trainer.base_trainer import BaseTrainer
from mindspore.train.callback import Callback

from plugins.expert_balance import adapter
from plugins.expert_balance.callback import Alone, ExpertBalance, Experts
from plugins.expert_balance.copies import none
from plugins.expert_balance.plan import Prediction
from plugins.expert_balance.record import Moved, Record
from plugins.expert_balance.routers import HOLD, WINDOW, Watcher
from plugins.expert_balance.settings import read as read_balance
from plugins.hierarchical_ep import adapter as hierarchical_ep
from plugins.hierarchical_ep.settings import read

EXPERTS, TOKENS, LAYERS = 16, 4096, (1, 2, 5)


def routed(rng, shares):
    """Tokens of each layer's experts, drawn by their shares."""
    return np.stack([rng.multinomial(TOKENS, row) for row in shares])


def healthy(seed, steps):
    """Loads of routers that drift slowly, and whose biases keep every expert near the mean."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 0.3, (len(LAYERS), EXPERTS))
    for _ in range(steps):
        logits = 0.95 * logits + rng.normal(0, 0.1, logits.shape)
        yield routed(rng, np.exp(logits) / np.exp(logits).sum(1, keepdims=True))


def slow_measures(history):
    """Compute the measures of one layer after its last step in the obvious way; `history` is a list of lists of
    tokens.
    """
    now, before = history[-1], history[-2] if len(history) > 1 else None
    total, experts = sum(now), len(now)
    fullest = max(now) / (total / experts)
    entropy = -sum(x / total * math.log(x / total) for x in now if x) / math.log(experts)
    similarity = math.nan
    if before:
        similarity = sum(min(x / total, y / sum(before)) for x, y in zip(now, before, strict=True))
    streak = 0
    for expert in range(experts):
        sides = [np.sign(step[expert] * experts - sum(step)) for step in history]
        length = 0
        for side in reversed(sides):
            if not side or side != sides[-1]:
                break
            length += 1
        streak = max(streak, length)
    return fullest, entropy, similarity, sum(x == 0 for x in now), streak


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1, max_size=6))
def test_measures_are_those_of_loops_over_experts(history):
    watcher = Watcher([3], 0.001)
    for step, tokens in enumerate(history, 1):
        found = watcher.see(step, np.array([tokens]))
    values = [getattr(found, name)[0] for name in ("fullest", "entropy", "similarity", "idle", "streak")]
    assert values == pytest.approx(slow_measures(history), nan_ok=True, abs=1e-12)
    line = found.as_json(12.5)
    assert (line["step"], line["time"], line["layers"]) == (len(history), 12.5, [3])
    assert line["fullest"][0] == pytest.approx(values[0], rel=1e-3)
    assert line["similarity"][0] is None if len(history) == 1 else 0 <= line["similarity"][0] <= 1


@pytest.mark.parametrize("seed", range(3))
def test_healthy_routers_raise_no_alarm(seed):
    watcher = Watcher(LAYERS, 0.001)
    assert not [
        alarm for step, tokens in enumerate(healthy(seed, 400), 1) for alarm in watcher.see(step, tokens).alarms
    ]


def collapse(tokens, steps_in):
    tokens[1, 1:] //= 4
    tokens[1, 0] = TOKENS - tokens[1, 1:].sum()
    return tokens


def dead(tokens, steps_in):
    tokens[1, 0] += tokens[1, 7]
    tokens[1, 7] = 0
    return tokens


def shuffled(tokens, steps_in):
    tokens[1] = [TOKENS // 2, *[0] * 14, TOKENS // 2] if steps_in % 2 else [0, TOKENS // 2, TOKENS // 2, *[0] * 13]
    return tokens


@pytest.mark.parametrize(
    ("plant", "rule", "after"),
    [(collapse, "fullest", HOLD), (collapse, "entropy", HOLD), (dead, "idle", WINDOW), (shuffled, "similarity", 1)],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_trouble_is_told_with_its_layer_and_step(plant, rule, after, seed):
    watcher, begins = Watcher(LAYERS, 0.0), 200
    for step, tokens in enumerate(healthy(seed, begins + after), 1):
        found = watcher.see(step, plant(tokens, step - begins) if step > begins else tokens)
        if step < begins + after:
            assert not [alarm for alarm in found.alarms if alarm.rule == rule]
    alarm = next(alarm for alarm in found.alarms if alarm.rule == rule)
    assert (alarm.layer, alarm.since) == (LAYERS[1], begins + after)
    assert {each.layer for each in found.alarms} == {LAYERS[1]}


def test_an_alarm_ends_with_its_trouble_and_keeps_its_step_until_then():
    watcher = Watcher(LAYERS, 0.0)
    raised = []
    for step, tokens in enumerate(healthy(0, 230), 1):
        found = watcher.see(step, collapse(tokens, 0) if 200 < step <= 220 else tokens)
        raised.append({alarm.since for alarm in found.alarms if alarm.rule == "fullest"})
    assert raised[201] == set() and raised[202:220] == [{203}] * 18 and raised[220:] == [set()] * 10


@pytest.mark.parametrize(("rate", "steps"), [(0.01, 100), (0.005, 200), (0.0, None)])
def test_a_bias_that_moves_through_the_whole_range_in_one_direction_is_told(rate, steps):
    watcher, first = Watcher(LAYERS, rate), None
    for step, tokens in enumerate(healthy(1, 250), 1):
        tokens[2, 3] += TOKENS
        alarms = [alarm for alarm in watcher.see(step, tokens).alarms if (alarm.rule, alarm.layer) == ("bias", 5)]
        first = first or (step if alarms else None)
        if alarms:
            assert alarms[0].since == steps and "expert 3 was above" in alarms[0].words
    assert first == steps


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


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ({}, 0.001),
        ({"moe_router_bias_update_rate": 0.0}, 0.0),
        ({"moe_router_bias_update_rate": 0.002}, 0.002),
        ({"topk_bias_update_rate": 0.003}, 0.003),
    ],
)
def test_the_rate_of_the_biases_is_that_of_mindformers_under_either_key_and_by_default(written, rate):
    assert adapter._rate(MindFormerConfig(**written)) == rate


@pytest.mark.parametrize(("ranks", "rows"), [(1, (2, 4)), (2, (1, 2))])
def test_tokens_are_counted_by_the_batch_of_the_step_where_it_grows(monkeypatch, ranks, rows):
    """A router tells shares of its tokens; a rank's step is one batch, of more rows in a later stage."""
    recipe = {
        "use_parallel": ranks > 1,
        "parallel_config": {"data_parallel": ranks},
        "parallel": {"parallel_mode": 0},
        "runner_config": {"batch_size": 4 // ranks},
        "plugins": {"batch_ramp": {"stages": [[1, 2]]}},
        "model": {"model_config": {"seq_length": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}},
        "callbacks": [],
    }
    config = MindFormerConfig(**recipe)
    samples = adapter._rows(config)
    adapter._add_callback(config, read_balance({}), "ExpertBalance", 1, samples)
    given = config.callbacks[0]
    assert [given["batches"].batch_at(step) * given["pairs"] for step in (1, 2)] == [2 * 8, 4 * 8]
    assert (samples.batch_at(1), samples.batch_at(2)) == rows

    def held(values):
        return SimpleNamespace(asnumpy=lambda: np.array(values))

    callback, told = object.__new__(ExpertBalance), []
    layer = Experts(1, SimpleNamespace(expert_load=held([0.5, 0.25, 0.25, 0.0])), held(range(4)), [])
    known = {"done": 0, "layers": [layer], "ranks": Alone(), "samples": samples, "pairs": 8, "held": none(1, 1, 0)}
    known |= {"prediction": Prediction(0.5), "settings": read_balance({"every": 0, "routers": False})}
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
