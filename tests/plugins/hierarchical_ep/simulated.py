"""A plan of one MoE layer carried out on simulated ranks, which moves only the planned rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plugins.hierarchical_ep.plan import Plan, Transfer

ExpertFn = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def move(step: Transfer, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """Run one collective on simulated ranks.

    Args:
        buffers: what each rank puts in, [rows, ...]: its rows once (all_gather), or the rows of each member of its
            group, in group order.

    Returns:
        what each rank gets: the rows of each member in group order, or their sum (reduce_scatter).
    """
    received = []
    for rank in range(len(buffers)):
        parts = []
        for source in step.group_of(rank):
            before = [r for r in step.group_of(rank) if r < rank]
            start = 0 if step.kind == "all_gather" else step.rows[source, before].sum()
            parts.append(buffers[source][start : start + step.rows[source, rank]])
        received.append(np.sum(parts, 0) if step.kind == "reduce_scatter" else np.concatenate(parts))
    return received


def execute(plan: Plan, tokens: list[np.ndarray], probs: list[np.ndarray], expert_fn: ExpertFn) -> list[np.ndarray]:
    """Run the plan on simulated ranks, moving only the planned rows.

    Args:
        plan: of these tokens' routing.
        tokens: [N_r, h] of each rank.
        probs: [N_r, k] of each rank.
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
    """Return the gradients of `execute` with respect to tokens and probs, by each planned step's adjoint, from last to
    first.

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
