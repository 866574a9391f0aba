"""This module says how tokens are distributed over the ranks by the operators with which `plugins.hierarchical_ep`
dispatches tokens. The module covers every dispatch mode of the plugin, with and without chunks.

The rules of `tools.prove.experts` check each step of a dispatch. The rules in this module assume that the steps of a
single rank on its own rows are right (which rows the rank takes, in which order, how often, and which columns share a
buffer), and check the steps between ranks. The path of dispatched rows has the step ("own", tokens of the rank) after
the grouping, and then only exchanges. The counts of an AlltoAllV must have been exchanged over the same ranks, the
combine must undo the exchanges in the opposite order, the experts must be cut over exactly the ranks to which their
rows were sent, and rows that were sent to a node must be compared with the experts of this node. The mode
`hierarchical` gathers the rows of all nodes on each rank, which then keeps the rows for the experts of its node: this
is treated as an exchange over the nodes, and the ReduceScatter over the same ranks undoes it. All integers that routing
decides for some rows are one `Order`: ("choice", the dimension of the rows, the axes along which its first expert
differs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.prove import documents
from tools.prove.call import Call, Order, Value, rule
from tools.prove.experts import ways
from tools.prove.moves import reduce_sum
from tools.prove.spread import (
    Dim,
    NotKnown,
    Rows,
    Spread,
    Zeros,
    by_element,
    check_linear,
    plain,
    refusal,
    tidy,
)
from tools.prove.tokens import grouped_rows, rows_in

_GROUPED = (("group",),)
_LAYER, _TURN = "-RoutedLayer/", "-InTurn/"  # cells of the plugin: MindFormers' dispatchers have other rules
_BY_CHOICE = ("IndexSelect", "InplaceIndexAddExt", "IndexAdd", "Gather")  # they take or add rows by an index
_EVERY = ("every row",)  # stands where an exchange has its counts: the ranks hold the rows of all


def _rows_of(x: Any) -> Rows | None:
    """Return the rows of dimension 0 of a tensor, if their path is that of this module, or has not begun."""
    if not isinstance(x, Spread) or not x.dims or (found := rows_in(x.dims[0])) is None:
        return None
    return found[1] if found[1].path[:1] == _GROUPED else None


def _dispatched(x: Any) -> bool:
    rows = _rows_of(x)
    return rows is not None and len(rows.path) > 1 and rows.path[1][0] == "own"


def _grouped(x: Any) -> bool:
    rows = _rows_of(x)
    return rows is not None and rows.path == _GROUPED


def _chosen(value: Any) -> bool:
    return isinstance(value, Order) and value.key[0] == "choice"


def _flat(values: Sequence[Value]) -> Iterator[Value]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _axis_and_rows(x: Spread) -> tuple[Dim, Rows]:
    found = rows_in(x.dims[0])
    assert found
    return tuple(atom for atom in x.dims[0] if isinstance(atom, str)), found[1]


def _entered(x: Spread) -> Dim:
    """Return the first dimension of the rows that a rank holds, in an order of its own."""
    axes, rows = _axis_and_rows(x)
    path = (*rows.path, ("own", rows.count)) if rows.path == _GROUPED else rows.path
    return (*axes, Rows(rows.origin, path, -1))


def held(x: Spread, shape: Sequence[int]) -> Spread:
    """Return how dispatched token rows are distributed over the ranks (their spread), for a tensor of the shape `shape`
    on each rank.

    Raises:
        NotKnown: a dimension after the rows is cut.
    """
    if any(isinstance(atom, str) for dim in x.dims[1:] for atom in dim):
        raise NotKnown(f"{x}: the columns of dispatched rows are cut")
    return replace(x, dims=(_entered(x), *(tidy((size,)) for size in shape[1:])))


def _left(x: Spread, count: int) -> Spread:
    """Return `x` as the tokens of the rank again if it has as many rows as the rank has tokens, and if every exchange
    on the rows' way is undone; otherwise return `x` unchanged.
    """
    axes, rows = _axis_and_rows(x)
    if rows.path != (*_GROUPED, ("own", count)):
        return x
    return replace(x, dims=((*axes, Rows(rows.origin, _GROUPED, count)), *x.dims[1:]))


def _choice(dim: Dim, first: frozenset[str] = frozenset()) -> Order:
    return Order(("choice", dim, first))


def _moved(x: Spread, index: Value, call: Call) -> Spread:
    """Return rows that the rank takes or adds by an index."""
    found = held(x, call.outputs[0].shape)
    if _chosen(index) and index.key[1] != found.dims[0]:
        raise refusal((x,), "rows are selected by the choices of other rows")
    return _left(found, call.outputs[0].shape[0])


def _taken(call: Call) -> Value:
    index = call.values[1 if call.node.op == "Gather" else 2]
    if _chosen(call.values[0]):
        return call.values[0]
    return _moved(call.spread(0), index, call)


def _added(call: Call) -> Value:
    index, x = (1, 2) if call.node.op == "IndexAdd" else (2, 3)
    if not isinstance(call.values[0], Zeros):
        raise NotKnown("it does not add to zeros")
    return _moved(call.spread(x), call.values[index], call)


def _integers(call: Call) -> Value:
    """Return integers of routing for some rows, behind any operator of a rank."""
    orders = [value for value in _flat(call.values) if _chosen(value)]
    tensors = [value for value in _flat(call.values) if _rows_of(value)]
    if len({order.key[1] for order in orders}) > 1 or any(_entered(x) != orders[0].key[1] for x in tensors):
        raise refusal((), "choices of different rows are combined")
    if tensors and not call.counts:
        return held(tensors[0], call.outputs[0].shape)
    first = frozenset().union(*(order.key[2] for order in orders))
    if call.node.op == "Sub" and call.differs:
        first |= frozenset(call.own_pieces((1, 0)))
    return _choice(orders[0].key[1], first)


def _counts(call: Call) -> Value:
    """Return how many rows a rank sends where: sums of choices over all rows."""
    own = call.values[0]
    if call.values[1] != (0,):
        return _integers(call)
    rows = next(atom for atom in own.key[1] if isinstance(atom, Rows))
    came = ways(rows)
    if not came and own.key[2]:
        raise NotKnown("rows arrived at a node neither by an exchange nor by an AllGather")
    if own.key[2] != frozenset(axis for axes in came for axis in axes):
        told = ", ".join(sorted(own.key[2])) or "no axis"
        raise refusal(
            (), f"the first expert of a node differs along {told}, but the node's rows did not come along these axes"
        )
    return Order(("counts", call.number, *came))


def _joined(call: Call) -> Value:
    members = call.values[0]
    if any(map(_chosen, members)):
        return _integers(call)
    rows = [item for item in members if _rows_of(item)]
    if len({(_entered(item), item.partial, item.powers) for item in rows}) > 1:
        raise refusal(rows, "rows that came in different ways are joined")
    if any(item.holes or item.partial or item.powers for item in members if item not in rows):
        raise NotKnown("rows are joined with a value that is not constant")
    return held(rows[0], call.outputs[0].shape)


def _gathered(call: Call) -> Value:
    x = held(call.spread(0), call.outputs[0].shape)
    axes, rows = _axis_and_rows(x)
    if missing := ", ".join(sorted(set(call.axes) - set(axes))):
        raise refusal((x,), f"rows are gathered over {missing}, over which they are not cut")
    rows = Rows(rows.origin, (*rows.path, ("exchange", (call.axes, _EVERY), -1)), -1)
    return replace(x, dims=((*axes, rows), *x.dims[1:]))


def _scattered(call: Call) -> Value:
    call.require_sum()
    x = held(call.spread(0), call.outputs[0].shape)
    axes, rows = _axis_and_rows(x)
    if rows.path[-1][:2] != ("exchange", (call.axes, _EVERY)):
        raise refusal((x,), "the summed rows are not the rows that were gathered over the same ranks")
    if over := ", ".join(sorted(x.partial.intersection(call.axes))):
        raise refusal((x,), f"rows are partial sums over {over}, over which they were gathered")
    rows = Rows(rows.origin, rows.path[:-1], -1)
    return _left(replace(x, dims=((*axes, rows), *x.dims[1:])), call.outputs[0].shape[0])


def _sliced(call: Call) -> Value:
    return held(call.spread(0), call.outputs[0].shape)


def _reshaped(call: Call) -> Value:
    """Return the same elements; a flat buffer of what belongs to the rank's tokens becomes a tensor of tokens again."""
    x, shape = held(call.spread(0), call.outputs[0].shape), call.outputs[0].shape
    if shape[:1] != (1,) or len(shape) == 1:
        return _left(x, shape[0]) if len(call.spread(0).dims) == 1 else x
    axes, rows = _axis_and_rows(x)
    if rows.path != (*_GROUPED, ("own", shape[1])):
        return x
    return replace(x, dims=(axes, (Rows(rows.origin, _GROUPED, shape[1]),), *x.dims[2:]))


def _summed(call: Call) -> Value:
    dims = call.values[1] if isinstance(call.values[1], tuple) else (call.values[1],)
    if not dims and call.values[3]:  # over nothing
        return call.spread(0)
    if 0 in dims or not dims or -len(call.spread(0).dims) in dims:
        raise NotKnown("dispatched rows are added up")
    x = reduce_sum(call.spread(0), dims, bool(call.values[2]))
    return held(x, x.shape)  # the graph may not state the columns


def _to_integers(call: Call) -> Value:
    x = call.spread(0)
    if not call.counts:
        return x
    check_linear(x, plain(()))
    if x.partial or x.powers:
        raise refusal((x,), "numbers of experts are a partial sum")
    return _choice(x.dims[0])


def _split(call: Call) -> Value:
    return [held(call.spread(0), out.shape) for out in call.outputs]


def _tiled(call: Call) -> Value:
    if call.values[1][0] != 1:
        raise NotKnown("dispatched rows are repeated")
    own = call.spread(0)
    return held(own, [size * count for size, count in zip(own.shape, call.values[1], strict=True)])


# operators on dispatched rows; the others have the rules that they have for any tensor
ON_ROWS: Mapping[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("IndexSelect", "Gather"), _taken),
    **dict.fromkeys(("InplaceIndexAddExt", "IndexAdd"), _added),
    **dict.fromkeys(("StridedSlice", "StridedSliceGrad", "Slice"), _sliced),
    **dict.fromkeys(("ReduceSum", "SumExt"), _summed),
    **dict.fromkeys(("Split", "SplitWithSize"), _split),
    "AllGather": _gathered,
    "ReduceScatter": _scattered,
    "Concat": _joined,
    "Reshape": _reshaped,
    "Cast": _to_integers,
    "Tile": _tiled,
}


def _places(call: Call) -> Value:
    """Return where the members of a Concat begin in its gradient."""
    return [Order(("place", number)) for number, _ in enumerate(call.values[0])]


def _on_choices(call: Call) -> Value:
    op = call.node.op
    if op in ("MakeTuple", "TupleGetItem"):
        return list(call.values) if op == "MakeTuple" else call.values[0]
    if op == "Shape":
        return Order(("shape",))
    if op in ("SortExt", "Sort"):
        return [call.values[0], call.values[0]]
    if op in ("ReduceSum", "SumExt"):
        return _counts(call)
    if op in _BY_CHOICE:
        return ON_ROWS[op](call)
    return _joined(call) if op == "Concat" else _integers(call)


def rule_of(call: Call) -> Callable[[Call], Value] | None:
    """Return the rule for an operator that belongs to the dispatch of tokens; return None for any other operator."""
    op, values = call.node.op, list(_flat(call.values))
    if op == "Depend" and _TURN in call.node.scope and _grouped(values[0]):
        return _sliced  # whole rows in front of a collective
    if op in ("Depend", "Load", "TensorMove"):
        return None
    if _LAYER in call.node.scope:
        found = [grouped_rows(value) if isinstance(value, Spread) else None for value in call.values]
        if any(found):
            call = replace(call, values=[rows or value for rows, value in zip(found, call.values, strict=True)])
            flat = list(_flat(call.values))
            taken = op in _BY_CHOICE and any(map(_chosen, flat))
            entering = _on_choices if taken else _entering(call, flat)
            return entering and (lambda _: entering(call))
    if "ShapeCalc_g_concat" in call.node.text:
        return _places
    if any(map(_chosen, values)):
        return _on_choices
    if any(map(_dispatched, values)):
        return ON_ROWS.get(op)
    if op == "TupleGetItem" and isinstance(call.values[0], Order):
        return lambda call: call.values[0]
    if op == "LogicalAnd" and call.differs and "%" not in call.node.head:
        return lambda call: Order(("to itself",))
    return _entering(call, values)


def _entering(call: Call, values: Sequence[Value]) -> Callable[[Call], Value] | None:
    """Return the rule of an operator by which tokens come into an order of the rank's own."""
    rows = [value for value in values if _grouped(value)]
    op = call.node.op
    if not rows:
        return None
    constant = any(isinstance(value, Spread) and not value.holes and not _rows_of(value) for value in call.values[2:3])
    if op in ("IndexSelect", "InplaceIndexAddExt") and constant and not isinstance(call.values[2], Order):
        return ON_ROWS[op]
    if op in ("Split", "SplitWithSize") and call.values[1 if op == "Split" else 2] == 0:
        return _split
    integers = call.counts
    one = len(call.outputs[0].shape) == 1 if call.outputs else False
    if op == "MakeTuple" and call.differs and len(values) == 2 and re.match(r"Int", call.outputs[-1].dtype):
        return lambda call: list(call.values)
    if op == "Concat" and one:
        return (lambda call: _choice(_entered(rows[0]))) if integers else _joined
    if op == "Cast" and integers and _LAYER in call.node.scope:  # the experts of whole tokens, for the first step
        return lambda call: _to_integers(replace(call, values=[held(rows[0], rows[0].shape), *call.values[1:]]))
    return None


@rule("IndexAdd", says="It adds up dispatched rows on a rank; the indices must be the router's choices.")
def _by_choices(call: Call) -> Value:
    raise NotKnown("there is a rule only for dispatched rows")


@rule("Gather", says="It takes dispatched rows by the router's choices, elements of a plain table by index, or one "
      "entry of each rank's own list.")  # fmt: skip
def _looked_up(call: Call) -> Value:
    if (entry := documents.entry(call)) is not None:
        return entry
    table = by_element(call.spread(0))
    if len(table.dims) != 1 or table.holes or not call.counts or call.values[2] != 0:
        raise NotKnown("there is a rule only for dispatched rows and a plain table of numbers")
    return by_element(call.spread(1))


@rule("Slice", says="It takes the rows after rows that are constant, in the gradient of Concat.")
def _behind_constants(call: Call) -> Value:
    raise NotKnown("there is a rule only for dispatched rows")


@rule("RemainderTensorScalar", says="The argument must be the router's choices, and the result belongs to the same "
      "rows.")  # fmt: skip
def _remainder(call: Call) -> Value:
    raise NotKnown("there is a rule only for choices of the router")
