"""The kernels of a graph: those that MindSpore's passes made, and those that `tools.fusion` predicts for DVM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from plugins.operator_fusion.operators import VECTOR
from tools.accuracy.fusion.arithmetic import KNOWN
from tools.accuracy.fusion.kernel import Kernel, UnreadableError, of_nodes
from tools.accuracy.fusion.shrink import shrunk
from tools.dryrun.graph.text import GraphText, Node
from tools.fusion.cluster import clusters
from tools.fusion.graph import VIRTUAL, operators
from tools.fusion.split import kernels
from tools.fusion.support import refusal


@dataclass
class Found:
    """Kernels of graphs.

    Args:
        kernels: each kind once, by `Kernel.key`. counts: how many there are of each.
        skipped: why a kernel cannot be computed again -> how many.
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def smallest(self) -> dict[str, Kernel]:
        """Of each `Kernel.kind` the one of the fewest numbers, by its key."""
        found: dict[str, Kernel] = {}
        for kernel in self.kernels.values():
            known = found.setdefault(kernel.kind, kernel)
            found[kernel.kind] = min(known, kernel, key=lambda each: each.elements)
        return {kernel.key: kernel for kernel in found.values()}

    def add(self, nodes: Sequence[Node], places: Sequence[int], outputs: Sequence[int], small: bool = False) -> None:
        """One kernel more; `small`: at toy size."""
        strange = next((nodes[place].op for place in places if nodes[place].op not in KNOWN), None)
        try:
            if strange is not None:
                raise UnreadableError(f"the operator {strange or 'call'}")
            kernel = of_nodes(nodes, places, outputs)
            kernel = shrunk(kernel) if small else kernel
        except UnreadableError as error:
            self.skipped[str(error)] += 1
            return
        self.kernels.setdefault(kernel.key, kernel)
        self.counts[kernel.key] += 1


def built(graphs: Sequence[GraphText]) -> Found:
    """The kernels of graphs that MindSpore's splitter has left: each is a subgraph of its own."""
    found = Found()
    for text in graphs:
        for name, nodes in text.graphs.items():
            if name == text.root:
                continue
            places = [place for place, node in enumerate(nodes) if node.op not in VIRTUAL]
            bound = [node for node in nodes if node.op in VIRTUAL]
            outputs = [each for node in bound for each in node.operands if each in places]
            found.add(nodes, places, sorted(set(outputs)) or places[-1:])
    return found


def predicted(graphs: Sequence[GraphText]) -> Found:
    """The kernels that DVM would make, of two operators or more, at toy size (`shrink.shrunk`).

    Composites that are not opened yet are left alone.
    """
    found = Found()
    for nodes in (nodes for text in graphs for nodes in text.graphs.values()):
        for places, outputs in _kernels_of(nodes):
            if len(places) > 1:
                found.add(nodes, places, outputs, small=True)
    return found


def _kernels_of(nodes: Sequence[Node]) -> Iterator[tuple[list[int], list[int]]]:
    """(places of a kernel's operators, places whose results leave it)."""
    graph = operators(nodes)
    users: dict[int, set[int]] = {}
    for place, operator in enumerate(graph):
        for source in operator.inputs:
            users.setdefault(source, set()).add(place)
    taken = [not operator.opened and not refusal(operator, VECTOR) for operator in graph]
    for group in clusters(graph, taken):
        number = {place: step for step, place in enumerate(group)}
        body = [
            replace(graph[place], inputs=tuple(number[each] for each in graph[place].inputs if each in number))
            for place in group
        ]
        left = {step for step, place in enumerate(group) if not users.get(place) or users[place] - number.keys()}
        for kernel in kernels(body, left):
            places = [group[step] for step in kernel]
            yield places, [place for place in places if not users.get(place) or users[place] - set(places)]
