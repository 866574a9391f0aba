"""`tc3 accuracy dump`: what a user says; launch/run/accuracy_dump.py does it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from tools.accuracy.dumps.marker import Job
from tools.accuracy.dumps.read import LEVELS, TASKS
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "run" / "accuracy_dump.py"


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder for the dump.")
@click.option("--mini", is_flag=True, help="Dump a mini of RECIPE on CPU: its architecture at toy size.")
@click.option("--steps", default=2, show_default=True, type=Number("steps"), help="Training steps.")
@click.option("--level", default="L0", show_default=True, type=click.Choice(LEVELS), help="What is hooked; see above.")
@click.option(
    "--task",
    type=click.Choice(TASKS),
    help="Each tensor's max, min, mean and norm, or all its values too.  [default: statistics; tensor at L2]",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@unverified_option
def dump(
    recipe: Path, out: Path, mini: bool, steps: int, level: str, task: str | None, overrides: tuple[str, ...]
) -> None:
    """Train RECIPE for a few steps and dump every tensor with msprobe, for `tc3 accuracy compare`.

    Statistics are small (2 MB for recipes/mini/pretrain.yaml, where values take 1.2 GB) and enough to find where two
    runs part. What changes places or cancels they do not show: dump values (--task tensor) to prove two runs equal, or
    to look at the tensors themselves. A dump that fills its disk is ended before nothing is left free.

    No edit to model or recipe is needed. L0 hooks cells, L1 functions, mix both: these run in PyNative, which is 20 to
    40 times slower than a graph; L2 dumps the kernels of the compiled graph. The weights after the last step are
    dumped too, and at L1 and L2, which show no weights, those before the first, so that `compare` can judge the
    optimizer's updates, even that of a single step; from statistics as far as they tell.

    Exit codes: 0 dumped, 1 a worker failed or the disk is full, 2 something to mend first, 130/143 interrupted (nothing
    is left then).
    """
    if level == "L2" and task == "statistics":
        raise click.UsageError("L2 dumps values only: leave --task out")
    task = task or ("tensor" if level == "L2" else "statistics")
    require_verified()
    job = Job(str(recipe), str(out), mini, steps, level, task, list(overrides))
    os.execv(sys.executable, [sys.executable, str(SCRIPT), json.dumps(asdict(job))])
