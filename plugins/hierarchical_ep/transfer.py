"""One collective step of dispatch or combine: who hands how many rows to whom, and what that is in bytes. NumPy only.

What is counted, per row:

* dispatch of copies: hidden * itemsize, one expert id and its router probability;
* dispatch of token rows: hidden * itemsize, k expert ids and k router probabilities;
* combine: hidden * itemsize;
* before each All-to-All(V) of dispatch an exchange of int32 counts: one per expert of the destination for copies, one
  per destination for token rows (AllGather needs none).

Ids and probabilities share one fp32 buffer. Gradients take the way back, with zeros for the ids; counts have none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plugins.hierarchical_ep.topology import Topology

ID_BYTES, PROB_BYTES, COUNT_BYTES = 4, 4, 4


@dataclass(frozen=True)
class Transfer:
    """One collective step.

    Attributes:
        step: "dispatch.inter", "dispatch.intra", "combine.intra", "combine.inter"; global mode "dispatch", "combine".
        kind: "all_gather", "all_to_all_v" or "reduce_scatter".
        groups: the groups that run it side by side; together they hold each rank once.
        rows: [ep, ep] rows that rank s hands to rank d; the diagonal stays where it is. Expectations are floats.
        weight: "token" (a row with its k expert ids and k probabilities) or "copy" (a row with one of each). Ids
            and probabilities travel in dispatch only.
    """

    step: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    rows: np.ndarray
    weight: str

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group in which `rank` takes part."""
        return next(group for group in self.groups if rank in group)

    def adjoint(self) -> Transfer:
        """The transfer of the gradients: every row goes back where it came from; copies of one row are summed."""
        kinds = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all_v": "all_to_all_v"}
        return replace(self, kind=kinds[self.kind], rows=self.rows.T)

    def returning(self) -> Transfer:
        """The combine step that undoes this dispatch step."""
        return replace(self.adjoint(), step=self.step.replace("dispatch", "combine"))


def row_transfer(mode: str, topology: Topology, rows: np.ndarray) -> Transfer:
    """Step 1 of the hierarchical and deduplicated modes, with `rows` [ep, ep]."""
    kind = "all_gather" if mode == "hierarchical" else "all_to_all_v"
    return Transfer("dispatch.inter", kind, topology.inter_groups, rows, "token")


def copy_transfer(mode: str, topology: Topology, rows: np.ndarray) -> Transfer:
    """Step 2 (the only one of global mode), with `rows` [ep, ep]."""
    if mode == "global":
        return Transfer("dispatch", "all_to_all_v", (topology.ep_group,), rows, "copy")
    return Transfer("dispatch.intra", "all_to_all_v", topology.intra_groups, rows, "copy")


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


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step, pair by pair. inter, intra: [ep, ep] bytes from rank s to rank d; zero on the diagonal."""

    name: str
    inter: np.ndarray
    intra: np.ndarray

    def sent(self, link: str) -> np.ndarray:
        """[ep] bytes that each rank sends over `link` ("inter" or "intra")."""
        return getattr(self, link).sum(1)

    def received(self, link: str) -> np.ndarray:
        """[ep] bytes that each rank receives over `link`."""
        return getattr(self, link).sum(0)

    def busiest(self, link: str) -> float:
        """The most that any rank sends or receives over `link`."""
        return float(max(self.sent(link).max(), self.received(link).max()))


def row_bytes(transfer: Transfer, top_k: int, hidden: int, itemsize: int) -> int:
    """Bytes of one row of a step with its metadata: a token's k ids and probabilities, a copy's id and probability.

    They travel in one buffer, and so do their gradients, with zeros for the ids.
    """
    row = hidden * itemsize
    if transfer.step.startswith("combine"):
        return row
    return row + (top_k if transfer.weight == "token" else 1) * (ID_BYTES + PROB_BYTES)


def step_bytes(
    topology: Topology, transfer: Transfer, top_k: int, hidden: int, itemsize: int, gradient: bool = False
) -> StepBytes:
    """Bytes of a forward step from rank s to rank d (`gradient`: only those that also travel back)."""
    moved = transfer.rows * row_bytes(transfer, top_k, hidden, itemsize)
    if not gradient:
        moved = moved + _count_bytes(topology, transfer)
    moved = moved * (1 - np.eye(topology.ep, dtype=int))
    same = topology.same_node
    return StepBytes(transfer.step, moved * ~same, moved * same)


def _count_bytes(topology: Topology, transfer: Transfer) -> np.ndarray:
    """[ep, ep] bytes of the counts that tell a receiver what will come; zero outside the groups."""
    if transfer.kind != "all_to_all_v" or transfer.step.startswith("combine"):
        return np.zeros((topology.ep, topology.ep), int)
    member = np.zeros((topology.ep, topology.ep), int)
    for group in transfer.groups:
        member[np.ix_(group, group)] = 1
    counts = topology.experts_per_rank if transfer.weight == "copy" else 1
    return member * counts * COUNT_BYTES
