"""The collectives of a recipe's groups are those that the time model asks of its own functions."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tools.estimate.efficiency import cluster
from tools.estimate.groups import Noted, collectives_of
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.profile.study import run_of

ROOT = Path(__file__).parents[3]
HARDWARE = cluster(DEFAULT_HARDWARE)


@cache
def config(name):
    return run_of(ROOT / "recipes" / f"{name}.yaml", ())


def test_noting_changes_no_prediction():
    run = config("telechat3_438b/pretrain_4k")
    assert Noted(HARDWARE).step(run).total == TimeModel(HARDWARE).step(run).total


def test_groups_are_those_of_the_mesh_and_their_largest_tensors():
    run = config("telechat3_438b/pretrain_4k")
    found = {(one.group, one.ranks, one.stride): one for one in collectives_of(run, HARDWARE)}
    assert set(found) == {("tp", 2, 1), ("ep", 16, 1), ("dp", 32, 16), ("dp", 256, 2), ("dp", 512, 1), ("pp", 2, 512)}
    tokens, hidden, bf16 = 4096, 5120, 2
    assert found["tp", 2, 1].bytes == tokens * hidden * bf16  # a sample, gathered
    assert found["pp", 2, 512].bytes == tokens * hidden * bf16 // 2  # each rank of tp sends its half
    assert found["ep", 16, 1].operator == "AlltoAll"
    assert found["tp", 2, 1].seconds == TimeModel(HARDWARE)._collective(tokens * hidden * bf16, 2, 1)


def test_context_parallel_groups_lie_between_tensor_and_data():
    found = {one.group: one for one in collectives_of(config("telechat3_1119b/context_128k"), HARDWARE)}
    assert (found["cp"].ranks, found["cp"].stride) == (8, 8)


def test_a_recipe_of_one_device_has_no_groups():
    assert collectives_of(config("mini/pretrain"), HARDWARE) == []


@pytest.mark.parametrize("devices", [0, 15, 64, 512])
def test_the_groups_of_a_kind_are_apart_and_inside_the_devices(devices):
    for one in collectives_of(config("telechat3_438b/pretrain_4k"), HARDWARE):
        groups = one.groups(devices)
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks)) == len(groups) * one.ranks
        assert all(0 <= rank < devices for rank in ranks)
        assert all(b - a == one.stride for group in groups for a, b in pairwise(group))
        assert len(ranks) == devices // (one.ranks * one.stride) * one.ranks * one.stride
