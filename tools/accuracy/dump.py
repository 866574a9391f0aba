"""`tc3 accuracy dump`: what a user says; launch/accuracy_dump.py does it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "accuracy_dump.py"
LEVELS = ("L0", "L1", "mix", "L2")
TASKS = ("statistics", "tensor")


@dataclass(frozen=True)
class Job:
    """One dump, in values fit for JSON."""

    recipe: str
    out: str
    mini: bool
    steps: int
    level: str
    task: str
    overrides: list[str]


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder for the dump.")
@click.option("--mini", is_flag=True, help="Dump a mini of RECIPE on CPU: its architecture at toy size.")
@click.option("--steps", default=2, show_default=True, type=click.IntRange(min=1), help="Training steps.")
@click.option("--level", default="L0", show_default=True, type=click.Choice(LEVELS), help="What is hooked; see above.")
@click.option("--task", default="tensor", show_default=True, type=click.Choice(TASKS), help="Values, or statistics.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
def dump(recipe: Path, out: Path, mini: bool, steps: int, level: str, task: str, overrides: tuple[str, ...]) -> None:
    """Train RECIPE for a few steps and dump every tensor with msprobe, for `tc3 accuracy compare`.

    No edit to model or recipe is needed. L0 hooks cells, L1 functions, mix both: these run in PyNative, which is 20 to
    40 times slower than a graph; L2 dumps the kernels of the compiled graph. The weights after the last step are
    dumped too, and at L1 and L2, which show no weights, those before the first, so that `compare` can judge the
    optimizer's updates, even that of a single step. It cannot from statistics.

    Exit codes: 0 dumped, 1 a worker failed, 2 something to mend first, 130/143 interrupted.
    """
    if level == "L2" and task != "tensor":
        raise click.UsageError("L2 dumps values only: leave --task out")
    job = Job(str(recipe), str(out), mini, steps, level, task, list(overrides))
    os.execv(sys.executable, [sys.executable, str(SCRIPT), json.dumps(asdict(job))])
