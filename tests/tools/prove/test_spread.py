"""Each rule of spreads against NumPy on the ranks of a small mesh: arrays are split as a spread says, every rank runs
the operation, and what the ranks then hold must be what the rule's spread says of the result of one device.

Where a rule refuses, no spread may describe what the ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.prove import moves, slices
from tools.prove.moves import reduce_largest, reduce_mean, reduce_sum
from tools.prove.spread import (
    Block,
    Contradiction,
    NotKnown,
    Spread,
    _size,
    add,
    by_element,
    divide,
    logical,
    matmul,
    multiply,
    plain,
    tidy,
)

SIZES = {"b": 3, "a": 2}  # the ranks along b lie closest
RANKS = [{"a": a, "b": b} for a in range(2) for b in range(3)]
Held = list[np.ndarray]

anything = given(st.randoms(use_true_random=False))


def piece(spread: Spread, value: np.ndarray, place: Mapping[str, int], sizes: Mapping[str, int]) -> np.ndarray:
    """Return the elements of a whole value that the rank at `place` of the mesh holds; partial sums and powers are left
    out.
    """
    atoms = [(number, atom) for number, dim in enumerate(logical(spread.dims)) for atom in dim]
    apart = value.reshape([_size(atom, sizes) for _, atom in atoms])
    apart = apart[tuple(place[atom] if isinstance(atom, str) else slice(None) for _, atom in atoms)]
    kept = [(number, atom) for number, atom in atoms if not isinstance(atom, str)]
    order: list[int] = []
    for number, dim in enumerate(spread.dims):  # the k-th extent of a dimension, and each block, where it lies
        own = [place for place, (home, atom) in enumerate(kept) if home == number and not isinstance(atom, Block)]
        for atom in dim:
            if isinstance(atom, Block):
                order.append(next(i for i, (_, each) in enumerate(kept) if each is atom))
            elif isinstance(atom, int):
                order.append(own.pop(0))
    return apart.transpose(order).reshape(spread.shape)


def scale(spread: Spread) -> float:
    return math.prod(float(SIZES[axis]) ** power for axis, power in spread.powers)


def hold(spread: Spread, whole: np.ndarray, random: Random, own: int = 0) -> Held:
    """Return what each rank holds of a value: random parts that add up to the value along the partial axes."""
    generator = np.random.default_rng([random.randrange(2**32), 1, own])
    held = [piece(spread, whole, place, SIZES) * scale(spread) for place in RANKS]
    for axis in sorted(spread.partial):
        for number, place in enumerate(RANKS):
            others = [at for at, other in enumerate(RANKS) if place | {axis: 0} == other | {axis: 0}]
            if number != others[0]:
                continue
            parts = generator.normal(size=(len(others), *held[number].shape))
            parts[-1] = held[number] - parts[:-1].sum(0)
            for at, part in zip(others, parts, strict=True):
                held[at] = part
    return held


def along(axes: Sequence[str], place: dict[str, int]) -> list[int]:
    """The ranks of the group of a rank over axes, those along the last one closest."""
    group = [
        at for at, other in enumerate(RANKS) if all(other[axis] == place[axis] for axis in SIZES if axis not in axes)
    ]
    return sorted(group, key=lambda at: [RANKS[at][axis] for axis in axes])


def describes(spread: Spread, whole: np.ndarray, held: Held) -> bool:
    """Return whether the ranks hold the value as the spread says."""
    if spread.whole(SIZES) != whole.shape or spread.shape != held[0].shape:
        return False
    for place in RANKS:
        total = sum(held[at] for at in along(sorted(spread.partial), place))
        if not np.allclose(total, piece(spread, whole, place, SIZES) * scale(spread)):
            return False
    return True


def spreads_like(shape: Sequence[int], whole: Sequence[int]) -> Iterator[Spread]:
    """Every spread with these shapes that cuts each dimension in front, with powers from -2 to 2."""
    ways = []
    for _ in SIZES:
        cuts = [("cut", number) for number in range(len(shape))]
        ways.append(cuts + [(how, power) for how in ("part", "same") for power in range(-2, 3)])
    for chosen in product(*ways):
        dims: list[tuple] = [(size,) for size in shape]
        for axis, (how, number) in zip(SIZES, chosen, strict=True):
            if how == "cut":
                dims[number] = (axis, *dims[number])
        partial = frozenset(axis for axis, (how, _) in zip(SIZES, chosen, strict=True) if how == "part")
        powers = [(axis, p) for axis, (how, p) in zip(SIZES, chosen, strict=True) if how != "cut" and p]
        found = Spread(tuple(map(tidy, dims)), partial, tuple(sorted(powers)))
        if found.whole(SIZES) == tuple(whole):
            yield found


def some_spread(random: Random, sizes: Sequence[int], partial: bool = True, powers: bool = True) -> Spread:
    """A random spread with this shape on the rank."""
    dims: list[list] = [[size] for size in sizes]
    parts, exponents = set(), []
    for axis in SIZES:
        how = random.choice(["cut", "cut", "part", "same"])
        if how == "cut" and sizes:
            random.choice(dims).insert(0, axis)
        elif how == "part" and partial:
            parts.add(axis)
        if powers and axis not in parts and random.random() < 0.3:
            exponents.append((axis, random.choice([-1, 1])))
    return Spread(tuple(map(tidy, dims)), frozenset(parts), tuple(sorted(exponents)))


def whole_of(spread: Spread, random: Random, own: int = 0) -> np.ndarray:
    return np.random.default_rng([random.randrange(2**32), 0, own]).uniform(0.5, 2.0, spread.whole(SIZES))


def check(
    rule: Callable[..., Spread], operation: Callable[..., np.ndarray], given: Sequence[Spread], random: Random
) -> str:
    """Run a rule and its operation; return whether the rule gave a spread, refused or did not know."""
    wholes = [whole_of(spread, random, own) for own, spread in enumerate(given)]
    held = [hold(spread, wholes[own], random, own) for own, spread in enumerate(given)]
    try:
        found = rule(*given)
    except NotKnown:
        return "not known"
    except Contradiction:
        try:
            whole = operation(*wholes)
            after = [operation(*own) for own in zip(*held, strict=True)]
        except ValueError:  # the shapes do not fit on one device, or not on the rank
            return "refused"
        assert not any(describes(each, whole, after) for each in spreads_like(after[0].shape, whole.shape)), given
        return "refused"
    after = [operation(*own) for own in zip(*held, strict=True)]
    assert describes(found, operation(*wholes), after), (given, found)
    return "found"


def shape(random: Random, count: int | None = None) -> list[int]:
    return [random.choice([1, 2, 3, 4]) for _ in range(random.randint(1, 3) if count is None else count)]


def broadcastable(random: Random, sizes: list[int]) -> list[int]:
    return [size if random.random() < 0.7 else 1 for size in sizes][random.choice([0, 0, 1]) :]


@pytest.mark.parametrize(
    ("rule", "operation"),
    [(add, np.add), (multiply, np.multiply), (divide, np.divide)],
    ids=["add", "multiply", "divide"],
)
@anything
def test_arithmetic(rule: Callable, operation: Callable, random: Random) -> None:
    sizes = shape(random)
    first = some_spread(random, sizes)
    alike = random.random() < 0.5
    second = first if alike else some_spread(random, broadcastable(random, sizes))
    check(rule, operation, [first, second], random)


@anything
def test_a_function_by_element(random: Random) -> None:
    check(by_element, np.exp, [some_spread(random, shape(random))], random)


def test_every_outcome_of_arithmetic_occurs() -> None:
    for rule, operation in ((add, np.add), (multiply, np.multiply)):
        seen = set()
        for seed in range(60):
            random = Random(seed)
            sizes = shape(random)
            first = some_spread(random, sizes)
            seen.add(check(rule, operation, [first, random.choice([first, some_spread(random, sizes)])], random))
        assert seen >= {"found", "refused"}


@pytest.mark.parametrize(("rule", "operation"), [(reduce_sum, np.sum), (reduce_mean, np.mean)], ids=["sum", "mean"])
@anything
def test_sums_and_means(rule: Callable, operation: Callable, random: Random) -> None:
    sizes = shape(random)
    axes = tuple(random.sample(range(len(sizes)), random.randint(1, len(sizes))))
    keep = random.random() < 0.5
    given = some_spread(random, sizes)
    check(lambda x: rule(x, axes, keep), lambda x: operation(x, axes, keepdims=keep), [given], random)


@anything
def test_the_largest(random: Random) -> None:
    given = some_spread(random, shape(random), partial=False, powers=False)
    axis = random.randrange(len(given.dims))
    whole = whole_of(given, random)
    found = reduce_largest(given, (axis,), True)
    held = [each.max(axis, keepdims=True) for each in hold(given, whole, random)]
    after = moves.all_largest(found, sorted(found.greatest))
    over = [np.max([held[at] for at in along(sorted(found.greatest), place)], 0) for place in RANKS]
    assert describes(after, whole.max(axis, keepdims=True), over)
    if found.greatest:
        with pytest.raises(Contradiction, match="the maximum of only"):
            multiply(found, plain(()))


@anything
def test_matrix_products(random: Random) -> None:
    rows, inner, columns = shape(random, 3)
    turned = random.random() < 0.5, random.random() < 0.5
    batch = shape(random, random.choice([0, 1]))
    first = some_spread(random, [*batch, *([inner, rows] if turned[0] else [rows, inner])])
    second = some_spread(random, [*batch, *([columns, inner] if turned[1] else [inner, columns])])

    def operation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x.swapaxes(-1, -2) if turned[0] else x) @ (y.swapaxes(-1, -2) if turned[1] else y)

    check(lambda x, y: matmul(x, y, *turned), operation, [first, second], random)


@anything
def test_reshapes(random: Random) -> None:
    given = some_spread(random, shape(random, 3))
    size = math.prod(given.shape)
    ways = [[size], [given.shape[0], size // given.shape[0]], [*given.shape[:1], 1, size // given.shape[0]]]
    ways += [[size // given.shape[2], given.shape[2]], [1, *given.shape], [*given.shape, 1]]
    wanted = random.choice(ways)
    whole = whole_of(given, random)
    held = hold(given, whole, random)
    try:
        found = moves.reshape(given, wanted)
    except NotKnown:
        return
    assert describes(found, whole.reshape(found.whole(SIZES)), [each.reshape(wanted) for each in held]), (given, wanted)


@anything
def test_orders_and_new_dimensions(random: Random) -> None:
    given = some_spread(random, shape(random, 3))
    order = random.sample(range(3), 3)
    assert check(lambda x: moves.transpose(x, order), lambda x: x.transpose(order), [given], random) == "found"
    axis = random.randrange(4)
    assert check(lambda x: moves.expand(x, axis), lambda x: np.expand_dims(x, axis), [given], random) == "found"


@anything
def test_repeats(random: Random) -> None:
    given = some_spread(random, shape(random, 2))
    counts = [random.choice([1, 2]) for _ in range(2)]
    check(lambda x: moves.tile(x, counts), lambda x: np.tile(x, counts), [given], random)


@pytest.mark.slow
@anything
def test_parts_and_joins(random: Random) -> None:
    given = some_spread(random, [4, random.choice([2, 4])])
    axis, half = random.choice([0, 1]), given.shape[1] // 2
    check(lambda x: moves.split(x, 0, (1, 3))[1], lambda x: np.split(x, (1,))[1], [given], random)
    check(lambda x: moves.split(x, 1, (half, half))[0], lambda x: np.split(x, 2, 1)[0], [given], random)
    other = given if random.random() < 0.5 else some_spread(random, list(given.shape))
    check(lambda *x: moves.concat(x, axis), lambda *x: np.concatenate(x, axis), [given, other], random)


def gathered(held: Held, axes: Sequence[str]) -> Held:
    return [np.concatenate([held[at] for at in along(axes, place)]) for place in RANKS]


def scattered(held: Held, axes: Sequence[str]) -> Held:
    found = []
    for number, place in enumerate(RANKS):
        group = along(axes, place)
        found.append(np.split(sum(held[at] for at in group), len(group))[group.index(number)])
    return found


def groups(random: Random) -> tuple[str, ...]:
    return random.choice([("a",), ("b",), ("a", "b")])


@anything
def test_sums_over_ranks(random: Random) -> None:
    given, axes = some_spread(random, shape(random)), groups(random)
    whole = whole_of(given, random)
    after = [sum(held[at] for at in along(axes, place)) for held in [hold(given, whole, random)] for place in RANKS]
    try:
        found = moves.all_reduce(given, axes)
    except Contradiction:
        assert not any(describes(each, whole, after) for each in spreads_like(after[0].shape, whole.shape))
        return
    assert describes(found, whole, after)


@anything
def test_gathered_pieces_come_to_where_they_belong(random: Random) -> None:
    sizes = shape(random, 2)
    home, axes = random.choice([0, 1]), groups(random)
    dims: list[tuple] = [(size,) for size in sizes]
    dims[home] = (*(axes if random.random() < 0.8 else axes[::-1]), *dims[home])
    given = Spread(tuple(map(tidy, dims)))
    whole = whole_of(given, random)
    held = gathered(hold(given, whole, random), axes)
    try:
        found = moves.all_gather(given, axes, SIZES)
        assert describes(found, whole, held)
        parts = math.prod(SIZES[axis] for axis in axes)
        joined = [np.concatenate(np.split(each, parts), 1) for each in held] if home else held
        back = moves.rejoin(found, 0, parts, 1) if home else found
    except Contradiction:
        assert dims[home][:2] == ("b", "a"), "pieces in order are put together"
        return
    assert back == plain(whole.shape)
    assert describes(back, whole, joined)


@anything
def test_scattered_sums(random: Random) -> None:
    axes = groups(random)
    parts = math.prod(SIZES[axis] for axis in axes)
    given = some_spread(random, [6, 6])
    whole = whole_of(given, random)
    held = hold(given, whole, random)
    home = random.choice([0, 1])
    before = given
    try:
        if home:  # pieces of dimension 1 are brought in front of dimension 0 first
            held = [np.concatenate(np.split(each, parts, 1)) for each in held]
            before = moves.rejoin(given, 1, parts, 0)
            assert describes(before, whole, held)
        found = moves.reduce_scatter(before, axes, SIZES)
    except Contradiction:
        assert given.holes.intersection(axes)
        return
    assert describes(found, whole, scattered(held, axes))


@anything
def test_exchanged_pieces(random: Random) -> None:
    given = Spread((("a", 3), (4,), ("b", 2)), frozenset(), ((("b", 1),) if random.random() < 0.5 else ()))
    whole = whole_of(given, random)
    held = hold(given, whole, random)
    after = []
    for place in RANKS:
        group = along("a", place)
        after.append(np.concatenate([np.split(held[at], 2, 1)[place["a"]] for at in group], 0))
    assert describes(moves.exchange(given, "a", 1, 0, SIZES), whole, after)


@anything
def test_pieces_that_are_exchanged_while_others_are_gathered(random: Random) -> None:
    """The pieces of one axis lie in front of a dimension of one element, and those of another take their places."""
    over, other = random.choice([("a", "b"), ("b", "a")])
    size, home = SIZES[over], random.choice([1, 2])
    gathered_too = random.random() < 0.5
    if gathered_too:  # as many pieces in front as there are ranks to take them
        dims: list[tuple] = [(Block(2, size, 0),), (), (over, 4)]
    elif random.random() < 0.5:  # twice as many, half of which stay in front
        dims, home = [(Block(2, 2 * size, 0),), (), (over, 4)], 2
    else:
        dims = [(size * random.choice([1, 2]),), (), (4,)]
        dims[home] = (over, *dims[home])
    given = Spread(tuple(map(tidy, dims)), frozenset(other if random.random() < 0.5 else ""))
    join = random.choice([1, 2])
    whole = whole_of(given, random)
    held = hold(given, whole, random)
    after = []
    for place in RANKS:
        group = along(over, place)
        after.append(np.concatenate([np.split(held[at], size, 0)[place[over]] for at in group], join))
    if gathered_too is False and isinstance(given.dims[0][0], Block) and join != home:
        with pytest.raises(NotKnown, match="before other pieces are in their final place"):
            moves.exchange(given, over, 0, join, SIZES)
        return
    found = moves.exchange(given, over, 0, join, SIZES)
    assert describes(found, whole, after)
    with pytest.raises(Contradiction, match=r"pieces over . are exchanged, but the value is") as caught:
        moves.exchange(given, other, 0, join, SIZES)
    assert caught.value.over == {other}, "wherever the pieces over other axes lie"


def test_pieces_that_are_exchanged_in_front_of_others_are_not_put_in_a_wrong_place() -> None:
    with pytest.raises(Contradiction, match="in an order that differs from the order of the ranks"):
        moves.exchange(Spread(((2,), (4, "a", 2))), "a", 0, 1, SIZES)
    # other gathered pieces are of another dimension, or come behind those that are exchanged
    for block, home in ((Block(1, 4, 0), ("b", "a", 4)), (Block(2, 4, 1), ("a", 4))):
        with pytest.raises(NotKnown, match="before other pieces are in their final place"):
            moves.exchange(Spread(((block,), (), home)), "a", 0, 2, SIZES)
    for front, said in ((5, "across their extents"), (Block(1, 5, 0), "are scattered over")):  # not equal parts
        with pytest.raises(NotKnown, match=said):
            moves.exchange(Spread(((front,), (), ("a", 4))), "a", 0, 2, SIZES)
    unsure = Spread(((6,), (), ("a", 4)), loose=frozenset("a"), dropped=frozenset("a"))
    found = moves.exchange(unsure, "a", 0, 2, SIZES)
    assert not found.loose and not found.dropped, "the pieces lie where they were taken"


@anything
def test_tables_of_which_each_rank_has_some_rows(random: Random) -> None:
    generator = np.random.default_rng(random.randrange(2**32))
    rows, tokens = 4, 5
    table_spread, ids_spread = Spread((("b", rows), (3,))), Spread((("a", tokens),))
    table, ids = whole_of(table_spread, random), generator.integers(0, 3 * rows, 2 * tokens)
    gradient = generator.normal(size=(2 * tokens, 3))
    looked, masks, hot, grads = [], [], [], []
    for place in RANKS:
        own = piece(ids_spread, ids, place, SIZES) - rows * place["b"]
        mask = ((own >= 0) & (own < rows)).astype(float)[:, None]
        near = own.clip(0, rows - 1)
        looked.append(piece(table_spread, table, place, SIZES)[near])
        masks.append(mask)
        hot.append((own[:, None] == np.arange(rows)).astype(float))
        sums = np.zeros((rows, 3))
        np.add.at(sums, near, gradient.reshape(2, tokens, 3)[place["a"]] * mask)
        grads.append(sums)
    shifted = Spread(ids_spread.dims, shifted=frozenset("b"))
    found = slices.look_up(shifted, table_spread, SIZES)
    mask_spread = moves.expand(shifted, 1)
    whole = table[ids]
    assert describes(multiply(found, mask_spread), whole, [x * y for x, y in zip(looked, masks, strict=True)])
    with pytest.raises(Contradiction, match="values that are not partial sums"):
        moves.all_reduce(found, ("b",))
    with pytest.raises(Contradiction, match="do not count"):
        slices.look_up(ids_spread, table_spread, SIZES)
    assert describes(slices.one_hot(shifted, rows, SIZES), (ids[:, None] == np.arange(3 * rows)).astype(float), hot)
    total = np.zeros((3 * rows, 3))
    np.add.at(total, ids, gradient)
    cut = Spread((("a", tokens), (3,)))
    assert describes(slices.add_rows(multiply(cut, mask_spread), shifted, rows, SIZES), total, grads)
    with pytest.raises(Contradiction, match="no mask"):
        slices.add_rows(cut, shifted, rows, SIZES)


def test_a_vocabulary_that_two_axes_cut_lies_in_the_order_of_the_ranks() -> None:
    """Their names are in the other order than their ranks: with Muon, tensor parallelism is two axes, tp.1 and tp.2."""
    sizes, rows, ids = {"t.1": 2, "t.2": 3}, 4, np.array([0, 23, 9, 14, 5])
    both = frozenset(sizes)
    hot = slices.one_hot(Spread(((5,),), shifted=both), rows, sizes)
    found = slices.look_up(Spread(((5,),), shifted=both), Spread((("t.2", "t.1", rows), (1,))), sizes)
    added = slices.add_rows(Spread(((5,), (1,)), shifted=both), Spread(((5,),), shifted=both), rows, sizes)
    assert found.dims == ((5,), (1,)) and added.dims == (("t.2", "t.1", rows), (1,))
    whole = (ids[:, None] == np.arange(6 * rows)).astype(float)
    for rank in range(6):
        own = ids - rank * rows
        held = piece(hot, whole, {"t.1": rank % 2, "t.2": rank // 2}, sizes)
        assert (held == (own[:, None] == np.arange(rows))).all()
    with pytest.raises(Contradiction, match="do not count"):
        slices.look_up(Spread(((5,),), shifted=both), Spread((("t.1", "t.2", rows), (1,))), sizes)


def test_a_piece_next_to_a_dimension_of_one_element_may_lie_in_either() -> None:
    given = moves.reshape(Spread(((8,), ("a",), (4,))), (8, 4))  # sequence, batch of one, width
    assert given.loose == {"a"}
    table = plain((8, 1, 4))
    back = moves.reshape(given, (8, 1, 4))
    assert add(back, table).dims == ((8,), ("a",), (4,))


def test_a_spread_says_what_it_is() -> None:
    given = Spread((("b", 4), (Block(0, 2, 0), 3)), frozenset("a"), (("b", -1),))
    assert str(given) == "[b*4, 2 of dimension 0*3] partial over a x b^-1"


def test_gathered_pieces_are_not_used_before_they_are_where_they_belong() -> None:
    given = moves.all_gather(Spread(((4,), ("a", 2))), ("a",), SIZES)
    assert given.dims == ((Block(1, 2, 0), 4), (2,))
    assert add(given, given).dims == given.dims
    for use in (
        lambda: add(given, plain((1, 2))),
        lambda: reduce_sum(given, (1,), False),
        lambda: matmul(given, plain((2, 3))),
        lambda: slices.take(given, (8, 1), {}, SIZES),
        lambda: moves.concat([given, given], 1),
        lambda: moves.transpose(given, (1, 0)),
    ):
        with pytest.raises(NotKnown, match="before they are in their final place"):
            use()
