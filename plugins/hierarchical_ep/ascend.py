"""Collectives and row operations for Ascend: those that MindFormers' own dispatchers use, in the same way.

Shapes follow the data. Counts, ids and index lists are kept for the backward pass, not recomputed: they are small,
and counts make the host wait for the device. Rows are sent again when a layer is recomputed.
"""

from __future__ import annotations

import mindspore as ms
from mindformers.parallel_core.training_graph.transformer.moe.utils import get_group
from mindspore import nn, ops
from mindspore.ops.auto_generate import CumsumExt, IndexSelect, SortExt


class AllToAllV(nn.Cell):
    """Rows to the members of a group, as many to each as `send` says."""

    def __init__(self, group, width, small):
        super().__init__(auto_prefix=False)
        self.width = width
        self.move = ops.AlltoAllV(group=group, block_size=width)
        if small:
            self.move.recompute(False)

    def construct(self, rows, send, receive, room):
        """rows: [C, width], send and receive: counts on the host, room: not used -> [sum(receive), width]."""
        return ops.reshape(self.move(ops.reshape(rows, (-1,)), send, receive), (-1, self.width))


class ExchangeCounts(nn.Cell):
    """How many rows each member sends and receives, on the host."""

    def __init__(self, group, size):
        super().__init__(auto_prefix=False)
        self.move = ops.AlltoAll(split_count=size, split_dim=0, concat_dim=0, group=group).recompute(False)
        self.to_host = ops.MoveTo().add_prim_attr("recompute", False)

    def construct(self, counts):
        """counts: int32 [n, m], rows of m kinds for each member -> send [n], receive [n], arriving rows by kind [m]."""
        counts = ops.stop_gradient(ops.cast(counts, ms.float32))
        arriving = self.move(counts)
        send, receive = ops.cast(ops.reduce_sum(counts, 1), ms.int64), ops.cast(ops.reduce_sum(arriving, 1), ms.int64)
        send = ops.depend(send, receive)
        return self.to_host(send, "CPU", True), self.to_host(receive, "CPU", True), ops.reduce_sum(arriving, 0)


class Net:
    """Makes the collectives of one EP group.

    Args:
        ranks: global ranks of the EP group; the methods take indices into it.
    """

    def __init__(self, ranks):
        self.ranks = ranks

    def _name(self, group):
        return get_group([self.ranks[index] for index in group])

    def create_groups(self, topology, rank) -> None:
        """Create what rank `rank` takes part in: EP group, inter-node group, intra-node group, in this order."""
        for group in (topology.ep_group, topology.inter_group(rank), topology.intra_group(rank)):
            if len(group) > 1:
                self._name(group)

    def all_gather(self, group, small=False):
        """A cell-like [m, ...] -> [n * m, ...]; `small`: kept, not sent again."""
        gather = ops.AllGather(group=self._name(group))
        return gather.recompute(False) if small else gather

    def reduce_scatter(self, group):
        """A cell-like [n * m, ...] -> [m, ...]."""
        return ops.ReduceScatter(group=self._name(group))

    def all_to_all_v(self, group, width, small=False):
        """A cell (rows [C, width], send, receive, room) -> [R, width]; `small`: kept, not sent again."""
        return AllToAllV(self._name(group), width, small)

    def exchange_counts(self, group):
        """A cell counts [n, m] -> send [n], receive [n], arriving [m]."""
        return ExchangeCounts(self._name(group), len(group))


class Rows(nn.Cell):
    """Row operations with shapes that follow the data."""

    limit = 2**24  # of whole numbers in float32
    spare = 1  # row to oneself in each exchange: AlltoAllV of no rows returns a scalar

    @staticmethod
    def numbers(kinds, count):
        """How many numbers `sort` and `invert` tell apart for `count` keys of `kinds` values."""
        return max(kinds, count)

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.ascending = SortExt()
        self.where = ops.NonZero().recompute(False)
        self.select = IndexSelect()
        self.add_at = ops.IndexAdd(axis=0)
        self.cumsum = CumsumExt()

    def sort(self, keys):
        """int [n] -> sorted int32 keys, and where each came from."""
        # float32 as in MindFormers' dispatchers; exact up to the limit
        ordered, order = self.ascending(ops.cast(keys, ms.float32))
        return ops.cast(ordered, ms.int32), ops.cast(order, ms.int32)

    def invert(self, order):
        """A permutation int32 [n] -> its inverse."""
        _, inverse = self.sort(order)
        return inverse

    def keep(self, values, mask):
        """[n], bool [n] -> those where the mask holds."""
        return self.select(values, 0, ops.reshape(self.where(mask), (-1,)))

    def take(self, values, index):
        """[n, ...], int [m] -> [m, ...]."""
        return self.select(values, 0, index)

    def add(self, values, index, count):
        """Sum rows [m, h] into [count, h] by index, in float32."""
        zeros = ops.zeros((count, values.shape[1]), ms.float32)
        return ops.cast(self.add_at(zeros, index, ops.cast(values, ms.float32)), values.dtype)

    def cumulate(self, counts, padded):
        """[E] -> cumulative int64 [E], with one row more for each where `padded`."""
        return ops.cast(self.cumsum(counts + (1.0 if padded else 0.0), 0), ms.int64)
