"""This module holds a rule for each operator of MindSpore's graph (`RULES`). A rule computes how the result of an
operator is distributed over the ranks, from the distribution of the operator's arguments.

A rule is a function of one `Call`. An operator that is not in the table has no rule, and all values computed from its
result are unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from tools.dryrun.graph_text import Node
from tools.dryrun.scale import OVER_DEVICES
from tools.prove import attention, documents, experts, layers, moves, places, routed, slices, tokens
from tools.prove.call import TABLE, Call, Order, Part, Value, rule
from tools.prove.moves import reduce_largest, reduce_mean, reduce_sum
from tools.prove.spread import (
    Alike,
    Certain,
    Contradiction,
    NotKnown,
    Rows,
    Spread,
    Uncertain,
    Zeros,
    add,
    as_tensor,
    by_element,
    checked,
    divide,
    extent,
    matmul,
    multiply,
    refusal,
    require_home,
    scaled,
    tidy,
)


def apply(call: Call) -> Value:
    """Return how the results of an operator are distributed over the ranks (their spreads), by the rule for this
    operator.

    Raises:
        NotKnown: the operator has no rule, or the rule does not cover these arguments.
        Contradiction: the operator does not allow the spreads of its arguments.
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
            raise Uncertain(str(error), loose if error.over is None else loose & error.over) from None
        raise


def _as_the_graph_says(call: Call, found: Value) -> Value:
    """Return the result of a rule; of a tensor, if it has the shape that the graph states."""
    if isinstance(found, Spread) and not isinstance(found, (Alike, Zeros)) and len(call.outputs) == 1:
        own, told = found.shape, call.outputs[0].shape
        if own != told and not {-1}.intersection((*own, *told)):
            raise NotKnown(f"{found}: its rule gives the shape {own}, but the graph says {told}")
    return found


@rule("Depend", "Load", "TensorMove", "Send", says="The result has the type of the first argument.")
def _same(call: Call) -> Value:
    return call.values[0]


@rule("Cast", "Neg", "Divs", says="It is linear: the result has the type of the argument, which must be plain in a "
      "Cast to integers.")  # fmt: skip
def _linear(call: Call) -> Value:
    x = call.spread(0)
    return by_element(x) if call.counts else x


@rule("Muls", says="It is linear. Where the loss's backward pass multiplies by the number of ranks in its sum, the "
      "result is scaled by it.")  # fmt: skip
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


@rule("Add", "AddExt", "Sub", "SubExt", says="It is a sum: both arguments must be cut, partial and scaled alike.",
      takes_differing=True)  # fmt: skip
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


@rule("AddN", says="It adds up the members of a tuple, under the rule of Add.")
def _sum_of_members(call: Call) -> Value:
    members = [item.spread if isinstance(item, Part) else item for item in call.values[0]]
    total = members[0]
    for item in members[1:]:
        total = add(total, item)
    return total


@rule("Mul", says="It is a product: it is partial if one factor is, and zero if one factor is; if the factors are "
      "integers, they must be plain.")  # fmt: skip
def _product(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    return by_element(x, y) if call.counts else multiply(x, y)


@rule("Div", "RealDiv", says="It is a quotient. Where it divides the loss's gradient by the number of devices, the "
      "power of each axis falls by 1.")  # fmt: skip
def _quotient(call: Call) -> Value:
    x, y = call.spread(0), call.spread(1)
    over = [axis for axis, power in x.powers if power > 0]
    forward = call.node.op == "RealDiv" and not re.search("Gradients/|Grad_", call.node.scope)
    if forward and over and divisor_of(call.node) == math.prod(call.sizes[axis] for axis in over):
        return scaled(x, over, -1)  # of a mean over ranks, each of which divided by its own number of elements
    if OVER_DEVICES not in call.node.scope:
        return divide(x, y)
    devices = math.prod(call.sizes.values())
    if divisor_of(call.node) != devices:
        raise Contradiction(f"the loss's gradient is not divided by the {devices} devices that share its sum")
    return scaled(x, call.sizes, -1)


def divisor_of(node: Node) -> float | None:
    """Return the number by which an operator divides its argument, if the graph has this number as a constant."""
    found = re.search(r"value=\s*\[?\s*([\d.]+(?:e[+-]\d+)?)\s*\]?\)\)$", node.head)
    return float(found[1]) if found else None


@rule(
    *("Square", "Rsqrt", "Sqrt", "Exp", "Log", "Cos", "Sin", "SiLU", "Sigmoid", "ReLU", "Reciprocal", "Pow"),
    *("PowTensorScalar", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalNot"),
    *("LogicalAnd", "LogicalOr", "Minimum", "Maximum", "FloorDiv", "LessScalar", "ClipByValue"),
    says="It is elementwise and not linear: every argument must be plain.",
)
def _by_element(call: Call) -> Value:
    tensors = [call.spread(i) for i, value in enumerate(call.values) if isinstance(value, (Spread, Part))]
    return by_element(*tensors)


@rule("Equal", says="It is elementwise. If it compares indices with a number that differs by rank, it finds the rank "
      "whose piece has the index.", takes_differing=True)  # fmt: skip
def _equal(call: Call) -> Value:
    found = by_element(call.spread(0), call.spread(1))
    if call.differs and not re.match(r"U?Int", call.node.inputs[0].dtype):
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    return replace(found, shifted=found.shifted.union(*(call.pieces_in_rank_order(key, 1) for key in call.differs)))


@rule("SiLUGrad", says="It is linear in the gradient; all other arguments must be plain.")
def _gradient_first(call: Call) -> Value:
    return multiply(call.spread(0), by_element(call.spread(1)))


@rule("RsqrtGrad", "SigmoidGrad", "SqrtGrad", "ReciprocalGrad", says="It is linear in the gradient, which is the "
      "second argument; the first must be plain.")  # fmt: skip
def _gradient_second(call: Call) -> Value:
    return multiply(call.spread(1), by_element(call.spread(0)))


@rule("Select", says="It chooses between two values, which must have the same type; the condition must be plain.")
def _choice(call: Call) -> Value:
    condition = by_element(call.spread(0))
    first, second = (multiply(condition, call.spread(place)) for place in (1, 2))
    return add(first, second)


@rule("MaskedFill", says="It replaces the elements at which a condition is true by one number. With zero it is linear, "
      "and only the condition must be plain; with another number all arguments must be plain.")  # fmt: skip
def _masked(call: Call) -> Value:
    x, condition, number = map(call.spread, range(3))
    if isinstance(number, Zeros) or call.values[2] == 0:  # it is linear
        return multiply(x, by_element(condition))
    return by_element(x, condition, number)


@rule("SumExt", "ReduceSum", says="It is a sum over dimensions: if one of them is cut, the result is partial.")
def _sum_over(call: Call) -> Value:
    return reduce_sum(call.in_its_layout(0), _axes(call), _keeps(call))


@rule("MeanExt", "ReduceMean", says="It is a mean over dimensions: if one is cut over an axis, the result is partial "
      "and scaled by the axis' size.")  # fmt: skip
def _mean_over(call: Call) -> Value:
    return reduce_mean(call.in_its_layout(0), _axes(call), _keeps(call))


@rule("ArgMaxWithValue", says="It takes the largest element along a dimension: if the dimension is cut, each rank has "
      "the largest of its piece.")  # fmt: skip
def _largest(call: Call) -> Value:
    found = reduce_largest(call.spread(0), (call.values[1],), call.values[2])
    return [found, found]


@rule("ReduceMax", says="It takes the largest element over dimensions: if one is cut, each rank has the largest of "
      "its piece.")  # fmt: skip
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


@rule("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Mm", "Bmm", says="It is a matrix product: the summed "
      "dimension must be cut alike in both matrices; if it is cut, the result is partial.")  # fmt: skip
def _matmul(call: Call) -> Value:
    turned = [value is True for value in (*call.values[2:4], False, False)]
    return matmul(call.spread(0), call.spread(1), turned[0], turned[1])


@rule("Dense", says="It is a matrix product whose second matrix is transposed.")
def _dense(call: Call) -> Value:
    if call.values[2] is not None:
        raise NotKnown("it has a bias")
    return matmul(call.spread(0), call.spread(1), False, True)


@rule("Outer", says="It is an outer product: both arguments must be plain.")
def _outer(call: Call) -> Value:
    x, y = by_element(call.spread(0)), by_element(call.spread(1))
    dims = checked(x.dims + y.dims, x, y)
    return Spread(dims, shifted=x.shifted | y.shifted, loose=x.loose | y.loose)


@rule("Reshape", "Squeeze", says="It keeps the elements: each piece stays between the same factors of the shape.")
def _reshape(call: Call) -> Value:
    x, shape = call.spread(0), call.outputs[0].shape
    for way in (tokens.grouped, tokens.ungrouped, tokens.ungrouped_rows):
        if (found := way(x, shape)) is not None:
            return found
    of_tile = "Grad_Tile" in call.node.scope  # it adds dimensions of one element in front of each
    found = moves.reshape(x, shape, of_tile, "-TopKRouter" in call.node.scope)  # its shapes are (ranks, tokens, ...)
    matrix = len(shape) == 2 and len(x.dims) == 3 and x.dims[2] == found.dims[1]
    return replace(found, merged=x.dims[:2]) if matrix else found


@rule("Transpose", says="It reorders the dimensions.")
def _transpose(call: Call) -> Value:
    x, order = call.spread(0), call.values[1]
    if "-MoELayer" not in call.node.scope or order != (1, 0, 2):
        return moves.transpose(x, order)
    x = tokens.ungrouped(x, x.shape) or x  # one sample on a rank needs no reshape to be grouped
    found = moves.transpose(x, order)
    return tokens.grouped(found, found.shape) or found


@rule("TransposeExtView", says="It swaps two dimensions.")
def _swap(call: Call) -> Value:
    x = call.spread(0)
    order = list(range(len(x.dims)))
    one, two = (axis % len(order) for axis in call.values[1:3])
    order[one], order[two] = two, one
    return moves.transpose(x, order)


@rule("ExpandDims", says="It adds a dimension of one element.")
def _expand(call: Call) -> Value:
    return moves.expand(call.spread(0), call.values[1])


@rule("ExpandAs", says="It returns the first argument, which must be as large as the second.")
def _expand_as(call: Call) -> Value:
    x, like = call.spread(0), call.spread(1)
    if x.dims != like.dims:
        raise NotKnown("there is no rule for a value that is repeated to the size of another")
    return x


@rule("ShapeCalc", says="It returns the dimensions over which the gradients of two factors are summed.")
def _broadcast_over(call: Call) -> Value:
    if "ShapeCalc_BroadcastGradientArgs" not in call.node.text:
        raise NotKnown("there is a rule only for the dimensions of a broadcast")
    x, y = call.spread(0).dims, call.spread(1).dims
    both = list(zip(x, y, strict=True))
    if any(-1 in (extent(one), extent(two)) and one != two for one, two in both):
        raise NotKnown("the data decide which dimensions are repeated")
    large = [(extent(one), extent(two)) for one, two in both]
    return [tuple(n for n, own in enumerate(large) if own[at] == 1 != own[1 - at]) for at in (0, 1)]


@rule("FillV2", says="It fills a tensor with one number, so all elements are equal. If routing decides the size, the "
      "elements are choices of experts.")  # fmt: skip
def _filled(call: Call) -> Value:
    shape, value = call.values[:2]
    if isinstance(shape, Order):
        return Order(("filled",))
    if not isinstance(shape, tuple) or not isinstance(value, (Alike, Zeros)):
        raise NotKnown("there is a rule only for a constant shape and a constant number")
    return type(value)(tuple(tidy((size,)) for size in shape))


@rule("CumSum", says="It is a running sum along a dimension, which must be whole.")
def _running_sum(call: Call) -> Value:
    x = call.spread(0)
    require_home(x)
    if any(not isinstance(atom, int) for atom in x.dims[call.values[1]]):
        raise refusal((x,), "each rank adds up only its own piece of a cut dimension")
    return as_tensor(x) if isinstance(x, Alike) else x  # the sums of equal elements grow


@rule("NonZero", says="It must find, among sorted choices of experts, the rows for the experts of the rank's node.")
def _non_zero(call: Call) -> Value:
    raise NotKnown("there is a rule only for finding the rows of a node's experts")


@rule("TensorToTuple", says="It makes a tuple of a tensor's elements: the tensor must be plain, and the tuple is cut "
      "like the tensor.")  # fmt: skip
def _elements(call: Call) -> Value:
    return by_element(call.spread(0))


@rule("Tile", says="It repeats the value along dimensions, which must be whole.")
def _tile(call: Call) -> Value:
    found = places.wherever(lambda x: moves.tile(x, call.values[1]), call.spread(0))
    of_flat = len(found.dims) == 1 and "CrossEntropyLoss/Grad_SumExt" in call.node.scope  # a gradient of a sum
    if "Router" not in call.node.scope and not of_flat:
        return found
    own = [number for number, dim in enumerate(call.spread(0).dims) if not dim and call.values[1][number] > 1]
    return tokens.equal_rows(found, own)  # of a mean over tokens, or of a sum


@rule("BroadcastTo", says="It repeats the value along dimensions of one element.")
def _broadcast(call: Call) -> Value:
    return places.wherever(lambda x: moves.broadcast(x, call.outputs[0].shape), call.spread(0))


@rule("Split", "SplitWithSize", says="It splits a dimension, which must be whole, or separates pieces that were "
      "gathered.")  # fmt: skip
def _split(call: Call) -> Value:
    axis = call.values[1 if call.node.op == "Split" else 2] % len(call.outputs[0].shape)
    sizes = tuple(out.shape[axis] for out in call.outputs)
    whole = call.spread(0)
    if len(sizes) == 2 and any(isinstance(atom, Rows) for atom in whole.dims[axis]):
        begin = [sizes[0] * (at == axis) for at in range(len(whole.dims))]
        return [None, tokens.unpadded(whole, begin, call.outputs[1].shape)]
    return [Part(whole, axis, sizes, number, call.number) for number in range(len(sizes))]


@rule("Concat", says="It joins values along a dimension, which must be whole, or moves gathered pieces to the "
      "dimension from which they came.")  # fmt: skip
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
    return places.wherever_they_fit(lambda given: moves.concat(given, axis), spreads)


@rule("MakeTuple", says="It makes a tuple of its arguments.")
def _tuple(call: Call) -> Value:
    return list(call.values)


@rule("TupleGetItem", says="It returns a member of a tuple.")
def _member(call: Call) -> Value:
    return call.values[0][call.values[1]]


@rule("StridedSlice", says="It takes a slice: along axes whose ranks start it at different offsets, the result is "
      "cut.", takes_differing=True)  # fmt: skip
def _take(call: Call) -> Value:
    by = _starts(call, 1, call.outputs[0].shape)
    if not by and (kept := tokens.unpadded(call.spread(0), call.values[1], call.outputs[0].shape)) is not None:
        return kept
    if "_MicroBatch" in call.node.scope and not by:  # which samples make a micro-batch does not matter
        x, wanted = call.spread(0), call.outputs[0].shape
        cuts = (tuple(atom for atom in dim if isinstance(atom, str)) for dim in x.dims)
        return replace(x, dims=tuple(tidy((*cut, size)) for cut, size in zip(cuts, wanted, strict=True)))
    return places.wherever(lambda x: slices.take(x, call.outputs[0].shape, by, call.sizes), call.spread(0))


@rule("StridedSliceGrad", says="It pads with zeros: along axes whose ranks put their slice at different offsets, the "
      "result is partial.", takes_differing=True)  # fmt: skip
def _pad(call: Call) -> Value:
    by = _starts(call, 2, call.node.inputs[0].shape)
    if not by and (more := tokens.padded_back(call.spread(0), call.values[2], call.outputs[0].shape)) is not None:
        return more
    x, shape = call.spread(0), call.outputs[0].shape
    try:
        return places.wherever(lambda given: slices.pad(given, shape, by, call.sizes), x)
    except Contradiction:
        if (found := slices.stacked(x, shape, by, call.sizes)) is None:
            raise
        return found


def _starts(call: Call, begin: int, piece: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Return the axes along which a slice, of this shape, starts elsewhere, by dimension, outermost first."""
    if any(argument not in (begin, begin + 1) for argument, _ in call.differs):
        raise NotKnown(f"its constants differ along {', '.join(sorted(call.shifts()))}")
    found = {key[1]: call.own_pieces(key, piece[key[1]]) for key in call.differs if key[0] == begin}
    if any(call.values[begin + 2][place] != 1 for place in found):
        raise NotKnown("a slice that starts elsewhere on each rank leaves out elements")
    return found


@rule("Embedding", says="It looks up rows of a table: if the rows are cut, each rank's indices must count from the "
      "first row of its piece.")  # fmt: skip
def _look_up(call: Call) -> Value:
    return slices.look_up(call.spread(0), call.spread(1), call.sizes)


@rule("EmbeddingDenseBackward", says="It sums gradients for each row of a table: if the tokens are cut, the result is "
      "partial.")  # fmt: skip
def _add_rows(call: Call) -> Value:
    return slices.add_rows(call.spread(0), call.spread(1), call.values[2], call.sizes)


@rule("OneHotExt", "OneHot", says="It makes one-hot rows: if each rank's indices count from the first class of its "
      "piece, the rows are cut.")  # fmt: skip
def _one_hot(call: Call) -> Value:
    x = call.spread(0)
    if call.values[4] != -1:
        raise NotKnown("there is a rule only for one-hot rows along a new last dimension")
    return experts.counts(x, call.number) or slices.one_hot(x, call.values[1], call.sizes)


@rule("AllReduce", says="It is a sum over ranks: a partial value becomes replicated, and a replicated value is scaled "
      "by the number of ranks. With op max it takes the largest.")  # fmt: skip
def _all_reduce(call: Call) -> Value:
    if re.search(r'\bop: "max"', call.node.text):
        return moves.all_largest(call.spread(0), call.axes)
    call.require_sum()
    return moves.all_reduce(call.spread(0), call.axes)


@rule("AllGather", says="It gathers pieces along dimension 0; they must later be moved to the dimension from which "
      "they came.")  # fmt: skip
def _all_gather(call: Call) -> Value:
    x = call.spread(0)
    found = experts.gathered(x, call.axes, call.sizes)
    return found or moves.all_gather_loose(tokens.by_rank(x, call.axes), call.axes, call.sizes)


@rule("ReduceScatter", says="It is a sum over ranks, of which each rank keeps a piece.")
def _reduce_scatter(call: Call) -> Value:
    call.require_sum()
    x = call.spread(0)
    found = experts.scattered(x, call.axes)
    return found or tokens.by_place(moves.reduce_scatter(x, call.axes, call.sizes))


assert attention and layers  # their rules are in the table, too
RULES = {operator: each for each in TABLE for operator in each.operators}
