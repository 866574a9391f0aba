"""Operators and kernels of one part of a graph, with their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.operator_fusion.plan import Fusion
from tools.dryrun.graph.collectives import COLLECTIVES, role_of
from tools.dryrun.graph.flops import MULTIPLY
from tools.dryrun.graph.text import GraphText, Node
from tools.fusion.cluster import clusters
from tools.fusion.count.composites import listed, main_part, refused
from tools.fusion.count.named_passes import weight_gradients
from tools.fusion.count.parts import parts_of
from tools.fusion.count.tensors import UNMOVED, moved_alone, moved_together, read_outside, users_of
from tools.fusion.graph import NOTHING, Operator
from tools.fusion.split import kernels


@dataclass
class Tally:
    """Of one part and pass; numbers of a mean may be broken.

    Args:
        operators: that DVM takes; kernels: that they become; fused: those of several operators.
        before, after: bytes that they move through HBM, each operator by itself, and by kernels.
        patterns: operators of a kernel, joined by "-" -> how often; saved: -> bytes.
        alone: (operator that DVM refuses, why) -> how often; moved: -> bytes. Collectives are left out.
        named: (pass that MindSpore knows by name, chain, why it does not match) -> how often; named_bytes: at stake.
    """

    operators: float = 0
    kernels: float = 0
    fused: float = 0
    before: float = 0
    after: float = 0
    patterns: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    alone: Counter[tuple[str, str]] = field(default_factory=Counter)
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    named: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    named_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, other: Tally, times: float = 1) -> None:
        """Take in another's numbers, `times` over."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, Counter):
                for key, number in value.items():
                    mine[key] += number * times
            else:
                setattr(self, name, mine + value * times)

    @property
    def launches(self) -> float:
        """Kernels fewer than operators."""
        return self.operators - self.kernels

    @property
    def beside(self) -> float:
        """Bytes of operators that DVM refuses, but for products and attention."""
        return sum(size for (name, _), size in self.moved.items() if name not in MULTIPLY)

    def as_json(self) -> dict[str, Any]:
        """The sums."""
        numbers = {name: round(getattr(self, name)) for name in ("operators", "kernels", "fused")}
        return numbers | {
            "launches_saved": round(self.launches),
            "bytes_before": round(self.before),
            "bytes_after": round(self.after),
            "bytes_of_others": round(self.beside),
        }


Tallies = dict[tuple[str, str], Tally]  # (part, pass: "forward", "recompute", "gradient" or "step")


def tallies(graph: GraphText, fusion: Fusion, rows: int) -> Tallies:
    """All operators of a graph by part and pass. A subgraph that is called twice counts once, as one micro-batch does.

    Args:
        rows: what stands for dimensions that only routing decides.
    """
    found: Tallies = {}
    for name, nodes in graph.graphs.items():
        _count(nodes, name, fusion, rows, found)
    return found


def kernels_of(nodes: Sequence[Node], fusion: Fusion) -> list[list[int]]:
    """The places of the operators of each kernel that DVM makes of a subgraph; alone ones are kernels, too."""
    ops = [_operator(node) for node in nodes]
    names = listed(fusion)
    taken = [node.op in names and not refused(_operator(node, False), fusion) for node in nodes]
    users = users_of(nodes)
    found, left = [], {place for place, good in enumerate(taken) if good}
    for group in clusters(ops, taken):
        here = {place: number for number, place in enumerate(group)}
        body = [_inside(ops[place], here) for place in group]
        outputs = {here[place] for place in read_outside(nodes, users, group)}
        found += [[group[place] for place in kernel] for kernel in kernels(body, outputs)]
        left -= set(group)
    return sorted(found + [[place] for place in left])


def _count(nodes: Sequence[Node], name: str, fusion: Fusion, rows: int, found: Tallies) -> None:
    parts, users = parts_of(nodes, "◂" in name), users_of(nodes)

    def tally(place: int) -> Tally:
        return found.setdefault((parts[place], _pass(nodes[place], name)), Tally())

    seen: set[int] = set()
    for kernel in kernels_of(nodes, fusion):
        alone = [moved_alone(nodes, place, rows) for place in kernel]
        after = moved_together(nodes, kernel, read_outside(nodes, users, kernel), rows) if len(kernel) > 1 else alone[0]
        one, pattern = tally(kernel[-1]), "-".join(nodes[place].op for place in kernel)
        several = len(kernel) > 1
        add = Tally(len(kernel), 1, several, sum(alone), after)
        if several:
            add.patterns[pattern], add.saved[pattern] = 1, sum(alone) - after
        one.add(add)
        seen.update(kernel)
    for place, node in enumerate(nodes):
        if place not in seen and node.op not in UNMOVED and node.op not in COLLECTIVES:
            key = (node.op, refused(_operator(node, False), fusion))
            tally(place).add(Tally(alone=Counter({key: 1}), moved=Counter({key: moved_alone(nodes, place, rows)})))
    for gradient in weight_gradients(nodes, rows):
        part = parts[gradient.place]
        chain = (gradient.fusion, gradient.chain, gradient.refusal)
        one = found.setdefault((part, _pass(nodes[gradient.place], name)), Tally())
        one.add(Tally(named=Counter({chain: 1}), named_bytes=Counter({chain: gradient.bytes})))


def _pass(node: Node, graph: str) -> str:
    """As `role_of`; what adds gradients up carries no sign of a gradient, and none of recomputation either."""
    role = role_of(node, graph)
    return "gradient" if role == "recompute" and not node.scope.startswith("recompute_") else role


def _operator(node: Node, standing: bool = True) -> Operator:
    """A node as the model sees it, a composite by its main part."""
    output = node.outputs[0] if node.outputs else NOTHING
    name = main_part(node.op) if standing else node.op
    return Operator(name, output, tuple(dict.fromkeys(node.operands)), node.inputs)


def _inside(operator: Operator, here: dict[int, int]) -> Operator:
    """An operator of a cluster with the places of those of its operands that are in it."""
    inputs = tuple(here[place] for place in operator.inputs if place in here)
    return Operator(operator.name, operator.output, inputs, operator.takes)
