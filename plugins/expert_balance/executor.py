"""This module moves experts from rank to rank between two steps: it sends the rows of their weights and of the
optimizer's moments.

`routes` says which experts a rank sends to which other rank when the placement changes, and `holders` says which ranks
hold the slices of a tensor. A move happens either completely or not at all, layer by layer:
1. All ranks compare digests of the whole plan. If one digest differs, every rank raises ClusterError, and nothing has
   changed.
2. The rows of a layer are received into separate buffers, not into the tensors: if a rank is lost, is late or sends
   other data, the exchange raises ClusterError, and nothing of this layer has changed.
3. All ranks that exchange rows confirm that they have received every row. Only after this confirmation each rank
   overwrites its tensors and the layer's placement.

Each pipeline stage moves its own layers. If several EP groups hold the same experts, each group moves them
independently. An optimizer that is sharded over the groups cuts a tensor into more slices than an EP group has ranks,
and a slice may hold only a part of an expert: then these parts are sent, between the ranks that hold one slice each.

If a rank dies after the confirmation and before it has written all tensors, the run ends, because the other ranks
notice it in their next exchange. The run then resumes from the last checkpoint, which is written after the move of its
step and never during a move.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from plugins.errors import ClusterError


def holders(mesh: Sequence[int], cuts: Sequence[int], slices: int) -> np.ndarray:
    """Return the ranks of a pipeline stage that hold the slices of a tensor along axis 0, int [sets, slices]: each row
    lists the ranks that together hold one copy of the tensor.

    The ranks of a row together hold each slice once, in the order of the slices; each rank of the stage is in exactly
    one row.

    Args:
        mesh: the mesh of the stage's devices, with the axis of neighbouring ranks last.
        cuts: the axes of the mesh that cut axis 0, counted from the last, the outermost cut first; -1: none.
        slices: the number of slices of axis 0. If there are more slices than the mesh makes, the optimizer is sharded,
            and neighbouring ranks with the same part share this part.
    """
    cutting = [len(mesh) - 1 - axis for axis in cuts if axis != -1]
    copying = [axis for axis in range(len(mesh)) if axis not in cutting]
    parts = math.prod(mesh[axis] for axis in cutting)
    # [parts, copies] ranks
    ranks = np.arange(math.prod(mesh)).reshape(mesh).transpose(*cutting, *copying).reshape(parts, -1)
    return ranks.reshape(parts, -1, slices // parts).swapaxes(0, 1).reshape(-1, slices)


def routes(old: np.ndarray, new: np.ndarray, devices: int, rank: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return which experts `rank` sends to each rank and receives from it when the placement changes; experts that stay
    on `rank` are included.

    Sender and receiver both list the experts that one rank sends to another in the order of their new slots.

    Args:
        old, new: int [E], logical expert -> slot; slot // (E / D) is the device.

    Returns:
        leave: [D] for each rank, the positions on `rank` of the experts that it gets; int [any].
        arrive: [D] for each rank, the positions on `rank` that its rows fill, in the order in which they are sent.
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
    """A `Ranks` connects some ranks of a run, such as those of a `plugins.cpu_backend.transport.Mesh`; `rank` is the
    index of this rank among them.
    """

    rank: int
    size: int

    def all_to_all_v(
        self, group: Sequence[int], tag: int, parts: Sequence[np.ndarray], rows: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Send each rank its part of the list `parts`; return the parts that the ranks sent to this rank."""


@dataclass(frozen=True)
class Slice:
    """A `Slice` is the part of a tensor that this rank holds. The tensor has along axis 0 an equal number of rows for
    each expert, in the order of the experts' slots.

    Attributes:
        parameter: this rank's slice of axis 0.
        ranks: the ranks that hold all slices, one slice each, in the order of the slices.
    """

    parameter: Any
    ranks: Ranks


@dataclass(frozen=True)
class Layer:
    """A `Layer` holds the tensors that change on this rank when the experts of one MoE layer move.

    Attributes:
        row: the row of the layer in a plan.
        number: the number of the layer in the model.
        placement: the parameter int [E], logical expert -> slot, the same on all ranks that have the layer.
        tensors: the weights and their optimizer state, in the same order on all ranks.
    """

    row: int
    number: int
    placement: Any
    tensors: Sequence[Slice]


Write = Callable[[Any, np.ndarray], None]  # (parameter, its new value)


def total(ranks: Ranks, own: np.ndarray) -> np.ndarray:
    """Return the elementwise sum over all ranks of the integer array `own`."""
    return np.sum(_from_all(ranks, _LOADS, own[None]), 0)[0]


def from_first(ranks: Ranks, own: np.ndarray) -> np.ndarray:
    """Broadcast rank 0's array [n, ...] to all ranks, and return it on every rank. All ranks except rank 0 pass an
    array `own` without rows; its other dimensions have the same sizes as those of rank 0's array.
    """
    return _from_all(ranks, _LOADS, own)[0]


def agree(ranks: Ranks, what: str, content: bytes) -> None:
    """Raise ClusterError on every rank unless all ranks call this function with the same `content`."""
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)[None]
    digests = [bytes(each) for each in _from_all(ranks, _DIGESTS, digest)]
    other = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if other:
        raise ClusterError(
            f"rank {ranks.rank}: ranks {other} do not have the same {what} as rank 0, so no expert is moved. All "
            "ranks plan from the same loads, so these ranks run other code or another NumPy, or their memory is "
            "faulty"
        )


def move(ranks: Ranks, layers: Sequence[Layer], old: np.ndarray, new: np.ndarray, write: Write) -> int:
    """Send experts from rank to rank so that the placement becomes `new` instead of `old`; every rank must call this
    function at the same time.

    Args:
        ranks: the connection to all ranks that follow the plan.
        layers: the layers of this rank's stage.
        old, new: int [layers of the model, E], logical expert -> slot.

    Returns:
        Bytes of experts that this rank sent to others.

    Raises:
        ClusterError: the ranks disagree, or one is lost, late or sends another shape or type.
    """
    agree(ranks, "plan", np.stack([old, new]).astype(np.int64).tobytes())
    sent = 0
    for layer in layers:
        before, after = old[layer.row], new[layer.row]
        if np.array_equal(before, after):
            continue
        staged = [_stage(each, before, after) for each in layer.tensors]
        for involved in {id(each.ranks): each.ranks for each in layer.tensors}.values():
            agree(involved, f"rows of layer {layer.number}", f"layer {layer.number} is here".encode())
        for tensor, (value, size) in zip(layer.tensors, staged, strict=True):
            write(tensor.parameter, value)
            sent += size
        write(layer.placement, after.astype(np.int32))
    return sent


def _stage(tensor: Slice, old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the new value of a tensor's slice, beside the old one, and the bytes that this rank sent.

    What travels are the largest pieces that make up both an expert and a slice: experts, or equal parts of them.
    """
    ranks, value = tensor.ranks, tensor.parameter.asnumpy()
    expert = len(value) * ranks.size // len(old)  # rows
    piece = math.gcd(expert, len(value))
    leave, arrive = routes(_in_pieces(old, expert // piece), _in_pieces(new, expert // piece), ranks.size, ranks.rank)
    rows = value.reshape(len(value) // piece, -1)
    parts = [rows[places] for places in leave]
    arrived = ranks.all_to_all_v(range(ranks.size), _ROWS, parts, rows=[len(places) for places in arrive])
    filled = np.empty_like(rows)
    for places, part in zip(arrive, arrived, strict=True):
        filled[places] = part
    return filled.reshape(value.shape), sum(part.nbytes for peer, part in enumerate(parts) if peer != ranks.rank)


def _in_pieces(slots: np.ndarray, each: int) -> np.ndarray:
    """Return the placement of equal parts of experts: [E] -> [E x each]."""
    return (slots[:, None] * each + np.arange(each)).reshape(-1)


def _from_all(ranks: Ranks, tag: int, own: np.ndarray) -> list[np.ndarray]:
    return ranks.all_to_all_v(range(ranks.size), tag, [own] * ranks.size)
