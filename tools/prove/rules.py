"""This module says for each operator of MindSpore's graph which spread its result has (`RULES`), by the algebra of
`tools.prove.spread` and `tools.prove.moves`.

A rule is a function of one `Call`. An operator that is not in the table has no rule, and what follows it is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from tools.dryrun.graph_text import Node
from tools.prove import attention, documents, experts, layers, moves, routed, slices, tokens
from tools.prove.call import TABLE, Call, Order, Part, Value, rule
from tools.prove.spread import (
    Alike,
    Certain,
    Contradiction,
    NotKnown,
    Rows,
    Spread,
    Zeros,
    add,
    by_element,
    divide,
    extent,
    matmul,
    multiply,
    reduce_largest,
    reduce_mean,
    reduce_sum,
    refusal,
    require_home,
    scaled,
    tidy,
)


def apply(call: Call) -> Value:
    """Return the spreads of an operator's results.

    Raises:
        NotKnown: it has no rule, or the rule cannot say. Contradiction: the spreads of its arguments do not fit.
    """
    found = RULES.get(call.node.op)
    if found is None:
        raise NotKnown("there is no rule for this operator")
    own = routed.rule_of(call)
    on_order = call.values and isinstance(call.values[0], Order) and call.node.op in experts.ON_ORDERS and not own
    if call.differs and not found.takes_differing and not on_order and not own:
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    try:
        if on_order:
            return experts.ON_ORDERS[call.node.op](call)
        return documents.with_formula(call, _as_the_graph_says(call, (own or found.of)(call)))
    except Contradiction as error:
        given = [each for value in call.values for each in (value if isinstance(value, list) else [value])]
        spreads = [value.whole if isinstance(value, Part) else value for value in given]
        loose = frozenset().union(*(each.loose for each in spreads if isinstance(each, Spread)))
        if error.over is not None and not loose & error.over:  # no place changes what is wrong
            raise
        if loose and not isinstance(error, Certain):  # another place of a piece might be right
            raise NotKnown(f"{error} (the place of the pieces over {', '.join(sorted(loose))} is uncertain)") from None
        raise


def _as_the_graph_says(call: Call, found: Value) -> Value:
    """Return the result of a rule; of a tensor, if it has the shape that the graph states."""
    if isinstance(found, Spread) and not isinstance(found, (Alike, Zeros)) and len(call.outputs) == 1:
        own, told = found.shape, call.outputs[0].shape
        if own != told and not {-1}.intersection((*own, *told)):
            raise NotKnown(f"{found}: its rule gives the shape {own}, but the graph says {told}")
    return found


@rule("Depend", "Load", "TensorMove", "Send", says="the result is as the first argument")
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
    once = call.node.op == "Sub" or (call.node.op == "SubExt" and call.values[2] == 1)
    if not once or set(call.differs) != {(1, 0)}:
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    found = by_element(x, y)  # an index, counted from where the rank's piece starts
    return replace(found, shifted=found.shifted | call.pieces_in_rank_order((1, 0)))


@rule("AddN", says="a sum of a tuple's members")
def _sum_of_members(call: Call) -> Value:
    members = [item.spread if isinstance(item, Part) else item for item in call.values[0]]
    total = members[0]
    for item in members[1:]:
        total = add(total, item)
    return total


@rule("Mul", says="a product: one partial factor stays partial; zero if a factor is; of integers: by element")
def _product(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    return by_element(x, y) if call.counts else multiply(x, y)


@rule(
    "Div", "RealDiv", says="a quotient; the one that divides the loss's gradient by all devices lowers every power by 1"
)
def _quotient(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    over = [axis for axis, power in x.powers if power > 0]
    forward = call.node.op == "RealDiv" and not re.search("Gradients/|Grad_", call.node.scope)
    if forward and over and divisor_of(call.node) == math.prod(call.sizes[axis] for axis in over):
        return scaled(x, over, -1)  # of a mean over ranks, each of which divided by its own number of elements
    if "Grad__VirtualDiv" not in call.node.scope:
        return divide(x, y)
    devices = math.prod(call.sizes.values())
    if divisor_of(call.node) != devices:
        raise Contradiction(f"the loss's gradient is not divided by the {devices} devices that share its sum")
    return scaled(x, call.sizes, -1)


def divisor_of(node: Node) -> float | None:
    """Return the number by which an operator divides, if it is written out."""
    found = re.search(r"value=\s*\[?\s*([\d.]+(?:e[+-]\d+)?)\s*\]?\)\)$", node.head)
    return float(found[1]) if found else None


@rule(
    *("Square", "Rsqrt", "Sqrt", "Exp", "Log", "Cos", "Sin", "SiLU", "Sigmoid", "ReLU", "Reciprocal", "Pow"),
    *("PowTensorScalar", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalNot"),
    *("LogicalAnd", "LogicalOr", "Minimum", "Maximum", "FloorDiv", "LessScalar", "ClipByValue"),
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
    return replace(found, shifted=found.shifted.union(*(call.pieces_in_rank_order(key, 1) for key in call.differs)))


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


@rule("ReduceMax", says="the largest over dimensions: over a cut one it is the largest of each rank's piece")
def _largest_over(call: Call) -> Value:
    if not (axes := _axes(call)):
        raise NotKnown("there is a rule only for the maximum over named dimensions")
    return reduce_largest(call.spread(0), axes, _keeps(call))


def _axes(call: Call) -> tuple[int, ...] | None:
    given = call.values[1] if len(call.values) > 1 else None
    if (
        given == () and call.node.op == "ReduceSum" and tuple(call.values[3:]) == (True,)
    ):  # no dimension, not all of them
        return ()
    return (given,) if isinstance(given, int) else given or None


def _keeps(call: Call) -> bool:
    return len(call.outputs[0].shape) == len(call.spread(0).dims)


@rule("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Mm", "Bmm", says="a product of matrices: both cut alike "
      "over the summed dimension make it partial")  # fmt: skip
def _matmul(call: Call) -> Value:
    turned = [value is True for value in (*call.values[2:4], False, False)]
    return matmul(call.spread(0), call.spread(1), turned[0], turned[1])


@rule("Dense", says="a matmul with a transposed matrix")
def _dense(call: Call) -> Value:
    if call.values[2] is not None:
        raise NotKnown("it has a bias")
    return matmul(call.spread(0), call.spread(1), False, True)


@rule("Outer", says="an outer product of plain values")
def _outer(call: Call) -> Value:
    x, y = by_element(call.spread(0)), by_element(call.spread(1))
    return Spread(x.dims + y.dims)


@rule("Reshape", "Squeeze", says="the same elements: pieces keep their places between the extents around them")
def _reshape(call: Call) -> Value:
    x, shape = call.spread(0), call.outputs[0].shape
    for way in (tokens.grouped, tokens.ungrouped, tokens.ungrouped_rows):
        if (found := way(x, shape)) is not None:
            return found
    of_tile = "Grad_Tile" in call.node.scope  # it adds dimensions of one element in front of each
    found = moves.reshape(x, shape, of_tile, "-TopKRouter" in call.node.scope)  # its shapes are (ranks, tokens, ...)
    matrix = len(shape) == 2 and len(x.dims) == 3 and x.dims[2] == found.dims[1]
    return replace(found, merged=x.dims[:2]) if matrix else found


@rule("Transpose", says="the dimensions in another order")
def _transpose(call: Call) -> Value:
    x, order = call.spread(0), call.values[1]
    if "-MoELayer" not in call.node.scope or order != (1, 0, 2):
        return moves.transpose(x, order)
    x = tokens.ungrouped(x, x.shape) or x  # one sample on a rank needs no reshape to be grouped
    found = moves.transpose(x, order)
    return tokens.grouped(found, found.shape) or found


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


@rule("ExpandAs", says="the first argument, which must be as large as the second")
def _expand_as(call: Call) -> Value:
    x, like = call.spread(0), call.spread(1)
    if x.dims != like.dims:
        raise NotKnown("there is no rule for a value that is repeated to the size of another")
    return x


@rule("ShapeCalc", says="the dimensions over which the gradients of two factors are summed")
def _broadcast_over(call: Call) -> Value:
    if "ShapeCalc_BroadcastGradientArgs" not in call.node.text:
        raise NotKnown("there is a rule only for the dimensions of a broadcast")
    x, y = call.spread(0).dims, call.spread(1).dims
    both = list(zip(x, y, strict=True))
    if any(-1 in (extent(one), extent(two)) and one != two for one, two in both):
        raise NotKnown("the data decide which dimensions are repeated")
    large = [(extent(one), extent(two)) for one, two in both]
    return [tuple(n for n, own in enumerate(large) if own[at] == 1 != own[1 - at]) for at in (0, 1)]


@rule("FillV2", says="a number repeated: zeros, or elements that are all equal; as many as routing decides: choices")
def _filled(call: Call) -> Value:
    shape, value = call.values[:2]
    if isinstance(shape, Order):
        return Order(("filled",))
    if not isinstance(shape, tuple) or not isinstance(value, (Alike, Zeros)):
        raise NotKnown("there is a rule only for a constant shape and a constant number")
    return type(value)(tuple(tidy((size,)) for size in shape))


@rule("CumSum", says="sums along a whole dimension")
def _running_sum(call: Call) -> Value:
    x = call.spread(0)
    require_home(x)
    if any(not isinstance(atom, int) for atom in x.dims[call.values[1]]):
        raise refusal((x,), "each rank adds up only its own piece of a cut dimension")
    return x


@rule("NonZero", says="of a comparison of sorted experts: the rows of the own node's experts")
def _non_zero(call: Call) -> Value:
    raise NotKnown("there is a rule only for finding the rows of a node's experts")


@rule("TensorToTuple", says="the elements of a plain tensor of numbers, as a tuple: cut as the tensor is")
def _elements(call: Call) -> Value:
    return by_element(call.spread(0))


@rule("Tile", says="repeated along whole dimensions")
def _tile(call: Call) -> Value:
    found = moves.wherever(lambda x: moves.tile(x, call.values[1]), call.spread(0))
    of_flat = len(found.dims) == 1 and "CrossEntropyLoss/Grad_SumExt" in call.node.scope  # a gradient of a sum
    if "Router" not in call.node.scope and not of_flat:
        return found
    own = [number for number, dim in enumerate(call.spread(0).dims) if not dim and call.values[1][number] > 1]
    return tokens.equal_rows(found, own)  # of a mean over tokens, or of a sum


@rule("BroadcastTo", says="repeated along dimensions of one element")
def _broadcast(call: Call) -> Value:
    return moves.wherever(lambda x: moves.broadcast(x, call.outputs[0].shape), call.spread(0))


@rule("Split", "SplitWithSize", says="parts of a whole dimension, or gathered pieces apart")
def _split(call: Call) -> Value:
    axis = call.values[1 if call.node.op == "Split" else 2] % len(call.outputs[0].shape)
    sizes = tuple(out.shape[axis] for out in call.outputs)
    whole = call.spread(0)
    if len(sizes) == 2 and any(isinstance(atom, Rows) for atom in whole.dims[axis]):
        begin = [sizes[0] * (at == axis) for at in range(len(whole.dims))]
        return [None, tokens.unpadded(whole, begin, call.outputs[1].shape)]
    return [Part(whole, axis, sizes, number, call.number) for number in range(len(sizes))]


@rule("Concat", says="joined along a whole dimension; gathered pieces come to where they belong")
def _concat(call: Call) -> Value:
    members, axis = call.values[0], call.values[1]
    if (padded := tokens.padded(members, axis)) is not None:
        return padded
    if all(isinstance(item, Part) for item in members):
        first = members[0]
        ordered = [item.number for item in members] == list(range(len(first.sizes)))
        if ordered and len({item.source for item in members}) == 1 and len(set(first.sizes)) == 1:
            return moves.rejoin(first.whole, first.axis, len(members), axis)
    spreads = [item.spread if isinstance(item, Part) else item for item in members]
    return moves.wherever_they_fit(lambda given: moves.concat(given, axis), spreads)


@rule("MakeTuple", says="a tuple")
def _tuple(call: Call) -> Value:
    return list(call.values)


@rule("TupleGetItem", says="a member of a tuple")
def _member(call: Call) -> Value:
    return call.values[0][call.values[1]]


@rule("StridedSlice", says="a part: where it starts elsewhere on each rank, the result is cut", takes_differing=True)
def _take(call: Call) -> Value:
    by = _starts(call, 1, call.outputs[0].shape)
    if not by and (kept := tokens.unpadded(call.spread(0), call.values[1], call.outputs[0].shape)) is not None:
        return kept
    if "_MicroBatch" in call.node.scope and not by:  # which samples make a micro-batch does not matter
        x, wanted = call.spread(0), call.outputs[0].shape
        cuts = (tuple(atom for atom in dim if isinstance(atom, str)) for dim in x.dims)
        return replace(x, dims=tuple(tidy((*cut, size)) for cut, size in zip(cuts, wanted, strict=True)))
    return moves.wherever(lambda x: slices.take(x, call.outputs[0].shape, by, call.sizes), call.spread(0))


@rule("StridedSliceGrad", says="zeros around: where they lie elsewhere on each rank, the result is partial",
      takes_differing=True)  # fmt: skip
def _pad(call: Call) -> Value:
    by = _starts(call, 2, call.node.inputs[0].shape)
    if not by and (more := tokens.padded_back(call.spread(0), call.values[2], call.outputs[0].shape)) is not None:
        return more
    return moves.wherever(lambda x: slices.pad(x, call.outputs[0].shape, by, call.sizes), call.spread(0))


def _starts(call: Call, begin: int, piece: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Return the axes along which a slice, of this shape, starts elsewhere, by dimension, outermost first."""
    if any(argument not in (begin, begin + 1) for argument, _ in call.differs):
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    found = {key[1]: call.own_pieces(key, piece[key[1]]) for key in call.differs if key[0] == begin}
    if any(call.values[begin + 2][place] != 1 for place in found):
        raise NotKnown("a slice that starts elsewhere on each rank leaves out elements")
    return found


@rule("Embedding", says="rows of a table: indices of a cut table count from the rank's own rows")
def _look_up(call: Call) -> Value:
    return slices.look_up(call.spread(0), call.spread(1), call.sizes)


@rule("EmbeddingDenseBackward", says="sums for each row of a table: partial where the tokens are cut")
def _add_rows(call: Call) -> Value:
    return slices.add_rows(call.spread(0), call.spread(1), call.values[2], call.sizes)


@rule("OneHotExt", "OneHot", says="rows of zeros with a one: cut where the indices count from the rank's own classes")
def _one_hot(call: Call) -> Value:
    x = call.spread(0)
    if call.values[4] != -1:
        raise NotKnown("there is a rule only for one-hot rows along a new last dimension")
    return experts.counts(x, call.number) or slices.one_hot(x, call.values[1], call.sizes)


@rule("AllReduce", says="a sum over ranks: a partial value becomes the same everywhere, and what is the same "
      "everywhere is scaled by the number of ranks; op max: the largest")  # fmt: skip
def _all_reduce(call: Call) -> Value:
    if re.search(r'\bop: "max"', call.node.text):
        return moves.all_largest(call.spread(0), call.axes)
    call.require_sum()
    return moves.all_reduce(call.spread(0), call.axes)


@rule("AllGather", says="pieces put together, to be moved to where they belong")
def _all_gather(call: Call) -> Value:
    x = call.spread(0)
    found = experts.gathered(x, call.axes, call.sizes)
    return found or moves.all_gather_loose(tokens.by_rank(x, call.axes), call.axes, call.sizes)


@rule("ReduceScatter", says="a sum over ranks, cut into pieces")
def _reduce_scatter(call: Call) -> Value:
    call.require_sum()
    x = call.spread(0)
    found = experts.scattered(x, call.axes)
    return found or tokens.by_place(moves.reduce_scatter(x, call.axes, call.sizes))


assert attention and layers  # their rules are in the table, too
RULES = {operator: each for each in TABLE for operator in each.operators}
