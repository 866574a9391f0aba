"""Four ranks as threads over the mesh of CPU runs; the tensors are arrays of their own that note who writes them."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import ClusterError
from plugins.expert_balance import executor
from plugins.expert_balance.executor import routes
from plugins.semi_auto_cpu.compile import slice_of
from tests.plugins.cpu_backend.ranks import meshes, on_ranks

RANKS, EXPERTS, LAYERS = 4, 12, 2
EACH = EXPERTS // RANKS
HERE = np.tile(np.arange(EXPERTS), (LAYERS, 1))


class Held:
    """A `Held` stands in for a parameter, with the methods that the executor calls."""

    def __init__(self, value):
        self.value, self.written = value, 0

    def asnumpy(self):
        return self.value


def write(held, value):
    assert value.shape == held.value.shape and value.dtype == held.value.dtype
    held.value, held.written = value, held.written + 1


def logical(layer):
    """Weights and moments of all experts of a layer, of three shapes and two types."""
    rng = np.random.default_rng(layer)
    return [
        rng.normal(size=(EXPERTS * 4, 3)).astype(np.float32),
        rng.normal(size=(EXPERTS, 2, 5)).astype(np.float16),
        rng.normal(size=(EXPERTS * 2, 1)).astype(np.float32),
    ]


def part(whole, slots, rank):
    """The rows of a tensor that `rank` holds under a placement."""
    here = np.argsort(slots)[rank * EACH : (rank + 1) * EACH]
    return whole.reshape(EXPERTS, -1)[here].reshape(-1, *whole.shape[1:])


def layers_of(ranks):
    return [
        executor.Layer(
            layer,
            layer,
            Held(np.arange(EXPERTS, dtype=np.int32)),
            [executor.Slice(Held(part(each, HERE[0], ranks.rank)), ranks) for each in logical(layer)],
        )
        for layer in range(LAYERS)
    ]


def held(layer):
    """All that a move may write of a layer."""
    return [layer.placement, *(tensor.parameter for tensor in layer.tensors)]


def shuffled(seed):
    return np.stack([np.random.default_rng([seed, layer]).permutation(EXPERTS) for layer in range(LAYERS)])


def check_in_place(layers, slots, rank):
    for number, layer in enumerate(layers):
        assert np.array_equal(layer.placement.value, slots[number])
        for tensor, whole in zip(layer.tensors, logical(number), strict=True):
            assert np.array_equal(tensor.parameter.value, part(whole, slots[number], rank))


@pytest.fixture(scope="module")
def mesh():
    with meshes(RANKS) as mesh:
        yield mesh


@settings(max_examples=30)
@given(st.permutations(range(8)), st.permutations(range(8)), st.sampled_from([1, 2, 4, 8]))
def test_each_expert_leaves_one_place_and_arrives_at_its_own(old, new, devices):
    old, new, each = np.array(old), np.array(new), 8 // devices
    every = [routes(old, new, devices, rank) for rank in range(devices)]
    went = np.full(8, -1)
    for rank, (leave, _) in enumerate(every):
        for peer, places in enumerate(leave):
            arrive = every[peer][1][rank]
            assert len(arrive) == len(places)
            for place, there in zip(places, arrive, strict=True):
                expert = int(np.flatnonzero(old == rank * each + place)[0])
                went[expert] = peer * each + there
    assert np.array_equal(went, new)


def test_rows_are_where_each_of_ten_placements_says_and_every_byte_is_counted(mesh):
    plans = [HERE, *map(shuffled, range(10))]

    def work(rank):
        layers, sent = layers_of(mesh[rank]), 0
        for old, new in pairwise(plans):
            sent += executor.move(mesh[rank], layers, old, new, write)
            check_in_place(layers, new, rank)
        return sent

    moved = sum((new // EACH != old // EACH).sum() for old, new in pairwise(plans))
    bytes_of_an_expert = sum(each.nbytes for each in logical(0)) // EXPERTS
    assert sum(on_ranks(RANKS, work)) == moved * bytes_of_an_expert


@settings(max_examples=60)
@given(st.data())
def test_the_ranks_of_a_stage_hold_the_slices_that_mindspore_cuts(data):
    """Against `slice_of`, with which every weight is compared after a compile."""
    mesh = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    cuts = data.draw(st.lists(st.sampled_from(range(-1, len(mesh))), min_size=1, unique=True))
    parts = math.prod(mesh[len(mesh) - 1 - axis] for axis in cuts if axis != -1)
    copies = math.prod(mesh) // parts
    slices = parts * data.draw(st.sampled_from([each for each in range(1, copies + 1) if copies % each == 0]))
    sets = executor.holders(mesh, cuts, slices)
    assert sorted(sets.flat) == list(range(math.prod(mesh))), "each rank once"
    layout = (mesh, [cuts], None, None, None, "", (slices,))
    for ranks in sets.tolist():
        assert [int(slice_of(np.arange(slices), layout, rank, 1)[0]) for rank in ranks] == list(range(slices))


class Among:
    """Some ranks of a mesh, in their order."""

    def __init__(self, mesh, members):
        self.mesh, self.members = mesh, members
        self.rank, self.size = members.index(mesh.rank), len(members)

    def all_to_all_v(self, group, tag, parts, rows=None):
        assert list(group) == list(range(self.size))
        return self.mesh.all_to_all_v(self.members, tag, parts, rows)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.permutations(range(6)))
def test_two_groups_of_two_ranks_move_alike_and_what_a_sharded_optimizer_has_cut_travels_in_parts(mesh, old, new):
    """Six experts: whole ones of a group's rank, and slices that hold one expert and a half each."""
    old, new = np.array(old), np.array(new)
    rng = np.random.default_rng(0)
    wholes = [(2, rng.normal(size=(6 * 4, 3)).astype(np.float32)), (4, rng.normal(size=(6 * 2, 5)).astype(np.float16))]

    def slice_of_rank(slots, rank, slices, whole):
        (row,) = (each for each in executor.holders((2, 2), [0], slices).tolist() if rank in each)
        by_slot = whole.reshape(6, -1)[np.argsort(slots)].reshape(whole.shape)
        return np.split(by_slot, slices)[row.index(rank)].copy(), row

    def work(rank):
        tensors = []
        for slices, whole in wholes:
            value, row = slice_of_rank(old, rank, slices, whole)
            tensors.append(executor.Slice(Held(value), Among(mesh[rank], row)))
        layer = executor.Layer(0, 5, Held(old.astype(np.int32)), tensors)
        executor.move(mesh[rank], [layer], old[None], new[None], write)
        assert np.array_equal(layer.placement.value, new)
        for tensor, (slices, whole) in zip(tensors, wholes, strict=True):
            assert np.array_equal(tensor.parameter.value, slice_of_rank(new, rank, slices, whole)[0])

    on_ranks(RANKS, work)


def test_stages_with_layers_of_their_own_follow_one_plan(mesh):
    """Ranks 0 and 1 have a plan's first layer, ranks 2 and 3 its last one."""
    old, new = np.tile(np.arange(4), (3, 1)), np.array([[3, 2, 1, 0], [0, 1, 2, 3], [1, 0, 3, 2]])

    def work(rank):
        row, members = (0, [0, 1]) if rank < 2 else (2, [2, 3])
        place = members.index(rank)
        tensor = executor.Slice(Held(np.arange(4).reshape(2, 2)[place].copy()), Among(mesh[rank], members))
        layer = executor.Layer(row, row, Held(old[row]), [tensor])
        executor.move(mesh[rank], [layer], old, new, lambda held, value: setattr(held, "value", value))
        assert np.array_equal(tensor.parameter.value, np.argsort(new[row]).reshape(2, 2)[place])

    on_ranks(RANKS, work)


def test_a_layer_whose_placement_stays_is_not_written(mesh):
    new = np.stack([HERE[0], shuffled(1)[1]])

    def work(rank):
        layers = layers_of(mesh[rank])
        executor.move(mesh[rank], layers, HERE, new, write)
        return [[each.written for each in held(layer)] for layer in layers]

    assert on_ranks(RANKS, work) == [[[0] * 4, [1] * 4]] * RANKS


def nothing_written(layers):
    return not any(each.written for layer in layers for each in held(layer))


def refused(size, mesh, work):
    """Return the error message of each rank."""

    def one(rank):
        with pytest.raises(ClusterError) as caught:
            work(rank)
        return str(caught.value)

    return on_ranks(size, one)


def test_a_rank_with_another_plan_is_named_by_all_and_nobody_moves(mesh):
    every = [layers_of(each) for each in mesh]

    def work(rank):
        executor.move(mesh[rank], every[rank], HERE, shuffled(9 if rank == 2 else 1), write)

    for told in refused(RANKS, mesh, work):
        assert "ranks [2] do not have the same plan as rank 0" in told
    assert all(map(nothing_written, every))


def test_a_rank_that_starts_from_another_placement_is_found(mesh):
    every = [layers_of(each) for each in mesh]

    def work(rank):
        executor.move(mesh[rank], every[rank], shuffled(5) if rank == 3 else HERE, shuffled(1), write)

    assert all("ranks [3]" in told for told in refused(RANKS, mesh, work))
    assert all(map(nothing_written, every))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rank_that_dies_in_the_exchange_of_a_layer_lets_nobody_write_it(after):
    """Rank 1 is gone after as many of the three tensors of the first layer: never does a part of a layer change."""
    with meshes(RANKS) as mesh:
        every = [layers_of(each) for each in mesh]
        exchange, seen = mesh[1].all_to_all_v, []

        def dying(group, tag, parts, rows=None):
            seen.append(rows)
            if len([each for each in seen if each is not None]) > after:
                mesh[1].close()
            return exchange(group, tag, parts, rows)

        mesh[1].all_to_all_v = dying
        told = refused(RANKS, mesh, lambda rank: executor.move(mesh[rank], every[rank], HERE, shuffled(1), write))
    assert all("rank 1" in each for each in told)
    assert all(map(nothing_written, every))


def test_a_rank_that_dies_before_it_says_that_all_is_here_lets_nobody_write():
    with meshes(RANKS) as mesh:
        every = [layers_of(each) for each in mesh]
        exchange, seen = mesh[1].all_to_all_v, []

        def dying(group, tag, parts, rows=None):
            seen.append(rows)
            if len(seen) == 1 + 3 + 1:  # the plan, three tensors, and then the word that they are here
                mesh[1].close()
            return exchange(group, tag, parts, rows)

        mesh[1].all_to_all_v = dying
        refused(RANKS, mesh, lambda rank: executor.move(mesh[rank], every[rank], HERE, shuffled(1), write))
    assert all(map(nothing_written, every))


def test_a_rank_with_other_shapes_raises_and_nobody_writes():
    with meshes(RANKS) as mesh:
        every = [layers_of(each) for each in mesh]
        every[3][0].tensors[1].parameter.value = np.zeros((EACH, 2, 6), np.float16)
        refused(RANKS, mesh, lambda rank: executor.move(mesh[rank], every[rank], HERE, shuffled(1), write))
    assert all(map(nothing_written, every))


def test_loads_are_added_up_and_rank_0_hands_out(mesh):
    own = np.arange(6, dtype=np.int64).reshape(2, 3)
    sums = on_ranks(RANKS, lambda rank: executor.total(mesh[rank], (rank + 1) * own))
    assert all(np.array_equal(each, 10 * own) for each in sums)
    first = np.arange(8).reshape(2, 4)
    got = on_ranks(RANKS, lambda rank: executor.from_first(mesh[rank], first if rank == 0 else first[:0]))
    assert all(np.array_equal(each, first) for each in got)
