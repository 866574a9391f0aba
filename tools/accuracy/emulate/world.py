"""Ranks in one process, and how they communicate: a tensor of the world is a list with one array per rank.

The ranks are those of one pipeline stage. Between stages every rank sends to the one in the same place of the next.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Array = np.ndarray
Parts = list[Array]


class World:
    """Ranks on a mesh.

    Every collective and hand-over has a tag, the place in the model that calls it, so that a test can break just one.

    Args:
        mesh: axis -> size, slowest first. Collectives run side by side in all groups along the axes they name.
    """

    def __init__(self, mesh: dict[str, int]):
        self.mesh = mesh
        self.ranks = math.prod(mesh.values())
        self.mail: dict[tuple[str, int], Parts] = {}

    def on(self, mesh: Mapping[str, int]) -> World:
        """The same ranks with other names for their places, or those of all stages where `mesh` has them."""
        other = copy.copy(self)
        other.mesh, other.ranks = dict(mesh), math.prod(mesh.values())
        return other

    def send(self, parts: Parts, tag: str, turn: int) -> None:
        """Hand a micro-batch over to another stage, rank to rank; `turn` is the micro-batch's number."""
        self.mail[tag, turn] = list(parts)

    def arrived(self, tag: str, turn: int) -> bool:
        """Whether `receive` would not have to wait."""
        return (tag, turn) in self.mail

    def receive(self, tag: str, turn: int) -> Parts:
        """What the other stage has sent."""
        return self.mail.pop((tag, turn))

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks of each group along `axes`, in rank order."""
        number = np.arange(self.ranks).reshape(*self.mesh.values())
        along = [index for index, name in enumerate(self.mesh) if name in axes]
        width = math.prod(number.shape[index] for index in along)
        return np.moveaxis(number, along, range(-len(along), 0)).reshape(-1, width).tolist()

    def all_reduce(
        self, parts: Parts, axes: Sequence[str], tag: str, reduce: Callable[..., Array] = np.add.reduce
    ) -> Parts:
        """The sum (or what `reduce` makes of a stack) over each group, on each of its ranks."""
        out = list(parts)
        for group in self.groups(axes):
            if len(group) > 1:
                total = reduce(np.stack([parts[rank] for rank in group]))
                for rank in group:
                    out[rank] = total
        return out

    def all_gather(self, parts: Parts, axis: str, dim: int, tag: str) -> Parts:
        """The parts of each group, concatenated along `dim`."""
        out = list(parts)
        for group in self.groups([axis]):
            whole = np.concatenate([parts[rank] for rank in group], dim)
            for rank in group:
                out[rank] = whole
        return out

    def reduce_scatter(self, parts: Parts, axis: str, dim: int, tag: str) -> Parts:
        """The sum over each group, cut along `dim`: one piece per rank."""
        out = list(parts)
        for group in self.groups([axis]):
            total = np.add.reduce(np.stack([parts[rank] for rank in group]))
            for rank, piece in zip(group, np.split(total, len(group), dim), strict=True):
                out[rank] = piece
        return out


def each(function: Callable[..., Array], *parts: Sequence[Array]) -> Parts:
    """`function` on every rank."""
    return [function(*values) for values in zip(*parts, strict=True)]


def each_pair(function: Callable[..., tuple[Array, Array]], *parts: Sequence[Array]) -> tuple[Parts, Parts]:
    """A function of two results on every rank."""
    results = [function(*values) for values in zip(*parts, strict=True)]
    return [first for first, _ in results], [second for _, second in results]
