"""This module holds layers for models on CPU: top-k, outer product, embedding lookup, and routed experts. The layers
use only operators that have a CPU kernel.

The first half replaces operators that have no CPU kernel in MindSpore 2.9.0 (`TopkExt`, `Outer`, `IndexSelect`). The
second half contains the routed experts of a run with one expert-parallel rank: a dispatch that drops no tokens, and a
grouped matmul in the blocks of `plan.block_layout`. The module `expert_parallel.py` computes experts that are divided
among several workers.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindformers.parallel_core.training_graph.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from mindspore import Tensor, nn, ops
from mindspore.ops import operations as P

from plugins.cpu_backend.plan import block_count, default_block


class PrimitiveLike(nn.Cell):
    """This cell accepts the calls that MindFormers chains on primitives (`shard`, `add_prim_attr`, `recompute`), and
    ignores them.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    def shard(self, *args, **kwargs):
        """Do nothing: with `plugins.cpu_backend` each process holds the whole model."""
        return self

    def add_prim_attr(self, *args, **kwargs):
        """Do nothing: attributes steer only Ascend's compiler."""
        return self

    def recompute(self, *args, **kwargs):
        """Do nothing: `plugins.cpu_backend` does not recompute activations."""
        return self


class TopK(PrimitiveLike):
    """A `TopK` computes `TopkExt(x, k) -> (values, indices)` along the last axis, largest first."""

    def __init__(self):
        super().__init__()
        self.topk = P.TopK(sorted=True)

    def construct(self, x, k):
        """Return the values [..., k] and the indices int32 [..., k] for x [..., n]."""
        return self.topk(x, k)


class Outer(PrimitiveLike):
    """An `Outer` computes `Outer(a, b)`, the outer product [m, n] of vectors [m] and [n]."""

    def construct(self, a, b):
        """Multiply every element of `a` with every element of `b`."""
        return ops.reshape(a, (-1, 1)) * ops.reshape(b, (1, -1))


class EmbeddingLookup(PrimitiveLike):
    """An `EmbeddingLookup` is the embedding lookup of `VocabParallelEmbedding`, computed without the operator
    `IndexSelect`.
    """

    def __init__(self):
        super().__init__()
        self.gather = P.Gather()

    def construct(self, input_ids, weight):
        """Return the embeddings [B, S, h] of input_ids int [B, S], which are rows of weight [v, h]."""
        return self.gather(weight, input_ids, 0)


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """A `TokenDispatcher` is MindFormers' `MoEAlltoAllTokenDispatcher` for `expert_parallel: 1`, computed without the
    operators `SortExt`, `IndexSelect` and `MoveTo`.

    No token is dropped, so no pad tokens are needed (`use_pad_tokens` protects Ascend's GroupedMatmul from an empty
    input, which the block layout here allows).
    """

    def __init__(self, config):
        super().__init__(config)
        self.sort = P.Sort(axis=0)
        self.gather = P.Gather()

    def token_permutation(self, tokens, probs, routing_map, ffn_num_tokens_per_expert=None):
        """Sort the (token, choice of expert) pairs by expert; the pairs of one expert keep the order of their tokens.

        Args:
            tokens: [1, N, h].
            probs: [1, N, k].
            routing_map: int32 [1, N, k], the chosen experts.
            ffn_num_tokens_per_expert: not used (expert relocation is refused on CPU by MindFormers).

        Returns:
            rows [N * k, h], cumulative counts int32 [E], and what `token_unpermutation` needs.
        """
        pairs = routing_map.shape[1] * self.moe_router_topk
        chosen = ops.reshape(routing_map, (-1,))
        # unique keys make the order independent of the sort's stability
        _, order = self.sort(chosen * pairs + Tensor(np.arange(pairs), ms.int32))
        _, inverse = self.sort(order)
        rows = self.gather(ops.reshape(tokens, (-1, self.hidden_size)), order // self.moe_router_topk, 0)
        experts = Tensor(np.arange(self.expert_num), ms.int32)
        chosen_or_before = ops.cast(ops.reshape(chosen, (-1, 1)) <= experts, ms.float32)
        ends = ops.cast(ops.reduce_sum(chosen_or_before, 0), ms.int32)
        return rows, ends, (probs, inverse, tokens.shape)

    def token_unpermutation(self, tokens, ctx):
        """Put the experts' outputs [N * k, h] back in the order of tokens. Return for each token the sum of its k
        outputs, weighted by the router's probabilities, [1, N, h].
        """
        probs, inverse, shape = ctx
        rows = self.gather(ops.reshape(tokens, (-1, self.hidden_size)), inverse, 0)
        rows = ops.reshape(rows, (shape[0], shape[1], self.moe_router_topk, self.hidden_size))
        return ops.reduce_sum(rows * ops.cast(ops.expand_dims(probs, -1), rows.dtype), 2)


class GroupedMatMul(PrimitiveLike):
    """This cell multiplies rows, sorted by expert, by their expert's weight, in the padded blocks that
    `plan.block_layout` plans.
    """

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        self.gather = P.Gather()
        self.matmul = P.BatchMatMul()
        self.cumsum = P.CumSum()

    def layout(self, ends, rows):
        """Compute the layout of `plan.block_layout` by graph operators; return (expert_of_block, source,
        slot_of_row).
        """
        block = default_block(rows, self.experts)
        count = block_count(rows, self.experts, block)
        counts = ends - ops.concat((Tensor([0], ms.int32), ends[:-1]))
        blocks = (counts + block - 1) // block
        # exact: CPU has CumSum for float32, and the counts stay far below 2**24
        block_ends = ops.cast(self.cumsum(ops.cast(blocks, ms.float32), 0), ms.int32)
        shift = (block_ends - blocks) * block - (ends - counts)
        expert_of_block = ops.minimum(_rank_in(block_ends, count), self.experts - 1)
        slots = Tensor(np.arange(count * block).reshape(count, block), ms.int32)
        source = slots - ops.reshape(self.gather(shift, expert_of_block, 0), (-1, 1))
        source = ops.minimum(ops.maximum(source, 0), rows - 1)
        slot_of_row = Tensor(np.arange(rows), ms.int32) + self.gather(shift, _rank_in(ends, rows), 0)
        return expert_of_block, source, slot_of_row

    def pack(self, x, source):
        """Return the rows [rows, h], copied into padded blocks [blocks, block, h]."""
        return self.gather(x, source, 0)

    def construct(self, packed, weight, expert_of_block):
        """Return the product of each block of `packed` [blocks, block, h] and its expert's weight of [E, h, H], as
        [blocks, block, H].
        """
        return self.matmul(packed, self.gather(weight, expert_of_block, 0))

    def unpack(self, packed, slot_of_row):
        """Return the rows [rows, H] without the padding of the blocks [blocks, block, H]."""
        return self.gather(ops.reshape(packed, (-1, packed.shape[-1])), slot_of_row, 0)


def _rank_in(ends, count):
    """Return, for each i < count, how many of `ends` are <= i: int32 [count]."""
    index = Tensor(np.arange(count).reshape(-1, 1), ms.int32)
    return ops.cast(ops.reduce_sum(ops.cast(index >= ops.reshape(ends, (1, -1)), ms.float32), 1), ms.int32)


class GroupedExperts(FFNGroupedGEMM):
    """A `GroupedExperts` is MindFormers' `FFNGroupedGEMM` with a dispatcher and a grouped matmul that run on CPU (hook:
    `MoESubmodules.experts`).
    """

    def __init__(self, config):
        super().__init__(config)
        self.token_dispatcher = TokenDispatcher(config)
        self.grouped = GroupedMatMul(config.num_moe_experts)

    def experts_forward(self, permuted_local_hidden_states, tokens_per_expert, w1, w2):
        """Compute the output of SwiGLU experts for the tokens.

        Args:
            permuted_local_hidden_states: [rows, h], sorted by expert.
            tokens_per_expert: int32 [E], cumulative counts.
            w1: [E, h, 2H], gate then up.
            w2: [E, H, h].

        Returns:
            [rows, h].
        """
        x = ops.reshape(permuted_local_hidden_states, (-1, self.hidden_size))
        expert_of_block, source, slot_of_row = self.grouped.layout(tokens_per_expert, x.shape[0])
        gate_up = self.grouped(self.grouped.pack(x, source), w1, expert_of_block)
        gate, up = ops.chunk(gate_up, 2, -1)
        out = self.grouped(gate * ops.sigmoid(gate) * up, w2, expert_of_block)
        return self.grouped.unpack(out, slot_of_row)
