"""This module merges the LoRA adapters of a checkpoint (`plugins.lora`) into the weights, and writes the result as the
weights of a model without adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import CheckpointError, DataError, RecipeError
from plugins.lora.plan import KEY, WEIGHT, A, B, Settings, adapters_of, is_adapter, merged, other_scale
from plugins.lora.plan import check as read_lora
from plugins.settings import value_at
from tools.checkpoint.stored import kind_of
from tools.checkpoint.tensor_files import TYPES, Header, Made, save_file
from tools.files.atomic import atomic_folder
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.average import rounded
from tools.weights.convert import finish_mindformers
from tools.weights.convert_plan import (
    file_of,
    in_files,
    keep_recipe,
    recipe_beside,
    recipe_of_run,
    refuse_other_settings,
)
from tools.weights.inventory import mark
from tools.weights.source import Source, is_of_the_model, refuse_target, require_room


@dataclass(frozen=True)
class Merge:
    """A `Merge` says which tensors a merge of adapters into weights reads, and which files it writes.

    Args:
        files: the names of the tensors of each file to write.
        headers: the headers of these tensors, by name.
        scale: the factor of the adapters' products, alpha / rank.
        adapted: the names of the weights to which an adapter's product is added.
        recipe: the recipe with the settings of the adapters, as it was when the merge was planned.
    """

    files: tuple[tuple[str, ...], ...]
    headers: Mapping[str, Header]
    scale: float
    adapted: frozenset[str]
    recipe: Recipe

    @property
    def bytes(self) -> int:
        """Return the number of bytes of all tensors that the merge writes."""
        return sum(self.headers[name].bytes for names in self.files for name in names)


def plan_merge(source: Source, recipe: Path | None, limit: int) -> Merge:
    """Return the plan for merging the adapters of `source` into its weights. The function reads only the headers of the
    files.

    Args:
        recipe: the path of the recipe; None for the recipe of the run that saved `source`.
        limit: the largest size of a file in bytes; a file with a single tensor may be larger.

    Raises:
        CheckpointError: `source` is not an iteration of a run, is incomplete, or has other adapters than the recipe.
        RecipeError: there is no recipe, or it does not have `plugins.lora`.
    """
    if source.form != "MindFormers":
        raise CheckpointError(
            f"{source.path}: the form of these weights is {source.form!r}; only checkpoints of runs (folders "
            f"iteration_*) have adapters to merge"
        )
    source.require_whole()
    source.require_types()
    file = recipe or recipe_beside(source.path)
    own = load_recipe(file)
    loaded = resolve(own)
    written = value_at(loaded, KEY, False)
    if written is False:
        raise RecipeError(f"{file}: {KEY}: the recipe trains no adapters, so there is nothing to merge")
    settings = read_lora(written, loaded, convert(View(loaded), load_schema()).fields)
    refuse_other_settings(source, file, loaded)
    wanted = require_adapters(source, settings, loaded)
    kept = {name: header for name, header in source.headers.items() if not is_adapter(name) and is_of_the_model(name)}
    files = in_files({name: header.bytes for name, header in kept.items()}, limit)
    adapted = frozenset(name.removesuffix(A) + WEIGHT for name in wanted if name.endswith(A))
    return Merge(files, kept, settings.scale, adapted, own)


def require_adapters(source: Source, settings: Settings, recipe: Recipe) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the adapters that the `settings` of a `recipe` describe, by name.

    Raises:
        CheckpointError: `source` has other adapters, or its run multiplied their products by another number.
    """
    matrices = {name: header.shape for name, header in source.headers.items() if len(header.shape) == 2}
    wanted = adapters_of({name: shape for name, shape in matrices.items() if kind_of(name) == "weights"}, settings)
    held = {name: header.shape for name, header in source.headers.items() if is_adapter(name)}
    held = {name: shape for name, shape in held.items() if kind_of(name) == "weights"}
    wrong = [f"no {name}" for name in wanted if name not in held]
    wrong += [f"{name}, which the recipe does not have" for name in held if name not in wanted]
    wrong += [
        f"{name} has the shape {list(held[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in held and tuple(held[name]) != tuple(shape)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more difference{'s' * (len(wrong) > 4)}" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{source.path}: these are not the adapters that {KEY} of the recipe describes: "
            f"{'; '.join(wrong[:3])}{more}"
        )
    before = recipe_of_run(source.path)
    if before and (other := other_scale(before, recipe, str(source.path))):
        raise CheckpointError(f"--recipe {recipe.source}: {other}, or leave --recipe out")
    return wanted


def merge(
    source: Source,
    target: Path,
    plan: Merge,
    progress: Callable[[int, str], None] = lambda done, file: None,
    damaged: Sequence[str] = (),
) -> None:
    """Write the merged weights to `target`, a folder that does not exist yet. The written tensors are not cut over
    ranks, so a run in any layout can start from them, and `tc3 weights convert` can read them.

    The merged weight W + scale x B A is computed in float64 and rounded once to the type of W. The optimizer's state is
    left out.

    Args:
        progress: a function that is called with the number of bytes written so far and the name of the file.
        damaged: descriptions of the damage in `source` that is accepted (`inventory.salvaged`), to be recorded in
            `target`.

    Raises:
        CheckpointError: `target` exists, or ranks hold different copies of a tensor.
        DataError: `target` cannot be written.
    """
    refuse_target(target)
    with atomic_folder(target) as part:
        require_room(part, target, plan.bytes)
        records: dict[str, Any] = {}
        done = 0
        for number, names in enumerate(plan.files):
            file = file_of("MindFormers", number, len(plan.files))
            tensors = {
                name: Made(plan.headers[name].dtype, plan.headers[name].shape, partial(_made, source, plan, name))
                for name in names
            }
            try:
                digest = save_file(tensors, part / file, {"format": "ms"})
            except OSError as error:
                raise DataError(f"{target}: this path cannot be written ({error.strerror or error})") from None
            described = {name: [str(TYPES[made.dtype]), list(made.shape)] for name, made in tensors.items()}
            records[file] = {"sha256": digest, "tensors": described}
            done += sum(plan.headers[name].bytes for name in names)
            progress(done, file)
        finish_mindformers(part, records)
        keep_recipe(part, plan.recipe)
        mark(part, damaged)


def _made(source: Source, plan: Merge, name: str) -> Iterator[np.ndarray]:
    """Yield one tensor to be written."""
    weight = _whole(source, name)
    if name in plan.adapted:
        layer = name.removesuffix(WEIGHT)
        a, b = (_whole(source, layer + matrix) for matrix in (A, B))
        weight = rounded(merged(weight, a, b, plan.scale), weight.dtype)
        if not math.isfinite(float(np.abs(weight.astype(np.float64)).max(initial=0.0))):
            raise CheckpointError(f"{source.path}: {layer}: the merged weight has values that are not finite")
    yield weight


def _whole(source: Source, name: str) -> np.ndarray:
    array, differing = source.read(name)
    source.require_same(name, differing)
    return array
