"""This module plans the exact sends and receives of each rank for one MoE layer, in three dispatch modes. The module
needs only NumPy. The dispatch modes are described in section 4.3 of the TeleChat3-MoE report.

All modes consist of the same two steps, and differ only in the first:

1. *rows*: token rows are sent between nodes (`inter`), among the ranks with the same local index;
     global        nothing moves: a rank holds its own rows;
     hierarchical  AllGather: a rank holds the rows of its whole inter-node group (the report's scheme, MindFormers'
                   `alltoall_deredundency`);
     deduplicated  All-to-All(V): a row goes once to each node where it has an expert, and to no other;
2. *copies*: each rank takes, from the rows that it holds, each (row, choice) pair whose expert belongs to its group (in
   global mode every pair; in the other modes the pairs of this node), sorts the pairs by expert and sends them to the
   experts' owners by All-to-All(V): over the EP group in global mode, inside the node in the other modes.

The combine is the same in reverse: copies return, are weighted by router probability and are added into the rows that
the rank holds; the rows return to their source rank, which adds up the rows from several nodes (hierarchical:
ReduceScatter).

A `Transfer` is one collective step of a dispatch or combine: it says how many rows each rank sends to each other rank,
and `step_bytes` says how many bytes these are. The following bytes are counted for each row:

* dispatch of copies: hidden * itemsize, one expert id and its router probability;
* dispatch of token rows: hidden * itemsize, k expert ids and k router probabilities;
* combine: hidden * itemsize;
* before each All-to-All(V) of dispatch an exchange of int32 counts: one per expert of the destination for copies, one
  per destination for token rows (AllGather needs none).

Ids and probabilities are sent in one fp32 buffer. Gradients are sent in the reverse direction, with zeros for the ids;
counts have no gradient.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.topology import Topology
from plugins.settings import Section, setting

ID_BYTES, PROB_BYTES, COUNT_BYTES = 4, 4, 4
MODES = ("global", "hierarchical", "deduplicated")


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says by which mode tokens are sent to their experts, and for which hardware `auto` chooses the
    mode.
    """

    KEY = "plugins.hierarchical_ep"
    RIGHT = f"write `mode:` under it, one of auto, {', '.join(MODES)}"
    CHANGE = ("layout", "routes tokens between devices differently")

    mode: str = setting(MISSING, "how tokens travel, or `auto`", choices=("auto", *MODES))
    hardware: str | None = setting(
        None, "name or file of a cluster, by which `auto` chooses", "write the name or the file of a cluster"
    )


@dataclass(frozen=True)
class Transfer:
    """A `Transfer` is one communication step of a dispatch, in which the ranks of a group exchange rows.

    Attributes:
        step: "dispatch.inter", "dispatch.intra", "combine.intra", "combine.inter"; global mode "dispatch", "combine".
        kind: "all_gather", "all_to_all_v" or "reduce_scatter".
        groups: the groups that run it at the same time; together they hold each rank once.
        rows: [ep, ep] the number of rows that rank s sends to rank d; the diagonal is not sent. Expected numbers are
            floats.
        weight: "token" (a row with its k expert ids and k probabilities) or "copy" (a row with one of each). Ids and
            probabilities are sent only in dispatch.
    """

    step: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    rows: np.ndarray
    weight: str

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group of this step in which `rank` takes part."""
        return next(group for group in self.groups if rank in group)

    def adjoint(self) -> Transfer:
        """Return the transfer of the gradients: each row's gradient goes back to the rank from which the row came, and
        the gradients of copies of one row are summed.
        """
        kinds = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all_v": "all_to_all_v"}
        return replace(self, kind=kinds[self.kind], rows=self.rows.T)

    def returning(self) -> Transfer:
        """Return the step of the combine that sends the rows of this dispatch step back."""
        return replace(self.adjoint(), step=self.step.replace("dispatch", "combine"))


def row_transfer(mode: str, topology: Topology, rows: np.ndarray) -> Transfer:
    """Return the first step of the dispatch in the hierarchical and deduplicated modes; `rows` [ep, ep] holds the
    numbers of token rows from each rank to each rank.
    """
    kind = "all_gather" if mode == "hierarchical" else "all_to_all_v"
    return Transfer("dispatch.inter", kind, topology.inter_groups, rows, "token")


def copy_transfer(mode: str, topology: Topology, rows: np.ndarray) -> Transfer:
    """Return the second step of the dispatch (in the global mode the only step); `rows` [ep, ep] holds the numbers of
    copies from each rank to each rank.
    """
    if mode == "global":
        return Transfer("dispatch", "all_to_all_v", (topology.ep_group,), rows, "copy")
    return Transfer("dispatch.intra", "all_to_all_v", topology.intra_groups, rows, "copy")


@dataclass(frozen=True)
class StepBytes:
    """A `StepBytes` holds the bytes that one step sends between each pair of ranks: `inter` and `intra`, each [ep, ep],
    hold the bytes from rank s to rank d over that link, with zero on the diagonal.
    """

    name: str
    inter: np.ndarray
    intra: np.ndarray

    def sent(self, link: str) -> np.ndarray:
        """Return the bytes that each rank sends over `link` ("inter" or "intra"), [ep]."""
        return getattr(self, link).sum(1)

    def received(self, link: str) -> np.ndarray:
        """Return the bytes that each rank receives over `link`, [ep]."""
        return getattr(self, link).sum(0)

    def busiest(self, link: str) -> float:
        """Return the largest number of bytes that any rank sends or receives over `link`."""
        return float(max(self.sent(link).max(), self.received(link).max()))


def row_bytes(transfer: Transfer, top_k: int, hidden: int, itemsize: int) -> int:
    """Return the bytes of one row of a step with its metadata: a token's k ids and probabilities, or a copy's id and
    probability.

    Ids and probabilities are sent in one buffer, and so are their gradients, with zeros for the ids.
    """
    row = hidden * itemsize
    if transfer.step.startswith("combine"):
        return row
    return row + (top_k if transfer.weight == "token" else 1) * (ID_BYTES + PROB_BYTES)


def step_bytes(
    topology: Topology, transfer: Transfer, top_k: int, hidden: int, itemsize: int, gradient: bool = False
) -> StepBytes:
    """Return the bytes that a forward step sends from rank s to rank d. If `gradient` is True, the bytes of the counts
    are left out, because counts have no gradient.
    """
    moved = transfer.rows * row_bytes(transfer, top_k, hidden, itemsize)
    if not gradient:
        moved = moved + _count_bytes(topology, transfer)
    moved = moved * (1 - np.eye(topology.ep, dtype=int))
    same = topology.same_node
    return StepBytes(transfer.step, moved * ~same, moved * same)


def _count_bytes(topology: Topology, transfer: Transfer) -> np.ndarray:
    """Return the bytes [ep, ep] of the counts from which a receiver learns how many rows it will get; zero outside the
    groups.
    """
    if transfer.kind != "all_to_all_v" or transfer.step.startswith("combine"):
        return np.zeros((topology.ep, topology.ep), int)
    member = np.zeros((topology.ep, topology.ep), int)
    for group in transfer.groups:
        member[np.ix_(group, group)] = 1
    counts = topology.experts_per_rank if transfer.weight == "copy" else 1
    return member * counts * COUNT_BYTES


@dataclass(frozen=True)
class RankPlan:
    """A `RankPlan` holds index arrays that say which rows one rank sends, holds and computes. The rank begins with N
    tokens, sends S rows in the first step, holds G rows after it, sends C copies of these rows in the second step, and
    computes M copies.

    Attributes:
        send_token: [S] the rank's own token of each row, in the order in which rows enter the inter-node step (by
            destination node in deduplicated mode; every token once in the other modes).
        row_rank, row_token: [G] the source rank and the token of each row that the rank holds, ordered by source rank,
            then by token.
        copy_row, copy_choice, copy_expert: [C] the row, choice (0 .. k - 1) and expert of each copy, ordered by expert,
            then row, then choice; copies are sent in this order.
        order: [M] for each row of the expert input, its position among the arrived copies (by source rank); the expert
            input is sorted by expert, then source rank, then row and choice.
        inverse: [M] the inverse of `order`: expert output [inverse] is in the order of arrival.
        counts: [local experts] the number of rows of each expert of this rank.
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
        """Return the cumulative counts of rows by local expert, which are the group list of a grouped matmul."""
        return np.cumsum(self.counts)


@dataclass(frozen=True)
class Plan:
    """A `Plan` holds the sends, the receives and the computation of each rank for one MoE layer and one micro-batch.

    Attributes:
        dispatch: the steps of dispatch, in order; `combine` undoes them in reverse.
        tokens: [ep] the number of tokens of each rank.
        top_k: the number of experts per token.
        ranks: the plan of each rank.
    """

    mode: str
    topology: Topology
    top_k: int
    tokens: np.ndarray
    dispatch: tuple[Transfer, ...]
    ranks: tuple[RankPlan, ...]

    @property
    def combine(self) -> tuple[Transfer, ...]:
        """Return in order the steps of the combine, which sends the experts' results back to the tokens' ranks."""
        return tuple(step.returning() for step in reversed(self.dispatch))

    @property
    def forward(self) -> tuple[Transfer, ...]:
        """Return the steps of the dispatch and of the combine."""
        return self.dispatch + self.combine

    @property
    def backward(self) -> tuple[Transfer, ...]:
        """Return the steps of the gradients: the adjoint of each forward step, from last to first."""
        return tuple(step.adjoint() for step in reversed(self.forward))

    def send_counts(self, step: Transfer, rank: int) -> np.ndarray:
        """Return the number of rows that `rank` sends to each member of its group (rows for itself are not sent)."""
        return step.rows[rank, list(step.group_of(rank))]

    def recv_counts(self, step: Transfer, rank: int) -> np.ndarray:
        """Return the number of rows that `rank` receives from each member of its group."""
        return step.rows[list(step.group_of(rank)), rank]


def make_plan(mode: str, topology: Topology, routing: list[np.ndarray]) -> Plan:
    """Plan the sends and receives of all ranks of an EP group for one MoE layer.

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
    sent = [np.bincount(topology.owner(expert), minlength=topology.ep) for _, _, expert in copies]
    intra = copy_transfer(mode, topology, np.array(sent))
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
            f"hierarchical_ep: mode {mode!r} does not exist{did_you_mean(str(mode), list(MODES))}; the modes are "
            f"{', '.join(MODES)}"
        )


def _row_step(mode: str, topology: Topology, routing: list[np.ndarray]) -> tuple[Transfer, list[np.ndarray]]:
    """Return step 1 of the dispatch and, for each rank, its tokens in the order in which they are sent. In the global
    mode rows only stay on their rank.
    """
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
    """Return [nodes, N] True where a token has an expert on a node."""
    node = topology.node_of(topology.owner(ids))
    return (node[None] == np.arange(topology.nodes)[:, None, None]).any(-1)


def _held_rows(topology, inter, send_tokens, rank) -> tuple[np.ndarray, np.ndarray]:
    """Return (source rank, token) of the rows that `rank` holds after step 1, in group order."""
    group = topology.inter_group(rank)
    parts = []
    for source in group:
        start = 0 if inter.kind == "all_gather" else inter.rows[source, [r for r in group if r < rank]].sum()
        parts.append(send_tokens[source][start : start + inter.rows[source, rank]])
    return np.repeat(group, [len(part) for part in parts]), np.concatenate(parts)


def _copies(mode, topology, routing, row_rank, row_token, rank) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (held row, choice, expert) of the copies that `rank` sends, by expert, then row, then choice."""
    group = topology.inter_group(rank)  # the order of the held rows
    experts = np.concatenate([routing[source][row_token[row_rank == source]] for source in group])
    first, last = (0, topology.experts) if mode == "global" else topology.experts_of_node(topology.node_of(rank))
    row, choice = np.nonzero((experts >= first) & (experts < last))
    expert = experts[row, choice]
    by_expert = np.argsort(expert, kind="stable")
    return row[by_expert], choice[by_expert], expert[by_expert]


def _arrivals(topology, group, copies, rank) -> tuple[np.ndarray, np.ndarray]:
    """Return expert order of the copies that arrive at `rank` (they come by source rank), and rows of each local
    expert.
    """
    first, last = topology.expert_bounds[rank : rank + 2]
    arrived = np.concatenate([copies[source][2] for source in group])
    arrived = arrived[(arrived >= first) & (arrived < last)]
    return np.argsort(arrived, kind="stable"), np.bincount(arrived - first, minlength=last - first)
