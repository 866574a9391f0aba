"""What the workers of a launch script check and write, as `tc3 train` does before it starts any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from launch.resume import data_digest
from launch.resume.checkpoint_model import check_model
from launch.resume.checkpoints import check_data_order, check_save_path, check_share, complete, one_iteration, save_path
from launch.run.msrun import worker_count
from tools.checkpoint.scan import CheckpointInfo, iteration
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe


def of_script(recipe: Recipe, run_dir: Path, resume: Path | None) -> Callable[[int], None]:
    """Check what every worker can see at once; the rest is for the function returned, called with each worker's rank.

    That one waits until the cluster stands, for it fails on some ranks only: each reads its share of a sealed
    checkpoint; rank 0, which alone may have to read an index, compares the data and its order, and keeps the recipe and
    the data's digests in the run's folder. Where nothing is left to train, the worker says so and ends, with code 0.

    Raises:
        CheckpointError: as `tc3 train`, here or later.
    """
    checkpoint = None
    if resume is None:
        check_save_path(save_path(recipe), resume=False, force=False)
    else:
        checkpoint = CheckpointInfo(one_iteration(str(resume)), iteration(resume))
        if done := complete(recipe, checkpoint):  # all workers see the same, and so does the scheduler's process
            click.echo(f"tc3: {done}")
            sys.exit(0)

    def check_and_keep(rank: int) -> None:
        if checkpoint is not None:
            check_share(checkpoint, rank, worker_count(recipe))
        if rank == 0:
            if checkpoint is not None:
                check_model(recipe, checkpoint.path)
                check_data_order(recipe, run_dir, checkpoint)
            dump_recipe(recipe, run_dir / "recipe.yaml")
            data_digest.keep(recipe, run_dir)

    return check_and_keep
