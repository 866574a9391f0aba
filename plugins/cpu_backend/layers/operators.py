"""Stand-ins for operators that have no CPU kernel in MindSpore 2.9.0 (`TopkExt`, `Outer`, `IndexSelect`)."""

from __future__ import annotations

from mindspore import nn, ops
from mindspore.ops import operations as P


class PrimitiveLike(nn.Cell):
    """A cell that answers the calls MindFormers chains on primitives, and does nothing in them."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def shard(self, *args, **kwargs):
        """Sharding is decided elsewhere: CPU runs data parallel only."""
        return self

    def add_prim_attr(self, *args, **kwargs):
        """Attributes steer Ascend's compiler."""
        return self

    def recompute(self, *args, **kwargs):
        """Recomputation is a memory plan; CPU runs without."""
        return self


class TopK(PrimitiveLike):
    """`TopkExt(x, k) -> (values, indices)` along the last axis, largest first."""

    def __init__(self):
        super().__init__()
        self.topk = P.TopK(sorted=True)

    def construct(self, x, k):
        """x: [..., n] -> ([..., k], int32 [..., k])."""
        return self.topk(x, k)


class Outer(PrimitiveLike):
    """`Outer(a, b)`: [m], [n] -> [m, n]."""

    def construct(self, a, b):
        """Multiply every element of `a` with every element of `b`."""
        return ops.reshape(a, (-1, 1)) * ops.reshape(b, (1, -1))


class EmbeddingLookup(PrimitiveLike):
    """The body of `VocabParallelEmbedding` without `IndexSelect`."""

    def __init__(self):
        super().__init__()
        self.gather = P.Gather()

    def construct(self, input_ids, weight):
        """input_ids: int [B, S], weight: [v, h] -> [B, S, h]."""
        return self.gather(weight, input_ids, 0)
