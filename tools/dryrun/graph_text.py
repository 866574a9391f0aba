"""This module reads MindSpore's final graph from its text: the operators of each subgraph, their inputs and outputs,
and their calls.

In the text each operator of a subgraph comes after its operands, so the operators can run in the order of the text.
`passes_of` returns the order in which the root of the graph runs the forward and backward passes of a stage's
micro-batches.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from plugins.errors import ClusterError

_ROOT = re.compile(r"# IR entry: @(\S+)")
_TOTAL = re.compile(r"# Total subgraphs: (\d+)")
_GRAPH = re.compile(r"subgraph @([^\s(]+)\(")
_PARAMETER = re.compile(r"%(para\d+)_")
_NODE = re.compile(r"  %(\d+)\([^)]*\) = (.*)")
_TYPES = re.compile(r"      : (\(.*\)) -> (\(.*\))$")
_SCOPE = re.compile(r"      # Fullname with scope: \((.*)\)")
_FILE = re.compile(r"      # In file (\S+?):(\d+)")
_CALL = re.compile(r"(?:Partial\()?(?:call )?@|call @|%\d+\[")  # by name, or of a value whose graphs are in brackets
_SECTION = re.compile(r" \{instance name:| (?:primitive_attrs|cnode_attrs|cnode_primal_attrs): \{")
_OPERATOR = re.compile(r"(?:PrimFunc_)?(\w+)\(")
_TENSOR = re.compile(r"Tensor\[(\w+)\]\]?, \(([-\d, ]*)\)")
_MEMBER = r"(?:Ref\[)?Tensor\[(\w+)\]\]?(?:\*(\d+))?"
_TUPLE = re.compile(
    r"<Tuple\[((?:(?:Ref\[)?Tensor\[\w+\]\]?(?:\*\d+)?,?)+)\], TupleShape\(((?:\([-\d, ]*\)(?:, )?)+)\)"
)
_FIRST = re.compile(r"(?:PrimFunc_)?\w+\(%(\d+)\b")
_GROUP = re.compile(r"\(([-\d, ]*)\)")


class TensorType(NamedTuple):
    """A `TensorType` holds the dtype (MindSpore's name) and the shape of a tensor on one rank; a dimension of -1 is
    known only at run time.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass
class Node:
    """A `Node` is one operator of a subgraph."""

    op: str  # name; "" for calls
    head: str  # text without attributes; `text` includes them
    text: str
    operands: list[int]  # the numbers of the nodes that are its arguments, in their order
    calls: list[str] = field(default_factory=list)  # subgraphs that it calls
    binds: str = ""  # the subgraph to which a Partial operator only binds arguments
    types: tuple[str, str] = ("", "")  # (inputs, outputs) as text
    scope: str = ""  # path of cells
    source: str = ""  # innermost line of Python code that made it, as "folder/file.py:line"
    hand_written: bool = False  # it comes from a hand-written `bprop`

    @property
    def value(self) -> int | None:
        """Return the number of the node that computes the operator's first argument, or None if this argument is a
        parameter or a constant.
        """
        first = _FIRST.match(self.head)
        return int(first[1]) if first else None

    @property
    def inputs(self) -> tuple[TensorType, ...]:
        """Return the operator's input tensors."""
        return tensors(self.types[0])

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        """Return the operator's output tensors; a tuple gives one tensor for each of its elements."""
        return tensors(self.types[1])


@dataclass(frozen=True)
class GraphText:
    """A `GraphText` holds all subgraphs of a compiled graph by name, the name of the root graph, and the parameters
    ("para1" ...) of each subgraph.
    """

    root: str
    graphs: dict[str, list[Node]]
    parameters: dict[str, list[str]] = field(default_factory=dict)


def read_graph(file: Path) -> GraphText:
    """Parse MindSpore's final graph from its text, which may be compressed. The functions `virtual_cluster.final_graph`
    and `compiles.text_of` return the path of a graph's text.

    Raises:
        ClusterError: the file cannot be read, or is not the text of a graph.
    """
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8", errors="replace") as lines:
            root, graphs, parameters = _parse(lines)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ClusterError(f"{file}: the file cannot be read ({error})") from None
    if root not in graphs:
        raise ClusterError(f"{file}: this is not the text of a graph that MindSpore compiled")
    for nodes in graphs.values():
        for node in nodes:
            node.calls = [called for called in node.calls if called in graphs]
    return GraphText(root, graphs, parameters)


def tensors(text: str) -> tuple[TensorType, ...]:
    """Return the tensor types in a text such as `<Tensor[BFloat16], (256, -1)>, ...`, including those inside tuples."""
    found = [(match.start(), TensorType(match[1], _shape(match[2]))) for match in _TENSOR.finditer(text)]
    for match in _TUPLE.finditer(text):
        dtypes = [dtype for dtype, count in re.findall(_MEMBER, match[1]) for _ in range(int(count or 1))]
        shapes = [_shape(shape) for shape in _GROUP.findall(match[2])]
        found += [(match.start(), TensorType(*item)) for item in zip(dtypes, shapes, strict=False)]
    return tuple(item for _, item in sorted(found, key=lambda pair: pair[0]))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"-?\d+", text)))


def arguments_of(head: str) -> list[str]:
    """Return the arguments of a call as text: ``"call @f(%1, (1, 2))"`` gives ``["%1", "(1, 2)"]``."""
    return listed(head.partition("(")[2].rpartition(")")[0])


def listed(text: str, opening: str = "([{", closing: str = ")]}") -> list[str]:
    """Split a text at the commas that are not in brackets, and return the parts."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in opening) - (letter in closing)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]


_UNFINISHED = re.compile(r"value=[^)]*$")  # a constant that ends on a later line


def whole_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a graph's text with their numbers; the lines of one long constant are joined."""
    begun: list[str] = []
    for number, line in enumerate(lines, 1):
        if begun and line.startswith(("      :", "      #")):
            yield number - len(begun), " ".join(part.strip("\n") for part in begun)
            begun = []
        if begun or (line.startswith("  %") and _UNFINISHED.search(line)):
            begun.append(line)
        else:
            yield number, line


def _parse(lines: Iterable[str]) -> tuple[str, dict[str, list[Node]], dict[str, list[str]]]:
    """Name of the root graph, the operators of each graph, and the parameters that each takes.

    Raises:
        ValueError: lines are missing or out of order.
    """
    root, total, last = "", 0, "}"
    graphs: dict[str, list[Node]] = {}
    parameters: dict[str, list[str]] = {}
    nodes: list[Node] = []
    for number, line in whole_lines(lines):
        if match := _NODE.match(line):
            if int(match[1]) != len(nodes):
                raise ValueError(
                    f"line {number}: operator %{match[1]} follows where %{len(nodes)} was expected, so lines of the "
                    "graph are missing"
                )
            nodes.append(_node(match[2]))
        elif line.startswith("      ") and nodes:
            _complete(nodes[-1], line)
        elif match := _GRAPH.match(line):
            nodes = graphs[match[1]] = []
            parameters[match[1]] = _PARAMETER.findall(line)
        elif match := _ROOT.match(line):
            root = match[1]
        elif match := _TOTAL.match(line):
            total = int(match[1])
        if not line.startswith("#"):  # an order of operators may follow the last graph
            last = line.strip() or last
    if len(graphs) < total or (total and last != "}"):
        raise ValueError(f"the text is cut in subgraph {len(graphs)} of {total}")
    return root, graphs, parameters


def _node(text: str) -> Node:
    """Return an operator from the text right of its '='."""
    head = _SECTION.split(text, maxsplit=1)[0]
    operator = _OPERATOR.match(head)
    node = Node(operator[1] if operator else "", head, text, [int(number) for number in re.findall(r"%(\d+)\b", head)])
    if node.op == "Partial":
        bound = re.match(r"Partial\(@([^\s(),\[\]]+)", head)
        node.binds = bound[1] if bound else ""
    elif _CALL.match(head):
        node.calls = re.findall(r"@([^\s(),\[\]]+)", head)
    return node


def _complete(node: Node, line: str) -> None:
    """Add to an operator the types or the scope that one of the lines below the operator states."""
    if match := _TYPES.match(line):
        if not node.types[1]:  # the second such line holds symbolic shapes
            node.types = match[1], match[2]
    elif match := _SCOPE.match(line):
        node.scope = match[1]
    elif match := _FILE.match(line):  # the last one is the innermost, and the forward's
        node.source = f"{'/'.join(Path(match[1]).parts[-2:])}:{match[2]}"
        node.hand_written |= "def bprop(" in line


class Pass(NamedTuple):
    """A `Pass` is one forward pass ("F") or backward pass ("B") of a micro-batch through a chunk of the stage's
    layers.
    """

    kind: str
    micro_batch: int
    chunk: int


def passes_of(graph: GraphText) -> list[Pass]:
    """Return the forward and backward passes of a stage in the order in which the root graph calls them. The root graph
    calls the forward and the backward subgraph of a model chunk once for each micro-batch, in order. Model chunks are
    numbered in the order of their first forward passes.
    """
    chunks = chunks_of(graph)
    place = {name: (kind, chunk) for chunk, pair in enumerate(chunks) for kind, name in zip("FB", pair, strict=True)}
    seen: dict[str, int] = {}
    found = []
    for node in graph.graphs[graph.root]:
        for name in node.calls:
            if name in place:
                kind, chunk = place[name]
                found.append(Pass(kind, seen.setdefault(name, 0), chunk))
                seen[name] += 1
    return found


def chunks_of(graph: GraphText) -> list[tuple[str, str]]:
    """Return the forward and backward subgraph of each model chunk, in the order of their first forward passes."""
    backward = {}
    for name, nodes in graph.graphs.items():
        if "▸" in name:
            backward[name] = next((node.binds for node in nodes if node.binds in graph.graphs), "")
    called = [name for node in graph.graphs[graph.root] for name in node.calls if name in backward]
    return [(name, backward[name]) for name in dict.fromkeys(called)]


def most_saved(passes: Sequence[Pass], sizes: Sequence[int]) -> int:
    """Return the largest number of bytes that are kept for backward passes at the same time. Each micro-batch in flight
    keeps `sizes[chunk]` bytes.
    """
    own = ((sizes[item.chunk] if item.kind == "F" else 0) for item in passes)
    return max(map(sum, zip(waiting(passes, sizes), own, strict=True)), default=0)


def waiting(passes: Sequence[Pass], sizes: Sequence[int]) -> list[int]:
    """Return for each pass the bytes of activations that are kept for later backward passes when the pass begins. If
    weight gradients are computed in a separate pass ("W"), the activations are kept until this pass ends.
    """
    split = {item[1:] for item in passes if item.kind == "W"}
    now, found = 0, []
    for item in passes:
        found.append(now)
        if item.kind == "F":
            now += sizes[item.chunk]
        elif item.kind == "W" or item[1:] not in split:
            now -= sizes[item.chunk]
    return found
