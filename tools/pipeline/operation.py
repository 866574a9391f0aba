"""What a pipeline stage runs, one piece of work after the other: operations, and orders of them as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KINDS = "FBW"  # by number in a table of operations
COLUMNS = 5  # of an order: index in `KINDS`, micro-batch, chunk, part, joined

# the way of a micro-batch through the chunks (chunk, stage) of a model
LOOP, V, BOTH_WAYS = "loop", "v", "both ways"


class Op(NamedTuple):
    """One piece of work of a stage: forward, backward, or the weight gradients split from a backward.

    A "B" without a "W" of the same micro-batch, chunk and part is the whole backward; with one it is the input
    gradients. `part` is a piece of the sequence (0 where sequences are not split): forwards of a micro-batch go through
    them from the first to the last, whose attention needs the keys and values of the ones before; backwards in reverse.
    """

    kind: str  # "F", "B" or "W"
    micro_batch: int
    chunk: int
    part: int = 0


def as_table(order: Sequence[Op | Sequence[Op]]) -> np.ndarray:
    """Return an order as numbers [operations, COLUMNS].

    An item that holds two operations is a pair: a forward and a backward of another micro-batch (in this order) that
    run together. Its second row has a 1 in the last column.
    """
    rows: list[tuple[int, ...]] = []
    for item in order:
        together = (item,) if isinstance(item, Op) else item
        rows += [(KINDS.index(op.kind), *op[1:], int(place > 0)) for place, op in enumerate(together)]
    return np.array(rows, int).reshape(-1, COLUMNS)


def widened(table: np.ndarray) -> np.ndarray:
    """Return a table of the first columns of an order with the others: part 0, nothing joined."""
    return np.pad(table, ((0, 0), (0, COLUMNS - table.shape[1])))
