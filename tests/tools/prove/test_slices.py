"""Slices that start elsewhere on each rank, gathered pieces and flat values against NumPy on simulated ranks, and the
places of loose pieces.
"""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.tools.prove.test_spread import (
    RANKS,
    SIZES,
    anything,
    describes,
    gathered,
    groups,
    hold,
    piece,
    scattered,
    some_spread,
    spreads_like,
    whole_of,
)
from tools.dryrun.graph_text import Node
from tools.prove import moves, places, rules, slices, tokens
from tools.prove.call import Call
from tools.prove.experts import exchange_over
from tools.prove.moves import reduce_sum
from tools.prove.report import against
from tools.prove.spread import Alike, Block, Contradiction, NotKnown, Spread, Zeros, multiply, plain


@anything
def test_slices_that_start_elsewhere_on_each_rank(random: Random) -> None:
    axis, number = random.choice(list(SIZES)), random.choice([0, 1])
    given = some_spread(random, [6, 6])
    whole = whole_of(given, random)
    size = 6 // SIZES[axis]
    wanted = [size if at == number else 6 for at in range(2)]
    held = [
        np.split(each, SIZES[axis], number)[place[axis]]
        for each, place in zip(hold(given, whole, random), RANKS, strict=True)
    ]
    try:
        found = slices.take(given, wanted, {number: (axis,)}, SIZES)
    except Contradiction:
        assert not any(describes(each, whole, held) for each in spreads_like(wanted, whole.shape))
        return
    assert describes(found, whole, held)


@anything
def test_zeros_around_pieces(random: Random) -> None:
    axis = random.choice(list(SIZES))
    other = next(each for each in SIZES if each != axis)
    given = some_spread(random, [2, 3], partial=False)
    whole = whole_of(given, random)
    held = []
    for each, place in zip(hold(given, whole, random), RANKS, strict=True):
        padded = np.zeros((2 * SIZES[axis], 3))
        padded[2 * place[axis] : 2 * place[axis] + 2] = each
        held.append(padded)
    try:
        found = slices.pad(given, (2 * SIZES[axis], 3), {0: (axis,)}, SIZES)
    except Contradiction:
        assert given.dims[0] != (axis, 2) and given.dims[0] != (other, axis, 2)
        return
    if given.dims[0] == (axis, other, 2):
        return  # padding goes around the pieces of the other axis, too
    assert describes(found, whole, held)


@anything
def test_gathered_pieces_that_other_ranks_take(random: Random) -> None:
    """Redistribution gathers over one axis and lets the ranks along another take the pieces; the gradient goes back."""
    over, by, home = random.choice([("a", "a", 1), ("b", "b", 1), ("b", "b", 2), ("a", "b", 1), ("b", "a", 2)])
    dims: list[tuple] = [(), (2,), (4,)]
    dims[home] = (over, *dims[home])
    given = Spread(tuple(dims))
    whole = whole_of(given, random)
    held = gathered(hold(given, whole, random), (over,))
    stacked = moves.all_gather(given, (over,), SIZES)
    wanted = (1, *stacked.shape[1:])
    if SIZES[over] != SIZES[by]:
        with pytest.raises(NotKnown):
            slices.take(stacked, wanted, {0: (by,)}, SIZES)
        return
    taken = slices.take(stacked, wanted, {0: (by,)}, SIZES)
    own = [each[place[by]][None] for each, place in zip(held, RANKS, strict=True)]
    assert taken == given and describes(taken, whole, own)
    parts = []
    for each, place in zip(own, RANKS, strict=True):
        zeros = np.zeros(stacked.shape)
        zeros[place[by]] = each[0]
        parts.append(zeros)
    found = slices.pad(taken, stacked.shape, {0: (by,)}, SIZES)
    assert found.partial == {by} and describes(found, whole, parts)
    back = moves.reduce_scatter(found, (by,), SIZES)
    assert back == given and describes(back, whole, scattered(parts, (by,)))


@anything
def test_the_same_one_of_gathered_pieces_on_all_ranks(random: Random) -> None:
    """As a ReduceScatter leaves it that is left out: what it should have added up stays partial."""
    over, home = random.choice([("a", 1), ("b", 1), ("b", 2), ("a", 2)])
    dims: list[tuple] = [(), (2,), (4,)]
    dims[home] = (over, *dims[home])
    (other,) = (axis for axis in SIZES if axis != over)
    given = Spread(tuple(dims), partial=frozenset((other,) if random.random() < 0.5 else ()))
    whole, number = whole_of(given, random), random.randrange(SIZES[over])
    held = gathered(hold(given, whole, random), (over,))
    stacked = moves.all_gather(given, (over,), SIZES)
    found = slices.take(stacked, (1, *stacked.shape[1:]), {}, SIZES)
    assert describes(found, np.split(whole, SIZES[over], home)[number], [each[number][None] for each in held])


def test_pieces_gathered_over_two_axes_are_taken_along_a_third() -> None:
    """A redistribution of a sequence that two axes of context parallelism cut, to the ranks of data parallelism."""
    sizes = {"a": 2, "b": 2, "c": 4}
    places = [{"a": a, "b": b, "c": c} for a in range(2) for b in range(2) for c in range(4)]
    given, wanted = Spread(((), ("a", "b", 2), (3,))), Spread(((), ("c", 2), (3,)))
    whole = np.random.default_rng(3).standard_normal((1, 8, 3))
    stacked = moves.all_gather(given, ("a", "b"), sizes)
    assert stacked.shape == (4, 2, 3) and slices.take(stacked, (1, 2, 3), {0: ("c",)}, sizes) == wanted
    for place in places:
        group = [place | {"a": a, "b": b} for a in range(2) for b in range(2)]
        own = np.concatenate([piece(given, whole, each, sizes) for each in group])[[place["c"]]]
        assert np.array_equal(own, piece(wanted, whole, place, sizes))
    with pytest.raises(NotKnown):  # in another order the pieces are no block
        slices.take(moves.all_gather(given, ("b", "a"), sizes), (1, 2, 3), {0: ("c",)}, sizes)


def test_exchanged_pieces_in_front_of_an_inner_dimension_are_taken_along_another_axis() -> None:
    """A redistribution of logits exchanges pieces several times before the ranks of another axis take them."""
    sizes = {"a": 2, "c": 2}
    given, wanted = Spread(((), ("a", 2), (4,), ())), Spread(((), ("c", 2), ("a", 2), ()))
    whole = np.random.default_rng(4).standard_normal((1, 4, 4, 1))
    stacked = moves.exchange(given, "a", 2, 3, sizes)
    assert stacked.shape == (1, 2, 2, 2)
    taken = slices.take(stacked, (1, 2, 2, 1), {3: ("c",)}, sizes)
    assert taken == wanted
    with pytest.raises(Contradiction, match="not cut along this axis"):
        slices.pad(taken, stacked.shape, {3: ("c",)}, sizes)
    padded = slices.stacked(taken, stacked.shape, {3: ("c",)}, sizes)
    assert padded == replace(stacked, partial=frozenset("c"))
    for a in range(2):
        sent = [piece(given, whole, {"a": other, "c": 0}, sizes)[:, :, 2 * a : 2 * a + 2] for other in range(2)]
        held, total = np.concatenate(sent, axis=3), np.zeros((1, 2, 2, 2))
        for c in range(2):
            own = held[..., c : c + 1]
            assert np.array_equal(own, piece(wanted, whole, {"a": a, "c": c}, sizes))
            total[..., c : c + 1] += own
        assert np.array_equal(total, held), "the parts of the padded gradient add up to the gradient of all pieces"


@pytest.mark.parametrize("kind", [Alike, Zeros])
def test_equal_elements_beside_zeros_are_not_equal_any_more(kind: type[Spread]) -> None:
    """Each rank pads its piece inside a dimension: only zeros stay what they are."""
    found = slices.stacked(kind(((2,), (), ("a", 3))), (2, 2, 3), {1: ("a",)}, {"a": 2})
    assert found is not None and found.partial == {"a"}
    assert type(found) is (Spread if kind is Alike else Zeros)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@anything
def test_pieces_gathered_over_one_axis_are_taken_along_another(order: tuple[str, str], random: Random) -> None:
    """On a mesh of two ranks each way, the sequence that was cut over one axis is then cut over the other."""
    sizes = {"a": 2, "b": 2}
    places = [{"a": a, "b": b} for a in range(2) for b in range(2)]
    over, by = order
    given = Spread(((), (over, 2), (3,)))
    whole = whole_of(given, random)[:, :4]
    held = [piece(given, whole, place, sizes) for place in places]
    stacked = moves.all_gather(given, (over,), sizes)
    other = [next(at for at, p in enumerate(places) if p == {**place, over: 1}) for place in places]
    first = [next(at for at, p in enumerate(places) if p == {**place, over: 0}) for place in places]
    both = [np.concatenate([held[one], held[two]]) for one, two in zip(first, other, strict=True)]
    taken = slices.take(stacked, (1, 2, 3), {0: (by,)}, sizes)
    assert taken == Spread(((), (by, 2), (3,)))
    own = [each[place[by]][None] for each, place in zip(both, places, strict=True)]
    for each, place in zip(own, places, strict=True):
        assert np.array_equal(piece(taken, whole, place, sizes), each)
    found = slices.pad(taken, (2, 2, 3), {0: (by,)}, sizes)
    assert found.partial == {by} and moves.reduce_scatter(found, (over,), sizes).partial == {by}


@anything
def test_flat_values_that_are_gathered_in_the_order_of_ranks(random: Random) -> None:
    """The tokens of a loss, cut over a sequence inside of their samples: gathered, weighted alike, and scattered."""
    given = Spread((("a", 2, "b", 2),), frozenset(), ((("a", -1),) if random.random() < 0.5 else ()))
    whole = whole_of(given, random)
    held = hold(given, whole, random)
    assert tokens.by_rank(given, ("c",)) == given and tokens.by_rank(Spread((("a", 2),)), ("a",)).dims == (("a", 2),)
    if random.random() < 0.5:
        together, lie = gathered(held, ("a", "b")), moves.all_gather(tokens.by_rank(given, ("b",)), ("a", "b"), SIZES)
    else:
        near = moves.all_gather(tokens.by_rank(given, ("b",)), ("b",), SIZES)
        assert str(near) == f"[a*3*rows(flat)]{' x a^-1' if given.powers else ''}"
        together = gathered(gathered(held, ("b",)), ("a",))
        lie = moves.all_gather(near, ("a",), SIZES)
    total = reduce_sum(lie, None, False)
    assert describes(total, np.array(whole.sum()), [each.sum() for each in together])
    equal = tokens.equal_rows(plain(lie.shape), (0,))
    weighted = multiply(lie, equal)
    back = tokens.by_place(moves.reduce_scatter(weighted, ("a", "b"), SIZES))
    assert back.dims == given.dims
    assert describes(back, 3.0 * whole, scattered([3.0 * each for each in together], ("a", "b")))
    with pytest.raises(Contradiction):
        moves.all_gather(tokens.by_rank(given, ("a",)), ("b", "a"), SIZES)
    with pytest.raises(Contradiction):
        multiply(lie, plain(lie.shape))


@anything
def test_the_gradient_of_a_part_of_a_vector_where_each_rank_has_one_sample(random: Random) -> None:
    """The sum over tokens and samples is one over tokens and a reshape, because a rank's samples are one."""
    axes = groups(random)
    samples = math.prod(SIZES[axis] for axis in axes)
    size, begin = random.choice([1, 2, 3]), random.choice([0, 1])
    powers = ((axes[0], -1),) if random.random() < 0.5 else ()
    given = Spread(((5,), axes, (size,)), powers=powers, loose=frozenset(axes))
    whole = whole_of(given, random)
    held = [each.sum(0) for each in hold(given, whole, random)]
    added = reduce_sum(given, (0,), False)
    if size > 1 or random.random() < 0.5:
        vector = moves.reshape(added, (size,))
    else:  # of one element: the gradient of a factor, in which the sum over the last dimension leaves the samples'
        vector, held = reduce_sum(added, (1,), False), [each.sum(1) for each in held]
    ends = (begin, 6 - begin - size)
    found = slices.pad(vector, (6,), {}, SIZES)
    assert found.partial == set(axes) and whole.shape == (5, samples, size)
    assert describes(found, np.pad(whole.sum((0, 1)), ends), [np.pad(each.reshape(size), ends) for each in held])
    assert against(found, plain((6,))) == f"it must still be summed over {', '.join(sorted(axes))}"
    if size > 1:  # what was gathered and cut again is no dimension of samples
        together = moves.all_gather(vector, axes, SIZES)
        again = replace(together, dims=moves.cut(together, 0, axes[0], SIZES[axes[0]]))
        with pytest.raises(NotKnown, match="cut over these ranks or still a partial sum"):
            slices.pad(again, (100,), {}, SIZES)


def test_a_gradient_that_looks_cut_where_it_is_not_added_up_yet_is_unknown():
    """A rank's gradient of a slice: cut over "a", or still to be added up over it. It was called a violation."""
    axis = next(iter(SIZES))
    with pytest.raises(NotKnown, match="cut over these ranks or still a partial sum"):
        slices.pad(Spread(((axis, 4),)), (12,), {}, SIZES)
    assert slices.pad(plain((4,)), (12,), {}, SIZES).dims == ((12,),)


def test_pieces_behind_a_piece_whose_place_is_a_guess_are_loose_too() -> None:
    """A mean over groups of tokens gathers them over one axis; pieces of two other axes may be in front of them."""
    given = moves.reshape(
        Spread((("dp", "cp.2", "cp.1", 4), (), (6,)), loose=frozenset(("dp", "cp.2", "cp.1"))), (1, 4, 6)
    )
    assert given.dims == (("dp",), ("cp.2", "cp.1", 4), (6,)) and given.loose >= {"cp.2", "cp.1"}


def test_all_pieces_in_front_of_a_dimension_of_one_element_are_loose() -> None:
    """Each rank has one head, and two axes of the mesh cut the heads: both pieces belong to the heads or to none."""
    found = moves.reshape(Spread(((8,), ("a", "b", 6))), (4, 2, 1, 6))
    assert found.dims == ((4,), (2,), (), ("a", "b", 6)) and found.loose == {"a", "b"}
    right = places.wherever(lambda x: moves.split(x, 3, (2, 4))[0], found)
    assert right.dims == ((4,), (2,), ("a", "b"), (2,))


def test_pieces_of_one_head_on_each_rank_become_pieces_of_the_width() -> None:
    heads, samples = (Spread(((2,), (4,), axes, (6,))) for axes in (("tp.2", "tp.1"), ("dp.2", "dp.1")))
    found = moves.reshape(heads, (2, 4, 6))
    assert found.dims == ((2,), (4,), ("tp.2", "tp.1", 6)) and found.loose == {"tp.2", "tp.1"}
    assert moves.reshape(samples, (2, 4, 6)).dims == ((2,), (4, "dp.2", "dp.1"), (6,))


def test_pieces_scattered_to_a_dimension_of_one_element_may_belong_to_the_next_one() -> None:
    """MindSpore cuts four samples over two axes as two dimensions of two, and leaves out the Reshape after that."""
    sizes = {"a": 2, "b": 2}
    gathered = Spread(((Block(home=2, count=2, at=0), 3), ("b",), (), (5,)), frozenset("a"))
    found = moves.reduce_scatter(gathered, ("a",), sizes)
    assert found.dims == ((3,), ("b",), ("a",), (5,)) and found.loose == {"a", "b"}
    repeated = places.wherever(lambda x: moves.tile(x, (1, 1, 4, 1)), found)
    assert repeated.dims == ((3,), ("b", "a"), (4,), (5,))
    tokens = moves.reduce_scatter(Spread(((4,), (), (), (5,)), frozenset("a")), ("a",), sizes)
    assert tokens.dims == (("a", 2), (), (), (5,)) and not tokens.loose, "the sequence has its own place"


def test_values_are_joined_where_their_loose_pieces_fit() -> None:
    given = [Spread(((4,), (), ("a", size)), loose=frozenset("a")) for size in (2, 3)]
    with pytest.raises(Contradiction, match="joined on each rank"):
        moves.concat(given, 2)
    assert places.wherever_they_fit(lambda each: moves.concat(each, 2), given).dims == ((4,), ("a",), (5,))


def test_values_with_many_loose_pieces_are_joined_where_these_are_in_the_same_dimensions() -> None:
    """Query, key and value of a device with one group of heads, in a mesh whose axes were divided."""
    given = [
        Spread(((4,), ("d.3", "d.2", "d.1"), (), ("a", size)), loose=frozenset(("d.3", "d.2", "d.1", "a")))
        for size in (8, 2, 2)
    ]
    joined = places.wherever_they_fit(lambda each: moves.concat(each, 3), given)
    assert joined.dims == ((4,), ("d.3", "d.2", "d.1"), ("a",), (12,))


def test_an_outer_axis_behind_an_inner_one_cuts_the_next_dimension() -> None:
    """The loss cuts the batch over the inner data-parallel axes and the sequence over the outer ones."""
    flat = Spread(((), ("dp.1", "cp.2", "cp.1", "dp.3", "dp.2"), (8,), (6,)), loose=frozenset(("cp.1", "dp.3")))
    found = moves.reshape(flat, (1, 8, 6))
    assert found.dims == (("dp.1", "cp.2", "cp.1"), ("dp.3", "dp.2", 8), (6,)) and "dp.3" in found.loose
    axes = ["dp.10", "dp.2", "dp", "cp.2", "cp.1", "tp.2", "tp"]
    for place, axis in enumerate(axes):
        assert not places.outside(axis, axis) and not places.outside(axis, "ep") and not places.outside("a", axis)
        assert all(places.outside(axis, inner) and not places.outside(inner, axis) for inner in axes[place + 1 :])


def test_loose_pieces_lie_where_the_operators_own_layout_cuts() -> None:
    """The mean over groups of tokens is one over tensor parallelism; its layout says so, the graph does not."""
    x = Spread((("dp",), ("cp", 4), (6,)), loose=frozenset(("dp", "cp")))
    text = "ReduceMean(%1, (I64(1)), Bool(1)) primitive_attrs: {in_strategy: ((6, 1, 1))} cnode_attrs: {}"
    sizes = {"tp": 4, "cp": 2, "dp": 3}
    types = ("(<Tensor[Float32], (1, 4, 6)>)", "(<Tensor[Float32], (1, 1, 6)>)")
    call = Call(Node("ReduceMean", "", text, [1], types=types), 0, [x, (1,), True], sizes)
    assert call.in_its_layout(0) == Spread((("dp", "cp"), (4,), (6,)))
    assert rules.RULES["ReduceMean"].of(call) == Spread((("dp", "cp"), (), (6,))), (
        "each rank's mean is of its own groups, and no partial sum"
    )
    for other in ("{}", "{in_strategy: ((2, 3, 1))}", "{in_strategy: ((6, 1))}"):
        unknown = replace(call, node=replace(call.node, text=other))
        assert unknown.in_its_layout(0) == x


@pytest.mark.parametrize(("split", "join"), [(2, 3), (3, 1), (2, 1)])
def test_an_exchange_over_two_axes_is_one_over_an_axis_of_both(split, join) -> None:
    """Context and data parallelism together exchange pieces of the logits."""
    sizes = {"c": 2, "a": 3, "b": 2}
    given = Spread(((), ("a", "b", 2), ("c", 6), (12,)))
    whole = np.random.default_rng(5).standard_normal((1, 12, 12, 12))
    found = exchange_over(given, ("a", "b"), split, join, sizes)
    text, types = f"split_dim: I64({split}), concat_dim: I64({join})", ("()", f"(<Tensor[Float32], {found.shape}>)")
    call = Call(Node("AlltoAll", "", text, [1], types=types), 0, [given], sizes, axes=("a", "b"))
    assert rules.RULES["AlltoAll"].of(call) == found
    pairs = [{"a": a, "b": b} for a in range(3) for b in range(2)]
    for place in [{**pair, "c": c} for pair in pairs for c in range(2)]:
        number = pairs.index({axis: place[axis] for axis in "ab"})
        sent = [np.split(piece(given, whole, {**pair, "c": place["c"]}, sizes), 6, split)[number] for pair in pairs]
        held = np.concatenate(sent, axis=join)
        assert held.shape == found.shape
        if join == 1:  # otherwise the pieces wait in front of another dimension
            assert np.array_equal(held, piece(found, whole, place, sizes))
    with pytest.raises(Contradiction, match="do not follow each other in one dimension"):
        exchange_over(given, ("b", "a"), split, join, sizes)
    if join == 3:
        back = exchange_over(found, ("a", "b"), 3, 2, sizes)
        assert back == given
