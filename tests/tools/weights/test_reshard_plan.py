"""These tests compare which rank writes what, and what it costs, with slow counting.

Layouts from recipes against those that MindFormers wrote for runs of them (frozen/layouts.json, see freeze.py).
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.weights.test_reshard import slices_of
from tests.training.runs import ROOT
from tools.estimate import configuration
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import static_memory
from tools.layout.resolve import resolve
from tools.model import parameters
from tools.recipe.load import load_recipe
from tools.weights import reshard_target
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import table
from tools.weights.reshard_plan import Plan, numbers, plan_moves
from tools.weights.reshard_target import Layout, target_of


@st.composite
def layouts(draw, axes):
    """A layout of a tensor of `axes` axes whose lengths 8 divides: a matrix of up to eight devices, on one stage."""
    devices = tuple(draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)))
    cutting = draw(st.permutations(range(len(devices))))
    count = draw(st.integers(0, len(devices)))
    owners = [draw(st.integers(0, axes - 1)) for _ in range(count)]
    own = tuple(tuple(a for a, o in zip(cutting, owners, strict=False) if o == axis) for axis in range(axes))
    return Layout(devices, own, draw(st.sampled_from([0, 2])))


def slow_places(layout):
    """rank -> its slice, as MindFormers' `_get_global_offset_and_replica_id_from_layout` counts: digit by digit."""
    found = {}
    for rank, index in enumerate(np.ndindex(*layout.devices)):
        place, stride = 0, 1
        for axis in reversed([axis for own in layout.axes for axis in own]):
            place += index[axis] * stride
            stride *= layout.devices[axis]
        found[layout.first + rank] = place
    return found


@settings(max_examples=60)
@given(layouts(2), layouts(2))
def test_the_costs_of_a_plan_are_those_of_moving_each_number(old, new):
    shape, world = (8, 16), 10
    whole = np.arange(math.prod(shape)).reshape(shape)
    moves = plan_moves([("a", "F32", "model", old.lying(shape), new)], world)
    found = numbers(Plan(moves, (), world, "x"))
    before, after = slices_of(whole, old.cuts), slices_of(whole, new.cuts)
    had, gets = slow_places(old), slow_places(new)
    online = dict.fromkeys(range(world), 0)
    for rank, place in gets.items():
        online[rank] = sum(part.size for part in before if np.isin(part, after[place]).any())
    stays = sum(
        np.isin(after[place], before[had[rank]]).sum() for place, rank in enumerate(moves[0].writers) if rank in had
    )
    assert all(gets[rank] == place for place, rank in enumerate(moves[0].writers)), "a writer is a holder"
    assert found.bytes == 4 * whole.size and found.changing == 4 * (whole.size - stays)
    assert (found.online, found.online_rank) == (4 * sum(online.values()), 4 * max(online.values()))
    assert found.loading == 4 * sum(after[place].size for place in gets.values())


def test_copies_are_written_once_and_dealt_evenly():
    layout = Layout((4,), ((),), 0)
    moves = plan_moves([(str(i), "F32", "model", layout.lying((8,)), layout) for i in range(8)], 4)
    assert sorted(move.writers for move in moves) == sorted([(rank,) for rank in range(4)] * 2)
    moves = plan_moves([(str(n), "F32", "model", layout.lying((n,)), layout) for n in (24, 8, 9, 10, 11)], 4)
    assert [move.writers for move in moves] == [(0,), (1,), (2,), (3,), (1,)], "by bytes, not by tensors"
    alone = Layout((1,), ((),), 0)
    held = [("own", alone), *((str(i), layout) for i in range(3))]
    moves = plan_moves([(name, "F32", "model", each.lying((8,)), each) for name, each in held], 4)
    assert [move.writers for move in moves] == [(rank,) for rank in range(4)], "what only one rank holds counts, too"


def test_a_layout_in_mindspores_words():
    layout = Layout((2, 1, 2), ((2, 0), ()), 4)
    assert layout.lying((8, 6)).holders == ((4,), (6,), (5,), (7,))
    assert layout.as_metadata() == {
        "device_matrix": [2, 1, 2],
        "tensor_map": [[0, 2], -1],
        "interleaved_parallel": False,
        "alias_name": ["a", "b", "c"],
        "rank_list": [4, 5, 6, 7],
    }


FROZEN = json.loads((ROOT / "tests/tools/weights/frozen/layouts.json").read_text())
FULL = ["105b/pretrain_4k", "438b/pretrain_4k", "438b/pretrain_4k_searched", "1119b/pretrain_4k", "36b/pretrain_8k"]


@pytest.mark.parametrize("recipe", FROZEN)
def test_layouts_are_those_that_a_run_wrote(recipe):
    found = target_of(load_recipe(ROOT / recipe))
    for name, (shape, cuts, ranks) in FROZEN[recipe].items():
        lying = found.place(name, tuple(shape)).lying
        assert (list(lying.cuts), list(map(list, lying.holders))) == (cuts, ranks), name
    assert found.weights.keys() <= FROZEN[recipe].keys(), "no weight that the run has not"
    assert all(list(placed.shape) == FROZEN[recipe][name][0] for name, placed in found.weights.items())


@pytest.mark.parametrize("recipe", FULL)
def test_a_full_size_recipe_holds_what_the_estimator_counts(recipe):
    loaded = load_recipe(ROOT / "recipes" / f"telechat3_{recipe}.yaml")
    found, config = target_of(loaded), from_recipe(resolve(loaded))
    assert sum(int(np.prod(placed.shape)) for placed in found.weights.values()) == parameters(config.model)
    held = [0] * config.pp
    for placed in found.weights.values():
        parts = np.prod(placed.shape) // np.prod(placed.layout.cuts)
        held[placed.layout.first // found.stage] += int(parts)  # a slice on each rank of the stage
    lent = bool(config.model.mtp)  # the embedding, to the last stage
    for number in range(config.pp - lent):
        assert 4 * held[number] == static_memory(config, number)[0], f"stage {number}"


@pytest.mark.parametrize("recipe", ["105b/pretrain_4k", "1119b/pretrain_4k"])
def test_names_and_shapes_are_those_of_the_conversion(recipe):
    loaded = load_recipe(ROOT / "recipes" / f"telechat3_{recipe}.yaml")
    wanted = {entry.mindformers: entry.shape for entry in table(model_of(loaded)) if entry.trained}
    assert {name: placed.shape for name, placed in target_of(loaded).weights.items()} == wanted


def test_gates_of_hyper_connections_lie_as_a_run_wrote_them():
    """As metadata.json of a run on two data-parallel ranks had them; only the matrix is shared by the optimizer."""
    recipe = load_recipe(ROOT / "tests" / "training" / "sharded_zero.yaml")
    recipe["plugins"]["hyper_connections"] = {"streams": 4}
    found = target_of(recipe).weights
    cuts = {name: found[f"decoder.layers.0.attn_hc.hc_{name}"].lying.cuts for name in ("fn", "base", "scale")}
    assert cuts == {"fn": (2, 1), "base": (1,), "scale": (1,)}


def test_shards_over_some_copies_lie_on_neighbours(monkeypatch):
    """optimizer_weight_shard_size 4 of dp 4 x cp 2: the inner half of dp, and cp."""
    config = from_recipe(load_recipe(ROOT / "tests" / "training" / "sharded_zero.yaml"))
    config = replace(config, dp=4, cp=2, tp=1, ep=1, shard_size=4)
    monkeypatch.setattr(configuration, "weight_shards", lambda weight, config: 4)
    name, weight = next(reshard_target._held(config, 0))
    devices, axes = reshard_target._cut(weight, config)
    lying = reshard_target.Layout(devices, axes, 0).lying(reshard_target._shape(weight))
    assert name == "embedding.word_embeddings.weight" and lying.cuts == (4, 1)
    assert lying.holders == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [("interleaved_1f1b", [[0, 3, 4, 5], [1, 2, 6]]), ("zero_bubble_v", [[0, 4, 5, 6], [1, 2, 3]])],
)
def test_layers_are_numbered_as_they_run(schedule, numbers):
    """Chunks of 1 and 2 layers, then of 3 and 1; in a V the second chunk runs back."""
    config = from_recipe(load_recipe(ROOT / "tests" / "training" / "sharded_pp2.yaml"))
    model = replace(config.model, pattern=("dense", *["moe"] * 6))
    config = replace(config, model=model, layers=((1, 2), (3, 1)), schedule=schedule)
    assert [config.layer_numbers(stage) for stage in range(2)] == numbers
