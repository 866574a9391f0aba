"""This program trains a recipe with a fault in one process: it runs `launch/train.py` with the fault as its last
plugin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from launch.train import build_config, train
from launch.workers.lifetime import die_with_parent, run_then_hard_exit
from plugins import ADAPTERS
from tools.recipe.dump import dump_recipe

FAULT, VARIABLE = "zoo", "TC3_ZOO_FAULT"  # its plugin's name; what names the fault


@click.command()
@click.option("--config", required=True, type=click.Path(path_type=Path))
@click.option("--run-dir", required=True, type=click.Path(path_type=Path))
@click.option("--resume", type=click.Path(path_type=Path))
def main(config: Path, run_dir: Path, resume: Path | None) -> None:
    """Train with the fault that the environment names; it may be empty."""
    if "TC3_SUPERVISED" in os.environ:
        die_with_parent()
    ADAPTERS[FAULT] = "tests.zoo.fault"
    recipe = build_config(config, (), run_dir, resume)
    run_dir.mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK_ID", "0") == "0" and os.environ.get("MS_ROLE") != "MS_SCHED":
        dump_recipe(recipe, run_dir / "recipe.yaml")
    recipe["plugins"] = {**recipe["plugins"], FAULT: os.environ.get(VARIABLE, "")}
    train(recipe)


if __name__ == "__main__":
    run_then_hard_exit(main)
