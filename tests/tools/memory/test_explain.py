"""Proposals against running out of memory: each is predicted from its own keys, and what is said to fit does."""

import pytest

from plugins.errors import RecipeError
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.changes import checked_advice, fewest_recomputed, pairs_of_changes, single_changes
from tools.estimate.memory.model import peak_memory, stage_memory
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, room_of
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB
from tools.memory.explain import explain, verdict
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

GRADIENTS = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
EP = "parallel_config.expert_parallel"


@pytest.fixture(scope="module")
def times():
    return TimeModel(cluster(DEFAULT_HARDWARE))


def public_48():
    """MindFormers' row of 48 devices, with an offset that its own check accepts and a micro-batch for each stage."""
    changes = {
        **{"data_parallel": 1, "model_parallel": 8, "pipeline_stage": 6, "expert_parallel": 1, "micro_batch_num": 8},
    }
    sets = [f"parallel_config.{key}={value}" for key, value in changes.items()]
    sets += ["model.model_config.offset=[1,1,1,0,0,0]", "context.max_device_memory=58GB"]
    return apply_overrides(load_recipe("recipes/telechat3_105b/pretrain_4k.yaml"), sets)


def test_the_public_row_of_48_devices_needs_expert_parallelism(times):
    """Compiled by `tc3 dryrun --quick`: 120.6 to 139.3 GiB at ep 1, 35.7 to 43.4 at ep 8; the limit is 58."""
    recipe = public_48()
    assert min(stage_memory(from_recipe(recipe), s).peak for s in range(6)) > 120 * GIB
    room = room_of(recipe, times.hardware)
    found = explain(recipe, times, room)
    best, by_keys = found[0], {tuple(row.keys): row for row in found}
    assert best.keys == {EP: 8} and best.fit == FITS and not best.refused
    assert best.peak / GIB == pytest.approx(43.2, abs=0.2)
    alone = by_keys[(GRADIENTS,)]
    assert alone.fit == DOES_NOT_FIT and alone.peak > 67 * GIB
    assert "does not finish compiling" in alone.refused
    said = checked_advice(recipe, int(58 * GIB))
    enough, short = said.split("not enough by itself")
    assert "expert_parallel times 8 (43.2 GiB)" in enough and "expert_parallel times 2" in short
    assert "shard accumulated gradients" not in said  # in a pipeline their compile does not end


def test_each_proposal_is_what_its_keys_give(times):
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    room = room_of(recipe, times.hardware, 30)
    found = explain(recipe, times, room)
    own = peak_memory(from_recipe(recipe))
    assert [row for row in found if row.refused] == [row for row in found if GRADIENTS in row.keys] == found[-1:]
    taken = [row for row in found if not row.refused]
    assert [row.fit for row in taken] == sorted((row.fit for row in taken), key=[FITS, "unknown", DOES_NOT_FIT].index)
    fitting = [row.step_s for row in taken if row.fit == FITS]
    assert len(fitting) > 2 and fitting == sorted(fitting)
    for row in found:
        sets = [f"{key}={value}" for key, value in row.keys.items()]
        again = from_recipe(apply_overrides(recipe, sets))
        assert again.devices == 4096 and again.global_batch == from_recipe(recipe).global_batch
        assert peak_memory(again) == row.peak == pytest.approx(own - row.freed)
        assert row.freed > 0 and row.fit == verdict(row.peak, room)


def test_two_together_where_one_is_not_enough(times):
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    found = explain(recipe, times, room_of(recipe, times.hardware, 13))
    assert any("; " in row.name for row in found)
    config, limit = from_recipe(recipe), 12.0 * GIB
    single = min(change.peak for change in single_changes(config, limit))
    assert min(change.peak for change in pairs_of_changes(config, limit)) < single


def test_as_few_layers_are_recomputed_as_fit():
    recipe = apply_overrides(
        load_recipe("recipes/telechat3_105b/pretrain_4k.yaml"), ["recompute_config.recompute=false"]
    )
    config = from_recipe(recipe)
    limit = 0.6 * peak_memory(config)
    changed = fewest_recomputed(config, limit)
    counts = changed.recompute.full[0]
    for stage, count in enumerate(counts):
        assert stage_memory(changed, stage).peak <= limit or count == config.layers[0][stage]
    assert 0 < sum(counts) < config.model.layers
    assert fewest_recomputed(config, 2 * peak_memory(config)) is None


def test_nothing_is_proposed_where_nothing_is_known(times):
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    config = from_recipe(recipe)
    assert all(change.peak < peak_memory(config) for change in single_changes(config, 50 * GIB))


def test_of_level3_nothing_is_said(times):
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    recipe["parallel"]["parallel_optimizer_config"] = {"optimizer_level": "level3"}
    with pytest.raises(RecipeError, match="with level3 fits is unknown"):
        room_of(recipe, times.hardware)
    assert checked_advice(recipe, 10 * GIB).startswith("what would make it fit is unknown: ")
