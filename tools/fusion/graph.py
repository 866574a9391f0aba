"""A graph as the fusion model sees it: operators in an order in which they can run, their types and their edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.dryrun.graph.text import Node, TensorType

VIRTUAL = ("Return", "MakeTuple", "TupleGetItem")  # bind and take apart tuples; nothing is computed


@dataclass(frozen=True)
class Operator:
    """One operator.

    Args:
        name: of its primitive; "" where `opened`.
        output: its first tensor. inputs: places of the operators that it takes from, each once, in order.
        takes: all tensors that it takes, those of parameters and constants, too.
        opened: a composite operator that the expander has opened, and so a small graph of its own.
    """

    name: str
    output: TensorType
    inputs: tuple[int, ...] = ()
    takes: tuple[TensorType, ...] = ()
    opened: bool = False

    @property
    def virtual(self) -> bool:
        """Whether it computes nothing."""
        return self.name in VIRTUAL


NOTHING = TensorType("", ())


def operators(nodes: Sequence[Node]) -> list[Operator]:
    """The operators of a subgraph of MindSpore's own text."""
    return [
        Operator(
            node.op,
            node.outputs[0] if node.outputs else NOTHING,
            tuple(dict.fromkeys(node.operands)),
            node.inputs,
            bool(node.calls),
        )
        for node in nodes
    ]
