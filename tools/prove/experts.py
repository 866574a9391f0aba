"""This module says how the results of MoE operators are distributed over the ranks. The covered operators are those of
the router, of the token exchange between ranks, and of the experts' matrix products.

The data decide which token goes to which expert, so the compiled graph does not show the rank of a token. A dispatched
dimension is a `Rows`: all tokens of its mesh axes in an unknown order, and the `path` of steps that produced this
order. Each step of the path must be undone by its counterpart, the last step first; the backward pass takes the same
path in reverse. The gradient of an expert's weight is a sum over rows, and does not depend on their order.

The steps of a path are ("group",), ("pad", number of padding rows in front), ("sort", the operator that sorts, number
of rows before) and ("exchange", (axes, the counts that are sent), -1). This module assumes that a sort's indices are a
permutation, and that the counts of an exchange fit the sorted rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.prove import moves, places
from tools.prove.call import Call, Order, Part, Value, rule
from tools.prove.spread import (
    Dim,
    NotKnown,
    Rows,
    Spread,
    Zeros,
    by_element,
    check_linear,
    check_rows,
    multiply,
    refusal,
    require_home,
    tidy,
    times,
)
from tools.prove.tokens import dispatched, rows_in


def counts(x: Spread, number: int) -> Order | None:
    """Return the number of tokens of each expert, which MindFormers computes by adding up one-hot rows, as an `Order`
    (integers that expert routing computes). Return None if the tokens are not dispatched to other ranks.
    """
    leave = any((found := rows_in(dim)) and found[1].path[-1][0] in ("pad", "gather") for dim in x.dims)
    return Order(("counts", number)) if leave else None


def _cut(dim: Dim) -> bool:
    return any(isinstance(atom, str) for atom in dim)


def _order(call: Call, place: int) -> Order:
    value = call.values[place]
    if not isinstance(value, Order):
        raise NotKnown(f"its argument {place} is not an order of rows")
    return value


def _rows(x: Spread) -> tuple[Dim, Rows, Dim]:
    """Return the axes of dispatched rows in dimension 0, the rows, and what stands behind them there."""
    found = rows_in(x.dims[0])
    if found is None:
        raise NotKnown(f"{x}: rows are selected that were not dispatched")
    place, rows = found
    return x.dims[0][:place], rows, x.dims[0][place + 1 :]


def _stepped(x: Spread, rows: Rows, behind: Dim = ()) -> Spread:
    axes = _rows(x)[0]
    return replace(x, dims=((*axes, rows, *behind), *x.dims[1:]))


def _push(x: Spread, kind: str, key: Any, count: int, behind: Dim) -> Spread:
    _, rows, _ = _rows(x)
    return _stepped(x, Rows(rows.origin, (*rows.path, (kind, key, rows.count)), count), behind)


def _pop(x: Spread, kind: str, key: Any, why: str, count: int = 0) -> Spread:
    """Return the rows before the last step, `count` of them: all copies of a token, or their sum."""
    _, rows, behind = _rows(x)
    if not rows.path or rows.path[-1][:2] != (kind, key):
        raise refusal((x,), why)
    before = rows.path[-1][2]
    copies = count // before if count > 0 and before > 0 else 1
    return _stepped(x, Rows(rows.origin, rows.path[:-1], before), tidy((copies, *behind)))


def gathered(x: Spread, axes: Sequence[str], sizes: Mapping[str, int]) -> Spread | None:
    """Return how dispatched token rows are distributed over the ranks after an AllGather along some axes of the mesh;
    return None if dimension 0 of the tensor holds no dispatched rows.
    """
    if not x.dims or (found := dispatched(x.dims[0])) is None or found[0] == 0:
        return None
    front, rows, behind = _rows(x)
    if missing := set(axes).difference(front):
        raise refusal((x,), f"rows are gathered over {_named(missing)}, over which they are not cut")
    count = rows.count * math.prod(sizes[axis] for axis in axes) if rows.count > 0 else -1
    own = Rows(rows.origin, (*rows.path, ("gather", (tuple(axes), front), rows.count)), count)
    rest = tuple(axis for axis in front if axis not in axes)
    return replace(x, dims=((*rest, own, *behind), *x.dims[1:]), loose=x.loose.difference(axes))


def scattered(x: Spread, axes: Sequence[str]) -> Spread | None:
    """Return how token rows are distributed over the ranks after a ReduceScatter over the ranks that had gathered these
    rows. Return None if dimension 0 of the value holds no rows that were dispatched to experts.
    """
    if not x.dims or dispatched(x.dims[0]) is None:
        return None
    _, rows, behind = _rows(x)
    if rows.path[-1][0] != "gather" or rows.path[-1][1][0] != tuple(axes):
        raise refusal((x,), "the summed rows are not the rows that were gathered over the same ranks")
    x = moves.all_reduce(x, axes)
    front, own = rows.path[-1][1][1], Rows(rows.origin, rows.path[:-1], rows.path[-1][2])
    return replace(x, dims=((*front, own, *behind), *x.dims[1:]))


def _picked(x: Spread, axes: tuple[str, ...], key: Any) -> Spread:
    """Return gathered and sorted rows of which each rank keeps those of its node's experts."""
    front, rows, behind = _rows(x)
    step = next((step for step in rows.path[::-1] if step[0] == "gather"), None)
    if step is None or step[1][0] != axes or set(axes) & x.partial or behind:
        raise refusal((x,), f"rows are divided over {_named(axes)}, but were not gathered over these ranks")
    whole = tuple(axis for axis in step[1][1] if axis in axes or axis in front)
    own = Rows(rows.origin, (*rows.path, ("pick", (axes, key), -1)), -1)
    return replace(x, dims=((*whole, own), *x.dims[1:]))


def _put_back(x: Spread, axes: tuple[str, ...], key: Any, count: int) -> Spread:
    """Return rows among those of other nodes, for which this rank has zeros."""
    front, rows, behind = _rows(x)
    if rows.path[-1][:2] != ("pick", (axes, key)) or behind:
        raise refusal((x,), "rows are put back into other rows than those from which they were selected")
    rest = tuple(axis for axis in front if axis not in axes)
    own = Rows(rows.origin, rows.path[:-1], count)
    found = replace(x, dims=((*rest, own), *x.dims[1:]), partial=x.partial | set(axes))
    return replace(found, loose=found.loose.difference(axes))


@rule("IndexSelect", says="It puts dispatched rows into the order of a sort or back, or selects the rows for the "
      "experts of the rank's node.")  # fmt: skip
def _select(call: Call) -> Value:
    x, order = call.spread(0), _order(call, 2).key
    if call.values[1] != 0:
        raise NotKnown("only rows are dispatched")
    count = call.outputs[0].shape[0]
    if order[0] == "own":
        return _picked(x, order[2], order[1])
    if order[0] == "sorted own":
        return _picked(_push(x, "sort", order[1], -1, ()), order[2], order[1])
    if order[0] == "sort":
        return _push(x, "sort", order[1], count, ())
    if order[0] == "unsort":
        return _pop(x, "sort", order[1], "rows are put back in the order of another sort", count)
    raise NotKnown("it is unknown whether the index that selects rows is an order of rows")


@rule("InplaceIndexAddExt", says="It is the gradient of IndexSelect: dispatched rows go back, and copies of a token "
      "are added. Rows for the experts of one node become partial over the nodes.")  # fmt: skip
def _add_back(call: Call) -> Value:
    x, order = call.spread(3), _order(call, 2).key
    if not isinstance(call.values[0], Zeros):
        raise NotKnown("it does not add to zeros")
    count = call.outputs[0].shape[0]
    if order[0] == "own":
        return _put_back(x, order[2], order[1], count)
    if order[0] == "sorted own":
        x = _put_back(x, order[2], order[1], -1)
        return _pop(x, "sort", order[1], "rows are put back in the order of another sort")
    if order[0] == "unsort":
        return _push(x, "sort", order[1], count, ())
    if order[0] == "sort":
        return _pop(x, "sort", order[1], "rows are put back in the order of another sort", count)
    raise NotKnown("it is unknown whether the index that adds rows is an order of rows")


@rule("AlltoAllV", says="It sends dispatched rows to the ranks of their experts, or back: the same ranks must have "
      "exchanged the counts of rows before.")  # fmt: skip
def _exchange(call: Call) -> Value:
    if isinstance(call.values[0], Order):
        return _exchanged_order(call, call.values[0].key)
    x, sent, received = call.spread(0), _order(call, 1).key, _order(call, 2).key
    axes, rows, behind = _rows(x)
    if missing := set(call.axes) - set(axes):
        how = "partial" if missing & x.partial else "the same"
        raise refusal((x,), f"rows are exchanged over {', '.join(sorted(missing))}, over which they are {how}")
    if received == (*sent, call.axes):
        return _stepped(x, Rows(rows.origin, (*rows.path, ("exchange", (call.axes, sent), -1)), -1), behind)
    if sent == (*received, call.axes):
        return _pop(x, "exchange", (call.axes, received), "rows do not come back in the way in which they were sent")
    raise refusal((x,), "the received counts are not the counts that the other ranks send")


def _exchanged_order(call: Call, key: tuple[Any, ...]) -> Order:
    """Return integers of routing after an exchange over ranks: of rows, or as many counts from each rank."""
    if key[0] != "counts":
        return Order((*key, "exchanged", call.number))
    sent, received = call.values[1:3]
    if not isinstance(sent, tuple) or sent != received or len(set(sent)) != 1:
        raise NotKnown("counts are exchanged in pieces, and it is unknown whether these are equal")
    if len(sent) != math.prod(call.sizes[axis] for axis in call.axes):
        raise refusal((), f"counts are exchanged in {len(sent)} pieces over {_named(call.axes)}")
    return Order((*key, call.axes))


@rule("AlltoAll", says="It exchanges the counts of rows, or moves an axis: the axis then cuts the dimension that is "
      "split, and the joined dimension becomes whole.")  # fmt: skip
def _exchange_counts(call: Call) -> Value:
    if isinstance(call.values[0], Spread):
        split, join = (re.search(rf"\b{name}: I64\((-?\d+)\)", call.node.text) for name in ("split_dim", "concat_dim"))
        if not split or not join:
            raise NotKnown("it is unknown which dimensions the exchange splits and joins")
        number = len(call.outputs[0].shape)
        dims = int(split[1]) % number, int(join[1]) % number
        if len(call.axes) == 1:
            return moves.exchange(call.spread(0), call.axes[0], *dims, call.sizes)
        return places.wherever(lambda x: exchange_over(x, call.axes, *dims, call.sizes), call.spread(0))
    return Order((*_order(call, 0).key, call.axes))


def exchange_over(x: Spread, axes: tuple[str, ...], split: int, join: int, sizes: Mapping[str, int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after an AllToAll over several axes of the mesh.
    The pieces along the exchanged axes must follow each other in one dimension, so that the axes count as one axis.

    Args:
        axes: the axes of the group, outermost first.
        split, join: the dimensions that are split and joined.
    """
    both, count = "*".join(axes), len(axes)
    dims = []
    for dim in x.dims:
        place = next((at for at in range(len(dim)) if dim[at : at + count] == axes), None)
        dims.append(dim if place is None else (*dim[:place], both, *dim[place + count :]))
    if both not in {atom for dim in dims for atom in dim}:
        raise refusal((x,), f"pieces over {_named(axes)} are exchanged, but do not follow each other in one dimension")
    one = replace(x, dims=tuple(dims), loose=x.loose.difference(axes))
    found = moves.exchange(one, both, split, join, {**sizes, both: math.prod(sizes[axis] for axis in axes)})
    apart = (tuple(part for atom in dim for part in (axes if atom == both else (atom,))) for dim in found.dims)
    return replace(found, dims=tuple(apart))


@rule("SortExt", "Sort", says="It finds an order of rows; sorting this order gives the order that undoes it.")
def _sort(call: Call) -> Value:
    given = call.values[0]
    if isinstance(given, Order) and given.key[0] == "sort":
        return [Order(("sorted", call.number)), Order(("unsort", given.key[1]))]
    if not isinstance(given, Order):
        given = by_element(call.spread(0))
        if not any(rows_in(dim) for dim in given.dims):
            raise NotKnown("there is a rule only for sorting dispatched rows")
    return [Order(("sorted", call.number)), Order(("sort", call.number))]


@rule("FmodScalar", "CumsumExt", "MoveTo", "Shape", says="The result keeps the source of its argument, which must be "
      "an order of rows, or counts of rows.")  # fmt: skip
def _counted(call: Call) -> Value:
    if call.node.op == "Shape":
        return Order(("shape",))
    return _order(call, 0)


@rule("Zeros", says="It makes a tensor of zeros.")
def _zeros(call: Call) -> Value:
    shape = call.values[0]
    return Zeros(tuple((size,) for size in shape) if isinstance(shape, tuple) else ())


@rule("GroupedMatmul", says="It multiplies each expert's rows with its weight: the rows must be on the ranks over "
      "which the experts are cut. The gradient of the weight is partial over all other axes of the rows.")  # fmt: skip
def _grouped(call: Call) -> Value:
    (x,), (w,) = ([each.spread if isinstance(each, Part) else each for each in call.values[at]] for at in (0, 1))
    check_linear(x, w)
    partial, powers = x.partial | w.partial, times((x.powers, 1), (w.powers, 1))
    exchanges = ways(_rows(x if call.values[9] == 0 else w)[1])
    if (counted := _order(call, 7).key)[0] != "counts" or counted[2:] != exchanges:
        both = (" and then over ".join(map(_named, each)) or _named(()) for each in (exchanges, counted[2:]))
        told = "the rows were exchanged over {}, and the numbers of rows of the groups over {}".format(*both)
        raise refusal((x, w), told if counted[0] == "counts" else "the numbers of rows of the groups are not counts")
    if call.values[9] == 0:
        _, rows, behind = _rows(x)
        cut, went = tuple(atom for atom in w.dims[0] if isinstance(atom, str)), _exchanged(rows)
        if cut != went or behind:
            raise refusal((x, w), f"rows are exchanged over {_named(went)}, but experts are cut over {_named(cut)}")
        if x.dims[1] != w.dims[1]:
            raise refusal((x, w), "the summed dimension of the product is not cut equally in both factors")
        over = frozenset(atom for atom in x.dims[1] if isinstance(atom, str))
        return [Spread((x.dims[0], w.dims[2]), partial | over, powers)]
    if call.values[9] != 2:
        raise NotKnown("there is a rule only for products of groups of rows")
    if x.dims[1] != w.dims[0]:
        check_rows(x.dims[1], w.dims[0])
        raise refusal((x, w), "the product sums over different rows of its factors")
    own = _exchanged(_rows(w)[1])
    dims = (tidy((*own, call.outputs[0].shape[0])), x.dims[0], w.dims[1])
    return [Spread(dims, partial | w.holes.difference(own), powers)]


def ways(rows: Rows) -> tuple[tuple[str, ...], ...]:
    """Return for each exchange of a token dispatch the axes of the device mesh over which the exchange has sent token
    rows to their experts.
    """
    return tuple(step[1][0] for step in rows.path if step[0] in ("exchange", "pick"))


def _exchanged(rows: Rows) -> tuple[str, ...]:
    return tuple(axis for axes in ways(rows) for axis in axes)


def _named(axes: Iterable[str]) -> str:
    return ", ".join(sorted(axes)) or "no ranks"


@rule("TopkExt", says="It finds the largest elements of the last dimension, which must be whole, and their indices.")
def _top(call: Call) -> Value:
    x = by_element(call.spread(0))
    if call.values[2] not in (-1, len(x.dims) - 1):
        raise NotKnown("there is a rule only for the last dimension")
    found = replace(_last_whole(x), dims=(*x.dims[:-1], tidy((call.values[1],))))
    return [found, found]


@rule("GatherD", says="It takes elements of the last dimension, which must be whole, by indices of each row.")
def _gather(call: Call) -> Value:
    x, places = _last_whole(call.spread(0)), by_element(call.spread(2))
    return multiply(replace(x, dims=(*x.dims[:-1], places.dims[-1])), places)


@rule("GatherDGradV2", says="It is the gradient of GatherD.")
def _gather_gradient(call: Call) -> Value:
    x, places = _last_whole(by_element(call.spread(0))), by_element(call.spread(2))
    found = multiply(call.spread(3), places)
    return replace(found, dims=(*found.dims[:-1], x.dims[-1]))


@rule("InplaceScatterSrc", says="It is the gradient of TopkExt for largest elements that nothing uses: it must be "
      "zero.")  # fmt: skip
def _scatter(call: Call) -> Value:
    if not isinstance(call.values[0], Zeros) or "Grad_TopkExt" not in call.node.scope or "%" in call.node.head[-40:]:
        raise NotKnown("there is a rule only for the zeros of unused values")
    return call.values[0]


def _last_whole(x: Spread) -> Spread:
    require_home(x)
    if _cut(x.dims[-1]):
        raise refusal((x,), "the operator needs the whole last dimension, which is cut")
    return x


def _same_order(call: Call) -> Value:
    if call.differs:
        raise NotKnown(f"its constants differ along {_named(call.shifts())}")
    return call.values[0]


def _bound(call: Call) -> Value:
    """Return whether the sorted experts are not below the first one of the node, or below the first one of the next
    node.
    """
    given = _order(call, 0).key
    if given[0] != "sorted" or len(given) != 2:
        raise NotKnown("there is a rule only for comparing sorted experts")
    if not call.differs:
        return Order(("from" if call.node.op == "GreaterEqual" else "below", given[1], (), 0))
    if call.node.op == "GreaterEqual":
        axes = call.own_pieces((1, 0))
        return Order(("from", given[1], axes, call.offsets[1, 0][1][axes[-1]]))
    first, steps = call.offsets.get((1, 0), (0, {}))  # one node further than the first expert
    own = min(steps.values(), default=0)
    return Order(("below", given[1], replace(call, offsets={(1, 0): (first - own, steps)}).own_pieces((1, 0)), own))


def _between(call: Call) -> Value:
    one, two = _order(call, 0).key, _order(call, 1).key
    if (one[0], two[0]) != ("from", "below"):
        raise NotKnown("there is a rule only for combining the first and the last expert of a node")
    if one[1:] != two[1:]:
        raise refusal(
            (), "the first and the last expert of a node differ along different axes, or belong to different rows"
        )
    return Order(("within", *one[1:3]))


def _places(call: Call) -> Value:
    given = _order(call, 0).key
    if given[0] != "within":
        raise NotKnown("there is a rule only for finding the rows of a node's experts")
    return Order(("own", *given[1:]))


def _chosen(call: Call) -> Value:
    """Return an order of rows, or sorted experts, of which only those of the node's experts are left."""
    given, own = _order(call, 0).key, _order(call, 2).key
    if own[0] != "own" or given[0] not in ("sort", "sorted") or len(given) != 2:
        raise NotKnown("there is a rule only for selecting the rows of a node's experts from an order")
    # the sort returns both its order and the sorted experts: their names tell which sort it was
    return Order(("sorted own" if given[0] == "sort" else "experts own", *own[1:]))


def _of_node(call: Call) -> Value:
    """Return the counts of the experts of a rank's node."""
    given = _order(call, 0).key
    if given[0] != "counts" or len(given) != 2 or len(call.values[1]) != 1:
        raise NotKnown("there is a rule only for selecting the counts of a node's experts")
    whole, own = call.node.inputs[0].shape[0], call.outputs[0].shape[0]
    axes = call.own_pieces((1, 0), own) if call.differs else ()
    if own * math.prod(call.sizes[axis] for axis in axes) != whole:
        raise refusal((), f"counts of {own} of {whole} experts are taken on the ranks along {_named(axes)}")
    return Order((*given, axes))


# what only moves, counts or compares integers of routing
ON_ORDERS: Mapping[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("Cast", "Reshape", "Transpose", "SumExt", "ReduceSum", "Depend", "Load"), _same_order),
    **dict.fromkeys(("FloorDiv", "CumSum", "Add"), _same_order),
    **dict.fromkeys(("GreaterEqual", "LessScalar"), _bound),
    "LogicalAnd": _between,
    "NonZero": _places,
    "IndexSelect": _chosen,
    "StridedSlice": _of_node,
}
