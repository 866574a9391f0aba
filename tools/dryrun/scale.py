"""This module reads from MindSpore's final graph the factor (such as 1 / micro-batches) by which each gradient is
multiplied outside of the forward and backward passes, and judges whether this factor is right.

The backward pass starts with a seed: the loss scale, divided by the number of micro-batches and by the devices of a
stage. After the sums, the gradient is divided by the loss scale. If a divisor is left out or applied twice, the run
trains with another learning rate, or with another weight of the auxiliary loss. Adam hides this fault, because Adam
divides by the size of the gradient, and only gradient clipping makes the fault visible. `Numbers` reads the seed and
the later factors, and `judge_scale` compares their product with 1 / (micro-batches x devices of a stage).

This module does not check factors inside the pass of a micro-batch (the mean over tokens, the loss's coefficients), or
the factor of clipping, which is the same for all weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tools.dryrun.graph_text import GraphText, Node, arguments_of, chunks_of, listed

SCALED = frozenset(("Mul", "Muls", "Div", "Divs", "RealDiv"))  # a gradient times or by a number
OVER_DEVICES = "Grad__VirtualDiv"  # the scope of the division of the loss's gradient by the number of devices

_PRODUCT = ("Mul", "Muls")
_SAME_NUMBER = frozenset(("Cast", "Depend", "ExpandDims", "Load", "Reshape", "TensorMove"))
_LOSS_SCALE = "scale_sense"
_OF_THE_LOSS = "Gradients/"  # the scope of a backward operator
_PARAMETER = re.compile(r"%(para\d+)_(\S+)")
_NUMBER = re.compile(r"(?:[IFU]\d+|BF16)\(([\d.e+-]+)\)|Tensor\(.*value=\[?\s*([\d.e+-]+)\s*\]?\)")
_CLOSE = 1e-5  # numbers are float32 in the graph


class Scale(NamedTuple):
    """A `Scale` is the factor by which a gradient is multiplied: the number `by`, times the loss scale to the power of
    `senses`. The field `unread` names the first operator whose factor is unknown, if there is one.
    """

    by: float = 1.0
    senses: int = 0
    unread: str = ""

    def times(self, other: Scale) -> Scale:
        """Return the product of this factor and another factor of a gradient."""
        return Scale(self.by * other.by, self.senses + other.senses, self.unread or other.unread)

    def over(self, other: Scale) -> Scale:
        """Return this factor of a gradient divided by another factor."""
        by = self.by / other.by if other.by else math.inf
        return Scale(by, self.senses - other.senses, self.unread or other.unread)


def number_of(text: str) -> float | None:
    """Return the number that a constant in the graph's text holds; return None if the text is not a constant number."""
    found = _NUMBER.fullmatch(text)
    return float(found[1] or found[2]) if found else None


class Numbers:
    """A `Numbers` reads the factors by which gradients are multiplied from one graph. The function `bound_to` returns
    the arguments that are passed for a parameter of a subgraph, each with the calling subgraph.
    """

    def __init__(self, graph: GraphText, bound_to: Callable[[str, str], list[tuple[str, str]]]):
        self.graph, self.bound_to = graph, bound_to

    def factor(self, graph: str, node: Node, whole: str) -> Scale:
        """Return the factor by which a product or quotient multiplies its argument `whole`. The factor of gradient
        clipping is left out, because it is the same for all weights and depends on their gradients.
        """
        arguments = arguments_of(node.head)
        first = arguments[0] == whole
        other = self.scalar(graph, arguments[1 if first else 0])
        if other.unread and "clip" in f"{node.scope} {node.source}":
            return Scale()
        if node.op in _PRODUCT:
            return other
        return Scale().over(other) if first else Scale(unread=_named(node))

    def scalar(self, graph: str, text: str) -> Scale:
        """Return the value of an argument that has one element, such as a constant or the loss scale, as a factor."""
        if number := re.fullmatch(r"%(\d+)", text):
            return self._result(graph, self.graph.graphs[graph][int(number[1])])
        if parameter := _PARAMETER.fullmatch(text):
            if graph == self.graph.root:
                return Scale(senses=1) if parameter[2] == _LOSS_SCALE else Scale(unread=f"parameter {parameter[2]}")
            given = {self.scalar(at, argument) for at, argument in self.bound_to(graph, parameter[1])}
            return given.pop() if len(given) == 1 else Scale(unread=f"parameter {parameter[2]}")
        by = number_of(text)
        return Scale(unread=text) if by is None else Scale(by)

    def _result(self, graph: str, node: Node) -> Scale:
        """Return the value of an operator, if it has one element and is a product of numbers."""
        while node.op in _SAME_NUMBER and (number := node.value) is not None:
            node = self.graph.graphs[graph][number]
        arguments = arguments_of(node.head)
        if math.prod(node.outputs[0].shape if node.outputs else (0,)) == 1:
            if node.op in _SAME_NUMBER:
                return self.scalar(graph, arguments[0])
            if node.op == "Reciprocal":
                return Scale().over(self.scalar(graph, arguments[0]))
            if node.op in SCALED:
                first, second = (self.scalar(graph, argument) for argument in arguments[:2])
                return first.times(second) if node.op in _PRODUCT else first.over(second)
        return Scale(unread=_named(node))

    def seeds(self) -> list[Scale]:
        """Return the values (such as the loss scale) with which the backward passes of a stage start. In a pipeline
        there is one start value for each micro-batch and loss; without a pipeline, there is one start value for each
        loss. For a stage that computes no loss, the result is empty.
        """
        root, nodes = self.graph.root, self.graph.graphs[self.graph.root]
        passes = {backward for _, backward in chunks_of(self.graph) if backward}
        if passes:
            calls = (node for node in nodes if passes.intersection(node.calls))
            given = (listed(node.head.rpartition("](")[2].rpartition(")")[0]) for node in calls)
            found = [self.scalar(root, text) for arguments in given for text in arguments if text.startswith("%")]
        else:
            found = [self._loss(node) for node in nodes if OVER_DEVICES in node.scope]
        return [seed for seed in found if seed.senses]

    def _loss(self, node: Node) -> Scale:
        """Return the factor that begins the backward pass of one loss, divided by the number of devices."""
        nodes = self.graph.graphs[self.graph.root]
        divided = self.factor(self.graph.root, node, arguments_of(node.head)[0]) if node.op in SCALED else Scale()
        while node.scope.startswith(_OF_THE_LOSS) and (number := node.value) is not None:
            node = nodes[number]
        return self._result(self.graph.root, node).times(divided)


def _named(node: Node) -> str:
    """Return an operator, with the line of Python that made it."""
    return f"{node.op or 'a call'} ({node.source})" if node.source else node.op or "a call"


def judge_scale(ways: Iterable[Scale], seeds: Iterable[Scale], micro_batches: int, devices: int) -> tuple[bool, str]:
    """Return whether a gradient is divided by the number of micro-batches times the number of devices of a stage:
    (True, "") if so, (False, reason) if not, and (True, reason) if the divisor is unknown. The argument `ways` holds
    the factors on the gradient's paths from the backward pass to the optimizer, and `seeds` holds the values with which
    the backward passes of the loss start.
    """
    wanted = 1 / (micro_batches * devices)
    pairs = [(way, seed) for way in dict.fromkeys(ways) for seed in dict.fromkeys(seeds)]
    unknown = "" if pairs else "the seed of the backward pass, or the way behind it, was not found in the graph"
    for way, seed in pairs:
        whole = seed.times(way)
        if whole.unread:
            unknown = unknown or f"its gradient is multiplied by {whole.unread}, of which nothing is known here"
        elif whole.senses:
            return False, f"its gradient holds the loss scale to the power of {whole.senses}"
        elif not math.isclose(whole.by, wanted, rel_tol=_CLOSE):
            return False, (
                f"its gradient is multiplied by {whole.by:g} ({seed.by:g} before the backward pass, {way.by:g} behind "
                f"it), but {micro_batches} micro-batches and {devices} devices of a stage want {wanted:g}"
            )
    return True, unknown
