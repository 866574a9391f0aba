"""What a launch makes of the ledger of left-out samples (`plugins/spike_guard/ledger.py`).

The worker that ends a run for a spike has written the ledger. A launch puts its samples into the effective recipe, sets
checkpoints aside that hold a guilty step, and goes on from the newest of the others.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from plugins.spike_guard import settings as spike_guard
from plugins.spike_guard.ledger import Entry, read_ledger, samples_of
from plugins.spike_guard.skip import Ranges, normal
from tools.checkpoint.scan import iteration, iterations, set_aside
from tools.recipe.dump import dump_recipe
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


def apply_ledger(recipe: Recipe, run_dir: Path) -> None:
    """Let `recipe` (in place) leave out what the ledger in `run_dir` says, beside what it says itself.

    Raises:
        DataError: the ledger cannot be read.
        RecipeError: the guard's settings are wrong.
    """
    entries = read_ledger(run_dir) if is_on(recipe) else []
    if entries:
        own = spike_guard.read(recipe["plugins"]["spike_guard"]).skipped
        every = normal([*own, *samples_of(entries)])
        recipe["plugins"]["spike_guard"] = {
            **recipe["plugins"]["spike_guard"],
            "skipped": [list(pair) for pair in every],
        }


def pending(run_dir: Path) -> list[Entry]:
    """The spikes that ended a run and after which no launch has followed: what its recipe does not leave out yet."""
    stored = run_dir / "recipe.yaml"
    before = left_out(load_recipe(stored)) if stored.exists() else ()
    return [entry for entry in read_ledger(run_dir) if normal([*before, *entry.samples]) != before]


def put_guilty_aside(recipe: Recipe, run_dir: Path, root: Path) -> None:
    """Rename the checkpoints under `root` that hold a step whose samples are left out from now on.

    Call before the effective recipe is written: it is the last launch's that says which ones are new.
    """
    guilty = min((entry.first for entry in pending(run_dir)), default=None) if is_on(recipe) else None
    for folder in iterations(root):
        if guilty is not None and iteration(folder) >= guilty:
            with suppress(FileNotFoundError):  # several nodes look at once
                click.echo(f"{folder} holds step {guilty}, which spiked: renamed {set_aside(folder).name}", err=True)


def go_back(recipe: Recipe, run_dir: Path, root: Path) -> None:
    """Between two attempts of a launch: let the next one go on without what the last one has found guilty.

    `recipe` (in place) and the run's effective recipe leave the samples out, checkpoints that hold them are set aside.
    """
    if not (is_on(recipe) and pending(run_dir)):
        return
    put_guilty_aside(recipe, run_dir, root)
    apply_ledger(recipe, run_dir)
    stored = load_recipe(run_dir / "recipe.yaml")
    apply_ledger(stored, run_dir)
    dump_recipe(stored, run_dir / "recipe.yaml")
