"""What ranks send each other when experts move, by MindSpore's own AlltoAllV: for Ascend, where no TCP mesh joins them.

A graph of its own, apart from the train step's, compiled once: everything travels as int32 words, counted in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm

_WORD = 4  # bytes


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
