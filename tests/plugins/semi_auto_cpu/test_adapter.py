"""These tests check which recipes run as the sharded graph on CPU and which operators are computed in Python; what a
rank holds of a weight by MindSpore's layout of the weight; which ranks a group has of which MindSpore's C++ tells the
name only, and the place of a rank in its group; and that layers that are recomputed one by one share nothing in the
sharded graph of a step of one stage (docs/memory.md).
"""

from itertools import chain, combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore.context import ParallelMode

from plugins import telechat3_moe
from plugins.cpu_backend.model import on_cpu
from plugins.errors import ClusterError
from plugins.semi_auto_cpu import adapter
from plugins.semi_auto_cpu.chosen import chosen, splits_model
from plugins.semi_auto_cpu.communication import CollectiveManager
from plugins.semi_auto_cpu.compile import refuse_wrong_slices, slice_of
from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.ranks import Ranks, made_up_name, members_of
from tests.plugins.test_output_biases import config


def test_what_mindspores_backend_adds_itself_is_python_s_from_the_start(monkeypatch):
    """TensorMove is in no graph that the pass sees, and MindSpore's own refuses bfloat16, whatever the weights are."""
    registered, replaced = [], {}
    library = SimpleNamespace(
        set_host=lambda function, rank: None,
        set_cluster=lambda ranks: None,
        replace=lambda name, low=False: replaced.setdefault(name, low),
        register=registered.append,
        add_pass=lambda done, missing: None,
    )
    monkeypatch.setattr(adapter.library, "load", lambda: library)
    adapter.Host(Ranks(1, 0), SimpleNamespace(size=1, rank=0), lambda: None)
    assert "TensorMove" in registered
    assert set(replaced) >= KERNELS.keys() | LOW_PRECISION.keys()


@pytest.mark.parametrize(
    ("mode", "splits", "runs"),
    [
        (0, False, False),
        (1, True, True),
        ("SEMI_AUTO_PARALLEL", True, True),
        ("semi_auto_parallel", True, True),
        (2, True, False),
        ("DATA_PARALLEL", False, False),
        (None, False, False),
    ],
)
def test_the_mode_decides(mode, splits, runs):
    parallel = {} if mode is None else {"parallel_mode": mode}
    assert splits_model(mode) == splits
    assert chosen({"context": {"device_target": "CPU"}, "parallel": parallel}) == runs
    assert not chosen({"context": {"device_target": "Ascend"}, "parallel": parallel})
    assert not chosen({"parallel": parallel}) and not chosen({})


@pytest.mark.parametrize("spoilt", [5, "text", [1]])
@pytest.mark.parametrize("section", ["context", "parallel"])
def test_a_section_that_is_no_mapping_chooses_nothing(section, spoilt):
    recipe = {"context": {"device_target": "CPU"}, "parallel": {"parallel_mode": 1}, section: spoilt}
    assert not chosen(recipe)


WHOLE = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)
LAYOUTS = [
    ([2, 2], [-1, 0], 2),  # dp2 tp2: columns over neighbours, the optimizer over ranks 0 and 2, 1 and 3
    ([2, 2], [0, -1], 2),
    ([2, 2], [1, -1], 2),  # cut by the first axis: neighbours are the copies
    ([2, 2], [-1, -1], 4),
    ([2, 2], [1, 0], 1),
    ([4, 2], [-1, 0], 2),  # optimizer_weight_shard_size: 2 of 4 copies
    ([2, 2, 2], [1, -1], 4),
    ([2, 3, 2], [-1, 0], 6),
    ([2, 3, 2], [-1, 1], 2),
    ([2, 2, 3], [(2, 1), 0], 1),
]


def slowly(mesh, cuts, shards, rank):
    """By trying all ranks: those with the same slice, of which `shards` neighbours share it in their order."""

    def slice_and_index(other):
        place = list(product(*map(range, mesh)))[other]
        part, where = WHOLE, []
        for dimension, axes in enumerate(cuts):
            for axis in axes if isinstance(axes, tuple) else (axes,):
                if axis >= 0:
                    count, index = mesh[::-1][axis], place[::-1][axis]
                    part = np.split(part, count, dimension)[index]
                    where.append(index)
        return part, where

    part, mine = slice_and_index(rank)
    copies = [other for other in range(np.prod(mesh)) if slice_and_index(other)[1] == mine]
    return np.split(part.ravel(), shards)[copies.index(rank) % shards]


@pytest.mark.parametrize(("mesh", "cuts", "shards"), LAYOUTS)
def test_each_rank_holds_its_part(mesh, cuts, shards):
    for stage, rank in product(range(2), range(int(np.prod(mesh)))):
        want = slowly(mesh, cuts, shards, rank)
        layout = (mesh, cuts, [], 0, True, "", list(WHOLE.shape))
        found = slice_of(WHOLE, layout, stage * int(np.prod(mesh)) + rank, want.size)
        assert np.array_equal(found.ravel(), want), f"rank {rank}"


def test_another_part_is_refused():
    """Rank 1 of dp2 tp2 with the second part of its columns, which is rank 3's."""
    layout = ([2, 2], [-1, 0], [24, 6], 0, True, "2-4190060298023907007", [24, 12])
    columns = WHOLE[:, 6:]

    def check(held, rank):
        weight = SimpleNamespace(name="w", asnumpy=lambda: held)
        cell = SimpleNamespace(parameter_layout_dict={"w": layout}, get_parameters=lambda: [weight])
        refuse_wrong_slices(cell, {"w": WHOLE}, rank)

    check(columns[:12], 1)
    check(columns[12:], 3)
    with pytest.raises(ClusterError, match=r"rank 1: the slice that MindSpore cut out of w is not .* map \[-1, 0\]"):
        check(columns[12:], 1)


# read off MindSpore 2.9.0: parameter_layout_dict of compiles for 4 and 8 devices
NAMED = {
    (0, 2): "2-5208665662337742843",
    (1, 3): "2-4190060298023907007",
    (0, 1): "2-5004544844489628105",
    (1, 3, 5, 7): "4-2688051859485673701",
}
MESHES = ((2, 2), (4, 2), (2, 4), (2, 2, 2), (2, 2, 2, 2), (3, 2), (2, 3), (6, 4), (2, 3, 2), (5, 3), (4, 2, 3, 2))


def groups_of(mesh, shards):
    """Slowly: every group of ranks that differ along some axes of a mesh only, cut into groups of `shards` ranks."""
    places = list(product(*(range(length) for length in mesh)))  # rank -> coordinates
    axes = chain.from_iterable(combinations(range(len(mesh)), count) for count in range(1, len(mesh) + 1))
    for varied in axes:
        together = {}
        for rank, place in enumerate(places):
            together.setdefault(tuple(x for axis, x in enumerate(place) if axis not in varied), []).append(rank)
        for group in together.values():
            size = shards if len(group) % shards == 0 else len(group)
            yield from (tuple(group[start : start + size]) for start in range(0, len(group), size))


def test_names_are_those_that_mindspore_gives():
    assert {ranks: made_up_name(ranks) for ranks in NAMED} == NAMED


def test_the_lines_of_an_axis_have_one_order_on_all_ranks_and_two_axes_have_two():
    near, far = ([made_up_name(line) for line in lines] for lines in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    orders = [(Ranks(4, rank).order_of(near[rank // 2]), Ranks(4, rank).order_of(far[rank % 2])) for rank in range(4)]
    assert len(set(orders)) == 1 and orders[0][0] != orders[0][1]
    assert Ranks(4, 0).order_of("unknown") == 0


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shards", [2, 3, 4, 1000])
def test_a_rank_knows_its_place_in_every_group_of_a_mesh(mesh, shards):
    devices = len(list(product(*(range(length) for length in mesh))))
    for group in set(groups_of(mesh, shards)):
        for place, rank in enumerate(group):
            ranks = Ranks(devices, rank)
            name = made_up_name(group)
            assert (ranks.ranks_of(name), ranks.rank_in(name), ranks.size_of(name)) == (group, place, len(group))


@settings(deadline=None)
@given(st.data(), st.integers(2, 48))
def test_pairs_of_any_ranks_are_known_and_other_ranks_groups_are_not(data, devices):
    first, second = sorted(data.draw(st.lists(st.integers(0, devices - 1), min_size=2, max_size=2, unique=True)))
    name = made_up_name((first, second))
    for rank in range(devices):
        assert members_of(name, devices, rank) == ((first, second) if rank in (first, second) else None)


def test_a_place_that_nothing_tells_is_refused():
    """No answer is better than a wrong one: it decides which slice of a weight a rank has."""
    ranks = Ranks(8, 1)
    told = r"rank 1 needs its index in group '3-77', whose ranks are unknown: MindSpore itself named"
    for ask in (ranks.rank_in, CollectiveManager(ranks).get_rank_id, CollectiveManager(ranks).get_group_ranks):
        with pytest.raises(ClusterError, match=told):
            ask("3-77")
    assert ranks.ranks_of("3-77") is None and ranks.size_of("3-77") == 3
    with pytest.raises(ClusterError, match="unknown"):
        ranks.rank_in(made_up_name((0, 2)))  # a group of others


def test_a_rank_of_many_devices_is_found():
    devices, rank = 6144, 3000
    group = tuple(range(rank % 8, devices, 8))
    assert members_of(made_up_name(group), devices, rank) == group


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mode", [ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.STAND_ALONE])
def test_a_graph_with_all_layers_in_one_has_layers_that_share_nothing(monkeypatch, whole, mode):
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)
    plain = config()
    plain.disable_lazy_inline = whole
    monkeypatch.setattr(telechat3_moe, "_get_parallel_mode", lambda: mode)
    layers = telechat3_moe.gpt_model(plain, on_cpu).decoder.layers
    shares_nothing = whole and mode == ParallelMode.SEMI_AUTO_PARALLEL
    assert {type(layer) for layer in layers} == {telechat3_moe.InTurn if shares_nothing else TransformerLayer}
