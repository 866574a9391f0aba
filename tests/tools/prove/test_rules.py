"""The rules of composite operators against NumPy on simulated ranks, as `test_spread.py` does for the algebra."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.tools.prove.test_spread import RANKS, SIZES, anything, check, describes, hold, shape, some_spread, whole_of
from tools.dryrun.graph_text import Node
from tools.prove import moves, slices
from tools.prove.call import Call, literal
from tools.prove.moves import reduce_largest, reduce_sum
from tools.prove.rules import RULES, TABLE, apply
from tools.prove.spread import (
    Alike,
    Contradiction,
    NotKnown,
    Spread,
    Uncertain,
    Zeros,
    joined,
    matmul,
    plain,
    tidy,
)

HEAD = "X(%0)"


def result(op: str, place: int, *values: Any, of: tuple[int, ...] = ()) -> Spread:
    """Return what the rule of an operator gives; the operator's output has the shape `of`."""
    types = ("()", f"(<Tensor[Float32], ({', '.join(map(str, of))})>)")
    found = RULES[op].of(Call(Node(op, HEAD, HEAD, [], types=types), 0, values, SIZES))
    return found[place] if isinstance(found, list) else found


def gradient_like(random: Random, x: Spread) -> Spread:
    """The spread of a gradient: cut as the value, and partial over some other axes."""
    rest = [axis for axis in SIZES if axis not in x.holes and random.random() < 0.5]
    powers = [(axis, -1) for axis in SIZES if axis not in rest and random.random() < 0.3]
    return Spread(x.dims, frozenset(rest), tuple(sorted(powers)))


def normed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True)) * w


def norm_gradient(place: int) -> Callable[..., np.ndarray]:
    def operation(gradient: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True))
        by_unit = gradient * w
        if place:
            return (gradient * x * scale).sum(tuple(range(x.ndim - 1)))
        return scale * (by_unit - x * scale * (by_unit * x * scale).mean(-1, keepdims=True))

    return operation


@anything
def test_norms(random: Random) -> None:
    sizes = shape(random, 3)
    x, w = some_spread(random, sizes, partial=False, powers=False), plain(sizes[-1:])
    check(lambda *given: result("RmsNorm", 0, *given), normed, [x, w], random)


@pytest.mark.parametrize("place", [0, 1])
@anything
def test_gradients_of_norms(place: int, random: Random) -> None:
    sizes = shape(random, 3)
    x, w = some_spread(random, sizes, partial=False, powers=False), plain(sizes[-1:])

    def rule(gradient: Spread, x: Spread, w: Spread) -> Spread:
        return result("RmsNormGrad", place, gradient, x, plain(()), w)

    check(rule, norm_gradient(place), [gradient_like(random, x), x, w], random)


@anything
def test_elements_that_a_number_replaces(random: Random) -> None:
    sizes = shape(random, 2)
    given = [some_spread(random, sizes, partial=False, powers=False) for _ in range(2)]
    check(
        lambda x, mask: result("MaskedFill", 0, x, mask, plain(())),
        lambda x, mask: np.where(mask > 1.25, -9.0, x),
        given,
        random,
    )
    zeros = Zeros(plain(given[1].shape).dims)
    partial = replace(given[0], partial=frozenset(("other",)))
    for zero in (Zeros(()), 0.0):
        assert isinstance(result("MaskedFill", 0, zeros, given[1], zero), Zeros)
    if given[0].dims == given[1].dims:
        assert result("MaskedFill", 0, partial, given[1], 0.0).partial == {"other"}
    with pytest.raises(Contradiction, match="not linear"):
        result("MaskedFill", 0, partial, given[1], plain(()))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@anything
def test_gated_activations(random: Random) -> None:
    first, second = (random.choice([1, 2, 3]) for _ in range(2))
    x = some_spread(random, [first, second], partial=False, powers=False)
    x = Spread((*x.dims, (8,)))
    check(
        lambda x: result("Swiglu", 0, x, of=(first, second, 4)),
        lambda x: silu(x[..., :4]) * x[..., 4:],
        [x],
        random,
    )
    gradient = gradient_like(random, Spread((*x.dims[:2], (4,))))

    def operation(gradient: np.ndarray, x: np.ndarray) -> np.ndarray:
        gate, value = x[..., :4], x[..., 4:]
        slope = 1 / (1 + np.exp(-gate)) * (1 + gate * (1 - 1 / (1 + np.exp(-gate))))
        return np.concatenate([gradient * value * slope, gradient * silu(gate)], -1)

    check(lambda *given: result("SwigluGrad", 0, *given, of=(first, second, 8)), operation, [gradient, x], random)


@anything
def test_the_largest_of_a_row(random: Random) -> None:
    sizes = shape(random, 2)
    x = some_spread(random, sizes, powers=False)
    x = Spread((*x.dims, (4,)), x.partial)
    kept = check(
        lambda x: result("ReduceMax", 0, x, (-1,), of=(*sizes, 1)), lambda x: x.max(-1, keepdims=True), [x], random
    )
    gone = check(lambda x: result("ReduceMax", 0, x, (-1,), of=tuple(sizes)), lambda x: x.max(-1), [x], random)
    assert kept == gone == ("refused" if x.partial else "found")


@anything
def test_the_gradient_of_a_clip_is_zero_beyond_it(random: Random) -> None:
    """Zeros of the shape that a rank has are a choice beside a gradient that is cut or partial."""
    x = some_spread(random, shape(random, 3), partial=False, powers=False)

    def rule(gradient: Spread, x: Spread) -> Spread:
        zeros = result("FillV2", 0, x.shape, literal("Tensor(shape=[], dtype=Float32, value=0)"))
        return result("Select", 0, result("Greater", 0, x, plain(())), zeros, gradient)

    def operation(gradient: np.ndarray, x: np.ndarray) -> np.ndarray:
        return np.where(x > 1.2, 0, gradient)

    assert check(rule, operation, [gradient_like(random, x), x], random) == "found"


def test_what_no_place_of_a_loose_piece_changes_is_a_violation():
    """A partial value meets what is not linear or replicated, or a sum meets pieces: only this axis must be sure."""

    def said(op: str, *values: Spread, axes: tuple[str, ...] = ()) -> type[Exception]:
        head = f"{op}({', '.join(f'%{place}' for place, _ in enumerate(values))})"
        types = ("()", "(<Tensor[Float32], (4, 1)>)")
        node = Node(op, head, f'{head} primitive_attrs: {{op: "sum"}}', [], types=types)
        with pytest.raises((Contradiction, NotKnown)) as error:
            apply(Call(node, 0, values, SIZES, axes=axes))
        return error.type

    for loose, wanted in (("b", Contradiction), ("a", Uncertain), ("ab", Uncertain)):
        parts = Spread(((4,), ("b",)), frozenset("a"), loose=frozenset(loose))
        cut = Spread((("a", 4), ("b",)), loose=frozenset(loose))
        assert said("SiLU", parts) is said("Add", parts, plain((4, 1))) is wanted
        assert said("AllReduce", cut, axes=("a",)) is wanted


@anything
def test_a_product_is_surely_a_sum_where_every_place_of_loose_pieces_makes_it_one(random: Random) -> None:
    rows, inner = random.choice([1, 2]), random.choice([1, 3])
    x = Spread((tidy((rows,)), tidy(("a", inner))), loose=frozenset("a"))
    y = Spread((tidy(("a", inner)), (5,)), loose=frozenset(random.choice(["", "a"])))
    found = matmul(x, y)
    assert found.partial == {"a"} and not found.loose
    given = [whole_of(each, random, own) for own, each in enumerate((x, y))]
    held = zip(*(hold(each, whole, random) for each, whole in zip((x, y), given, strict=True)), strict=True)
    assert describes(found, given[0] @ given[1], [one @ two for one, two in held])
    unit = Spread(((), (), ("a",)), loose=frozenset("a"))  # of the batch, or of what is summed
    second = Spread(((), ("a",), ()), loose=frozenset("a"))
    found = matmul(unit, second)
    assert found.partial == {"a"} == found.loose


def test_each_operator_has_one_rule() -> None:
    names = [operator for each in TABLE for operator in each.operators]
    assert len(names) == len(set(names)) == len(RULES)


def test_the_elements_of_a_tensor_as_a_tuple() -> None:
    assert result("TensorToTuple", 0, plain((2,)), of=(2,)) == plain((2,))
    for partial in (Spread(((2,),), frozenset("a")), Spread(((2,),), powers=(("a", -1),))):
        with pytest.raises(Contradiction):
            result("TensorToTuple", 0, partial, of=(2,))


@anything
def test_the_reshape_of_a_router_puts_the_ranks_in_front(random: Random) -> None:
    """Without `ranks_first` the outer piece may lie in either dimension, and is loose."""
    given = Spread((("a", "b", random.choice((2, 6))), (4,)))
    tokens = given.shape[0]
    found = moves.reshape(given, (1, tokens, 4), ranks_first=True)
    assert found == Spread((("a", "b"), (tokens,), (4,)))
    value = whole_of(given, random)
    held = [each.reshape(1, tokens, 4) for each in hold(given, value, random)]
    assert describes(found, value.reshape(found.whole(SIZES)), held)
    assert "a" in moves.reshape(given, (1, tokens, 4)).loose


@pytest.mark.parametrize("samples", [1, 2])
@anything
def test_a_bias_of_which_each_rank_has_one_sample_is_summed_over_the_samples(samples: int, random: Random) -> None:
    given = Spread((("a", 4), tidy(("b", samples)), (5,)))  # tokens, samples, width
    whole = whole_of(given, random)
    summed = reduce_sum(given, (0,) if samples == 1 else (0, 1), keep=False)  # one sample needs no sum on the rank
    bias = moves.reshape(summed, (5,))
    held = [each.sum((0, 1)) for each in hold(given, whole, random)]
    after = [sum(held)] * len(RANKS)
    assert describes(moves.all_reduce(bias, ("a", "b")), whole.sum((0, 1)), after)
    over_tokens = moves.all_reduce(bias, ("a",))
    assert describes(moves.all_reduce(over_tokens, ("b",)), whole.sum((0, 1)), after), "in two steps"
    with pytest.raises(Contradiction, match="different pieces"):
        moves.all_reduce(replace(bias, dims=(("b", 5),), partial=frozenset("a"), dropped=frozenset()), ("b",))


def test_zeros_or_equal_elements_beside_others_are_no_longer_all_equal() -> None:
    """A value that counted as zeros could be added to a partial sum, or multiplied away."""
    four = plain((4,))
    for constant in (Zeros(((4,),)), Alike(((4,),))):
        for members in ([constant, four], [four, constant]):
            assert type(moves.concat(members, 0)) is Spread
    assert isinstance(moves.concat([Zeros(((4,),)), Zeros(((4,),))], 0), Zeros)
    with pytest.raises(Contradiction, match="would count once for each rank"):
        result("Add", 0, Spread(((8,),), partial=frozenset("a")), moves.concat([Zeros(((4,),)), four], 0), of=(8,))
    cut = Spread((("a", 8),))
    for found in (slices.pad(Alike(((4,),)), (8,), {}, SIZES), result("CumSum", 0, Alike(((8,),)), 0, of=(8,))):
        with pytest.raises(Contradiction, match="not cut equally"):
            joined(found, cut)
    assert isinstance(slices.pad(Zeros(((4,),)), (8,), {}, SIZES), Zeros)


def test_one_axis_does_not_cut_two_dimensions_of_an_outer_product_or_of_one_hot_rows() -> None:
    """Each rank would have the products of its own pieces, which are the blocks on the diagonal."""
    cut, loose = Spread((("a", 4),)), Spread((("a", 4),), loose=frozenset("a"))
    with pytest.raises(Contradiction, match="a would cut two dimensions"):
        result("Outer", 0, cut, cut, of=(4, 4))
    assert result("Outer", 0, loose, plain((2,)), of=(4, 2)) == replace(loose, dims=(("a", 4), (2,)))
    with pytest.raises(Contradiction, match="a would cut two dimensions"):
        slices.one_hot(replace(cut, shifted=frozenset("a")), 8, SIZES)


def test_the_largest_of_a_ranks_own_piece_is_not_added_up() -> None:
    largest = reduce_largest(Spread((("a", 4), (8,), (2,))), (0,), keep=False)
    with pytest.raises(Contradiction, match="own piece over a is added up"):
        reduce_sum(largest, (0,), keep=False)
    with pytest.raises(Contradiction, match="maximum of only a rank's own piece over a"):
        matmul(largest, plain((2, 3)))
    assert reduce_sum(moves.all_largest(largest, ("a",)), (0, 1), keep=False) == plain(())
