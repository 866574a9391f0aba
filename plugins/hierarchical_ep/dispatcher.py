"""This module sends tokens to experts and back in three modes (section 4.3 of the TeleChat3-MoE report); the same code
serves Ascend and CPU.

A dispatch has two steps. The first step sends data between nodes, among the ranks of one inter-node group:

    global         there is no first leg
    hierarchical   AllGather: every rank holds the rows of its counterparts on all nodes
    deduplicated   All-to-All: each row goes once to each node where it has an expert

The second step stays inside a node (in global mode it spans the whole EP group): each rank keeps the (row, choice)
pairs whose expert is in its node, sorts them by expert, and sends them by All-to-All to the ranks that own the experts;
these ranks multiply the experts' outputs by the router's probabilities. The combine does the same in reverse order: an
All-to-All, the sum over a row's pairs, then a ReduceScatter or an All-to-All and a sum. No token is dropped.
`RoutedLayer` passes the tokens of all chunks through dispatch, experts and combine, in a given order.

The differences between devices are in two objects of a backend (`ascend.py`, on CPU `cpu_backend.expert_parallel`):
`net` makes the collectives of a group of ranks, `rows` sorts and gathers rows. On CPU shapes are static: a buffer holds
as many rows as could ever arrive, used rows first and zeros behind them; only used rows are sent. An expert id is sent
as id + 1, so that a row of zeros has no expert.

If two ranks start two collectives in different orders, both ranks hang. The operator `Depend` orders only the forward
pass, because its gradient does not keep the order. So every collective takes and returns a scalar, called the turn
(`InTurn`), which is passed from collective to collective: each collective waits for the turn, and passes it on when the
collective is done. In the backward pass the gradient of the turn is passed in the reverse order, and the gradients of
the collectives wait for it. Only these dependencies matter: the values of the turn and of its gradient are never read.

If shapes depend on the data and an All-to-All brings a rank no row, AlltoAllV would return a scalar without meaning
(MindSpore's documentation of `AlltoAllV`), and reshaping this scalar stops the run. So with `rows.spare` each rank
always sends itself a row: in the first step its first token, and in the second step one pair of that row with its own
first expert and the probability 0. These additional rows add nothing to a result or a gradient, and no additional row
is sent over a link.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from plugins.hierarchical_ep.topology import Topology

STEPS = ("dispatch.inter", "dispatch.intra", "experts", "combine.intra", "combine.inter")
UNCUT = tuple((0, step) for step in STEPS)


class _Enter(nn.Cell):
    """This cell returns its rows unchanged, but makes them depend on the value `turn` of the collective before."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        # not the forward pass's turn: the gradient would then keep, or recompute, all that it has waited for
        self.turn = Tensor(0.0, mstype.float32)

    def construct(self, rows, turn):
        return ops.depend(rows, turn)

    def bprop(self, rows, turn, out, dout):
        return dout, ops.depend(self.turn, dout)


class _Leave(nn.Cell):
    """This cell returns its rows unchanged, and a value that depends on these rows."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, rows, turn):
        return rows, ops.depend(turn, rows)

    def bprop(self, rows, turn, out, dout):
        return ops.depend(dout[0], dout[1]), dout[1]


class _Pass(nn.Cell):
    """This cell returns the turn after another scalar is there; the turn's gradient does not depend
    on that scalar.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, turn, scalar):
        return ops.depend(turn, scalar)

    def bprop(self, turn, scalar, out, dout):
        return dout, ops.zeros_like(scalar)


class InTurn(nn.Cell):
    """An `InTurn` wraps a collective so that it starts only after the collective before it has run, in the forward and
    in the backward pass.
    """

    def __init__(self, collective):
        super().__init__(auto_prefix=False)
        self.collective = collective
        self.enter, self.leave = _Enter(), _Leave()

    def construct(self, rows, turn, *rest):
        """Return the collective's result for (rows, *rest), and a value on which the next collective depends."""
        return self.leave(self.collective(self.enter(rows, turn), *rest), turn)


class InTurnOnce(nn.Cell):
    """An `InTurnOnce` wraps a collective that has no gradient: in the forward pass the collective starts only after the
    collective before it, and it has no backward pass.
    """

    def __init__(self, collective):
        super().__init__(auto_prefix=False)
        self.collective = collective
        self.through = _Pass()

    def construct(self, rows, turn, *rest):
        """Return the collective's result for (rows, *rest), and a value on which the next collective depends."""
        waiting = ops.stop_gradient(turn)
        out = ops.stop_gradient(self.collective(ops.depend(ops.stop_gradient(rows), waiting), *rest))
        return out, self.through(turn, ops.depend(waiting, out))


def first_turn(rows):
    """Return the value on which the first collective of a layer depends: a scalar that the compiler cannot replace by a
    constant.
    """
    return ops.stop_gradient(ops.cast(ops.reshape(rows, (-1,))[0], mstype.float32))


class Stay(nn.Cell):
    """A `Stay` stands for the first step of the dispatch in the global mode, in which this step does nothing."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, rows, meta, turn):
        """Return rows [N, h] and meta [N, 2k] unchanged; the way back needs no stored data."""
        return rows, meta, (), turn

    def back(self, rows, route, turn):
        """Return the rows [N, h] unchanged on the way back from the experts."""
        return rows, turn


class Gather(nn.Cell):
    """A `Gather` is the first step of the dispatch in the hierarchical mode: an AllGather between nodes on the way to
    the experts, and a ReduceScatter on the way back.
    """

    def __init__(self, group, net):
        super().__init__(auto_prefix=False)
        self.gather_meta = InTurn(net.all_gather(group, small=True))
        self.gather = InTurn(net.all_gather(group))
        self.scatter = InTurn(net.reduce_scatter(group))

    def construct(self, rows, meta, turn):
        """Send rows [N, h] and their metadata [N, 2k] to all nodes; return the gathered rows [nodes * N, h] and
        metadata [nodes * N, 2k].
        """
        meta, turn = self.gather_meta(meta, turn)
        rows, turn = self.gather(rows, turn)
        return rows, meta, (), turn

    def back(self, rows, route, turn):
        """Sum the experts' partial results [nodes * N, h] over the nodes by a ReduceScatter, and return [N, h]."""
        return self.scatter(rows, turn)


class Select(nn.Cell):
    """A `Select` is the first step of the dispatch in the deduplicated mode: an All-to-All between nodes that sends
    each row once to every node that needs it.
    """

    def __init__(self, topology: Topology, rank, hidden, top_k, net, rows):
        super().__init__(auto_prefix=False)
        group = topology.inter_group(rank)
        self.nodes, self.top_k = topology.nodes, top_k
        bounds = topology.expert_bounds[:: topology.devices_per_node]
        self.first, self.end = Tensor(bounds[:-1], ms.int32), Tensor(bounds[1:], ms.int32)
        self.node = Tensor(np.arange(self.nodes), ms.int32)
        self.own = Tensor(np.arange(self.nodes) == int(topology.node_of(rank)))
        self.count = InTurnOnce(net.exchange_counts(group))
        self.send_rows = InTurn(net.all_to_all_v(group, hidden))
        self.send_meta = InTurn(net.all_to_all_v(group, 2 * top_k, small=True))
        self.return_rows = InTurn(net.all_to_all_v(group, hidden))
        self.rows = rows

    def construct(self, rows, meta, turn):
        """Send rows [N, h] and their metadata [N, 2k]; return the rows [R, h] and metadata [R, 2k] that arrive,
        including those from this rank's node.
        """
        tokens = rows.shape[0]
        ids = ops.cast(ops.stop_gradient(meta[:, : self.top_k]), ms.int32) - 1
        ids = ops.reshape(ids, (tokens, self.top_k, 1))
        wanted = ops.cast(ops.logical_and(ids >= self.first, ids < self.end), ms.float32)
        wanted = ops.reduce_sum(wanted, 1) > 0
        if self.rows.spare:
            wanted = ops.logical_or(wanted, ops.logical_and(Tensor(np.arange(tokens).reshape(-1, 1) == 0), self.own))
        counts = ops.cast(ops.reduce_sum(ops.cast(wanted, ms.float32), 0), ms.int32)
        # (row, node) pairs, sorted by node, those not wanted last
        away = ops.cast(ops.logical_not(wanted), ms.int32) * self.nodes
        key, order = self.rows.sort(ops.reshape(ops.maximum(self.node, away), (-1,)))
        source = self.rows.keep(order // self.nodes, key < self.nodes)
        (send, receive, _), turn = self.count(ops.reshape(counts, (self.nodes, 1)), turn)
        room = self.nodes * tokens
        meta, turn = self.send_meta(self.rows.take(meta, source), turn, send, receive, room)
        rows, turn = self.send_rows(self.rows.take(rows, source), turn, send, receive, room)
        return rows, meta, (source, send, receive, tokens), turn

    def back(self, rows, route, turn):
        """Send the experts' partial results [R, h] back to the tokens' ranks, and sum them for each token, [N, h]."""
        source, send, receive, tokens = route
        returned, turn = self.return_rows(rows, turn, receive, send, self.nodes * tokens)
        return self.rows.add(returned, source, tokens), turn


class Beside(nn.Cell):
    """A `Beside` joins two vectors [n] as the two columns of a matrix [n, 2]; the first vector has no gradient.

    The gradient is written as code of this class to avoid a fault of MindSpore's recompute pass: the pass takes a slice
    or reshape behind the gradient of a CPU collective for the cell's first gradient and makes the recomputed operators
    wait for it, which has led to a dependency cycle.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, first, second):
        """Return a matrix [n, 2] with the two vectors [n] as its columns."""
        return ops.concat((ops.reshape(first, (-1, 1)), ops.reshape(second, (-1, 1))), 1)

    def bprop(self, first, second, out, dout):
        """Return the gradient of the second vector; the first vector has none."""
        return ops.zeros_like(first), dout[:, 1]


class Exchange(nn.Cell):
    """An `Exchange` is the second step of the dispatch in every mode: it sends (token, expert) pairs to the ranks of
    `group` that own the experts, and the results back.

    Args:
        group: the ranks, in the order of their experts.
        rank: this rank, a member of the group.
        experts: (first, end), the experts of the group, the same number on each rank.
        pad: whether each expert gets a row of zeros, for grouped matmuls that do not accept an empty input.
    """

    def __init__(self, group, rank, experts, hidden, top_k, net, rows, pad):
        super().__init__(auto_prefix=False)
        self.size, self.top_k, self.hidden = len(group), top_k, hidden
        self.first, self.owned = experts[0], experts[1] - experts[0]
        self.local = self.owned // self.size
        self.expert = Tensor(np.arange(self.owned), ms.int32)
        self.pads = self.local if pad else 0
        pads = np.zeros((self.local, 2))
        pads[:, 0] = np.arange(1, self.local + 1)
        self.pad_meta = Tensor(pads, ms.float32)
        # the pair for oneself: its expert, its probability
        self.spare = rows.spare
        self.spare_id = Tensor([tuple(group).index(rank) * self.local], ms.int32)
        self.spare_weight = Tensor([0.0], ms.float32)
        self.probability = Tensor([[0.0, 1.0]], ms.float32)
        self.beside = Beside()
        self.count = InTurnOnce(net.exchange_counts(group))
        self.send_meta = InTurn(net.all_to_all_v(group, 2, small=True))
        self.send_rows = InTurn(net.all_to_all_v(group, hidden))
        self.return_rows = InTurn(net.all_to_all_v(group, hidden))
        self.rows = rows

    def construct(self, rows, meta, turn):
        """Return the copies [R, h] of the rows that this rank's experts process, sorted by local expert, the cumulative
        counts [E_local], and the data that `back` needs; the arguments are rows [M, h] and meta [M, 2k].
        """
        count, top_k = rows.shape[0], self.top_k
        ids = ops.reshape(ops.cast(ops.stop_gradient(meta[:, :top_k]), ms.int32), (-1,)) - 1 - self.first
        weights = ops.reshape(meta[:, top_k:], (-1,))
        if self.spare:
            ids, weights = ops.concat((self.spare_id, ids), 0), ops.concat((self.spare_weight, weights), 0)
        here = ops.logical_and(ids >= 0, ids < self.owned)
        key, order = self.rows.sort(ops.select(here, ids, ops.full_like(ids, self.owned)))
        counts = ops.cast(ops.reshape(key, (-1, 1)) == self.expert, ms.float32)
        counts = ops.reshape(ops.cast(ops.reduce_sum(counts, 0), ms.int32), (self.size, self.local))
        order, wanted = self.rows.keep(order, key < self.owned), self.rows.keep(key, key < self.owned)
        weights = self.rows.take(weights, order)
        source = (ops.maximum(order - self.spare, 0) if self.spare else order) // top_k

        (send, receive, arriving), turn = self.count(counts, turn)
        room = self.size * count * min(top_k, self.local) + self.spare
        meta = self.beside(ops.cast(wanted % self.local + 1, ms.float32), weights)
        meta, turn = self.send_meta(meta, turn, send, receive, room)
        copies, turn = self.send_rows(self.rows.take(rows, source), turn, send, receive, room)
        if self.pads:
            meta = ops.concat((self.pad_meta, meta), 0)
            copies = ops.concat((ops.zeros((self.pads, self.hidden), copies.dtype), copies), 0)
        ids = ops.reshape(ops.cast(ops.stop_gradient(meta[:, :1]), ms.int32), (-1,))
        _, by_expert = self.rows.sort(ops.select(ids > 0, ids, ops.full_like(ids, self.local + 1)))
        inverse = self.rows.invert(by_expert)
        ends = self.rows.cumulate(arriving, self.pads > 0)
        # a sum, not a slice: see Beside
        weights = ops.reshape(ops.reduce_sum(self.rows.take(meta, by_expert) * self.probability, 1), (-1, 1))
        return self.rows.take(copies, by_expert), ends, (source, inverse, weights, send, receive, count), turn

    def back(self, copies, route, turn):
        """Return for each of M rows the weighted sum over its (token, expert) pairs, [M, h]; the argument `rows` [R, h]
        is sorted by expert.
        """
        source, inverse, weights, send, receive, count = route
        copies = ops.cast(ops.cast(copies, ms.float32) * weights, copies.dtype)
        # the index is cut, not the rows, for the same reason
        copies = self.rows.take(copies, inverse[self.pads :] if self.pads else inverse)
        pairs, turn = self.return_rows(copies, turn, receive, send, count * self.top_k + self.spare)
        return self.rows.add(pairs, source, count), turn


class Dispatcher(nn.Cell):
    """A `Dispatcher` runs both steps of the dispatch in one mode, to the experts and back.

    Args:
        mode: "global", "hierarchical" or "deduplicated".
        rank: this rank's index in its EP group.
        net, rows: the device's collectives (of this EP group) and row operations.
        pad: see `Exchange`.
    """

    def __init__(self, mode, topology: Topology, rank, hidden, top_k, net, rows, pad=False):
        super().__init__(auto_prefix=False)
        self.crosses = mode != "global" and topology.nodes > 1
        if not self.crosses:
            self.first = Stay()
            group, experts = topology.ep_group, (0, topology.experts)
        else:
            if mode == "hierarchical":
                self.first = Gather(topology.inter_group(rank), net)
            else:
                self.first = Select(topology, rank, hidden, top_k, net, rows)
            group, experts = topology.intra_group(rank), topology.experts_of_node(int(topology.node_of(rank)))
        self.second = Exchange(group, rank, experts, hidden, top_k, net, rows, pad)

    def to_nodes(self, rows, meta, turn):
        """Run the first step of the dispatch for rows [N, h] and metadata [N, 2k]; return rows [M, h], metadata [M,
        2k], the data that `from_nodes` needs, and a value on which the next collective depends.
        """
        return self.first(rows, meta, turn)

    def to_experts(self, rows, meta, turn):
        """Run the second step of the dispatch; return copies sorted by expert [R, h], cumulative counts [E_local], the
        data that `from_experts` needs, and a value on which the next collective depends.
        """
        return self.second(rows, meta, turn)

    def from_experts(self, copies, route, turn):
        """Run the second step of the dispatch in reverse: it takes rows [R, h], and returns rows [M, h] and a value on
        which the next collective depends.
        """
        return self.second.back(copies, route, turn)

    def from_nodes(self, rows, route, turn):
        """Run the first step of the dispatch in reverse: it takes rows [M, h], and returns rows [N, h] and a value on
        which the next collective depends.
        """
        return self.first.back(rows, route, turn)


def pack(probs, ids):
    """Pack probs [N, k] and ids int [N, k] into one float32 [N, 2k]: ids + 1, then probabilities."""
    return ops.concat((ops.cast(ops.stop_gradient(ids), ms.float32) + 1, ops.cast(probs, ms.float32)), 1)


class RoutedLayer(nn.Cell):
    """A `RoutedLayer` holds the chunks of a rank's tokens and a dispatcher for each chunk; it issues the steps of all
    chunks in the order `order`.

    The router has already chosen the experts of all tokens, and its auxiliary loss is computed over all of them:
    cutting the tokens into chunks changes neither. Collectives over the same class of links wait for each other in the
    order of issue, so that every rank starts them in the same order; collectives over different classes run at the same
    time if the device has a stream for each class.

    Args:
        dispatchers: one dispatcher for each chunk.
        pieces: int32 Tensors, the token indices of each chunk; None with one chunk.
        whole: an int32 Tensor, the position of each token in the concatenation of the pieces.
        order: (chunk, step) pairs, the same on all ranks.
        experts: a cell (copies, ends, w1, w2) -> copies.
        rows: the row operations of the device.
        streams: 2 if inter-node and intra-node collectives run at the same time, 1 if they take turns.
    """

    def __init__(self, dispatchers, pieces, whole, order, experts, rows, streams):
        super().__init__(auto_prefix=False)
        self.dispatchers = nn.CellList(dispatchers, auto_prefix=False)
        self.pieces, self.whole = pieces, whole
        self.count = len(dispatchers)
        self.program = tuple((chunk, STEPS.index(step)) for chunk, step in order)
        self.experts, self.rows = experts, rows
        self.inner = streams - 1
        # as MindFormers marks where its shared expert's branch joins: MindSpore may interleave what is joined here
        self.join = ops.Concat(0).add_prim_attr("parallel_branch", 1)

    def construct(self, tokens, probs, ids, w1, w2):
        """Return the experts' outputs [N, h] for tokens [N, h], probs and ids [N, k], and the weights of this rank's
        experts.
        """
        meta = pack(probs, ids)
        start = first_turn(tokens)
        turns = (start, start)
        chunks = self.start(tokens, meta)
        for index, step in self.program:
            rows, extra, first, second = chunks[index]
            dispatcher = self.dispatchers[index]
            if step == 0:
                rows, extra, first, turn = dispatcher.to_nodes(rows, extra, turns[0])
                turns = (turn, turns[1])
            elif step == 1:
                rows, extra, second, turn = dispatcher.to_experts(rows, extra, turns[self.inner])
                turns = turns[: self.inner] + (turn,) + turns[self.inner + 1 :]
            elif step == 2:
                rows = self.experts(rows, extra, w1, w2)
            elif step == 3:
                rows, turn = dispatcher.from_experts(rows, second, turns[self.inner])
                turns = turns[: self.inner] + (turn,) + turns[self.inner + 1 :]
            else:
                rows, turn = dispatcher.from_nodes(rows, first, turns[0])
                turns = (turn, turns[1])
            chunks = chunks[:index] + ((rows, extra, first, second),) + chunks[index + 1 :]
        if self.count == 1:
            return chunks[0][0]
        return self.rows.take(self.join(tuple([chunk[0] for chunk in chunks])), self.whole)

    def start(self, tokens, meta):
        """Return for each chunk a tuple of its token rows, their routing metadata, and two empty tuples. Each of the
        two steps of the dispatch later replaces one of the two empty tuples by the data that the step needs to send
        results back.
        """
        if self.count == 1:
            return ((tokens, meta, (), ()),)
        return tuple([
            (self.rows.take(tokens, piece), self.rows.take(meta, piece), (), ()) for piece in self.pieces
        ])  # fmt: skip


def cut(slices):
    """Return the arguments `pieces` and `whole` of `RoutedLayer` for chunks of the given token indices: the indices of
    each chunk, and the order that puts the tokens of all chunks back in their original order.
    """
    whole = np.argsort(np.concatenate(slices))
    return tuple(Tensor(piece, mstype.int32) for piece in slices), Tensor(whole, mstype.int32)
