"""From what a user gives to a plan: a stored checkpoint, or a recipe whose run would save one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError
from tools.checkpoint.names import kind_of
from tools.checkpoint.slot_order import refuse_moved
from tools.checkpoint.stored import rank_of
from tools.checkpoint.types import TYPES
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.weights.reshard.layout import Lying, Shape
from tools.weights.reshard.plan import Copied, Item, Kind, Numbers, Plan, numbers, plan_moves
from tools.weights.reshard.target import Target, saved_by, target_of
from tools.weights.source import Source

LISTED = 6  # names in a message
_FILE = re.compile(r"(?P<prefix>.*?)-?(?P<kind>model|opt)-\d+-\d+\.safetensors$")
_PREFIX = "reshard"


@dataclass(frozen=True)
class Resharding:
    """A plan and what it costs; ranks of the old layout."""

    plan: Plan
    numbers: Numbers
    ranks: int

    def lines(self, given: Path, written: Path, recipe: Path, dry_run: bool) -> list[str]:
        """What was done or would be, for a reader."""
        plan, costs = self.plan, self.numbers
        verb = "would hold" if dry_run else "holds"
        files = len(plan.files)
        many = "" if files == 1 else "s"
        found = [
            f"{written} {verb} {len(plan.moves):,} tensors of {given}, laid out for {plan.world:,} ranks instead of "
            f"{self.ranks:,}",
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
            found.append(f"go on with it: tc3 train {recipe} --resume {written}")
        return found

    def as_dict(self, given: Path, written: Path, recipe: Path) -> dict[str, Any]:
        """The same for a program."""
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
    """The plan for a checkpoint on disk.

    Raises:
        CheckpointError: it is not whole, of another model, or has experts that have moved where `recipe` has none.
        RecipeError: see `target_of`.
    """
    if source.form != "MindFormers":
        raise CheckpointError(
            f"{source.path}: {source.form}; give an iteration of a run, such as checkpoint/iteration_*"
        )
    if reason := source.seal_fault(checksums=False):
        raise CheckpointError(f"{source.path}: not a whole checkpoint: {reason}")
    refuse_moved(source.stored.folder, View(recipe).keeps_placements)
    target, stored = target_of(recipe), source.stored
    _check(source.path, {name: header.shape for name, header in source.headers.items()}, target)
    _check_types(source)
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
    plan = Plan(plan_moves(items, target.world), tuple(copied), target.world, _prefix(stored.files))
    return Resharding(plan, numbers(plan), source.ranks)


def plan_recipes(old: Recipe, new: Recipe) -> Resharding:
    """The plan for what a run of `old` would save, without any file.

    Raises:
        CheckpointError: the two are not one model. RecipeError: see `target_of`.
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
        raise CheckpointError(f"{path}: not the model of the recipe; {'; '.join(found)}")


def _check_types(source: Source) -> None:
    wrong = [name for name, header in source.headers.items() if header.dtype not in TYPES]
    if wrong:
        raise CheckpointError(f"{source.path}: {_some(wrong)}: of a type that is not known here")


def _kind(file: str) -> Kind:
    found = _FILE.match(file)
    return "opt" if found and found["kind"] == "opt" else "model"


def _prefix(files: Mapping[str, Any]) -> str:
    """What MindFormers' names of files begin with, as the old ones do."""
    names = (_FILE.match(file) for file in sorted(files, key=rank_of))
    return next((found["prefix"] for found in names if found and found["prefix"]), _PREFIX)


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + ", ..." * (len(names) > LISTED)


def _size(count: float) -> str:
    """``1.5 GB``: powers of ten, as of disks."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
