"""Experts that move in a sharded graph: on Ascend, and in semi-auto parallel on CPU.

`CollectiveRanks` is what ranks send each other when experts move, by MindSpore's own AlltoAllV, for no TCP mesh joins
them here. It is a graph of its own, apart from the train step's, compiled once: everything travels as int32 words,
counted in words.

`PlacedGroupedGEMM` and `PlacedDispatch` are the routed experts with a parameter that says in which slot each expert
lives. As in `placed.py`, one Gather renames the experts that tokens were routed to, on the way into the dispatch.
MindSpore cuts it as it cuts the tokens, so that it needs no communication; every rank has the whole placement, 4 x E
bytes.

`ShardedExpertBalance` records and moves. The router counts for itself: MindSpore averages its loads over all ranks, so
that every rank has the loads of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm

from plugins import telechat3_moe
from plugins.expert_balance.callback import ExpertBalance
from plugins.expert_balance.settings import KEY
from plugins.hierarchical_ep.experts import RoutedExperts

_WORD = 4  # bytes
CALLBACK = "ShardedExpertBalance"


@contextmanager
def unsharded() -> Iterator[None]:
    """Graphs of this block are this rank's own: MindSpore would take their inputs for parts of a batch."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode)


class Exchange(nn.Cell):
    """Words to every rank of a group, as many to each as `send` says."""

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.move = ops.AlltoAllV(group=group, block_size=1)
        self.to_host = ops.MoveTo()

    def construct(self, words, send, receive):
        """words: int32 [sum(send)], send and receive: int64 [ranks] -> int32 [sum(receive)]."""
        return self.move(words, self.to_host(send, "CPU", True), self.to_host(receive, "CPU", True))


class CollectiveRanks:
    """`plugins.expert_balance.executor.Ranks` for all ranks of a run.

    Args:
        rank, size: this rank and their number.
        exchange: a cell as `Exchange`; by default of MindSpore's world group.
    """

    def __init__(self, rank: int, size: int, exchange=None):
        self.rank, self.size = rank, size
        self.exchange = exchange or Exchange(GlobalComm.WORLD_COMM_GROUP)
        counts = Tensor(shape=[size], dtype=ms.int64)
        self.exchange.set_inputs(Tensor(shape=[None], dtype=ms.int32), counts, counts)

    def all_to_all_v(
        self, group: Sequence[int], tag: int, parts: Sequence[np.ndarray], rows: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """[size] parts [rows, ...] for each rank, alike but for their rows -> what each sent here.

        Args:
            group: all ranks. tag: not used, as collectives run in the order of their calls.
            rows: how many arrive from each; where they are not told, the ranks tell each other first.
        """
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        if rows is None:
            told = self._swap([np.array([len(part)], np.int32) for part in parts], [1] * self.size)
            rows = [int(count[0]) for count in told]
        each = -(-int(np.prod(shape)) * dtype.itemsize // _WORD)
        arrived = self._swap([_words(part, each) for part in parts], [each * count for count in rows])
        return [_rows(part, count, shape, dtype) for part, count in zip(arrived, rows, strict=True)]

    def _swap(self, parts: list[np.ndarray], due: list[int]) -> list[np.ndarray]:
        """Words [any] for each rank -> words from each. What is a rank's own stays; a spare word goes in its place, for
        AlltoAllV of nothing returns no array."""
        own = parts[self.rank]
        sent = [*parts[: self.rank], np.zeros(1, np.int32), *parts[self.rank + 1 :]]
        due = [*due[: self.rank], 1, *due[self.rank + 1 :]]
        counts = [Tensor(list(each), ms.int64) for each in ([part.size for part in sent], due)]
        with unsharded():
            arrived = self.exchange(Tensor(np.concatenate(sent)), *counts).asnumpy()
        found = np.split(arrived, list(accumulate(due))[:-1])
        return [*found[: self.rank], own, *found[self.rank + 1 :]]


def _words(part: np.ndarray, each: int) -> np.ndarray:
    """[rows, ...] of any type -> int32 [rows x each], the rows filled up with zeros."""
    octets = (
        np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) if part.size else np.zeros((0, 0), np.uint8)
    )
    filled = np.zeros((len(part), each * _WORD), np.uint8)
    filled[:, : octets.shape[1]] = octets
    return filled.view(np.int32).reshape(-1)


def _rows(words: np.ndarray, count: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What `_words` made, back: [count, *shape]."""
    size = int(np.prod(shape)) * dtype.itemsize
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(count, -1)[:, :size] if count else np.zeros(0, np.uint8)
    return np.ascontiguousarray(octets).reshape(-1).view(dtype).reshape(count, *shape)


class PlacedGroupedGEMM(FFNGroupedGEMM):
    """With MindFormers' own dispatch."""

    def __init__(self, config):
        super().__init__(config)
        place(self, config)

    def construct(self, tokens, probs, routing_map):
        """tokens [ranks, N, h], probs [ranks, N, k], routing_map int32 [ranks, N, k] -> [ranks, N, h]."""
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


class PlacedDispatch(RoutedExperts):
    """With the dispatch of `plugins.hierarchical_ep`."""

    def __init__(self, config, settings, net, rows, streams):
        super().__init__(config, settings, net, rows, streams)
        place(self, config)

    def construct(self, tokens, probs, routing_map):
        """As `PlacedGroupedGEMM`."""
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


def place(cell, config) -> None:
    """Give `cell` the parameter and the Gather, cut over the ranks of a stage."""
    identity = Tensor(np.arange(config.num_moe_experts), ms.int32)
    cell.placement = Parameter(identity, name="placement", requires_grad=False, parallel_optimizer=False)
    ranks = config.data_parallel_size * config.tensor_model_parallel_size * config.context_parallel_size
    cell.slot_of = ops.Gather()
    cell.slot_of.shard(((1,), (ranks, 1, 1)))


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class ShardedExpertBalance(ExpertBalance):
    """`ExpertBalance` where each rank's counts are those of all ranks already; copies: of all ranks."""

    def connect(self) -> CollectiveRanks:
        """Return all ranks of the run, by MindSpore's collectives."""
        return CollectiveRanks(get_real_rank(), get_real_group_size())

    def tokens(self, counted: np.ndarray) -> np.ndarray:
        """[layers, E] shares of all ranks' choices -> numbers of them."""
        return np.rint(counted * self.copies).astype(np.int64)


def use_placed_experts(config) -> None:
    """Models built from now on carry a placement; `plugins.hierarchical_ep` has been enabled, if it is on."""
    telechat3_moe.use_edited_model(config.model.model_config, KEY)
    if (config.get("plugins") or {}).get("hierarchical_ep"):
        telechat3_moe.use_experts(ModuleSpec(PlacedDispatch, params=telechat3_moe.experts().params))
    else:
        telechat3_moe.use_experts(PlacedGroupedGEMM)
