"""How many terms an element of a dumped tensor accumulates: the row of Table 2, from the class or function and shapes.

What is known (a name is matched by a part of its class or function, in lower case):

    matrix products   of a cell, forward: the last axis of the input; gradient of the input: the last axis of the
                      gradient that arrives; gradient of the weight: the rows. Of a function or kernel, which may
                      transpose: sqrt(values of a x values of b / values of the product), per matrix of a batch
    norms             the last axis; gradients of scale and shift: the rows
    softmax           the last axis
    attention         the longest axis of its inputs (a sum over keys)
    embeddings        forward 1; gradient of the table: all indices, which is the most that one row can be summed from
    losses            all values of the largest input
    sums and means    values of the input for each of the output

A cell that holds other cells takes the largest count among them. Everything else, and what only moves values (which in
a chain are no longer exact), is judged by `DEFAULT`: the strictest row.
"""

from __future__ import annotations

import math

from tools.accuracy.dumps.kernels import KIND
from tools.accuracy.dumps.names import BACKWARD, FORWARD, GRADIENT
from tools.accuracy.dumps.read_items import Entry, Item

DEFAULT = 1
PRODUCTS = ("linear", "dense", "matmul", "gemm", "bmm", "baddbmm", "addmm")
SUMS = ("sum", "mean", "cumsum")
LOSSES = ("loss", "crossentropy", "cross_entropy")


class Counter:
    """Counts for the tensors of one step on one rank.

    Args:
        entries: all calls of the step, golden side.
    """

    def __init__(self, entries: list[Entry]):
        self._forward: dict[str, Entry] = {}
        for entry in entries:
            if entry.name.phase == FORWARD or entry.name.kind == KIND:
                self._forward.setdefault(_place(entry), entry)
        own = {_place(entry): _counts(entry) for entry in self._forward.values()}
        self._counts = dict(own)
        for place, counts in own.items():
            self._spread(place, counts)

    def _spread(self, place: str, counts: tuple[int, int, int]) -> None:
        """Tell the cells around it."""
        while "." in place:
            place = place.rpartition(".")[0]
            if place in self._counts:
                self._counts[place] = tuple(map(max, self._counts[place], counts))  # type: ignore[assignment]

    def of(self, entry: Entry, item: Item) -> int:
        """The accumulation count of one tensor."""
        forward, backward, gradient = self._counts.get(_place(entry), (DEFAULT,) * 3)
        if entry.name.phase == GRADIENT:
            return gradient
        if item.role in ("input", "parameters"):
            return DEFAULT  # the tensor as it is, whoever made it
        if entry.name.kind == KIND:
            return forward  # a kernel of the backward pass is an operator like any other
        return backward if entry.name.phase == BACKWARD else forward


def _place(entry: Entry) -> str:
    """Cells by path; a function by name and number of the call, for its shapes change from call to call."""
    name = entry.name
    return f"Cell.{name.path}" if name.kind == "Cell" else f"{name.kind}.{name.path}#{name.call}"


def _counts(entry: Entry) -> tuple[int, int, int]:
    """(forward, gradient of the input, gradient of a parameter)."""
    kind = entry.name.type.lower()
    inputs = [item.shape for item in entry.items if item.role == "input" and item.is_tensor]
    outputs = [item.shape for item in entry.items if item.role == "output" and item.is_tensor]
    if not inputs or not outputs or not inputs[0]:
        return (DEFAULT,) * 3
    first, last = inputs[0], outputs[0]
    rows = math.prod(first[:-1])
    if any(word in kind for word in PRODUCTS) and entry.name.kind != "Cell" and len(inputs) > 1 and len(last) > 1:
        size = math.prod(first) * math.prod(inputs[1]) / max(math.prod(last), 1) / max(math.prod(last[:-2]), 1)
        return max(1, round(math.sqrt(size))), last[-1], DEFAULT
    if any(word in kind for word in PRODUCTS):
        return first[-1], last[-1] if last else DEFAULT, rows
    if "norm" in kind:
        return first[-1], first[-1], rows
    if "softmax" in kind:
        return first[-1], first[-1], DEFAULT
    if "attention" in kind:
        longest = max(size for shape in inputs for size in shape)
        return longest, longest, DEFAULT
    if "embedding" in kind:
        return DEFAULT, DEFAULT, math.prod(first)
    if any(word in kind for word in LOSSES):
        return max(map(math.prod, inputs)), DEFAULT, DEFAULT
    if any(word in kind for word in SUMS):
        return max(1, math.prod(first) // max(1, math.prod(last))), DEFAULT, DEFAULT
    return (DEFAULT,) * 3
