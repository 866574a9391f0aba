"""This program prints a table of the reports of `tc3 prove --quick` on the shipped recipes at their full layouts.

    python -m benchmarks.proofs_of_recipes [RECIPE ...]

RECIPE: files; by default all recipes of `recipes/` whose compiled graphs hold collectives. Each takes a compile for
every kind of stage and axis of its mesh, minutes to an hour on two cores, unless the cache of `tc3 dryrun` has them. A
line is printed for each recipe as soon as it is known, and the exit code is 1 if there is a violation or a recipe does
not compile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tools.recipe.load import load_recipe
from tools.recipe.view import View

ROOT = Path(__file__).resolve().parents[1]
_NO_RECIPES = ("base", "mini")  # folders of parts, and of small recipes for the CPU
_SHOWN = 4  # operators without a type


def shipped() -> list[Path]:
    """Return the recipes of `recipes/` for clusters of devices, sorted by name."""
    found = (path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if path.name != "card.yaml")
    return [path for path in found if path.parent.name not in _NO_RECIPES]


def layout_of(path: Path) -> str:
    """Return the degrees of parallelism of a recipe that are not 1, and its devices."""
    view = View(load_recipe(path))
    degrees = {"dp": view.dp, "tp": view.tp, "cp": view.cp, "pp": view.pp, "ep": view.ep}
    told = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return f"{told} ({view.devices:,} devices)"


def row_of(path: Path, report: Mapping[str, Any]) -> str:
    """Return the table's line for a recipe.

    Args:
        report: the object that `tc3 prove --json` prints.
    """
    missing = [f"`{name}` {count}" for name, count in report["missing"].items()]
    ends = ", ".join(missing[:_SHOWN]) + (" and more" if len(missing) > _SHOWN else "")
    operators = sum(stage["operators"] for stage in report["stages"])
    counts = f"{report['proven']} of {report['weights']} | {report['wrong']} | {report['unknown']}"
    name = path.resolve().relative_to(ROOT / "recipes") if path.resolve().is_relative_to(ROOT / "recipes") else path
    return f"| `{name}` | {layout_of(path)} | {operators:,} | {counts} | {len(report['problems'])} | {ends} |"


def proof_of(path: Path) -> tuple[int, str, str]:
    """Return the exit code, the printed report and the messages of `tc3 prove --quick --json` for a recipe."""
    command = [sys.executable, "-c", "from launch.cli import main; main()", "prove", str(path), "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def table(recipes: Sequence[Path]) -> bool:
    """Print a line of the table for each recipe as soon as it is known; return whether no recipe has a violation or is
    refused.
    """
    sound = True
    click.echo("| recipe | layout | operators | proven | wrong | unknown | violations | ends at |")
    click.echo("|---|---|---|---|---|---|---|---|")
    for path in recipes:
        code, told, messages = proof_of(path)
        sound = sound and not code
        report = json.loads(told) if told.startswith("{") else {"problems": messages.strip().splitlines()}
        if "weights" in report:
            click.echo(row_of(path, report))
        else:  # a rank does not compile, or the recipe is wrong
            last = report["problems"][-1:]
            click.echo(f"| `{path.name}` | {layout_of(path)} | | refused | | | | {''.join(last)} |")
    return sound


@click.command()
@click.argument("recipes", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(recipes: tuple[Path, ...]) -> None:
    """Print a table of what is proven of RECIPES, by default of all shipped ones."""
    sys.exit(0 if table(recipes or shipped()) else 1)


if __name__ == "__main__":
    main()
