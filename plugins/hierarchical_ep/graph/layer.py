"""The routed experts of one rank: tokens of all chunks through dispatch, experts and combine, in a given order."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from plugins.hierarchical_ep.graph.dispatcher import pack
from plugins.hierarchical_ep.graph.order import first_turn

STEPS = ("dispatch.inter", "dispatch.intra", "experts", "combine.intra", "combine.inter")
UNCUT = tuple((0, step) for step in STEPS)


class RoutedLayer(nn.Cell):
    """The chunks of a rank's tokens, each with a dispatcher of its own, their steps issued as `order` says.

    The router has chosen experts for all tokens before, and its auxiliary loss is taken over all of them: cutting
    changes neither. Collectives of one link class wait for each other in the order of issue, so that every rank
    starts them in the same order; different classes run side by side, where the device has a stream for each.

    Args:
        dispatchers: one for each chunk.
        pieces: int32 Tensors, the token indices of each chunk; None with one chunk.
        whole: int32 Tensor, where each token is in the concatenation of the pieces.
        order: (chunk, step) pairs; the same on all ranks.
        experts: a cell (copies, ends, w1, w2) -> copies.
        rows: row operations of the device.
        streams: 2 where inter-node and intra-node collectives run side by side, 1 where they take turns.
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
        """tokens: [N, h], probs and ids: [N, k], weights of this rank's experts -> [N, h]."""
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
        """For each chunk: rows, metadata (later counts), what the first leg and what the second leg remember."""
        if self.count == 1:
            return ((tokens, meta, (), ()),)
        return tuple([
            (self.rows.take(tokens, piece), self.rows.take(meta, piece), (), ()) for piece in self.pieces
        ])  # fmt: skip


def cut(slices):
    """Token indices of the chunks -> (pieces, whole) as `RoutedLayer` takes them."""
    whole = np.argsort(np.concatenate(slices))
    return tuple(Tensor(piece, mstype.int32) for piece in slices), Tensor(whole, mstype.int32)
