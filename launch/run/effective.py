"""The recipe as `tc3 train` runs it: size, overrides, number of steps, `auto` resolved, the run's folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from launch.run.size import Size
from plugins.errors import RecipeError
from tools.auto.resolve import resolve
from tools.recipe.load import Recipe
from tools.recipe.override import also_changed, apply_overrides, dotted
from tools.recipe.view import RUNNER, View

FULL_SIZE = Size()
_WARMUP = "lr_schedule.warmup_steps"


def effective_recipe(
    path: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: Path,
    size: Size = FULL_SIZE,
    make_layout: bool = True,
) -> Recipe:
    """The flat recipe that will run: overrides, number of steps, and this run's folders filled in.

    `make_layout`: search for the layout of a recipe with `offset: auto`, and keep it, where nobody has.
    """
    flat = chosen_recipe(path, overrides, size)
    flat = resolved(apply_overrides(flat, steps_overrides(flat, steps, overrides)), make_layout)
    flat["output_dir"] = str(run_dir)
    checkpoint = flat["checkpoint"] = flat.get("checkpoint") or {}
    checkpoint["save_path"] = checkpoint.get("save_path") or str(run_dir / "checkpoint")
    return flat


def chosen_recipe(path: Path, overrides: tuple[str, ...], size: Size = FULL_SIZE) -> Recipe:
    """The recipe, or its mini, with the user's overrides."""
    flat = size.load(path)
    for override in overrides:
        if others := also_changed(flat, override):
            click.echo(f"--set {override} also sets {', '.join(others)} (one value, shared by an anchor)", err=True)
    return apply_overrides(flat, overrides)


def resolved(flat: Recipe, make_layout: bool) -> Recipe:
    """The recipe with values in the place of `auto`; `make_layout` as in `effective_recipe`."""
    return resolve(flat, partial(click.echo, err=True), "search" if make_layout else "file")


def steps_overrides(recipe: Recipe, steps: int | None, given: tuple[str, ...] = ()) -> list[str]:
    """The overrides that make a recipe train `steps` steps: samples of the dataset, one pass over it, the schedule.

    A warm-up that is longer than all steps becomes the share of them that it was of the recipe's; a word on stderr says
    so. One that the user's own overrides set stays as it is, and is refused like that of a recipe.

    Args:
        given: the user's overrides, which `recipe` has.
    """
    if steps is None:
        return []
    view = View(recipe)
    if not (view.samples_key and view.samples and view.has((*RUNNER, "batch_size"))):
        raise RecipeError(
            f"{recipe.source}: --steps needs train_dataset.data_loader.sizes (of HFDataLoader a last handler `take`) "
            "and runner_config.batch_size"
        )
    found = [f"{dotted(view.samples_key)}={steps * view.global_batch}"]  # stays the first
    if view.number((*RUNNER, "epochs"), 1) > 1:
        found.append("runner_config.epochs=1")
    if view.number(("lr_schedule", "total_steps"), 0):
        found.append(f"lr_schedule.total_steps={steps}")
        found += _shorter_warmup(view, steps, given)
    return found


def _shorter_warmup(view: View, steps: int, given: tuple[str, ...]) -> list[str]:
    warmup, total = (view.number(("lr_schedule", name), 0) for name in ("warmup_steps", "total_steps"))
    if warmup <= steps or total < warmup or any(each.startswith(_WARMUP) for each in given):
        return []
    share = max(1, round(steps * warmup / total))
    click.echo(f"--steps {steps}: a warm-up of {share}, not {warmup} steps (--set {_WARMUP}=N for another)", err=True)
    return [f"{_WARMUP}={share}"]
