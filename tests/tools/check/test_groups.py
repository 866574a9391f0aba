"""Degrees whose communication groups MindSpore refuses without an NPU: what its front end said about such graphs."""

import itertools

import pytest

from tools.accuracy.equivalence.sharding import Sharding, derive_sharded
from tools.accuracy.equivalence.strategies import one_worker
from tools.check.check import check_recipe
from tools.check.groups import Group, _made, refused_group, splits_over
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides


@pytest.mark.parametrize(
    ("made", "groups"),
    [
        (True, [(4, 2), (3, 8), (6, 4), (24, 1), (12, 2), (40, 1)]),
        (False, [(2, 3), (3, 2), (3, 1), (6, 1), (4, 3), (3, 4), (12, 1), (2, 6), (4, 6), (7, 1), (16, 3), (2, 5)]),
    ],
)
def test_groups_that_mindspore_makes_and_refuses(made, groups):
    """A matrix product whose sum was divided over (count, stride) of 24 to 120 ranks."""
    assert {group: _made(Group("", *group)) for group in groups} == dict.fromkeys(groups, made)


@pytest.mark.parametrize(
    ("degrees", "refused"),
    [
        ({"dp": 8, "tp": 3}, Group("model_parallel", 3, 1)),
        ({"dp": 6, "tp": 4}, None),
        ({"dp": 3, "tp": 4}, Group("data_parallel", 3, 4)),
        ({"dp": 24, "ep": 3}, Group("expert_parallel", 8, 3)),
        ({"dp": 4, "cp": 6}, Group("context_parallel", 6, 1)),
    ],
)
def test_degrees_with_a_group_that_mindspore_refuses(degrees, refused):
    """Training steps on 24 devices; the third row in two stages."""
    assert refused_group(**{"dp": 1, "cp": 1, "tp": 1, **degrees}) == refused


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "shard", "refused"),
    [
        (12, 2, 1, 6, Group("optimizer_weight_shard_size", 6, 2)),
        (12, 2, 1, 4, None),
        (12, 2, 1, 2, None),
        (3, 8, 1, 3, Group("optimizer_weight_shard_size", 3, 1)),
        (24, 1, 1, 8, None),
        (24, 1, 1, 3, Group("optimizer_weight_shard_size", 3, 1)),
        (24, 1, 1, -1, None),
    ],
)
def test_parts_of_copies_over_which_the_optimizer_is_sharded(dp, tp, ep, shard, refused):
    assert refused_group(dp, 1, tp, ep) is None
    assert refused_group(dp, 1, tp, ep, shard) == refused


def test_powers_of_two_are_never_refused_and_few_numbers_of_devices_taken():
    for degrees in itertools.product((1, 2, 4, 8, 16), repeat=3):
        assert all(refused_group(*degrees, ep) is None for ep in (1, 2, 4, 8) if degrees[0] * degrees[2] % ep == 0)
    assert [number for number in range(1, 33) if splits_over(number)] == [1, 2, 4, 8, 16, 24, 32]


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (Sharding(tp=3, sp=True), "data_parallel: the degrees make 3 devices, and MindSpore splits a model over 1, 2"),
        (
            Sharding(dp=4, tp=6, sp=True),
            "model_parallel: without an NPU MindSpore makes no communication group of 6 ranks that are 1 apart, as",
        ),
        (Sharding(dp=2, tp=2, sp=True), None),
    ],
)
def test_a_recipe_with_such_a_group_is_refused(sharding, words):
    base = one_worker("tests/training/by_three.yaml")
    found = [each.words for each in check_recipe(derive_sharded(base, sharding, 1, "corpus")).errors]
    assert [each for each in found if "MindSpore" in each] == found[: bool(words)]
    assert words is None or found[0].startswith(f"parallel_config.{words}")


def test_on_devices_of_today_only_the_number_of_devices_is_refused():
    """MindSpore compares servers only where it knows no NPU, or one of the kind 910A."""
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    for data_parallel, notes in ((3, 1), (4, 0)):
        degrees = [f"parallel_config.data_parallel={data_parallel}", "parallel_config.model_parallel=4"]
        found = check_recipe(apply_overrides(recipe, [*degrees, "parallel_config.expert_parallel=1"]))
        assert not any("MindSpore" in each.words for each in [*found.errors, *found.warnings])
        assert sum("tc3 dryrun cannot compile" in each.words for each in found.findings) == notes
