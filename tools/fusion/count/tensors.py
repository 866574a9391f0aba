"""Bytes that operators and kernels move through HBM: what they read from outside, and what is read of them outside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tools.dryrun.graph.activations import VIEWS, tensor_bytes
from tools.dryrun.graph.text import Node, TensorType, arguments_of, tensors
from tools.fusion.graph import VIRTUAL

_BINDS = frozenset(("", "UpdateState", "Partial", "Switch", "FuncUnion", "Stack", "StopGradient", "TransposeExtView"))
UNMOVED = VIEWS | _BINDS | frozenset(VIRTUAL)  # they name, bind and view tensors
_WRITES_FIRST = ("Assign",)  # what they overwrite is not read
_ALIKE = frozenset(("Load", "Depend", "Reshape"))  # the same bytes as their first argument


class Read(NamedTuple):
    """A tensor that an operator reads: the operator (or parameter) that it is of, and its type."""

    source: str
    tensor: TensorType


def reads_of(nodes: Sequence[Node], place: int) -> list[Read]:
    """The tensors that an operator reads from HBM, each once."""
    node = nodes[place]
    arguments, types = arguments_of(node.head), _split(node.types[0])
    if len(arguments) != len(types):
        own = [Read(f"{place}.{number}", tensor) for number, tensor in enumerate(node.inputs)]
    else:
        own = [
            Read(_source(nodes, argument), tensor)
            for argument, text in zip(arguments, types, strict=True)
            for tensor in tensors(text)
        ]
    return list(dict.fromkeys(own[1:] if node.op in _WRITES_FIRST else own))


def moved_alone(nodes: Sequence[Node], place: int, rows: int) -> int:
    """Bytes of one operator by itself: each tensor that it takes and gives."""
    return _bytes((read.tensor for read in reads_of(nodes, place)), rows) + _bytes(nodes[place].outputs, rows)


def moved_together(nodes: Sequence[Node], kernel: Collection[int], kept: Collection[int], rows: int) -> int:
    """Bytes of a kernel: tensors from outside, each once, and those that something outside reads.

    Args:
        kept: places whose results are read outside the kernel (`read_outside`), or overwrite a parameter.
    """
    inner = {f"%{place}" for place in kernel}
    reads = dict.fromkeys(read for place in kernel for read in reads_of(nodes, place) if read.source not in inner)
    written = (tensor for place in kernel if place in kept for tensor in nodes[place].outputs)
    return _bytes((read.tensor for read in reads), rows) + _bytes(written, rows)


def users_of(nodes: Sequence[Node]) -> list[list[int]]:
    """For each operator those that take from it."""
    users: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for operand in dict.fromkeys(node.operands):
            users[operand].append(place)
    return users


def read_outside(nodes: Sequence[Node], users: Sequence[Sequence[int]], kernel: Collection[int]) -> set[int]:
    """Places of a kernel whose results something outside takes; what writes a parameter is always one."""
    inside = set(kernel)
    return {
        place
        for place in kernel
        if nodes[place].op.startswith("Assign") or not users[place] or not inside.issuperset(users[place])
    }


def _source(nodes: Sequence[Node], argument: str) -> str:
    """What an argument is, seen through operators that give the same bytes under another name."""
    while argument.startswith("%") and argument[1:].isdecimal() and nodes[int(argument[1:])].op in _ALIKE:
        inner = arguments_of(nodes[int(argument[1:])].head)
        if not inner or not inner[0].startswith("%"):
            break
        argument = inner[0]
    return argument


def _bytes(found: Iterable[TensorType], rows: int) -> int:
    return sum(tensor_bytes(tensor, rows) for tensor in found)


def _split(text: str) -> list[str]:
    """`(<A, (1, 2)>, <B>)` as its types."""
    found, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [each.strip() for each in found if each.strip()]
