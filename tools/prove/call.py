"""This module defines what a rule of `tools.prove.rules` gets: an operator with the spreads of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.dryrun.graph_text import Node, TensorType, listed
from tools.prove import moves
from tools.prove.spread import NotKnown, Spread, Zeros, plain


@dataclass(frozen=True)
class Part:
    """This is one of the equal or unequal parts into which a rank splits a dimension."""

    whole: Spread
    axis: int
    sizes: tuple[int, ...]
    number: int
    source: int

    @property
    def spread(self) -> Spread:
        """Return the part as a value of its own."""
        return moves.wherever(lambda x: moves.split(x, self.axis, self.sizes)[self.number], self.whole)


Value = Any  # a Spread, a Part, a list of values (a tuple of the graph), or a number, text or tuple that is written out


@dataclass(frozen=True)
class Call:
    """This is one operator with the spreads of its arguments.

    Args:
        node: of the graph.
        number: its place there.
        values: of its arguments.
        sizes: of the axes of the mesh.
        differs: (argument, place in its tuple or 0) -> the axes along which this constant has another value.
        axes: of a collective's group, the one along which neighbouring ranks lie last.
        repeats: of the sums of the loss: the axes over which its forward sums (see `_scale`).
    """

    node: Node
    number: int
    values: Sequence[Value]
    sizes: Mapping[str, int]
    differs: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    repeats: frozenset[str] = frozenset()

    def spread(self, place: int) -> Spread:
        """Return the spread of an argument."""
        value = self.values[place]
        if isinstance(value, Part):
            return value.spread
        if isinstance(value, (int, float)):
            return plain(())
        if not isinstance(value, Spread):
            raise NotKnown(f"its argument {place} is not a tensor")
        return value

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        """Return the types of what it gives."""
        return self.node.outputs

    @property
    def counts(self) -> bool:
        """Return whether it gives integers or truth values."""
        return not self.outputs or not re.match(r"B?Float|Complex", self.outputs[0].dtype)

    def shifts(self) -> frozenset[str]:
        """Return the axes along which any constant of it differs."""
        return frozenset().union(*self.differs.values())


_NUMBER = re.compile(r"([IUF]\d+|BF16|Bool)\((\S+)\)")
_TENSOR = re.compile(r"Tensor\(shape=\[([\d, ]*)\], dtype=\w+, value=\s*(.*)\)", re.DOTALL)
_ZERO = re.compile(r"\[?\s*0(?:\.0*(?:e[+-]\d+)?)?\s*\]?")


def literal(text: str) -> Value:
    """Return what an argument that is written out in the graph stands for."""
    if number := _NUMBER.fullmatch(text):
        if number[1] == "Bool":
            return number[2] == "1"
        return int(number[2]) if number[1][0] in "IU" else float(number[2])
    if tensor := _TENSOR.fullmatch(text):
        found = plain(int(size) for size in re.findall(r"\d+", tensor[1]))
        return Zeros(found.dims) if _ZERO.fullmatch(tensor[2]) else found
    if text[:1] in "([" and text:
        return tuple(literal(part) for part in listed(text[1:-1]) if part)
    return None
