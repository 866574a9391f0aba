"""This module plans a resharding: which rank writes which slice of the new layout, and how many bytes are read and
written. Planning reads only the headers of files.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plugins.errors import CheckpointError
from tools.checkpoint.stored import kind_of, rank_of, refuse_moved
from tools.checkpoint.tensor_files import TYPES
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.weights.reshard_target import Layout, Lying, Shape, Target, saved_by, target_of
from tools.weights.source import Source

Kind = Literal["model", "opt"]


@dataclass(frozen=True)
class Move:
    """A `Move` is a tensor that is resharded from the old layout to the new layout.

    Args:
        dtype: the type of the tensor as safetensors writes it.
        kind: the kind of the tensor's file: weights, or the optimizer's state.
        old, new: the slices of the tensor in the old and in the new layout.
        writers: for each new slice the rank whose file holds it; only one of the ranks that hold a slice writes it.
        layout: the new layout of the tensor in MindSpore's form.
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
        """Return the number of bytes of one slice of the tensor in the new layout."""
        return math.prod(self.new.part) * TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Copied:
    """A `Copied` is a small tensor whose layout the checkpoint does not list, such as a counter. Each rank in `ranks`
    of the new layout gets the tensor that one rank of the old layout wrote.

    Args:
        file: the file of the old checkpoint from which the tensor is read.
        ranks: the ranks of the new layout that get the tensor.
    """

    name: str
    dtype: str
    shape: Shape
    kind: Kind
    file: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A `Plan` says which tensors a resharding writes, and in which layout.

    Args:
        world: the number of ranks of the new layout.
        prefix: the text with which the names of the new files begin.
    """

    moves: tuple[Move, ...]
    copied: tuple[Copied, ...]
    world: int
    prefix: str

    def file(self, rank: int, kind: Kind) -> str:
        """Return the name of the file of one rank with one kind of tensors, as MindFormers names it."""
        return f"{self.prefix}-{kind}-{rank:07d}-{self.world:07d}.safetensors"

    @property
    def files(self) -> list[tuple[int, Kind]]:
        """Return the pair (rank, kind of tensors) of every file that the resharding writes. Each rank has a file of
        weights, and also a file of optimizer state if any rank has one.
        """
        kinds: tuple[Kind, ...] = ("model", "opt") if any(move.kind == "opt" for move in self.moves) else ("model",)
        return [(rank, kind) for rank in range(self.world) for kind in kinds]

    @property
    def bytes(self) -> int:
        """Return the number of bytes of all tensors in `moves`. Each element of a resharded tensor is read once and
        written once.
        """
        return sum(move.part_bytes * len(move.writers) for move in self.moves)


@dataclass(frozen=True)
class Numbers:
    """A `Numbers` holds the numbers of bytes that a resharding reads and writes, and the number that a run reads when
    it loads the result.

    Args:
        changing: the number of bytes that the new checkpoint has in the file of another rank than the old checkpoint.
        largest_rank: the largest number of bytes in the files of one rank.
        largest_slice: the largest number of bytes in a slice of a tensor.
        online, online_rank: the number of bytes that all ranks, and that the busiest rank, would read if MindFormers
            loaded the old files in the new layout; it reads each old slice completely that has an element of the new
            slice.
        loading, loading_rank: the number of bytes that all ranks, and that the busiest rank, read if MindFormers loads
            the new files.
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
    """Return for each tensor the rank that writes each slice of the new layout. If several ranks hold a slice, the rank
    with the fewest bytes to write so far writes the slice.
    """
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
    """Return the holders, where each slice has one."""
    if any(len(ranks) > 1 for ranks in holders):
        return None
    ranks = tuple(ranks[0] for ranks in holders)
    return np.array(ranks), ranks


def numbers(plan: Plan) -> Numbers:
    """Return the number of bytes that a resharding reads and writes, and the number of bytes that move to another
    rank's file.
    """
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
    """Return ranks, and the slice that each has."""
    pairs = [(rank, place) for place, ranks in enumerate(holders) for rank in ranks]
    ranks, places = np.array(pairs, np.int64).T
    return ranks, places


def _bounds(shape: Shape, cuts: Shape, places: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (begin, end) along each axis of slices by place."""
    index: Sequence[Any] = np.unravel_index(places, cuts) if cuts else ()
    parts = [length // count for length, count in zip(shape, cuts, strict=True)]
    return [(at * part, (at + 1) * part) for at, part in zip(index, parts, strict=True)]


@lru_cache(maxsize=4096)
def _touched(shape: Shape, old: Shape, new: Shape) -> np.ndarray:
    """Return for each new slice from how many old slices its elements come."""
    count = np.ones(math.prod(new), np.int64)
    for (begin, end), length, parts in zip(_bounds(shape, new, np.arange(math.prod(new))), shape, old, strict=True):
        before = length // parts
        count *= -(-end // before) - begin // before
    return count


def _staying(old: Lying, new: Lying, writers: tuple[int, ...]) -> int:
    """Return numbers that the rank which writes them had before."""
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


# From what a user gives to a plan: a stored checkpoint, or a recipe whose run would save one.

LISTED = 6  # names in a message
_FILE = re.compile(r"(?P<prefix>.*?)-?(?P<kind>model|opt)-\d+-\d+\.safetensors$")
_PREFIX = "reshard"


@dataclass(frozen=True)
class Resharding:
    """A `Resharding` holds the plan of a resharding, its numbers of bytes, and the number of ranks of the old
    layout.
    """

    plan: Plan
    numbers: Numbers
    ranks: int

    def lines(
        self, given: Path, written: Path, recipe: Path, dry_run: bool, overrides: Sequence[str] = ()
    ) -> list[str]:
        """Return lines of text that say what the resharding did, or would do if it is only planned. The argument
        `overrides` holds the overrides of the recipe whose layout is the new layout.
        """
        plan, costs = self.plan, self.numbers
        verb = "would hold" if dry_run else "holds"
        files = len(plan.files)
        many = "" if files == 1 else "s"
        found = [
            f"{written} {verb} {len(plan.moves):,} tensors of {given}, laid out for {plan.world:,} "
            f"rank{'s' * (plan.world > 1)} instead of {self.ranks:,}",
            f"{_size(costs.bytes)} in {files:,} file{many}, each number read once and written once; "
            f"{_size(costs.changing)} go to another rank's file; the largest rank has {_size(costs.largest_rank)}, "
            f"the largest slice {_size(costs.largest_slice)}",
            f"to begin, all ranks read {_size(costs.loading)}, the busiest {_size(costs.loading_rank)}; from the old "
            f"files it would be {_size(costs.online)} and {_size(costs.online_rank)}",
        ]
        if plan.copied:
            names = sorted({item.name for item in plan.copied})
            found.append(f"copied to all ranks, as the checkpoint does not say how they lie: {_some(names)}")
        if not dry_run:
            whole = any(move.kind == "opt" for move in plan.moves)  # else only a new run can begin with the weights
            sets = [word for each in overrides for word in ("--set", each)]
            begin = ["--resume", str(written)] if whole else ["--set", f"checkpoint.load_path={written}"]
            words = "go on with it" if whole else "begin with it"
            found.append(f"{words}: " + shlex.join(["tc3", "train", str(recipe), *begin, *sets]))
        return found

    def as_dict(self, given: Path, written: Path, recipe: Path) -> dict[str, Any]:
        """Return the facts about the resharding as values fit for JSON."""
        return {
            "from": str(given),
            "to": str(written),
            "recipe": str(recipe),
            "tensors": len(self.plan.moves),
            "ranks": {"from": self.ranks, "to": self.plan.world},
            "files": len(self.plan.files),
            **asdict(self.numbers),
        }


def plan_stored(source: Source, recipe: Recipe) -> Resharding:
    """Return the plan for resharding a checkpoint on disk to the layout of a recipe.

    Raises:
        CheckpointError: the checkpoint is incomplete or of another model, or has moved experts although `recipe` does
            not keep the placements of experts (plugins.expert_balance).
        RecipeError: see `target_of`.
    """
    if source.form != "MindFormers":
        raise CheckpointError(
            f"{source.path}: the form of these weights is {source.form!r}; give an iteration of a run, such as "
            "checkpoint/iteration_*"
        )
    source.require_whole()
    refuse_moved(source.stored.folder, View(recipe).keeps_placements)
    target, stored = target_of(recipe), source.stored
    _check(source.path, {name: header.shape for name, header in source.headers.items()}, target)
    source.require_types()
    items: list[Item] = []
    for name, tensor in stored.tensors.items():
        holders = tuple(tuple(rank for rank, _ in copies) for copies in tensor.copies)
        old = Lying(tensor.shape, tensor.cuts, holders)
        layout = target.place(name, tensor.shape).layout
        items.append((name, tensor.dtype, _kind(tensor.copies[0][0][1]), old, layout))
    copied = []
    for name, files in stored.unlisted.items():
        file = files[min(files)]
        header = stored.files[file][name]
        if name in target.states:  # all ranks of a stage have the same, and a resume is to find it
            holders = (tuple(sorted(files)),)
            old = Lying(header.shape, (1,) * len(header.shape), holders)
            items.append((name, header.dtype, _kind(file), old, target.place(name, header.shape).layout))
        else:
            copied.append(Copied(name, header.dtype, header.shape, _kind(file), file, tuple(range(target.world))))
    items.sort(key=lambda item: item[0])  # one layout's checkpoints are alike, from whatever layouts they come
    plan = Plan(plan_moves(items, target.world), tuple(copied), target.world, _prefix(stored.files))
    return Resharding(plan, numbers(plan), source.ranks)


def plan_recipes(old: Recipe, new: Recipe) -> Resharding:
    """Return the plan for resharding the checkpoint that a run of the recipe `old` would save to the layout of the
    recipe `new`. The function reads no file of a checkpoint, because both layouts follow from the recipes.

    Raises:
        CheckpointError: the two recipes do not describe the same model.
        RecipeError: see `target_of`.
    """
    target, saved = target_of(new), saved_by(old)
    _check(Path(old.source), {name: placed.shape for name, (_, placed) in saved.items()}, target)
    items: list[Item] = []
    for name, (dtype, placed) in saved.items():
        kind: Kind = "opt" if kind_of(name) == "optimizer" else "model"
        items.append((name, dtype, kind, placed.lying, target.place(name, placed.shape).layout))
    plan = Plan(plan_moves(items, target.world), (), target.world, _PREFIX)
    return Resharding(plan, numbers(plan), target_of(old).world)


def _check(path: Path, shapes: Mapping[str, Shape], target: Target) -> None:
    """Raise CheckpointError unless the weights are those of the recipe's model, by name and shape."""
    held = {name: shape for name, shape in shapes.items() if kind_of(name) == "weights" and name not in target.states}
    lists = {
        "missing": [name for name in target.weights if name not in held],
        "not of this model": [name for name in held if name not in target.weights],
        "of another shape": [
            f"{name} {list(shape)} instead of {list(target.weights[name].shape)}"
            for name, shape in held.items()
            if name in target.weights and target.weights[name].shape != shape
        ],
    }
    if found := [f"{len(names)} {what}: {_some(names)}" for what, names in lists.items() if names]:
        raise CheckpointError(f"{path}: the weights are not those of the recipe's model: {'; '.join(found)}")


def _kind(file: str) -> Kind:
    found = _FILE.match(file)
    return "opt" if found and found["kind"] == "opt" else "model"


def _prefix(files: Mapping[str, Any]) -> str:
    """Return what MindFormers' names of files begin with, as the old ones do."""
    names = (_FILE.match(file) for file in sorted(files, key=rank_of))
    return next((found["prefix"] for found in names if found and found["prefix"]), _PREFIX)


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + ", ..." * (len(names) > LISTED)


def _size(count: float) -> str:
    """Return ``1.5 GB``: powers of ten, as of disks."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
