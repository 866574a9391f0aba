"""Which rank writes which slice of the new layout, and what that costs, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tools.checkpoint.types import TYPES
from tools.weights.reshard.layout import Layout, Lying, Shape

Kind = Literal["model", "opt"]


@dataclass(frozen=True)
class Move:
    """A tensor that goes from one layout to another.

    Args:
        dtype: as safetensors writes it; kind: of the file that it is in: weights, or the optimizer's state.
        writers: by new slice, the rank whose file has it: one of its holders, so that nothing is written twice.
        layout: of the new slices, in MindSpore's words.
    """

    name: str
    dtype: str
    kind: Kind
    old: Lying
    new: Lying
    writers: tuple[int, ...]
    layout: Layout

    @property
    def part_bytes(self) -> int:
        """Of a new slice."""
        return math.prod(self.new.part) * TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Copied:
    """A small tensor that the checkpoint does not list, such as a counter: each of `ranks` gets what one rank had.

    Args:
        file: of the old checkpoint, that has it.
    """

    name: str
    dtype: str
    shape: Shape
    kind: Kind
    file: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A new layout of a checkpoint, thought through and not begun.

    Args:
        world: ranks of the new layout; prefix: of its files' names.
    """

    moves: tuple[Move, ...]
    copied: tuple[Copied, ...]
    world: int
    prefix: str

    def file(self, rank: int, kind: Kind) -> str:
        """As MindFormers names it."""
        return f"{self.prefix}-{kind}-{rank:07d}-{self.world:07d}.safetensors"

    @property
    def files(self) -> list[tuple[int, Kind]]:
        """(rank, kind) of every file; each rank has one of weights, and of states where any rank has."""
        kinds: tuple[Kind, ...] = ("model", "opt") if any(move.kind == "opt" for move in self.moves) else ("model",)
        return [(rank, kind) for rank in range(self.world) for kind in kinds]

    @property
    def bytes(self) -> int:
        """Of all listed numbers: each is read once, and written once."""
        return sum(move.part_bytes * len(move.writers) for move in self.moves)


@dataclass(frozen=True)
class Numbers:
    """What a plan costs, in bytes.

    Args:
        changing: written to another rank's file than those that had them.
        largest_rank: the most that a rank's files hold; largest_slice: of one tensor.
        online, online_rank: read in all, and by the busiest rank, where MindFormers loads the old files in the new
            layout; it reads each old slice whole that has a number of the new one.
        loading, loading_rank: the same where it loads the new files.
    """

    bytes: int
    changing: int
    largest_rank: int
    largest_slice: int
    online: int
    online_rank: int
    loading: int
    loading_rank: int


Item = tuple[str, str, Kind, Lying, Layout]  # name, type, kind, how it lies, how it is to lie


def plan_moves(items: Iterable[Item], world: int) -> tuple[Move, ...]:
    """Give every new slice to the holder that has least to write."""
    load = np.zeros(world, np.int64)
    found = []
    for name, dtype, kind, old, layout in items:
        new = layout.lying(old.shape)
        size = math.prod(new.part) * TYPES[dtype].itemsize
        writers = _writers(new.holders, size, load)
        found.append(Move(name, dtype, kind, old, new, writers, layout))
    return tuple(found)


def _writers(holders: tuple[tuple[int, ...], ...], size: int, load: np.ndarray) -> tuple[int, ...]:
    alone = _alone(holders)
    if alone is not None:
        load[alone[0]] += size
        return alone[1]
    found = []
    for ranks in holders:
        rank = ranks[int(np.argmin(load[list(ranks)]))]
        load[rank] += size
        found.append(rank)
    return tuple(found)


@lru_cache(maxsize=4096)
def _alone(holders: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """The holders, where each slice has one."""
    if any(len(ranks) > 1 for ranks in holders):
        return None
    ranks = tuple(ranks[0] for ranks in holders)
    return np.array(ranks), ranks


def numbers(plan: Plan) -> Numbers:
    """What a plan costs."""
    written, online, loading = (np.zeros(plan.world, np.int64) for _ in range(3))
    stays = largest = 0
    for move in plan.moves:
        item = TYPES[move.dtype].itemsize
        np.add.at(written, list(move.writers), move.part_bytes)
        stays += _staying(move.old, move.new, move.writers) * item
        largest = max(largest, move.part_bytes)
        ranks, places = _by_rank(move.new.holders)
        touched = _touched(move.old.shape, move.old.cuts, move.new.cuts)[places]
        online[ranks] += touched * math.prod(move.old.part) * item
        loading[ranks] += move.part_bytes
    return Numbers(
        bytes=plan.bytes,
        changing=plan.bytes - stays,
        largest_rank=int(written.max()),
        largest_slice=largest,
        online=int(online.sum()),
        online_rank=int(online.max()),
        loading=int(loading.sum()),
        loading_rank=int(loading.max()),
    )


@lru_cache(maxsize=4096)
def _by_rank(holders: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Ranks, and the slice that each has."""
    pairs = [(rank, place) for place, ranks in enumerate(holders) for rank in ranks]
    ranks, places = np.array(pairs, np.int64).T
    return ranks, places


def _bounds(shape: Shape, cuts: Shape, places: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(begin, end) along each axis of slices by place."""
    index: Sequence[Any] = np.unravel_index(places, cuts) if cuts else ()
    parts = [length // count for length, count in zip(shape, cuts, strict=True)]
    return [(at * part, (at + 1) * part) for at, part in zip(index, parts, strict=True)]


@lru_cache(maxsize=4096)
def _touched(shape: Shape, old: Shape, new: Shape) -> np.ndarray:
    """By new slice, how many old ones it has numbers of."""
    count = np.ones(math.prod(new), np.int64)
    for (begin, end), length, parts in zip(_bounds(shape, new, np.arange(math.prod(new))), shape, old, strict=True):
        before = length // parts
        count *= -(-end // before) - begin // before
    return count


def _staying(old: Lying, new: Lying, writers: tuple[int, ...]) -> int:
    """Numbers that the rank which writes them had before."""
    ranks, places = _by_rank(old.holders)
    had = dict(zip(ranks.tolist(), places.tolist(), strict=True))
    pairs = [(place, had[rank]) for place, rank in enumerate(writers) if rank in had]
    if not pairs:
        return 0
    after, before = np.array(pairs, np.int64).T
    common = np.ones(len(pairs), np.int64)
    ends = zip(_bounds(old.shape, new.cuts, after), _bounds(old.shape, old.cuts, before), strict=True)
    for (begin, end), (low, high) in ends:
        common *= np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
    return int(common.sum())
