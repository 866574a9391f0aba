"""This module is the program that msrun starts on every worker of `tc3 accuracy dump`: it is `train.py` with msprobe's
debugger as an additional plugin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # msrun starts this file by path; the repository may not be installed
    sys.path.insert(0, str(ROOT))

from launch.train import build_config, train
from launch.workers.lifetime import (
    die_with_parent,
    run_then_hard_exit,
)
from plugins import ADAPTERS
from plugins.errors import TC3Error
from tools.schema.versions import unverified_option

DEBUGGER = "msprobe_debugger"


@click.command()
@click.option("--config", "config_path", required=True, type=click.Path(path_type=Path), help="Train this recipe.")
@click.option(
    "--run-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Write the run's files, and the dump of its tensors, into this folder.",
)
@click.option(
    "--level",
    required=True,
    help="Choose where msprobe dumps tensors: at cells, which are MindSpore's modules (L0), at functions (L1), at both "
    "(mix), or at kernels (L2).",
)
@click.option(
    "--task",
    required=True,
    help="Choose what is dumped of each tensor: only its statistics (statistics), or also all its values (tensor).",
)
@unverified_option
def main(config_path: Path, run_dir: Path, level: str, task: str) -> None:
    """Run a recipe and dump its tensors on this worker."""
    if "TC3_SUPERVISED" in os.environ:
        die_with_parent()
    # after the recipe's own plugins, when the CPU backend has checked a recipe of graph mode
    ADAPTERS[DEBUGGER] = "launch.workers.accuracy_callback"
    try:
        recipe = build_config(config_path, (), run_dir, None)
        recipe["plugins"] = {**(recipe.get("plugins") or {}), DEBUGGER: {"level": level, "task": task}}
        train(recipe)
    except TC3Error as error:
        click.echo(f"tc3: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    run_then_hard_exit(main)
