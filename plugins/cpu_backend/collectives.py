"""Differentiable collectives for MindSpore's CPU backend, which has AllReduce(SUM) and nothing else in sub-groups.

Each is an AllReduce of a zero-padded buffer, exact in value (every element is one number plus zeros). Traffic is
group-size times what the named collective moves: this is for checking numerics on a laptop, not for speed.
Each cell holds its own AllReduce primitive: a cell shared by `construct` and `bprop` does not compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group, get_group_size, get_rank

from plugins.errors import ClusterError

_created: set[str] = set()


class ProcessGroup:
    """Ranks that communicate. Only members may build it, in the same order on each of them.

    Attributes:
        ranks: global ranks, in group order; size: how many; rank: this process's index in the group;
        name: what a communication primitive takes as `group`.

    Raises:
        ClusterError: when this process is not one of `ranks`, or `ranks` repeats one.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        if len(set(self.ranks)) != self.size:
            raise ClusterError(f"a communication group repeats a rank: {self.ranks}")
        if get_rank() not in self.ranks:
            raise ClusterError(f"rank {get_rank()} builds the group {self.ranks} without being in it")
        self.rank = self.ranks.index(get_rank())
        if self.ranks == list(range(get_group_size())):
            self.name = GlobalComm.WORLD_COMM_GROUP
        else:
            self.name = "tc3_" + "_".join(map(str, self.ranks))
            # a group of one never communicates: MindSpore refuses to create it
            if self.size > 1 and self.name not in _created:
                create_group(self.name, self.ranks)
                _created.add(self.name)


def world_group() -> ProcessGroup:
    """Every rank of this run."""
    return ProcessGroup(range(get_group_size()))


class _Collective(nn.Cell):
    """Common parts: the sum primitive and a one-hot over this rank's index."""

    def __init__(self, group: ProcessGroup):
        super().__init__(auto_prefix=False)
        self.size, self.rank = group.size, group.rank
        self.alone = group.size == 1
        world = GlobalComm.WORLD_COMM_GROUP
        self.sum = ops.AllReduce(ops.ReduceOp.SUM, world if self.alone else group.name)
        self.mine = Tensor(np.eye(group.size, dtype=np.float32)[group.rank])

    def spread(self, x):
        """x at this rank's place of a new leading axis of group size, zeros elsewhere: [...] -> [n, ...]."""
        place = ops.reshape(self.mine, (self.size,) + (1,) * x.ndim)
        return ops.cast(place, x.dtype) * ops.expand_dims(x, 0)

    def own_slice(self, x):
        """This rank's n-th part of the first axis."""
        rows = x.shape[0] // self.size
        return x[self.rank * rows : (self.rank + 1) * rows]


class AllReduceSum(_Collective):
    """Sum over the group; the gradient is the sum of the gradients."""

    def construct(self, x):
        """[...] -> [...]."""
        return x if self.alone else self.sum(x)

    def bprop(self, x, out, dout):
        """The adjoint of a sum seen by everyone: a sum."""
        return (dout if self.alone else self.sum(dout),)


class AllReduceMean(nn.Cell):
    """Mean over all ranks of the run; not meant to be differentiated."""

    def __init__(self, size: int):
        super().__init__(auto_prefix=False)
        self.sum = ops.AllReduce(ops.ReduceOp.SUM)
        self.size = size

    def construct(self, x):
        """[...] -> [...]."""
        return self.sum(x) / self.size


class AllGather(_Collective):
    """Concatenate along axis 0 in group order; the gradient is a reduce-scatter."""

    def construct(self, x):
        """[m, ...] -> [n * m, ...]."""
        if self.alone:
            return x
        return ops.reshape(self.sum(self.spread(x)), (-1,) + x.shape[1:])

    def bprop(self, x, out, dout):
        """[n * m, ...] -> [m, ...]."""
        return (dout if self.alone else self.own_slice(self.sum(dout)),)


class ReduceScatter(_Collective):
    """Sum over the group, keep this rank's part of axis 0; the gradient is an all-gather."""

    def construct(self, x):
        """[n * m, ...] -> [m, ...]."""
        return x if self.alone else self.own_slice(self.sum(x))

    def bprop(self, x, out, dout):
        """[m, ...] -> [n * m, ...]."""
        if self.alone:
            return (dout,)
        return (ops.reshape(self.sum(self.spread(dout)), (-1,) + dout.shape[1:]),)


class AllToAll(_Collective):
    """Part j of axis 0 goes to rank j; what arrives is ordered by sender. It is its own adjoint."""

    def construct(self, x):
        """[n * m, ...] -> [n * m, ...]."""
        return x if self.alone else self._exchange(x)

    def bprop(self, x, out, dout):
        """[n * m, ...] -> [n * m, ...]."""
        return (dout if self.alone else self._exchange(dout),)

    def _exchange(self, x):
        parts = ops.reshape(x, (self.size, -1) + x.shape[1:])
        received = self.sum(self.spread(parts))[:, self.rank]
        return ops.reshape(received, x.shape)
