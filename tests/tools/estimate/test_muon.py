"""What Muon computes and gathers, counted against the reference's own matrices."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tools.accuracy.reference.muon import Parts
from tools.estimate.configuration import weight_cut, weight_shards
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import counted_weights, static_memory
from tools.estimate.muon import Matrix, gathers, matrices
from tools.estimate.time_model import TimeModel
from tools.recipe.load import load_recipe

RECIPE = "recipes/mini/pretrain_muon.yaml"
NAMES = {
    "q_up": "linear_q_up_proj.", "q_down": "linear_q_down_proj.", "kv_up": "linear_kv_up_proj.",
    "kv_down": "linear_kv_down_proj.", "proj": "linear_proj.", "mlp_fc1": "mlp.linear_fc1.",
    "mlp_fc2": "mlp.linear_fc2.",
    "shared_fc1": "shared_experts.linear_fc1.", "shared_fc2": "shared_experts.linear_fc2.", "router": "router.",
    "experts_1": "mlp.experts.weight1", "experts_2": "mlp.experts.weight2", "projection": "eh_proj.",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(RECIPE)


def by_name(config):
    """Weight of each name, of all kinds of layers."""
    return {weight.name: weight for weight, _ in counted_weights(config, 0)}


def test_matrices_are_those_that_the_reference_takes_apart(recipe):
    config, parts = from_recipe(recipe), Parts.of(recipe["model"]["model_config"])
    found = by_name(config)
    assert {name for name, weight in found.items() if matrices(weight, config)} == set(NAMES)
    assert {"embedding", "output"} < found.keys() and not found["final_norm"].columns > 1
    for name, weight in found.items():
        if name in NAMES:
            split = parts.split(NAMES[name], np.zeros((weight.rows, weight.columns), np.float32))
            want = sorted(
                shape for part in split for shape in [part.shape[-2:]] * (part.size // np.prod(part.shape[-2:]))
            )
            got = sorted((each.rows, each.columns) for each in matrices(weight, config) for _ in range(int(each.count)))
            assert got == want, name


def test_flops_of_five_steps():
    assert Matrix(3, 7).flops == Matrix(7, 3).flops == 5 * (2 * 3 * 3 * 7 + 2 * 3**3 + 2 * 3 * 7 * 3)
    assert Matrix(3, 7, count=4).flops == 4 * Matrix(3, 7).flops


def test_parts_are_gathered_and_experts_are_not(recipe):
    """dp 4 in pairs, tp 2: rows of fc1 from the pair, then from the tensor-parallel ranks; the router's from a pair."""
    alone = from_recipe(recipe)
    config = replace(alone, dp=4, tp=2, ep=2, shard_optimizer=True, shard_size=2, shard_threshold=0, shared_whole=True)
    found = by_name(config)
    size = 2 * found["mlp_fc1"].size
    assert list(gathers(found["mlp_fc1"], config)) == [(size / 2, 2, 2), (size, 2, 1)]
    assert list(gathers(found["router"], config)) == [(2 * found["router"].size, 2, 1)]
    assert list(gathers(found["q_up"], config)) == [(2 * found["q_up"].size, 2, 1)], "its copies are not sharded"
    assert list(gathers(found["experts_1"], config)) == list(gathers(found["embedding"], config)) == []
    (experts,) = matrices(found["experts_2"], config)
    assert experts.count == 16 / 2 / 2, "of the group's half the shards' half"
    assert not any(list(gathers(weight, alone)) for weight in found.values())


def test_projections_stay_whole_on_every_copy_and_keep_one_moment(recipe):
    config = replace(from_recipe(recipe), dp=2, shard_optimizer=True, shard_size=2, shard_threshold=0)
    adam = replace(config, matrix_state_item=None)
    for name, weight in by_name(config).items():
        whole = name in ("q_up", "q_down", "kv_up", "kv_down", "projection")
        assert weight_shards(weight, config) == (1 if whole else 2) and weight_shards(weight, adam) == 2
    counted = counted_weights(config, 0)
    vectors = sum(n * w.size for w, n in counted if w.columns == 1 or w.name in ("embedding", "output"))
    others = sum(
        n * w.size / weight_cut(w, config) / weight_shards(w, config) for w, n in counted if matrices(w, config)
    )
    assert static_memory(config, 0)[1] == pytest.approx(4 * (2 * vectors / 2 + others))


def test_the_optimizer_takes_longer_by_its_matmuls_and_gathers(recipe):
    config = replace(from_recipe(recipe), dp=2, shard_optimizer=True, shard_size=2, shard_threshold=0, dtype="bf16")
    times, adam = TimeModel(cluster("atlas_800t_a2")), replace(config, matrix_state_item=None)
    assert times.optimizer(config, 0) > times.optimizer(adam, 0)
    wider = replace(config, dp=4)
    assert times.optimizer(wider, 0) == pytest.approx(times.optimizer(config, 0)), "a pair gathers, whatever dp is"
