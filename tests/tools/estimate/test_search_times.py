from dataclasses import replace

import pytest

from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory_model import stage_weights
from tools.estimate.sharding import copies
from tools.estimate.time_model import TimeModel
from tools.model.architecture import pattern_of
from tools.recipe.load import load_recipe


@pytest.fixture(scope="module")
def times():
    return TimeModel(cluster("atlas_800t_a2"))


@pytest.fixture(scope="module")
def run():
    config = from_recipe(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"))
    return replace(config, shard_optimizer=True, shard_gradients=True)


def test_groups_of_shards_are_reduced_inside_and_summed_once(times, run):
    once, each = times.once_and_each(replace(run, shard_size=0), 1)
    grouped_once, grouped_each = times.once_and_each(replace(run, shard_size=8), 1)
    assert grouped_each < each  # eight ranks, not all copies
    assert grouped_once > 0 and once > 0


def test_one_group_is_no_group(times, run):
    # all weights of a dense model on one tp rank have as many copies
    dense = replace(run.model, pattern=pattern_of(run.model.layers), experts=0, top_k=0, shared_ffn=0)
    run = replace(run, ep=1, tp=1, shared_whole=False, model=dense)
    (held,) = {copies(weight, run) for weight in stage_weights(run, 1)}
    assert times.once_and_each(replace(run, shard_size=held), 1) == times.once_and_each(run, 1)


def test_without_sharded_gradients_nothing_is_reduced_each_time(times, run):
    assert times.once_and_each(replace(run, shard_gradients=False), 1)[1] == 0
