"""At which size `tc3 train` trains a recipe: its own, a mini on one worker, or a mini with its parallel strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import WORKERS, load_mini


@dataclass(frozen=True)
class Size:
    """What --mini, --parallel and --workers say.

    Attributes:
        mini: whether it is a mini;
        workers: of a mini that keeps its parallel strategy; None for any other.
    """

    mini: bool = False
    workers: int | None = None

    @classmethod
    def chosen(cls, mini: bool, parallel: bool, workers: int | None) -> Size:
        """Read the options; click.UsageError where they do not go together."""
        if parallel and not mini:
            raise click.UsageError("--parallel is for minis: add --mini")
        if workers is not None and not parallel:
            raise click.UsageError("--workers is for minis that keep their parallel strategy: add --mini --parallel")
        return cls(mini, (workers or WORKERS) if parallel else None)

    def load(self, path: Path) -> Recipe:
        """The recipe of a file at this size."""
        return load_mini(path, workers=self.workers) if self.mini else load_recipe(path)

    def run_dir(self, recipe: Path) -> Path:
        """``output/<recipe's folder>-<recipe>`` below the working folder, and what kind of mini it is."""
        kind = "-mini" * self.mini + "-parallel" * bool(self.workers)
        return Path("output") / f"{recipe.absolute().parent.name}-{recipe.stem}{kind}"

    def words(self) -> list[str]:
        """The options that say so."""
        workers = ["--workers", str(self.workers)] if self.workers not in (None, WORKERS) else []
        return ["--mini"] * self.mini + ["--parallel"] * bool(self.workers) + workers
