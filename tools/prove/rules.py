"""This module says for each operator of MindSpore's graph which spread its result has (`RULES`), by the algebra of
`tools.prove.spread` and `tools.prove.moves`.

A rule is a function of one `Call`. An operator that is not in the table has no rule, and what follows it is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from tools.prove import moves
from tools.prove.call import Call, Part, Value
from tools.prove.spread import (
    Contradiction,
    NotKnown,
    Spread,
    add,
    by_element,
    divide,
    extent,
    matmul,
    multiply,
    placements,
    plain,
    reduce_largest,
    reduce_mean,
    reduce_sum,
    refusal,
    require_home,
    scaled,
    tidy,
)


class Rule(NamedTuple):
    """This is the rule of some operators, and a sentence that says it."""

    operators: tuple[str, ...]
    says: str
    of: Callable[[Call], Value]
    takes_differing: bool


TABLE: list[Rule] = []


def rule(*operators: str, says: str, takes_differing: bool = False) -> Callable[[Callable[[Call], Value]], Any]:
    """Return a decorator that enters a function into `TABLE`.

    Args:
        takes_differing: the function knows what constants mean that are not the same on all ranks.
    """

    def enter(of: Callable[[Call], Value]) -> Callable[[Call], Value]:
        TABLE.append(Rule(operators, says, of, takes_differing))
        return of

    return enter


def apply(call: Call) -> Value:
    """Return what an operator gives.

    Raises:
        NotKnown: it has no rule, or the rule cannot say. Contradiction: the spreads of its arguments do not fit.
    """
    found = RULES.get(call.node.op)
    if found is None:
        raise NotKnown("there is no rule for this operator")
    if call.differs and not found.takes_differing:
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    try:
        return found.of(call)
    except Contradiction as error:
        spreads = [value.whole if isinstance(value, Part) else value for value in call.values]
        loose = frozenset().union(*(each.loose for each in spreads if isinstance(each, Spread)))
        if loose:  # another place of a piece might be right
            raise NotKnown(f"{error} (the place of the pieces over {', '.join(sorted(loose))} is not sure)") from None
        raise


@rule("Depend", "Load", "TensorMove", says="the result is as the first argument")
def _same(call: Call) -> Value:
    return call.values[0]


@rule(
    "Cast", "Neg", "Divs", says="linear: the result is as the argument (an argument of Cast to integers must be plain)"
)
def _linear(call: Call) -> Value:
    x = call.spread(0)
    return by_element(x) if call.counts else x


@rule(
    "Muls", says="linear; the factor of the loss's backward that stands for the ranks of its sum counts as their power"
)
def _scale(call: Call) -> Value:
    x = call.spread(0)
    if not call.repeats:
        return x
    wanted = math.prod(call.sizes[axis] for axis in call.repeats)
    if call.values[1] != wanted:
        raise Contradiction(
            f"{x}: the loss is summed over {wanted} ranks, and its gradient is multiplied by {call.values[1]}"
        )
    return scaled(x, call.repeats, 1)


@rule("Add", "AddExt", "Sub", "SubExt", says="a sum: both must be spread and scaled alike", takes_differing=True)
def _sum(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    if not call.differs:
        return add(x, y)
    if not call.counts:
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    found = by_element(x, y)  # an index, counted from where the rank's piece starts
    return replace(found, shifted=found.shifted | call.shifts())


@rule("AddN", says="a sum of a tuple's members")
def _sum_of_members(call: Call) -> Value:
    members = [item.spread if isinstance(item, Part) else item for item in call.values[0]]
    total = members[0]
    for item in members[1:]:
        total = add(total, item)
    return total


@rule("Mul", says="a product: one partial factor stays partial; of integers: by element")
def _product(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    return by_element(x, y) if call.counts else multiply(x, y)


@rule(
    "Div", "RealDiv", says="a quotient; the one that divides the loss's gradient by all devices lowers every power by 1"
)
def _quotient(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    if "Grad__VirtualDiv" not in call.node.scope:
        return divide(x, y)
    devices = math.prod(call.sizes.values())
    if f"value={devices}" not in re.sub(r"\s|\.0*(?=\D)", "", call.node.head):
        raise Contradiction(f"the loss's gradient is not divided by the {devices} devices that share its sum")
    return scaled(x, call.sizes, -1)


@rule(
    *("Square", "Rsqrt", "Sqrt", "Exp", "Log", "Cos", "Sin", "SiLU", "Sigmoid", "ReLU", "Reciprocal", "Pow"),
    *("PowTensorScalar", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalNot"),
    *("LogicalAnd", "LogicalOr", "Minimum", "Maximum", "FloorDiv", "LessScalar"),
    says="by element and not linear: no argument may be partial or have a power",
)
def _by_element(call: Call) -> Value:
    tensors = [call.spread(i) for i, value in enumerate(call.values) if isinstance(value, (Spread, Part))]
    return by_element(*tensors)


@rule("Equal", says="by element; of indices with another number on each rank: which rank's piece has it",
      takes_differing=True)  # fmt: skip
def _equal(call: Call) -> Value:
    found = by_element(call.spread(0), call.spread(1))
    if call.differs and not re.match(r"U?Int", call.node.inputs[0].dtype):
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    return replace(found, shifted=found.shifted | call.shifts())


@rule("SiLUGrad", says="linear in the gradient, by element in the rest")
def _gradient_first(call: Call) -> Value:
    return multiply(call.spread(0), by_element(call.spread(1)))


@rule("RsqrtGrad", "SigmoidGrad", "SqrtGrad", "ReciprocalGrad", says="linear in the gradient (the second), by element "
      "in the rest")  # fmt: skip
def _gradient_second(call: Call) -> Value:
    return multiply(call.spread(1), by_element(call.spread(0)))


@rule("Select", says="a choice: the condition must be plain, both choices spread alike")
def _choice(call: Call) -> Value:
    condition = by_element(call.spread(0))
    first, second = (multiply(condition, call.spread(place)) for place in (1, 2))
    return add(first, second)


@rule("SumExt", "ReduceSum", says="a sum over dimensions: over a cut one the result is partial")
def _sum_over(call: Call) -> Value:
    return reduce_sum(call.spread(0), _axes(call), _keeps(call))


@rule(
    "MeanExt",
    "ReduceMean",
    says="a mean over dimensions: over a cut one it is partial, and too large by the axis' size",
)
def _mean_over(call: Call) -> Value:
    return reduce_mean(call.spread(0), _axes(call), _keeps(call))


@rule("ArgMaxWithValue", says="the largest over a dimension: over a cut one it is the largest of each rank's piece")
def _largest(call: Call) -> Value:
    found = reduce_largest(call.spread(0), (call.values[1],), call.values[2])
    return [found, found]


def _axes(call: Call) -> tuple[int, ...] | None:
    given = call.values[1] if len(call.values) > 1 else None
    return (given,) if isinstance(given, int) else given or None


def _keeps(call: Call) -> bool:
    return len(call.outputs[0].shape) == len(call.spread(0).dims)


@rule("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Mm", "Bmm", says="a product of matrices: both cut alike "
      "over the summed dimension make it partial")  # fmt: skip
def _matmul(call: Call) -> Value:
    turned = [value is True for value in (*call.values[2:4], False, False)]
    return matmul(call.spread(0), call.spread(1), turned[0], turned[1])


@rule("Dense", says="a product with a turned matrix")
def _dense(call: Call) -> Value:
    if call.values[2] is not None:
        raise NotKnown("it has a bias")
    return matmul(call.spread(0), call.spread(1), False, True)


@rule("Outer", says="an outer product of plain values")
def _outer(call: Call) -> Value:
    x, y = by_element(call.spread(0)), by_element(call.spread(1))
    return Spread(x.dims + y.dims)


@rule("RmsNorm", says="not linear; the last dimension must be whole")
def _norm(call: Call) -> Value:
    x = by_element(call.spread(0))
    whole_last(x)
    scale = by_element(x, by_element(call.spread(1)))
    return [scale, Spread((*x.dims[:-1], ()), loose=x.loose)]


@rule("RmsNormGrad", says="linear in the gradient; the weight's gradient is a sum over all but the last dimension")
def _norm_gradient(call: Call) -> Value:
    gradient, x = call.spread(0), by_element(call.spread(1))
    whole_last(x)
    both = multiply(gradient, x)
    return [both, reduce_sum(both, range(len(x.dims) - 1), False)]


def whole_last(x: Spread) -> None:
    """Refuse a value whose last dimension is cut."""
    require_home(x)
    if any(not isinstance(atom, int) for atom in x.dims[-1]):
        raise refusal((x,), "the operator needs the whole last dimension, which is cut")


@rule("Swiglu", says="not linear; the last dimension is halved on each rank, cut or whole")
def _swiglu(call: Call) -> Value:
    return _last(by_element(call.spread(0)), call.outputs[0].shape[-1])


@rule("SwigluGrad", says="linear in the gradient; the last dimension is doubled on each rank")
def _swiglu_gradient(call: Call) -> Value:
    x = by_element(call.spread(1))
    found = multiply(call.spread(0), _last(x, extent(x.dims[-1]) // 2))
    return _last(found, call.outputs[0].shape[-1])


def _last(x: Spread, size: int) -> Spread:
    return replace(x, dims=(*x.dims[:-1], tidy((*(atom for atom in x.dims[-1] if isinstance(atom, str)), size))))


@rule(
    "FlashAttentionScore",
    says="not linear; queries, keys and values cut alike by batch and heads, and nothing else cut",
)
def _attention(call: Call) -> Value:
    query, _, value = _attended(call, *(by_element(call.spread(place)) for place in range(3)))
    small = Spread((*query.dims[:3], (8,)))
    return [small, small, plain((0,)), Spread((*query.dims[:3], value.dims[3]))]


@rule("FlashAttentionScoreGrad", says="linear in the gradient; cut as the attention itself")
def _attention_gradient(call: Call) -> Value:
    given = (by_element(call.spread(place)) for place in range(3))
    query, key, value, gradient = _attended(call, *given, call.spread(3))
    if mixed := gradient.partial & query.holes:
        raise refusal((gradient, query), f"the gradient is partial over {', '.join(sorted(mixed))}")
    found = [Spread(x.dims, gradient.partial, gradient.powers, loose=x.loose) for x in (query, key, value)]
    return [*found, plain((0,))]


_LAYOUT = re.compile(r"(?:, I64\(-?\d+\)){3}, I64\((\d)\), I64\(\d+\)\)$")
_BNSD = "1"


def _attended(call: Call, *given: Spread) -> list[Spread]:
    """Queries, keys, values and the gradient, with their loose pieces where they are cut alike."""
    written = _LAYOUT.search(call.node.head)
    if not written or written[1] != _BNSD:
        raise NotKnown("only attention with the layout BNSD has a rule")
    require_home(*given)
    whole = [[each for each in placements(x) if not any(_cuts(each)[2:])] for x in given]
    for x, places in zip(given, whole, strict=True):
        if not places:
            raise NotKnown(f"{x}: attention over a cut sequence has no rule")
    found = next((list(each) for each in product(*whole) if all(_cuts(x) == _cuts(each[0]) for x in each)), None)
    if found is None:
        raise refusal(given, "batch or heads are not cut alike")
    masks = [v for v in call.values[3:8] if isinstance(v, Spread) and len(v.dims) == 4 and v.dims != given[0].dims]
    if masks and extent(masks[0].dims[0]) > 1 and _cuts(masks[0])[0] != _cuts(found[0])[0]:
        raise refusal((found[0], masks[0]), "the mask's batch is not cut alike")
    return found


def _cuts(x: Spread) -> list[list[str]]:
    return [[atom for atom in dim if isinstance(atom, str)] for dim in x.dims]


@rule("Reshape", "Squeeze", says="the same elements: pieces keep their places between the extents around them")
def _reshape(call: Call) -> Value:
    of_tile = "Grad_Tile" in call.node.scope  # it adds dimensions of one element in front of each
    return moves.reshape(call.spread(0), call.outputs[0].shape, of_tile)


@rule("Transpose", says="the dimensions in another order")
def _transpose(call: Call) -> Value:
    return moves.transpose(call.spread(0), call.values[1])


@rule("TransposeExtView", says="two dimensions change places")
def _swap(call: Call) -> Value:
    x = call.spread(0)
    order = list(range(len(x.dims)))
    one, two = (axis % len(order) for axis in call.values[1:3])
    order[one], order[two] = two, one
    return moves.transpose(x, order)


@rule("ExpandDims", says="a new dimension of one element")
def _expand(call: Call) -> Value:
    return moves.expand(call.spread(0), call.values[1])


@rule("Tile", says="repeated along whole dimensions")
def _tile(call: Call) -> Value:
    return moves.wherever(lambda x: moves.tile(x, call.values[1]), call.spread(0))


@rule("BroadcastTo", says="repeated along dimensions of one element")
def _broadcast(call: Call) -> Value:
    return moves.wherever(lambda x: moves.broadcast(x, call.outputs[0].shape), call.spread(0))


@rule("Split", "SplitWithSize", says="parts of a whole dimension, or gathered pieces apart")
def _split(call: Call) -> Value:
    axis = call.values[1 if call.node.op == "Split" else 2] % len(call.outputs[0].shape)
    sizes = tuple(out.shape[axis] for out in call.outputs)
    whole = call.spread(0)
    return [Part(whole, axis, sizes, number, call.number) for number in range(len(sizes))]


@rule("Concat", says="joined along a whole dimension; gathered pieces come to where they belong")
def _concat(call: Call) -> Value:
    members, axis = call.values[0], call.values[1]
    if all(isinstance(item, Part) for item in members):
        first = members[0]
        ordered = [item.number for item in members] == list(range(len(first.sizes)))
        if ordered and len({item.source for item in members}) == 1 and len(set(first.sizes)) == 1:
            return moves.rejoin(first.whole, first.axis, len(members), axis)
    return moves.concat([item.spread if isinstance(item, Part) else item for item in members], axis)


@rule("MakeTuple", says="a tuple")
def _tuple(call: Call) -> Value:
    return list(call.values)


@rule("TupleGetItem", says="a member of a tuple")
def _member(call: Call) -> Value:
    return call.values[0][call.values[1]]


@rule("StridedSlice", says="a part: where it starts elsewhere on each rank, the result is cut", takes_differing=True)
def _take(call: Call) -> Value:
    by = _starts(call, 1)
    if "_MicroBatch" in call.node.scope and not by:  # which samples make a micro-batch does not matter
        x, wanted = call.spread(0), call.outputs[0].shape
        cuts = (tuple(atom for atom in dim if isinstance(atom, str)) for dim in x.dims)
        return replace(x, dims=tuple(tidy((*cut, size)) for cut, size in zip(cuts, wanted, strict=True)))
    return moves.wherever(lambda x: moves.take(x, call.outputs[0].shape, by, call.sizes), call.spread(0))


@rule("StridedSliceGrad", says="zeros around: where they lie elsewhere on each rank, the result is partial",
      takes_differing=True)  # fmt: skip
def _pad(call: Call) -> Value:
    by = _starts(call, 2)
    return moves.wherever(lambda x: moves.pad(x, call.outputs[0].shape, by), call.spread(0))


def _starts(call: Call, begin: int) -> dict[int, tuple[str, ...]]:
    """The axes along which a slice starts elsewhere, by dimension, outermost first."""
    if any(argument not in (begin, begin + 1) for argument, _ in call.differs):
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    order = list(call.sizes)[::-1]
    return {
        place: tuple(sorted(axes, key=order.index))
        for (argument, place), axes in call.differs.items()
        if argument == begin
    }


@rule("Embedding", says="rows of a table: indices of a cut table count from the rank's own rows")
def _look_up(call: Call) -> Value:
    return moves.look_up(call.spread(0), call.spread(1))


@rule("EmbeddingDenseBackward", says="sums for each row of a table: partial where the tokens are cut")
def _add_rows(call: Call) -> Value:
    return moves.add_rows(call.spread(0), call.spread(1), call.values[2])


@rule("OneHotExt", says="rows of zeros with a one: cut where the indices count from the rank's own classes")
def _one_hot(call: Call) -> Value:
    return moves.one_hot(call.spread(0), call.values[1])


@rule("AllReduce", says="a sum over ranks: a partial value becomes the same everywhere, and what is the same "
      "everywhere is scaled by the number of ranks; op max: the largest")  # fmt: skip
def _all_reduce(call: Call) -> Value:
    if re.search(r'\bop: "max"', call.node.text):
        return moves.all_largest(call.spread(0), call.axes)
    _check_sum(call)
    return moves.all_reduce(call.spread(0), call.axes)


def _check_sum(call: Call) -> None:
    if not re.search(r'\bop: "sum"', call.node.text):
        raise NotKnown("only collectives that add have a rule")


@rule("AllGather", says="pieces put together, to be moved to where they belong")
def _all_gather(call: Call) -> Value:
    return moves.wherever(lambda x: moves.all_gather(x, call.axes, call.sizes), call.spread(0))


@rule("ReduceScatter", says="a sum over ranks, cut into pieces")
def _reduce_scatter(call: Call) -> Value:
    _check_sum(call)
    return moves.reduce_scatter(call.spread(0), call.axes, call.sizes)


RULES = {operator: each for each in TABLE for operator in each.operators}
