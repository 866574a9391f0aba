"""The exact sends and receives of each rank for one MoE layer, in three dispatch modes. NumPy only. Report 4.3.

All modes are the same two moves and differ in the first:

1. *rows*: token rows cross to the nodes (`inter`), along the ranks with the same local index;
     global        nothing moves: a rank holds its own rows;
     hierarchical  AllGather: a rank holds the rows of its whole inter-node group (the report's scheme, MindFormers'
                   `alltoall_deredundency`);
     deduplicated  All-to-All(V): a row goes once to each node where it has an expert, and to no other;
2. *copies*: of the rows it holds, a rank takes each (row, choice) whose expert its group owns (global: every pair;
   else: the pairs of this node), sorts them by expert and sends them to the owners by All-to-All(V): over the
   EP group in global mode, inside the node in the others.

Combine is the same way back: copies return, are weighted by router probability and added into the rows held, and the
rows return to their source, which adds up what comes from several nodes (hierarchical: ReduceScatter).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.transfer import Transfer, copy_transfer, move, row_transfer

ExpertFn = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
MODES = ("global", "hierarchical", "deduplicated")


@dataclass(frozen=True)
class RankPlan:
    """The indices of one rank. N own tokens, S rows sent, G rows held, C copies sent, M copies computed here.

    Attributes:
        send_token: [S] own token of each row, in the order the rows enter the inter-node step (by destination node in
            deduplicated mode; all tokens once in the others).
        row_rank, row_token: [G] where each held row comes from, by source rank, then token.
        copy_row, copy_choice, copy_expert: [C] held row, choice (0 .. k - 1) and expert of each copy, by expert, then
            row, then choice: the order in which copies are sent.
        order: [M] position among the arrived copies (by source rank) of each row of the expert input, which is sorted
            by expert, then source rank, then row and choice.
        inverse: [M] the way back: expert output [inverse] is in the order of arrival.
        counts: [local experts] rows of each expert of this rank.
    """

    send_token: np.ndarray
    row_rank: np.ndarray
    row_token: np.ndarray
    copy_row: np.ndarray
    copy_choice: np.ndarray
    copy_expert: np.ndarray
    order: np.ndarray
    inverse: np.ndarray
    counts: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        """[local experts] cumulative counts: the group list of a grouped matmul."""
        return np.cumsum(self.counts)


@dataclass(frozen=True)
class Plan:
    """What each rank does for one layer and one micro-batch.

    Attributes:
        dispatch: the steps forward, in order; `combine` undoes them from last to first.
        tokens: [ep] tokens of each rank; top_k: experts per token.
        ranks: the indices of each rank.
    """

    mode: str
    topology: Topology
    top_k: int
    tokens: np.ndarray
    dispatch: tuple[Transfer, ...]
    ranks: tuple[RankPlan, ...]

    @property
    def combine(self) -> tuple[Transfer, ...]:
        """The steps back, in order."""
        return tuple(step.returning() for step in reversed(self.dispatch))

    @property
    def forward(self) -> tuple[Transfer, ...]:
        """Dispatch and combine."""
        return self.dispatch + self.combine

    @property
    def backward(self) -> tuple[Transfer, ...]:
        """The gradients' way: the adjoint of each forward step, from last to first."""
        return tuple(step.adjoint() for step in reversed(self.forward))

    def send_counts(self, step: Transfer, rank: int) -> np.ndarray:
        """[group] rows that `rank` hands to each member of its group (its own entry stays)."""
        return step.rows[rank, list(step.group_of(rank))]

    def recv_counts(self, step: Transfer, rank: int) -> np.ndarray:
        """[group] rows that `rank` gets from each member of its group."""
        return step.rows[list(step.group_of(rank)), rank]


def make_plan(mode: str, topology: Topology, routing: list[np.ndarray]) -> Plan:
    """Plan one MoE layer.

    Args:
        mode: one of MODES.
        topology: the EP group.
        routing: for each EP rank an int array [N_r, k], the expert ids of its tokens; N_r may differ and be 0.

    Raises RecipeError for an unknown mode.
    """
    check_mode(mode)
    assert len(routing) == topology.ep, "one routing array per rank"
    inter, send_tokens = _row_step(mode, topology, routing)
    held = [_held_rows(topology, inter, send_tokens, rank) for rank in range(topology.ep)]
    copies = [_copies(mode, topology, routing, *held[rank], rank) for rank in range(topology.ep)]
    intra = copy_transfer(mode, topology, _count_copies(topology, copies))
    ranks = []
    for rank in range(topology.ep):
        order, counts = _arrivals(topology, intra.group_of(rank), copies, rank)
        ranks.append(
            RankPlan(send_tokens[rank], *held[rank], *copies[rank], order, np.argsort(order, kind="stable"), counts)
        )
    dispatch = (intra,) if mode == "global" else (inter, intra)
    tokens = np.array([len(ids) for ids in routing])
    return Plan(mode, topology, routing[0].shape[1], tokens, dispatch, tuple(ranks))


def check_mode(mode: str) -> None:
    """Raise RecipeError for an unknown dispatch mode."""
    if mode not in MODES:
        raise RecipeError(
            f"hierarchical_ep: no mode {mode!r}{did_you_mean(str(mode), list(MODES))}; modes are {', '.join(MODES)}"
        )


def _row_step(mode: str, topology: Topology, routing: list[np.ndarray]) -> tuple[Transfer, list[np.ndarray]]:
    """Step 1 and, for each rank, its tokens in the order they are sent. In global mode rows only 'stay'."""
    rows = np.zeros((topology.ep, topology.ep), int)
    send_tokens = []
    for rank, ids in enumerate(routing):
        group = list(topology.inter_group(rank))
        if mode == "deduplicated":
            node, token = np.nonzero(_visits(topology, ids))
            rows[rank, group] = np.bincount(node, minlength=topology.nodes)
        else:
            token = np.arange(len(ids))
            rows[rank, [rank] if mode == "global" else group] = len(ids)
        send_tokens.append(token)
    return row_transfer(mode, topology, rows), send_tokens


def _visits(topology: Topology, ids: np.ndarray) -> np.ndarray:
    """[nodes, N] True where a token has an expert on a node."""
    node = topology.node_of(topology.owner(ids))
    return (node[None] == np.arange(topology.nodes)[:, None, None]).any(-1)


def _held_rows(topology, inter, send_tokens, rank) -> tuple[np.ndarray, np.ndarray]:
    """(source rank, token) of the rows that `rank` holds after step 1, in group order."""
    group = topology.inter_group(rank)
    parts = []
    for source in group:
        start = 0 if inter.kind == "all_gather" else inter.rows[source, [r for r in group if r < rank]].sum()
        parts.append(send_tokens[source][start : start + inter.rows[source, rank]])
    return np.repeat(group, [len(part) for part in parts]), np.concatenate(parts)


def _copies(mode, topology, routing, row_rank, row_token, rank) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(held row, choice, expert) of the copies that `rank` sends, by expert, then row, then choice."""
    group = topology.inter_group(rank)  # the order of the held rows
    experts = np.concatenate([routing[source][row_token[row_rank == source]] for source in group])
    first, last = (0, topology.experts) if mode == "global" else topology.experts_of_node(topology.node_of(rank))
    row, choice = np.nonzero((experts >= first) & (experts < last))
    expert = experts[row, choice]
    by_expert = np.argsort(expert, kind="stable")
    return row[by_expert], choice[by_expert], expert[by_expert]


def _count_copies(topology: Topology, copies) -> np.ndarray:
    """[ep, ep] copies that rank s sends to rank d."""
    return np.array([np.bincount(topology.owner(expert), minlength=topology.ep) for _, _, expert in copies])


def _arrivals(topology, group, copies, rank) -> tuple[np.ndarray, np.ndarray]:
    """Expert order of the copies that arrive at `rank` (they come by source rank), and rows of each local expert."""
    first, last = topology.expert_bounds[rank : rank + 2]
    arrived = np.concatenate([copies[source][2] for source in group])
    arrived = arrived[(arrived >= first) & (arrived < last)]
    return np.argsort(arrived, kind="stable"), np.bincount(arrived - first, minlength=last - first)


def execute(plan: Plan, tokens: list[np.ndarray], probs: list[np.ndarray], expert_fn: ExpertFn) -> list[np.ndarray]:
    """Run the plan on simulated ranks, moving nothing but the planned rows.

    Args:
        plan: of these tokens' routing.
        tokens: [N_r, h] of each rank; probs: [N_r, k] of each rank.
        expert_fn: (rank, rows [M, h], ends [local experts]) -> [M, h'], the rank's experts on rows sorted by expert.

    Returns:
        [N_r, h'] of each rank.
    """
    inputs = _send_copies(plan, _copies_of(plan, _send_rows(plan, tokens)))
    outputs = [expert_fn(rank, rows, plan.ranks[rank].ends) for rank, rows in enumerate(inputs)]
    weights = _weights(plan, _send_rows(plan, probs))
    weighted = [w[:, None] * rows for w, rows in zip(weights, _return_copies(plan, outputs), strict=True)]
    return _return_rows(plan, _add_copies(plan, weighted))


def execute_backward(
    plan: Plan,
    tokens: list[np.ndarray],
    probs: list[np.ndarray],
    expert_fn: ExpertFn,
    expert_vjp: Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    d_out: list[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of `execute` with respect to tokens and probs: each planned step's adjoint, from last to first.

    Args:
        plan, tokens, probs, expert_fn: as in `execute`, whose forward is recomputed.
        expert_vjp: (rank, rows [M, h], ends, d_output [M, h']) -> d_rows [M, h]; weight gradients are its own affair.
        d_out: [N_r, h'] of each rank.

    Returns:
        d_tokens, [N_r, h] of each rank, and d_probs, [N_r, k] of each rank.
    """
    inputs = _send_copies(plan, _copies_of(plan, _send_rows(plan, tokens)))
    outputs = [expert_fn(rank, rows, plan.ranks[rank].ends) for rank, rows in enumerate(inputs)]
    held_probs = _send_rows(plan, probs)

    d_weighted = _copies_of(plan, _send_rows(plan, d_out))  # the adjoints of returning and of adding up
    d_held_probs = [np.zeros_like(held) for held in held_probs]
    returned = _return_copies(plan, outputs)
    for index, d_probs, rows, d_rows in zip(plan.ranks, d_held_probs, returned, d_weighted, strict=True):
        d_probs[index.copy_row, index.copy_choice] = (rows * d_rows).sum(1)
    weights = _weights(plan, held_probs)
    d_outputs = _send_copies(plan, [w[:, None] * rows for w, rows in zip(weights, d_weighted, strict=True)])
    d_inputs = [expert_vjp(rank, rows, plan.ranks[rank].ends, d_outputs[rank]) for rank, rows in enumerate(inputs)]
    d_held = _add_copies(plan, _return_copies(plan, d_inputs))
    return _return_rows(plan, d_held), _return_rows(plan, d_held_probs)


def _send_rows(plan: Plan, values: list[np.ndarray]) -> list[np.ndarray]:
    """Own rows [N, ...] to the rows held [G, ...]."""
    moved = [rows[index.send_token] for index, rows in zip(plan.ranks, values, strict=True)]
    for step in plan.dispatch[:-1]:
        moved = move(step, moved)
    return moved


def _return_rows(plan: Plan, held: list[np.ndarray]) -> list[np.ndarray]:
    """Adjoint of `_send_rows`: partial sums of the rows held to sums at their source."""
    for step in plan.combine[1:]:
        held = move(step, held)
    return [
        _sums(int(tokens), index.send_token, rows)
        for tokens, index, rows in zip(plan.tokens, plan.ranks, held, strict=True)
    ]


def _send_copies(plan: Plan, copies: list[np.ndarray]) -> list[np.ndarray]:
    """Copies [C, ...] in the order they are sent to expert inputs [M, ...] in expert order."""
    arrived = move(plan.dispatch[-1], copies)
    return [rows[index.order] for index, rows in zip(plan.ranks, arrived, strict=True)]


def _return_copies(plan: Plan, outputs: list[np.ndarray]) -> list[np.ndarray]:
    """Inverse and adjoint of `_send_copies`."""
    return move(plan.combine[0], [rows[index.inverse] for index, rows in zip(plan.ranks, outputs, strict=True)])


def _copies_of(plan: Plan, held: list[np.ndarray]) -> list[np.ndarray]:
    """Rows held to copies, in the order they are sent."""
    return [rows[index.copy_row] for index, rows in zip(plan.ranks, held, strict=True)]


def _add_copies(plan: Plan, copies: list[np.ndarray]) -> list[np.ndarray]:
    """Adjoint of `_copies_of`: copies added up in the rows held."""
    return [_sums(len(index.row_rank), index.copy_row, rows) for index, rows in zip(plan.ranks, copies, strict=True)]


def _weights(plan: Plan, held_probs: list[np.ndarray]) -> list[np.ndarray]:
    """[C] router probability of each copy, of each rank."""
    return [held[index.copy_row, index.copy_choice] for index, held in zip(plan.ranks, held_probs, strict=True)]


def _sums(size: int, at: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[size, ...] sums of the rows that fall on each index."""
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    np.add.at(out, at, rows)
    return out
