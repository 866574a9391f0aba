"""Move experts between the ranks of an EP group, between two steps: rows of weights and of the optimizer's moments.

`routes` says which rows of a rank go where when one placement follows another. A move is all or nothing, a layer at a
time:
1. All ranks compare digests of the whole plan. Where one differs, every rank raises and nothing has changed.
2. A layer's rows are exchanged into memory beside the tensors: a rank that is lost, late or sends something else makes
   the exchange raise, and nothing of this layer has changed.
3. All ranks say that they hold every row. Only then each overwrites its tensors and the layer's placement.

A rank that dies between 3 and the end of its writing ends the run, as the others find out in their next exchange. What
counts then is the last checkpoint, which is written after the move of its step and never within one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from plugins.errors import ClusterError


def routes(old: np.ndarray, new: np.ndarray, devices: int, rank: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return what `rank` sends and receives, the rows that stay with it included.

    Both ends count the experts between two ranks in the order of their new slots.

    Args:
        old, new: int [E], logical expert -> slot; slot // (E / D) is the device.

    Returns:
        leave: [D] for each rank, the places on `rank` of the experts that it gets; int [any].
        arrive: [D] for each rank, the places on `rank` that its rows fill, in the order in which they are sent.
    """
    each = len(old) // devices
    order = np.argsort(new)
    sent = order[old[order] // each == rank]
    got = order[new[order] // each == rank]
    leave = [old[sent[new[sent] // each == peer]] % each for peer in range(devices)]
    arrive = [new[got[old[got] // each == peer]] % each for peer in range(devices)]
    return leave, arrive


# the graph's exchanges count their tags from 0: these never meet them
_DIGESTS, _ROWS, _LOADS = range(1 << 40, (1 << 40) + 3)


class Ranks(Protocol):
    """The ranks of an EP group that are all of this run: a `plugins.cpu_backend.transport.Mesh`."""

    rank: int
    size: int

    def all_to_all_v(
        self, group: Sequence[int], tag: int, parts: Sequence[np.ndarray], rows: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """[size] parts for each rank -> what each sent here."""


@dataclass(frozen=True)
class Layer:
    """What of one MoE layer changes when its experts move.

    Attributes:
        number: of the layer in the model.
        placement: the parameter int [E], logical expert -> slot, the same on all ranks.
        tensors: this rank's parameters whose first axis is its E / D experts in the order of slots (or these times
            something): weights and the optimizer's state of them. All ranks have them in one order.
    """

    number: int
    placement: Any
    tensors: Sequence[Any]


Write = Callable[[Any, np.ndarray], None]  # (parameter, its new value)


def total(ranks: Ranks, own: np.ndarray) -> np.ndarray:
    """Return the sum of every rank's integers `own`."""
    return np.sum(_from_all(ranks, _LOADS, own[None]), 0)[0]


def from_first(ranks: Ranks, own: np.ndarray) -> np.ndarray:
    """Rank 0's array [n, ...], on every rank; the others' `own` has no rows, and the same shape behind."""
    return _from_all(ranks, _LOADS, own)[0]


def agree(ranks: Ranks, what: str, content: bytes) -> None:
    """Raise ClusterError on every rank unless all of them bring the same `content`."""
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)[None]
    digests = [bytes(each) for each in _from_all(ranks, _DIGESTS, digest)]
    other = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if other:
        raise ClusterError(
            f"rank {ranks.rank}: ranks {other} do not have the {what} that rank 0 has: no expert is moved. "
            "All ranks plan from the same loads, so one runs other code or another NumPy, or its memory is at fault"
        )


def move(ranks: Ranks, layers: Sequence[Layer], old: np.ndarray, new: np.ndarray, write: Write) -> int:
    """Go over from the placements `old` to `new`; every rank calls this at once.

    Args:
        old, new: int [layers, E], logical expert -> slot.

    Returns:
        Bytes of experts that this rank sent to others.

    Raises:
        ClusterError: the ranks disagree, or one is lost, late or sends another shape or type.
    """
    agree(ranks, "plan", np.stack([old, new]).astype(np.int64).tobytes())
    sent = 0
    for layer, before, after in zip(layers, old, new, strict=True):
        if np.array_equal(before, after):
            continue
        staged, size = _stage(ranks, layer.tensors, before, after)
        agree(ranks, f"rows of layer {layer.number}", f"layer {layer.number} is here".encode())
        for tensor, value in zip(layer.tensors, staged, strict=True):
            write(tensor, value)
        write(layer.placement, after.astype(np.int32))
        sent += size
    return sent


def _stage(ranks: Ranks, tensors: Sequence[Any], old: np.ndarray, new: np.ndarray) -> tuple[list[np.ndarray], int]:
    """The new value of each tensor, beside the old ones, and the bytes that this rank sent."""
    leave, arrive = routes(old, new, ranks.size, ranks.rank)
    staged, sent = [], 0
    for tensor in tensors:
        value = tensor.asnumpy()
        rows = value.reshape(len(old) // ranks.size, -1)
        parts = [rows[places] for places in leave]
        arrived = ranks.all_to_all_v(range(ranks.size), _ROWS, parts, rows=[len(places) for places in arrive])
        filled = np.empty_like(rows)
        for places, part in zip(arrive, arrived, strict=True):
            filled[places] = part
        staged.append(filled.reshape(value.shape))
        sent += sum(part.nbytes for peer, part in enumerate(parts) if peer != ranks.rank)
    return staged, sent


def _from_all(ranks: Ranks, tag: int, own: np.ndarray) -> list[np.ndarray]:
    return ranks.all_to_all_v(range(ranks.size), tag, [own] * ranks.size)
