"""What a rank called in its last steps, in order: to be compared with what `tc3 dryrun` says that it would call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# the side of an operator that is as large as what all members hold together; the inputs of all others
_FROM_OUTPUT = ("AllGather", "_MiniStepAllGather", "_MicroStepAllGather", "Receive", "Broadcast")


# calls of one step that are kept; who never says that a step begins has no more
LIMIT = 100_000


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
    """Calls by step.

    Args:
        steps: how many of the last steps are kept.
    """

    def __init__(self, steps: int = 2):
        self._steps: deque[tuple[int, deque[CallRecord]]] = deque(maxlen=steps)
        self.begin(0)

    def begin(self, step: int) -> None:
        """What follows belongs to this step."""
        self._steps.append((step, deque(maxlen=LIMIT)))

    def add(
        self,
        op: str,
        ranks: tuple[int, ...],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        peer: int | None = None,
        sr_tag: int | None = None,
    ) -> None:
        """Remember one call."""
        side = outputs if op in _FROM_OUTPUT else inputs
        side = side[:1] if op.endswith("V") else side[: len(outputs) or 1]
        size = sum(tensor.nbytes for tensor in side)
        shape, dtype = (side[0].shape, side[0].dtype.name) if side else ((), "")
        self._steps[-1][1].append(CallRecord(op, ranks, size, shape, dtype, peer, sr_tag))

    def recorded(self, step: int) -> list[CallRecord]:
        """The calls of a step that is still kept, in order; none of any other."""
        return [call for number, calls in self._steps if number == step for call in calls]
