"""This module holds what is known of the calls of a compiled graph: the values of each call (`Frame`), and the values
that no spread describes (`Failure`, `Closure`, `Sum`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.dryrun.collectives import attributes_of
from tools.dryrun.graph_text import Node
from tools.prove.call import Value
from tools.prove.mesh import COLLECTIVES

PARAMETER = re.compile(r"%(para\d+)_(\S+)")


@dataclass(frozen=True)
class Failure:
    """A `Failure` holds the reason why it could not be determined how a value is distributed over the ranks.

    Args:
        contradicts: whether the operator does not allow the spreads of its arguments; otherwise the spread is unknown.
        graph, number: the operator that caused the failure.
        why: what is wrong or missing at this operator.
        loose: the axes that cut the arguments into loose pieces, if other places of these might make them right.
    """

    contradicts: bool
    graph: str
    number: int
    why: str
    loose: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Closure:
    """A `Closure` is a subgraph of the compiled graph, together with the values of its first arguments."""

    graph: str
    values: tuple[Value, ...]
    names: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """A `Sum` describes the parameter in which a weight's gradient is accumulated over micro-batches."""

    weight: str


class Frame:
    """A `Frame` is one call of a subgraph: its arguments, and how the values that it computes are distributed over the
    ranks.

    Equal operators with equal arguments have equal names, so a recomputed value is recognized in the backward pass.
    """

    def __init__(self, name: str, given: Mapping[str, Value], names: Mapping[str, int] | None = None):
        self.name, self.given = name, given
        self.values: dict[int, Value] = {}
        self.names: dict[int, int] = {}
        self.given_names = names or {}
        self.origins: dict[str, tuple[Frame, str]] = {}  # of arguments: where the caller has them
        self.called: dict[int, Frame] = {}  # by operator: the call of a graph that it is

    def named(self, text: str) -> int:
        """Return the identifier of an argument; arguments with equal identifiers have equal values."""
        if number := re.fullmatch(r"%(\d+)", text):
            return self.names.get(int(number[1]), hash((self.name, text)))
        parameter = PARAMETER.fullmatch(text)
        return self.given_names.get(parameter[1] if parameter else "", hash(text))

    def name_node(self, number: int, node: Node, arguments: Sequence[str]) -> int:
        """Return the identifier of an operator, and assign one if there is none; operators that compute the same value
        have equal identifiers.
        """
        if node.op in ("Depend", "Load", "TensorMove") and not node.calls:
            self.names[number] = self.named(arguments[0])
        elif node.calls or node.op == "Receive":
            self.names[number] = hash((self.name, number, *self.given_names.values()))
        else:
            found = attributes_of(node.text) if node.op in COLLECTIVES else {}
            how = tuple(str(found.get(key, "")) for key in ("group", "op", "split_dim", "concat_dim"))
            self.names[number] = hash((node.op, how, *map(self.named, arguments)))
        return self.names[number]


Direction = tuple[str, tuple[int, ...]]  # "forward" or "backward", and the shape
