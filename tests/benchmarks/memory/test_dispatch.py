"""The comparison of dispatch buffers: tokens routed by hand, told as workers tell it, against the estimator."""

import json

import numpy as np
import pytest

from benchmarks.memory.dispatch import RECIPE, Call, by_layer, calls_of, expert_seconds, measured, predicted
from plugins.expert_balance.record import Record
from tools.estimate.from_recipe import from_recipe
from tools.recipe.load import load_recipe

STEPS, LAYERS = 2, 3


@pytest.fixture(scope="module")
def config():
    return from_recipe(load_recipe(RECIPE))


def routed(config):
    """Records, and the calls of each worker: all tokens choose experts by a skew of their layer."""
    rng, records, workers = np.random.default_rng(0), [], [[] for _ in range(config.ep)]
    experts, each = config.model.experts, config.model.experts // config.ep
    row, own = config.model.hidden * config.item, config.rank_tokens * config.model.top_k
    for step in range(1, STEPS + 1):
        weights = np.exp(rng.normal(0, 1, (LAYERS, experts)))
        tokens = np.array([rng.multinomial(config.ep * own, one / one.sum()) for one in weights])
        got = tokens.reshape(LAYERS, config.ep, each).sum(2)
        for worker, calls in enumerate(workers):
            for layer in [*range(LAYERS), *reversed(range(LAYERS))]:
                there, back = own * row, int(got[layer, worker]) * row
                seconds = 10.0 * step + layer
                calls += [Call(config.model.hidden, there, back, seconds)]
                calls += [Call(config.model.hidden, back, there, seconds + 0.25)]
        slots = np.tile(np.arange(experts), (LAYERS, 1))
        records.append(Record(step, config.ep, (1, 2, 3), tokens, slots, (None,) * LAYERS))
    return records, workers


def test_bytes_of_every_worker_layer_and_step_are_those_predicted(config):
    records, workers = routed(config)
    found, expected = measured(workers, STEPS, LAYERS), predicted(config, records)
    assert found.shape == (STEPS, LAYERS, config.ep) and found.min() < found.max()
    assert np.array_equal(found, expected)


def test_one_row_more_is_seen_where_it_is(config):
    records, workers = routed(config)
    late = 2 * LAYERS * 2 + 3  # the second step's second layer, on its way back
    more = workers[1][late]
    workers[1][late] = Call(more.row, more.read, more.filled + config.model.hidden * config.item, more.processor)
    apart = np.argwhere(measured(workers, STEPS, LAYERS) != predicted(config, records))
    assert apart.tolist() == [[1, 1, 1]]


def test_backward_runs_through_the_layers_in_reverse(config):
    _, workers = routed(config)
    calls = by_layer(workers[0], STEPS, LAYERS)
    assert calls.shape == (STEPS, LAYERS, 4)
    assert all(call.processor - 10 * (step + 1) - layer < 1 for (step, layer, _), call in np.ndenumerate(calls))
    assert np.allclose(expert_seconds(workers[0], STEPS, LAYERS), 0.25)


def test_a_missing_exchange_is_refused(config):
    _, workers = routed(config)
    with pytest.raises(ValueError, match="23 exchanges of rows, but 2 steps of 3 layers make 4 each"):
        measured([workers[0][:-1]], STEPS, LAYERS)


def test_exchanges_of_numbers_are_left_out(config, tmp_path):
    lines = [{"row": row, "read": 8, "filled": 8, "processor": 0.5} for row in (1, config.model.hidden)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert calls_of(tmp_path / "0.jsonl", config.model.hidden) == [Call(config.model.hidden, 8, 8, 0.5)]
