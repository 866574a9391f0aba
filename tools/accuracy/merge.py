"""One tensor from the parts that ranks hold: concatenated, added up, equal copies, or rows under an index. NumPy only.

`Layout` is for tensors that are cut evenly along axes of a mesh of ranks, `Rows` for rows that go where a map says
(tokens that were routed to experts, experts that ranks own). Both merge parts into the whole, and tell which part of
a whole each rank should hold, by which a wrong tensor is traced to ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
SAME, SUM = "same", "sum"


@dataclass(frozen=True)
class Merged:
    """A whole tensor, and the ranks whose copy of it is not that of the first rank (which was taken)."""

    value: Array
    differing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh of ranks.

    Args:
        mesh: axis -> size, slowest first: rank = ((i * size_2) + j) * size_3 + k for coordinates i, j, k.
        rules: axis -> an integer (cut along this axis of the tensor), SAME (copies) or SUM (partial sums); SAME where
            an axis is not named. Where several cut the same axis of the tensor, the slowest cuts first.
    """

    mesh: Mapping[str, int]
    rules: Mapping[str, int | str]

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh.values())

    def merge(self, parts: Sequence[Array]) -> Merged:
        """The whole of one part for each rank. Copies must be identical; the ranks that differ are named."""
        assert len(parts) == self.ranks, f"{len(parts)} parts for {self.ranks} ranks"
        values, width = list(parts), 1
        differing: set[int] = set()
        for name, size in reversed(list(self.mesh.items())):  # the fastest axis first: its ranks are neighbours
            rule = self.rules.get(name, SAME)
            groups = [values[first : first + size] for first in range(0, len(values), size)]
            if rule == SAME:
                for index, copy in enumerate(values):
                    if not _identical(copy, groups[index // size][0]):
                        differing.update(range(index * width, (index + 1) * width))
            values = [_joined(group, rule) for group in groups]
            width *= size
        return Merged(values[0], tuple(sorted(differing)))

    def pieces(self, whole: Array) -> list[Array]:
        """What each rank holds of `whole`; where parts are to be added, what their sum should be."""
        values = [whole]
        for name, size in self.mesh.items():
            rule = self.rules.get(name, SAME)
            cut = [[value] * size if isinstance(rule, str) else np.split(value, size, rule) for value in values]
            values = [piece for pieces in cut for piece in pieces]
        return values

    def adding(self) -> list[tuple[int, ...]]:
        """Ranks whose parts are added up to one piece; each rank alone where nothing is added."""
        number = np.arange(self.ranks).reshape(*self.mesh.values())
        added = [index for index, name in enumerate(self.mesh) if self.rules.get(name, SAME) == SUM]
        number = np.moveaxis(number, added, range(-len(added), 0)) if added else number[..., None]
        width = math.prod(number.shape[-len(added) :]) if added else 1
        return [tuple(group) for group in number.reshape(-1, width).tolist()]

    def copies(self) -> int:
        """How many ranks hold the same piece."""
        return math.prod(size for name, size in self.mesh.items() if self.rules.get(name, SAME) == SAME)

    def without_sums(self) -> Layout:
        """The layout after partial sums have been reduced to copies."""
        return Layout(self.mesh, {name: SAME if rule == SUM else rule for name, rule in self.rules.items()})


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor under an index: rank r holds rows `index[r]` of `total`.

    Args:
        index: for each rank an integer array; times: how many ranks hold each row; rule: SAME where these are copies,
            SUM where they are to be added up.
    """

    index: Sequence[Array]
    total: int
    times: int = 1
    rule: str = SAME

    def merge(self, parts: Sequence[Array]) -> Merged:
        """The whole, [total, ...].

        Raises:
            ValueError: a row is held by more or fewer ranks than it should be, or a part has no index of its own.
        """
        lengths = [(len(part), len(index)) for part, index in zip(parts, self.index, strict=True)]
        if any(rows != indices for rows, indices in lengths):
            raise ValueError(f"(rows, indices) of the ranks are {lengths}: they must be equal")
        held = np.bincount(np.concatenate([np.zeros(0, int), *self.index]), minlength=self.total)
        wrong = np.flatnonzero(held != self.times)
        if len(wrong):
            raise ValueError(f"row {wrong[0]} is held {held[wrong[0]]} times instead of {self.times}")
        whole = np.zeros((self.total, *parts[0].shape[1:]), np.result_type(*parts))
        differing = []
        for rank, (part, index) in enumerate(zip(parts, self.index, strict=True)):
            if self.rule == SUM:
                np.add.at(whole, index, part)
            else:
                earlier = np.concatenate([np.zeros(0, int), *self.index[:rank]])
                known = np.isin(index, earlier)
                if not _identical(whole[index[known]], part[known]):
                    differing.append(rank)
                whole[index[~known]] = part[~known]
        return Merged(whole, tuple(differing))

    def pieces(self, whole: Array) -> list[Array]:
        """What each rank holds of `whole`."""
        return [whole[index] for index in self.index]

    def adding(self) -> list[tuple[int, ...]]:
        """Ranks whose parts are added up: those that hold the same rows."""
        if self.rule == SAME:
            return [(rank,) for rank in range(len(self.index))]
        groups: dict[bytes, list[int]] = {}
        for rank, index in enumerate(self.index):
            groups.setdefault(np.ascontiguousarray(index).tobytes(), []).append(rank)
        return [tuple(group) for group in groups.values()]


def _joined(group: Sequence[Array], rule: int | str) -> Array:
    if rule == SAME:
        return group[0]
    if rule == SUM:
        return np.sum(group, 0) if len(group) > 1 else group[0]
    return np.concatenate(group, int(rule)) if len(group) > 1 else group[0]


def _identical(first: Array, other: Array) -> bool:
    return first is other or (first.shape == other.shape and np.array_equal(first, other, equal_nan=_float(first)))


def _float(values: Array) -> bool:
    return np.issubdtype(values.dtype, np.floating)
