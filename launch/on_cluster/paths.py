"""Paths of a launch script that lie outside the checkout: every node needs what stands there, at the same place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launch.run.msrun import ROOT
from launch.run.preflight import data_prefixes, held_out
from tools.recipe.load import Recipe
from tools.recipe.view import LOADER, View

_DATA_PATH = (*LOADER, "config", "data_path")
_OTHERS = (("checkpoint", "load_path"), ("checkpoint", "save_path"), ("load_checkpoint",), ("pretrained_model_dir",))


def outside(recipe_file: Path, recipe: Recipe, resume: str | None, run_dir: Path | None) -> list[str]:
    """A sentence for each path of the script for `recipe` that is not in the checkout; relative ones start there."""
    return [
        f"{name}: {path} is outside the checkout ({ROOT}): every node needs it there"
        for name, path in _paths(recipe_file, recipe, resume, run_dir)
        if path and not Path(os.path.normpath(ROOT / path)).is_relative_to(ROOT)
    ]


def _paths(recipe_file: Path, recipe: Recipe, resume: str | None, run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """(what it is, path), in the order of a launch."""
    view = View(recipe)
    yield "the recipe", str(recipe_file.absolute())
    if run_dir:
        yield "--run-dir", str(run_dir.absolute())
    if resume:
        yield "--resume", str(Path(resume).absolute())
    if view.megatron and view.has(_DATA_PATH):
        yield from ((".".join(_DATA_PATH), prefix) for prefix in data_prefixes(view.get(_DATA_PATH)))
    yield from ((".".join((*LOADER, "data_files")), file) for file in view.instruction_files)
    yield from (("plugins.held_out_loss.data_path", prefix) for prefix in held_out(recipe))
    for key in _OTHERS:
        value = view.get(key)
        yield ".".join(key), value if isinstance(value, str) else ""
