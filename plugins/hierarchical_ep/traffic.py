"""This module computes the bytes of one MoE layer's dispatch and combine on each class of link: exactly from a plan, or
as expected values in closed form.

`inter` links join nodes (RoCE), `intra` links join the devices of one node (HCCS). `transfer` says what is counted for
a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

import numpy as np

from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import (
    ID_BYTES,
    PROB_BYTES,
    Plan,
    StepBytes,
    Transfer,
    check_mode,
    copy_transfer,
    row_transfer,
    step_bytes,
)
from plugins.hierarchical_ep.topology import Topology

LINKS = ("inter", "intra")


@dataclass(frozen=True)
class Step:
    """A `Step` is one communication step of an MoE layer, with the bytes of the busiest rank.

    Attributes:
        name: "dispatch.inter", "dispatch.intra", "combine.intra", "combine.inter"; global mode "dispatch", "combine".
            `backward` appends ".backward".
        stream: "inter", "intra" or "both": the link classes that it occupies.
        inter_bytes, intra_bytes: the bytes that the busiest rank sends or receives over that class, whichever is
            larger.
        inter_peers, intra_peers: the number of ranks with which it exchanges a message (a collective costs one latency
            for each).
        inter_forward_only, intra_forward_only: the part of the bytes without a gradient (the counts).
    """

    name: str
    stream: str
    inter_bytes: float
    intra_bytes: float
    inter_peers: int
    intra_peers: int
    inter_forward_only: float = 0.0
    intra_forward_only: float = 0.0


def hit_probability(experts: int, experts_on_node: int, top_k: int) -> float:
    """Return the probability that a token has an expert on a node: 1 - C(E - n, k) / C(E, k) (hypergeometric)."""
    return 1 - comb(experts - experts_on_node, top_k) / comb(experts, top_k)


def expected_steps(
    mode: str,
    topology: Topology,
    tokens: float,
    top_k: int,
    hidden: int,
    itemsize: int,
    skew: float = 1.0,
) -> tuple[Step, ...]:
    """Return the communication steps of one MoE layer's forward pass on one micro-batch, with the bytes expected under
    uniform routing without replacement.

    With N `tokens` a rank, E experts, k `top_k`, E_d experts on rank d and n_d on its node, rank s hands to rank d

        global        N k E_d / E copies;
        hierarchical  N rows (d in s's inter-node group), then nodes N k E_d / E copies (d on s's node);
        deduplicated  N (1 - C(E - n_d, k) / C(E, k)) rows, then the same copies as hierarchical.

    `skew` is the load of the busiest rank (of the busiest node, for rows) divided by the mean: the rows that this rank
    receives are multiplied by it, up to the limit that k distinct experts allow (min(k, E_d) copies and one row per
    token). The rows that ranks send in the forward pass are not multiplied: every rank has N k copies to send, whatever
    their destination. The AllGather does not depend on routing.

    Args:
        mode: one of `plan.MODES`.
        topology: the EP group.
        tokens: the number of tokens of each rank in the micro-batch (per tensor- and context-parallel shard).
        top_k: the number of experts per token.
        hidden: the width of a row.
        itemsize: the bytes of an element (fp32 4, bf16 2).
        skew: the load of the busiest rank divided by the mean, at least 1.

    Raises RecipeError for an unknown mode, top_k above the number of experts or skew below 1.
    """
    check_mode(mode)
    check_routing(topology, top_k, skew)
    copies = _expected_copies(mode, topology, tokens, top_k)
    most_copies = np.minimum(top_k, topology.experts_per_rank) * tokens * (copies > 0)
    if mode != "global":
        most_copies = most_copies * topology.nodes
    transfers = [(copy_transfer(mode, topology, copies), np.minimum(copies * skew, most_copies))]
    if mode != "global":
        rows = _expected_rows(mode, topology, tokens, top_k)
        busy = rows if mode == "hierarchical" else np.minimum(rows * skew, tokens * (rows > 0))
        transfers.insert(0, (row_transfer(mode, topology, rows), busy))
    dispatch = [_expected_step(topology, step, busy, top_k, hidden, itemsize) for step, busy in transfers]
    combine = [
        _expected_step(topology, step.returning(), busy.T, top_k, hidden, itemsize)
        for step, busy in reversed(transfers)
    ]
    return tuple(dispatch + combine)


def check_routing(topology: Topology, top_k: int, skew: float) -> None:
    """Raise RecipeError if there are fewer than `top_k` experts, or if `skew` (the load of the busiest rank over the
    mean) is below 1.
    """
    if not 1 <= top_k <= topology.experts:
        raise RecipeError(
            f"hierarchical_ep: num_experts_per_tok is {top_k}, but the model has {topology.experts} routed experts; "
            f"it must be 1 to {topology.experts}"
        )
    if skew < 1:
        raise RecipeError(
            f"hierarchical_ep: skew is {skew}, but it is the load of the busiest rank divided by the mean load; write "
            "1 or more"
        )


def _expected_copies(mode: str, topology: Topology, tokens: float, top_k: int) -> np.ndarray:
    """Return [ep, ep] expected copies of the All-to-All(V)."""
    share = topology.experts_per_rank / topology.experts
    copies = np.broadcast_to(tokens * top_k * share, (topology.ep, topology.ep))
    return copies if mode == "global" else copies * topology.nodes * topology.same_node


def _expected_rows(mode: str, topology: Topology, tokens: float, top_k: int) -> np.ndarray:
    """Return [ep, ep] expected token rows between the ranks of inter-node groups."""
    on_node = [hit_probability(topology.experts, int(experts), top_k) for experts in topology.experts_per_node]
    share = np.repeat(on_node, topology.devices_per_node) if mode == "deduplicated" else np.ones(topology.ep)
    local = topology.local_of(np.arange(topology.ep))
    return tokens * share * (local[:, None] == local)


def _expected_step(topology, transfer, busy, top_k, hidden, itemsize) -> Step:
    """Return the `Step` of a transfer with the expected numbers of rows; `busy` holds for each rank the rows that it
    would send or receive if it were the busiest rank.
    """
    # no rank has more at its other end, where each rank has its tokens' share of all experts
    end = StepBytes.sent if transfer.step.startswith("combine") else StepBytes.received
    busiest = []
    for gradient in (False, True):
        found = step_bytes(topology, replace(transfer, rows=busy), top_k, hidden, itemsize, gradient)
        busiest.append({link: float(end(found, link).max()) for link in LINKS})
    return _step(topology, transfer, *busiest)


def _step(topology: Topology, transfer: Transfer, whole: dict[str, float], gradient: dict[str, float]) -> Step:
    """Return a `Step` from the bytes of the busiest rank: all bytes (`whole`), and those of values that have a gradient
    (`gradient`).
    """
    group = transfer.groups[0]
    intra = sum(topology.node_of(rank) == topology.node_of(group[0]) for rank in group) - 1
    inter = len(group) - 1 - intra
    stream = "both" if inter and intra else "inter" if inter else "intra"
    if transfer.step.endswith(LINKS):
        stream = transfer.step.split(".")[1]
    return Step(
        transfer.step,
        stream,
        whole["inter"],
        whole["intra"],
        int(inter),
        int(intra),
        whole["inter"] - gradient["inter"],
        whole["intra"] - gradient["intra"],
    )


def per_rank_bytes(plan: Plan, hidden: int, itemsize: int, direction: str = "forward") -> tuple[StepBytes, ...]:
    """Return the exact bytes between all pairs of ranks for each step, in the order of execution; `direction` is
    "forward" or "backward".
    """
    forward = [
        step_bytes(plan.topology, step, plan.top_k, hidden, itemsize, gradient=direction == "backward")
        for step in plan.forward
    ]
    if direction == "forward":
        return tuple(forward)
    return tuple(StepBytes(f"{step.name}.backward", step.inter.T, step.intra.T) for step in reversed(forward))


def backward(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps of the backward pass, in reverse order of the forward steps: each sends the same bytes in the
    other direction, without the counts, which have no gradient.
    """
    return tuple(
        replace(
            step,
            name=f"{step.name}.backward",
            inter_bytes=step.inter_bytes - step.inter_forward_only,
            intra_bytes=step.intra_bytes - step.intra_forward_only,
            inter_forward_only=0.0,
            intra_forward_only=0.0,
        )
        for step in reversed(steps)
    )


@dataclass(frozen=True)
class BreakEven:
    """A `BreakEven` compares the inter-node bytes of the three dispatch modes, for dispatch and combine of one layer's
    forward pass.

    Attributes:
        metadata_ratio: m, the relative additional size of an AllGathered row compared with a copy, in both directions
            together: the bytes of a row with k ids and k probabilities and of a row back, divided by those of a copy
            with its id and probability and of a copy back, minus 1.
        load: the copies per token that the busiest rank receives: skew * k if experts divide evenly.
        nodes_limit: the number of nodes below which AllGather moves fewer bytes than the global All-to-All.
        ep_limit: the same limit as a number of ranks of the EP group.
        hierarchical_over_global: the bytes of mode hierarchical divided by those of mode global, nodes (1 + m) / load.
        deduplicated_over_hierarchical: the same ratio of modes deduplicated and hierarchical, at most 1.
    """

    metadata_ratio: float
    load: float
    nodes_limit: float
    ep_limit: float
    hierarchical_over_global: float
    deduplicated_over_hierarchical: float

    @property
    def deduplicated_over_global(self) -> float:
        """Return the inter-node bytes of deduplicated dispatch and combine, divided by the inter-node bytes of the
        global All-to-All.
        """
        return self.hierarchical_over_global * self.deduplicated_over_hierarchical


def break_even(topology: Topology, top_k: int, hidden: int, itemsize: int, skew: float = 1.0) -> BreakEven:
    """Return up to which number of nodes the AllGather of rows moves fewer inter-node bytes than the global All-to-All
    of copies.

    With N tokens per rank, P nodes, D ranks per node, h b bytes per row, the busiest rank moves over inter-node links

        AllGather and ReduceScatter   N (P - 1) (2 h b + 8 k): the rows of its peers on the P - 1 other nodes;
        All-to-All and back           skew N k (P - 1) / P (2 h b + 8): of the skew N k copies that reach it, the
                                      share 1 / P comes from its own node and stays inside;

    the factor P - 1 is the own node's share in both and cancels, and with 1 + m = (2 h b + 8 k) / (2 h b + 8)

        AllGather wins  <=>  P (1 + m) < skew k.

    Where E / (P D) is not whole, the busiest rank owns E_max experts and skew k becomes P D min(skew k E_max / E,
    min(k, E_max)), the copies that k distinct experts can bring it. Deduplicated rows are the AllGather's times
    min(1, skew (1 - C(E - n, k) / C(E, k))), n the experts of the largest node: never more. The count lists, which do
    not grow with N, are left out.

    Raises RecipeError as `expected_steps`.
    """
    check_routing(topology, top_k, skew)
    largest = int(topology.experts_per_rank.max())
    load = topology.ep * min(skew * top_k * largest / topology.experts, min(top_k, largest))
    gathered = 2 * hidden * itemsize + top_k * (ID_BYTES + PROB_BYTES)
    copied = 2 * hidden * itemsize + ID_BYTES + PROB_BYTES
    limit = load * copied / gathered
    hit = hit_probability(topology.experts, int(topology.experts_per_node.max()), top_k)
    return BreakEven(
        metadata_ratio=gathered / copied - 1,
        load=load,
        nodes_limit=limit,
        ep_limit=limit * topology.devices_per_node,
        hierarchical_over_global=topology.nodes / limit,
        deduplicated_over_hierarchical=min(1.0, skew * hit),
    )
