"""This module computes expert parallelism on CPU: each worker holds its own experts' weights, and only the tokens
routed to them are sent.

Collectives, row operations and grouped matmul are host functions in the graph. MindSpore's CPU backend has no
collective but AllReduce, and it cannot compute gradients of tensors whose shapes depend on data. So a buffer is as
large as its worst case, with the used rows first: the host functions move and multiply only the used rows, and leave
zeros in the others. `Net` and `Rows` are the backend of `plugins/hierarchical_ep/dispatcher.py`; `CpuRoutedExperts` are
the model's routed experts on top of it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import operations as P

from plugins.cpu_backend import transport
from plugins.cpu_backend.host_functions import operator
from plugins.cpu_backend.plan import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx
from plugins.hierarchical_ep.experts import RoutedExperts

_tags = itertools.count()


def _moving(group):
    """Return the operator of an all-to-all-v, which maps (rows, send, receive, like) to the received rows in the shape
    of `like`.
    """
    # every rank, and every start of a run, builds the same operators in the same order, so tags agree
    group, tag = tuple(map(int, group)), next(_tags)

    def move(rows, send, receive, like):
        out = np.zeros(like.shape, rows.dtype)
        parts = np.split(rows[: send.sum()], np.cumsum(send)[:-1])
        arrived = transport.mesh().all_to_all_v(group, tag, parts, rows=receive.tolist())
        np.concatenate(arrived, out=out[: receive.sum()])
        return out

    def shape(rows, send, receive, like):
        return like

    return operator(move, shape)


def _gathering(group):
    """Return the operator of an all-gather: [m, ...] -> [n * m, ...]."""
    group, tag, size = tuple(map(int, group)), next(_tags), len(group)

    def gather(rows):
        return np.concatenate(transport.mesh().all_to_all_v(group, tag, [rows] * size))

    def shape(rows):
        return [size * rows[0], *rows[1:]]

    return operator(gather, shape)


def _scattering(group):
    """Return the operator of a reduce-scatter, which maps [n * m, ...] to [m, ...] and adds up the parts in group
    order.
    """
    group, tag, size = tuple(map(int, group)), next(_tags), len(group)

    def scatter(rows):
        return sum(transport.mesh().all_to_all_v(group, tag, np.split(rows, size)))

    def shape(rows):
        return [rows[0] // size, *rows[1:]]

    return operator(scatter, shape)


class AllToAllV(nn.Cell):
    """An `AllToAllV` sends rows to the members of a group (an All-to-All of unequal parts); `send` holds the number of
    rows for each member.
    """

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.there, self.back = _moving(group), _moving(group)

    def construct(self, rows, send, receive, room):
        """Return the received rows [room, w] for the sent rows [C, w]; send and receive are int32 [n], and `room` is
        the number of rows that the result has.
        """
        return self.there(rows, send, receive, ops.zeros((room, rows.shape[1]), rows.dtype))

    def bprop(self, rows, send, receive, room, out, dout):
        """Return the gradient of the sent rows: each gradient is sent back to the rank that sent the row."""
        return self.back(dout, receive, send, rows), ops.zeros_like(send), ops.zeros_like(receive), 0


class Linear(nn.Cell):
    """A `Linear` is a collective operator that is a linear function of rows of tokens; in the backward pass, the
    operator `back` computes the gradient.
    """

    def __init__(self, there, back):
        super().__init__(auto_prefix=False)
        self.there, self.back = there, back

    def construct(self, rows):
        """Return the result of the collective operator for this rank's rows."""
        return self.there(rows)

    def bprop(self, rows, out, dout):
        """Return the gradient of the rows: the operator `back`, applied to the gradient of the result."""
        return (self.back(dout),)


class ExchangeCounts(nn.Cell):
    """An `ExchangeCounts` exchanges counts in a group, so that each member gets the numbers of rows that it will send
    to, and receive from, each other member.
    """

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.size = len(group)
        self.move = _moving(group)
        self.one = Tensor(np.ones(self.size), ms.int32)

    def construct(self, counts):
        """Return three counts of rows: sent to each of n members, int32 [n]; received from each member, int32 [n]; and
        received of each of m kinds, int32 [m]. The argument `counts`, int32 [n, m], holds the number of rows that this
        rank sends, by member and kind.
        """
        counts = ops.stop_gradient(counts)
        arriving = self.move(counts, self.one, self.one, counts)
        return _sum(counts, 1), _sum(arriving, 1), _sum(arriving, 0)


def _sum(counts, axis):
    return ops.cast(ops.reduce_sum(ops.cast(counts, ms.float32), axis), ms.int32)


class Net:
    """A `Net` builds the collective operators of one EP group.

    Args:
        ranks: the global ranks of the EP group; the methods take indices into it. `small` is used only on Ascend; on
            CPU a recomputed layer sends everything again.
    """

    def __init__(self, ranks):
        self.ranks = ranks

    def _global(self, group):
        return [self.ranks[index] for index in group]

    def all_gather(self, group, small=False):
        """Return an AllGather cell, which joins the tensors [m, ...] of n ranks to one tensor [n * m, ...], in the
        order of the group; its gradient is a ReduceScatter.
        """
        return Linear(_gathering(self._global(group)), _scattering(self._global(group)))

    def reduce_scatter(self, group):
        """Return a ReduceScatter cell, which sums the tensors [n * m, ...] of n ranks and gives each rank a part [m,
        ...] of the sum; its gradient is an AllGather.
        """
        return Linear(_scattering(self._global(group)), _gathering(self._global(group)))

    def all_to_all_v(self, group, width, small=False):
        """Return an AlltoAllV cell: it takes rows [C, width], the counts to send and to receive, and the number of rows
        `room` that the receive buffer has, and returns the buffer [room, width].
        """
        return AllToAllV(self._global(group))

    def exchange_counts(self, group):
        """Return a cell that takes the counts [n, m] of rows of m kinds for n members, and returns how many rows this
        rank sends to each member [n], receives from each member [n], and receives of each kind [m].
        """
        return ExchangeCounts(self._global(group))


class Rows(nn.Cell):
    """A `Rows` holds the dispatcher's row operations (sort, gather, add) with static shapes, as a CPU graph needs
    them.
    """

    limit = 2**31  # of int32
    spare = 0  # buffers of a fixed size may arrive with no row in use

    @staticmethod
    def numbers(kinds, count):
        """Return the number of different key values that `sort` must be able to sort for `count` elements with keys of
        `kinds` different values; on CPU each key is made unique, so this number is `kinds * count`.
        """
        return kinds * count

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.ascending = P.Sort(axis=0)
        self.gather = P.Gather()
        self.scatter = P.UnsortedSegmentSum()
        self.cumsum = P.CumSum()

    def sort(self, keys):
        """Return the sorted keys of an int32 [n] tensor, and the original index of each key; equal keys keep their
        order.
        """
        count = keys.shape[0]
        # unique keys make the order independent of the sort's stability
        unique, order = self.ascending(keys * count + Tensor(np.arange(count), ms.int32))
        return unique // count, order

    def invert(self, order):
        """Return the inverse of a permutation int32 [n]."""
        _, inverse = self.ascending(order)
        return inverse

    def keep(self, values, mask):
        """Return `values` unchanged: buffers have a fixed size on CPU, so unused rows stay at the end of the buffer,
        and no rank sends them.
        """
        return values

    def take(self, values, index):
        """Return the rows of a tensor [n, ...] at the indices int32 [m], as a tensor [m, ...]."""
        return self.gather(values, index, 0)

    def add(self, values, index, count):
        """Return the sums [count, ...] of those rows of a tensor [m, ...] that have the same index."""
        return self.scatter(values, index, count)

    def cumulate(self, counts, padded):
        """Return the cumulative sums int32 [E] of the counts int32 [E]; if `padded`, each expert counts one more
        row.
        """
        counts = ops.cast(counts, ms.float32) + (1.0 if padded else 0.0)
        return ops.cast(self.cumsum(counts, 0), ms.int32)


class SparseGroupedMatmul(nn.Cell):
    """A `SparseGroupedMatmul` multiplies rows [C, h], sorted by expert, by weights [E, h, H]; it computes only the used
    rows of the result [C, H].
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

        def product(rows, weight, ends):
            return [rows[0], weight[2]]

        def input_gradient(dout, weight, ends):
            return [dout[0], weight[1]]

        def weight_gradient(dout, rows, ends):
            return [ends[0], rows[1], dout[1]]

        self.forward = operator(grouped_matmul, product)
        self.dx = operator(grouped_matmul_dx, input_gradient)
        self.dw = operator(grouped_matmul_dw, weight_gradient)

    def construct(self, rows, weight, ends):
        """Return the products [C, H] of rows [C, h] and weights [E, h, H]; ends is int32 [E], the cumulative counts of
        rows.
        """
        return self.forward(rows, weight, ends)

    def bprop(self, rows, weight, ends, out, dout):
        """Return the gradients of the rows and of the weight."""
        return self.dx(dout, weight, ends), self.dw(dout, rows, ends), ops.zeros_like(ends)


class _Share(nn.Cell):
    """This cell returns a weight unchanged, and divides the weight's gradient by the number of workers.

    Each worker's loss is the mean over its own tokens. The reducer averages the gradients of shared weights over the
    workers; an expert's gradient has been added up over all workers' tokens already, and nothing divides it.
    """

    def __init__(self, workers):
        super().__init__(auto_prefix=False)
        self.workers = workers

    def construct(self, weight):
        return weight + 0.0

    def bprop(self, weight, out, dout):
        return (dout / self.workers,)


class CpuRoutedExperts(RoutedExperts):
    """A `CpuRoutedExperts` is MindFormers' `RoutedExperts` for data parallelism on CPU: each worker has only its own
    experts' weights, and the gradient reducer leaves their gradients unchanged.

    Args:
        spare: the number of additional slots of a worker, for a subclass that fills them (`plugins.expert_balance`).
            The dispatch numbers the slots of all workers consecutively.
    """

    def __init__(self, config, settings, spare=0):
        topology = settings.topology
        slots = replace(settings, topology=replace(topology, experts=topology.experts + spare * topology.ep))
        super().__init__(config, slots, Net(settings.ranks), Rows(), streams=1)
        self.matmul = SparseGroupedMatmul()
        self.share = _Share(settings.topology.ep)
        first, end = settings.topology.expert_bounds[settings.rank : settings.rank + 2]
        # all experts are built first: the same random numbers as in one process
        for name in ("weight1", "weight2"):
            setattr(self, name, _part(getattr(self, name), first, end, self.num_local_experts))

    def forward_func(self, tokens, probs, routing_map, w1, w2, num_tokens_per_expert=None):
        """Compute the same output as the parent's `forward_func`; the gradients of w1 and w2 are divided by the number
        of workers.
        """
        return self.routed(tokens, probs, routing_map, self.share(w1), self.share(w2))

    def experts_forward(self, permuted_local_hidden_states, tokens_per_expert, w1, w2):
        """Return the SwiGLU [R, h] of rows [R, h] that are sorted by expert, with cumulative counts [E], w1 [E, h, 2H]
        and w2 [E, H, h].
        """
        gate, up = ops.chunk(self.matmul(permuted_local_hidden_states, w1, tokens_per_expert), 2, -1)
        return self.matmul(gate * ops.sigmoid(gate) * up, w2, tokens_per_expert)


def _part(weight, first, end, experts):
    """Return experts first .. end - 1 of a weight [experts * n, ...], as a parameter that only this worker has."""
    value = weight.asnumpy().reshape(experts, -1, weight.shape[-1])[first:end]
    value = np.ascontiguousarray(value.reshape(-1, weight.shape[-1]))
    return Parameter(Tensor(value, ms.float32), name=weight.name, layerwise_parallel=True)
