"""This module checks in a compiled graph that the loss of a step contains the mean of the ranks' balancing losses
(auxiliary losses of the routers), and not their sum.

Each router sums its balancing loss over the ranks and divides it by their number. In the backward pass, the gradient of
the loss must therefore be divided by the number of ranks between the division by all devices (`_VirtualDiv`) and the
sum over ranks. In a pipeline, the gradient of the balancing losses of earlier stages is sent from stage to stage; it is
still undivided there, because each router divides the gradient of its own loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.dryrun.graph_text import GraphText, Node, arguments_of
from tools.dryrun.scale import OVER_DEVICES
from tools.prove.frame import PARAMETER, Direction, Frame
from tools.prove.mesh import Mesh
from tools.prove.rules import divisor_of
from tools.prove.spread import Contradiction, NotKnown, Spread

_SUM = re.compile(r"Router/(?:.*/)?Grad_AllReduce/")


class Graph(Protocol):
    """A `Graph` lists the attributes of a `Typing` (of `tools.prove.typing`) that this module uses."""

    graph: GraphText
    mesh: Mesh
    root: Frame
    received: Mapping[Direction, Spread]

    def before(self, frame: Frame, node: Node) -> list[tuple[Frame, int]]:
        """Return the operators whose results are inputs of an operator."""

    def direction_of(self, node: Node) -> Direction:
        """Return the pass and the shape of a Send or Receive."""


@dataclass
class Way:
    """A `Way` says what was found on all paths in the graph from the loss's gradient to an operator.

    Args:
        averaged: whether a way passes a router's division by the number of ranks.
        undivided: whether a way comes from the division by all devices and passes no router's division.
        unsure: whether a way ends at an operator behind which it is unknown.
    """

    averaged: bool = False
    undivided: bool = False
    unsure: bool = False


def require_mean(typing: Graph, frame: Frame, node: Node, axes: Sequence[str]) -> None:
    """Refuse a graph in which the ranks' balancing losses are summed, but the gradient is not that of their mean.

    Raises:
        Contradiction: nothing divides the gradient by the number of ranks.
        NotKnown: it is unknown whether the gradient is divided.
    """
    if node.op != "AllReduce" or math.prod(node.outputs[0].shape) != 1 or not _SUM.search(node.scope):
        return
    ranks = math.prod(typing.mesh.sizes[axis] for axis in axes)
    way = _way(typing, typing.before(frame, node), ranks)
    if way.undivided:
        raise Contradiction(f"the balancing losses of {ranks} ranks are summed, but not divided by {ranks}")
    if way.unsure or not way.averaged:  # the gradient comes from another graph
        raise NotKnown(f"nothing here divides the losses of {ranks} ranks, which are summed, by {ranks}")


def is_gradient_of_one_number(direction: Direction) -> bool:
    """Return whether the value that stages send in a direction may be the gradient of their balancing losses: it
    belongs to the backward pass and has only one element.
    """
    return direction[0] == "backward" and math.prod(direction[1]) == 1


def averaged_sends(typing: Graph) -> set[Direction]:
    """Return the directions in which a stage sends a gradient of one element, if the stage may have divided this
    gradient as a router does.
    """
    found = set()
    for number, node in enumerate(typing.graph.graphs[typing.graph.root]):
        if node.op == "Send" and is_gradient_of_one_number(typing.direction_of(node)):
            way = _way(typing, [(typing.root, number)], None)
            if way.averaged or way.unsure:
                found.add(typing.direction_of(node))
    return found


def _way(typing: Graph, todo: list[tuple[Frame, int]], ranks: int | None) -> Way:
    """Return what is found on the ways to some operators.

    Args:
        ranks: the divisor of the router's division; None for any divisor.
    """
    found, seen = Way(), set[tuple[int, int]]()
    while todo:
        frame, number = todo.pop()
        if (id(frame), number) in seen:
            continue
        seen.add((id(frame), number))
        each = typing.graph.graphs[frame.name][number]
        if each.op == "RealDiv" and "Grad_RealDiv" in each.scope and ranks in (None, divisor_of(each)):
            found.averaged = True
        elif each.op == "RealDiv" and OVER_DEVICES in each.scope:
            found.undivided = True
        elif each.op == "Receive":
            value = typing.received.get(typing.direction_of(each))
            found.undivided |= value is not None and value.undivided
            found.unsure |= value is None or not value.undivided
        elif (inner := _member(typing, frame, each)) is not None:
            todo.append(inner)
        else:
            found.unsure |= bool(each.calls)
            todo += typing.before(frame, each)
    return found


def _member(typing: Graph, frame: Frame, node: Node) -> tuple[Frame, int] | None:
    """Return the operator whose result an operator takes from a tuple, also from a tuple that a called graph returns;
    return None for any other operator, and for a member that is not the result of an operator.
    """
    place = re.search(r", I64\((\d+)\)\)", node.head) if node.op == "TupleGetItem" else None
    if place is None or not node.operands:
        return None
    inner, number = frame, node.operands[0]
    if number in frame.called:
        inner, number = frame.called[number], len(typing.graph.graphs[frame.called[number].name]) - 1
    nodes = typing.graph.graphs[inner.name]
    while (last := nodes[number]).op in ("Depend", "Return") and last.value is not None:
        number = last.value
    members = arguments_of(last.head) if last.op == "MakeTuple" else []
    text = members[int(place[1])] if int(place[1]) < len(members) else ""
    while (given := PARAMETER.fullmatch(text)) and given[1] in inner.origins:
        inner, text = inner.origins[given[1]]
    return (inner, int(text[1:])) if re.fullmatch(r"%\d+", text) else None
