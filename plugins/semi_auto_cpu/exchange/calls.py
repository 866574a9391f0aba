"""What a rank called in a step, in order: to be compared with what `tc3 dryrun` says that it would call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# the side of an operator that is as large as what all members hold together; the inputs of all others
_FROM_OUTPUT = ("AllGather", "_MiniStepAllGather", "_MicroStepAllGather", "Receive", "Broadcast")


class CallRecord(NamedTuple):
    """One collective.

    Attributes:
        op: as MindSpore names it; ranks: its group's, in their order; bytes, shape, dtype: of its tensor on the larger
            side (several tensors: the bytes of all, the rest of the first);
        peer, sr_tag: of a Send or Receive.
    """

    op: str
    ranks: tuple[int, ...]
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    peer: int | None = None
    sr_tag: int | None = None


class Calls:
    """Calls between `begin` and `end`; none are kept otherwise."""

    def __init__(self) -> None:
        self._calls: list[CallRecord] = []
        self._on = False

    def begin(self) -> None:
        """Keep what follows."""
        self._calls, self._on = [], True

    def add(
        self,
        op: str,
        ranks: tuple[int, ...],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        peer: int | None = None,
        sr_tag: int | None = None,
    ) -> None:
        """Remember one call, if asked to."""
        if not self._on:
            return
        side = outputs if op in _FROM_OUTPUT else inputs
        side = side[:1] if op.endswith("V") else side[: len(outputs) or 1]
        size = sum(tensor.nbytes for tensor in side)
        shape, dtype = (side[0].shape, side[0].dtype.name) if side else ((), "")
        self._calls.append(CallRecord(op, ranks, size, shape, dtype, peer, sr_tag))

    def end(self) -> list[CallRecord]:
        """What was called since `begin`, in order."""
        self._on = False
        return self._calls
