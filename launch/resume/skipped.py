"""What a launch makes of the ledger of left-out samples (`plugins/spike_guard/ledger.py`).

The worker that ends a run for a spike has written the ledger. Whoever plans the next attempt puts its samples into the
effective recipe, and goes on from the newest checkpoint that holds no guilty step; those that do are set aside once the
plan counts. All of it is read from the disk before each plan: no node knows what another one has planned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from plugins.sealed_checkpoint.plan import made
from plugins.spike_guard import plan as spike_guard
from plugins.spike_guard.ledger import Ranges, normal, read_ledger, samples_of
from tools.checkpoint.scan import iteration, iterations, set_aside
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View

SECTION = ("plugins", "spike_guard")
SKIPPED = (*SECTION, "skipped")


def is_on(recipe: Recipe) -> bool:
    """Whether the recipe's run is guarded."""
    return View(recipe).get(SECTION) not in (None, False)


def left_out(recipe: Recipe) -> Ranges:
    """The samples that a recipe's run leaves out."""
    return normal(View(recipe).get(SKIPPED) or ()) if is_on(recipe) else ()


def apply_ledger(recipe: Recipe, run_dir: Path, before: Ranges = ()) -> None:
    """Let `recipe` (in place) leave out what the ledger in `run_dir` says, beside what it says itself.

    Whoever plans an attempt calls this first: another node may have planned, or met, what came before.

    Args:
        before: what an earlier attempt has left out. A late rank may have written an older ledger over a newer one.

    Raises:
        DataError: the ledger cannot be read.
        RecipeError: the guard's settings are wrong.
    """
    found = normal([*samples_of(read_ledger(run_dir)), *before]) if is_on(recipe) else ()
    if found:
        own = spike_guard.read(recipe["plugins"]["spike_guard"]).skipped
        recipe["plugins"]["spike_guard"] = {
            **recipe["plugins"]["spike_guard"],
            "skipped": [list(pair) for pair in normal([*own, *found])],
        }


def guilty(recipe: Recipe, run_dir: Path) -> Callable[[Path, int], str | None]:
    """Why a checkpoint (folder, its step) of the run is not to be gone on from: its samples are left out since.

    A checkpoint's seals say what the run left out that made it; of one that does not say so, what RUN/recipe.yaml
    leaves out counts, so ask before that is written anew.
    """
    entries = read_ledger(run_dir) if is_on(recipe) else []
    stored = run_dir / "recipe.yaml"
    last = left_out(load_recipe(stored)) if entries and stored.exists() else ()

    def why(folder: Path, step: int) -> str | None:
        late = [entry for entry in entries if step >= entry.first]
        if not late:
            return None
        own = made(folder).get("skipped")
        known = last if own is None else normal(own)
        first = min((entry.first for entry in late if normal([*known, *entry.samples]) != known), default=None)
        return None if first is None else f"holds step {first}, which spiked"

    return why


def put_guilty_aside(recipe: Recipe, run_dir: Path, root: Path) -> None:
    """Rename the checkpoints under `root` that are `guilty`."""
    why = guilty(recipe, run_dir)
    for folder in iterations(root):
        words = why(folder, iteration(folder))
        if words and (aside := set_aside(folder, partial(_still, why, iteration(folder)))):
            click.echo(f"{folder} {words}: renamed {aside.name}", err=True)


def _still(why: Callable[[Path, int], str | None], step: int, moved: Path) -> bool:
    return why(moved, step) is not None
