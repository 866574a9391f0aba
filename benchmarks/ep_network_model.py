"""This module defines the cases and plans of `ep_network.py`, and predicts their seconds; it opens no sockets.

The model counts bytes and link rates, but no latency. All ranks of a node share one link to the other node, which is
full duplex, and all messages inside a node share one loopback, both directions together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.ep_overlap.plan import issue_order
from plugins.ep_overlap.timeline import Op, Timeline, simulate
from plugins.hierarchical_ep.plan import Plan, StepBytes, make_plan
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import LINKS, per_rank_bytes

ITEMSIZE = 4
TOPOLOGY = Topology(nodes=2, devices_per_node=2, experts=64)
ROUTINGS = ("balanced", "skewed", "node-limited")


@dataclass(frozen=True)
class Case:
    """A `Case` is a kind of routing with top-k, tokens of a rank, elements of a row, and the number of chunks of the
    overlapped layer.
    """

    routing: str
    top_k: int
    tokens: int
    hidden: int
    chunks: int

    def ids(self) -> list[np.ndarray]:
        """Return for each rank the distinct experts of its tokens [tokens, k], which are the same in every process.

        balanced      every expert alike;
        skewed        expert e in proportion to (e + 1) ** -0.7, so the first node gets most;
        node-limited  each token's experts on one node, drawn alike.
        """
        rng = np.random.default_rng(7)
        bias = np.zeros(TOPOLOGY.experts)
        if self.routing == "skewed":
            bias = -0.7 * np.log(np.arange(TOPOLOGY.experts) + 1)
        node_of = TOPOLOGY.node_of(TOPOLOGY.owner(np.arange(TOPOLOGY.experts)))
        every = []
        for _ in range(TOPOLOGY.ep):
            scores = bias + rng.gumbel(size=(self.tokens, TOPOLOGY.experts))
            if self.routing == "node-limited":
                node = rng.integers(TOPOLOGY.nodes, size=(self.tokens, 1))
                scores[node_of != node] = -np.inf
            every.append(np.argsort(-scores, axis=1)[:, : self.top_k])
        return every

    def plan(self, mode: str) -> Plan:
        """Return the plan that dispatches the whole micro-batch."""
        return make_plan(mode, TOPOLOGY, self.ids())

    def chunk_plans(self, mode: str) -> list[Plan]:
        """Return a dispatch plan for each chunk of the tokens."""
        parts = [np.array_split(ids, self.chunks) for ids in self.ids()]
        return [make_plan(mode, TOPOLOGY, list(chunk)) for chunk in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Rates:
    """A `Rates` holds bytes of payload per second: of the link between the nodes (in each direction), and of a node's
    loopback (both directions together).
    """

    inter: float
    intra: float


def link_bytes(moved: StepBytes) -> dict[str, float]:
    """Return the bytes of one communication step on its busiest link between nodes and on its busiest link inside a
    node.
    """
    nodes = TOPOLOGY.node_of(np.arange(TOPOLOGY.ep))
    between = [moved.inter[np.ix_(nodes == source, nodes != source)].sum() for source in range(TOPOLOGY.nodes)]
    inside = [moved.intra[np.ix_(nodes == node, nodes == node)].sum() for node in range(TOPOLOGY.nodes)]
    return {"inter": float(max(between)), "intra": float(max(inside))}


def layer_bytes(case: Case, mode: str) -> dict[str, float]:
    """Return the bytes of dispatch and combine together on the busiest link between nodes and inside a node."""
    steps = [link_bytes(moved) for moved in per_rank_bytes(case.plan(mode), case.hidden, ITEMSIZE)]
    return {link: sum(step[link] for step in steps) for link in LINKS}


def step_seconds(plan: Plan, hidden: int, rates: Rates) -> list[float]:
    """Return the predicted seconds of each communication step of dispatch and combine: those of the slower of its two
    links.
    """
    each = [link_bytes(moved) for moved in per_rank_bytes(plan, hidden, ITEMSIZE)]
    return [max(step["inter"] / rates.inter, step["intra"] / rates.intra) for step in each]


def move_seconds(case: Case, mode: str, rates: Rates) -> float:
    """Return the predicted seconds of dispatch and combine without chunks."""
    return sum(step_seconds(case.plan(mode), case.hidden, rates))


def step_names(plan: Plan) -> list[str]:
    """Return the names of the steps of a chunk in order: dispatch, experts, combine."""
    half = len(plan.dispatch)
    names = [step.step for step in plan.forward]
    return [*names[:half], "experts", *names[half:]]


def stream_of(name: str) -> str:
    """Return the name of the stream on which a step runs."""
    if name == "experts":
        return "compute"
    return name.split(".")[1] if "." in name else "both"


def chunk_ops(case: Case, mode: str, rates: Rates, compute: float, stride: int) -> list[Op]:
    """Return the steps of the layer in chunks, in order of issue, with predicted seconds; `compute` is the seconds of
    the experts' work on all tokens.
    """
    plans = case.chunk_plans(mode)
    names = step_names(plans[0])
    seconds = []
    for plan in plans:
        moves = step_seconds(plan, case.hidden, rates)
        share = plan.tokens[0] / case.tokens
        half = len(plan.dispatch)
        seconds.append(dict(zip(names, [*moves[:half], compute * share, *moves[half:]], strict=True)))
    before = dict(zip(names[1:], names, strict=False))
    ops = []
    for chunk, name in issue_order(case.chunks, names, stride):
        after = ((chunk, before[name]),) if name in before else ()
        ops.append(Op(name, chunk, stream_of(name), seconds[chunk][name], after))
    return ops


def overlapped(case: Case, mode: str, rates: Rates, compute: float) -> tuple[int, Timeline]:
    """Return the stride with the shortest predicted time of the layer in chunks, and its timeline."""
    strides = range(len(step_names(case.chunk_plans(mode)[0])) + 1)
    runs = [(stride, simulate(chunk_ops(case, mode, rates, compute, stride))) for stride in strides]
    return min(runs, key=lambda run: run[1].makespan)
