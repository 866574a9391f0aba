"""This module holds the collectives and row operations for Ascend, used in the same way as in MindFormers' own
dispatchers.

The shapes of tensors depend on the data. Counts, expert ids and index lists are stored for the backward pass and not
recomputed: they are small, and recomputing counts would make the host wait for the device. When a layer is recomputed,
its rows are sent again.
"""

from __future__ import annotations

import mindspore as ms
from mindformers.parallel_core.training_graph.transformer.moe.utils import get_group
from mindspore import nn, ops
from mindspore.ops.auto_generate import CumsumExt, IndexSelect, SortExt


class AllToAllV(nn.Cell):
    """An `AllToAllV` sends rows to the members of a group (an All-to-All of unequal parts); `send` holds the number of
    rows for each member.
    """

    def __init__(self, group, width, small):
        super().__init__(auto_prefix=False)
        self.width = width
        self.move = ops.AlltoAllV(group=group, block_size=width)
        if small:
            self.move.recompute(False)

    def construct(self, rows, send, receive, room):
        """Return the received rows [sum(receive), width] for `rows` [C, width]. The arguments `send` and `receive` are
        counts in host memory; `room` is not used.
        """
        return ops.reshape(self.move(ops.reshape(rows, (-1,)), send, receive), (-1, self.width))


class ExchangeCounts(nn.Cell):
    """An `ExchangeCounts` exchanges counts in a group, so that each member gets, in host memory, the numbers of rows
    that it sends to, and receives from, each other member.
    """

    def __init__(self, group, size):
        super().__init__(auto_prefix=False)
        self.move = ops.AlltoAll(split_count=size, split_dim=0, concat_dim=0, group=group).recompute(False)
        self.to_host = ops.MoveTo().add_prim_attr("recompute", False)

    def construct(self, counts):
        """Return how many rows this rank sends to each of n members [n], receives from each member [n], and receives of
        each of m kinds [m], such as experts. The argument `counts`, int32 [n, m], holds the number of rows that this
        rank sends, by member and kind.
        """
        counts = ops.stop_gradient(ops.cast(counts, ms.float32))
        arriving = self.move(counts)
        send, receive = ops.cast(ops.reduce_sum(counts, 1), ms.int64), ops.cast(ops.reduce_sum(arriving, 1), ms.int64)
        send = ops.depend(send, receive)
        return self.to_host(send, "CPU", True), self.to_host(receive, "CPU", True), ops.reduce_sum(arriving, 0)


class Net:
    """A `Net` builds the collective operators of one EP group.

    Args:
        ranks: the global ranks of the EP group; the methods take indices into it.
    """

    def __init__(self, ranks):
        self.ranks = ranks

    def _name(self, group):
        return get_group([self.ranks[index] for index in group])

    def create_groups(self, topology, rank) -> None:
        """Create the groups in which rank `rank` takes part, in this order: EP group, inter-node group, intra-node
        group.
        """
        for group in (topology.ep_group, topology.inter_group(rank), topology.intra_group(rank)):
            if len(group) > 1:
                self._name(group)

    def all_gather(self, group, small=False):
        """Return an AllGather operator, which joins the tensors [m, ...] of n ranks to one tensor [n * m, ...]; a
        `small` result is stored for the backward pass, so that recomputation does not send it again.
        """
        gather = ops.AllGather(group=self._name(group))
        return gather.recompute(False) if small else gather

    def reduce_scatter(self, group):
        """Return a ReduceScatter operator, which sums the tensors [n * m, ...] of n ranks and gives each rank a part
        [m, ...] of the sum.
        """
        return ops.ReduceScatter(group=self._name(group))

    def all_to_all_v(self, group, width, small=False):
        """Return an AlltoAllV cell: it takes rows [C, width], the counts to send and to receive, and the number of rows
        `room` of the receive buffer, and returns the buffer [R, width]; a `small` result is kept, so that
        recomputation does not send it again.
        """
        return AllToAllV(self._name(group), width, small)

    def exchange_counts(self, group):
        """Return a cell that takes the counts [n, m] of rows of m kinds (such as experts) for n members, and returns
        how many rows this rank sends to each member [n], receives from each member [n], and receives of each kind [m].
        """
        return ExchangeCounts(self._name(group), len(group))


class Rows(nn.Cell):
    """A `Rows` holds the dispatcher's row operations (sort, gather, add), whose output shapes depend on the data."""

    limit = 2**24  # of whole numbers in float32
    spare = 1  # row to oneself in each exchange: AlltoAllV of no rows returns a scalar

    @staticmethod
    def numbers(kinds, count):
        """Return the number of different values that `sort` and `invert` must be able to sort, for `count` keys with
        `kinds` different values.
        """
        return max(kinds, count)

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.ascending = SortExt()
        self.where = ops.NonZero().recompute(False)
        self.select = IndexSelect()
        self.add_at = ops.IndexAdd(axis=0)
        self.cumsum = CumsumExt()

    def sort(self, keys):
        """Return the sorted keys, int32 [n], of the keys int [n], and the original index of each key."""
        # float32 as in MindFormers' dispatchers; exact up to the limit
        ordered, order = self.ascending(ops.cast(keys, ms.float32))
        return ops.cast(ordered, ms.int32), ops.cast(order, ms.int32)

    def invert(self, order):
        """Return the inverse of a permutation int32 [n]."""
        _, inverse = self.sort(order)
        return inverse

    def keep(self, values, mask):
        """Return the elements of a tensor [n] for which the mask, bool [n], is True."""
        return self.select(values, 0, ops.reshape(self.where(mask), (-1,)))

    def take(self, values, index):
        """Return the rows of a tensor [n, ...] at the indices int [m], as a tensor [m, ...]."""
        return self.select(values, 0, index)

    def add(self, values, index, count):
        """Return the sums [count, h] of those rows of a tensor [m, h] that have the same index, computed in float32."""
        zeros = ops.zeros((count, values.shape[1]), ms.float32)
        return ops.cast(self.add_at(zeros, index, ops.cast(values, ms.float32)), values.dtype)

    def cumulate(self, counts, padded):
        """Return the cumulative sums int64 [E] of the counts [E]; if `padded`, each expert counts one more row."""
        return ops.cast(self.cumsum(counts + (1.0 if padded else 0.0), 0), ms.int64)
