"""This module is the program that msrun starts on every worker: it reads the recipe, makes MindFormers' config, enables
plugins and runs MindFormers' Trainer.

It replaces MindFormers' run_mindformer.py, which MindFormers' wheel does not contain. A user can start it by hand:
    msrun --worker_num=1 --local_worker_num=1 --join=True launch/train.py --config recipes/mini/pretrain.yaml
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # msrun starts this file by path; the repository may not be installed
    sys.path.insert(0, str(ROOT))

from launch.workers.cores import stay_on_own_cores, with_bind_file

if __name__ == "__main__":
    stay_on_own_cores()  # before the imports below start threads
    gc.set_threshold(100_000)  # imports and compiling make millions of objects that stay; looking for cycles took 5 %

from launch.resume.checkpoints import keep_cost
from launch.resume.data import all_steps, apply_ledger
from launch.run.compile_cache import refuse_own
from launch.run.script import of_script
from launch.workers.backends import backend_of
from launch.workers.lifetime import answer_with_stacks, die_with_parent, run_then_hard_exit
from plugins.errors import StoppedError, TC3Error
from plugins.lines import ATTEMPT
from plugins.operator_fusion import adapter as operator_fusion
from tools.layout.resolve import resolve
from tools.process.children import import_mindformers, temporary_folder
from tools.ranges import overrides_option
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.runs.attempts import DONE, INTERRUPTED, STOPPED
from tools.schema.versions import require_verified, unverified_option


def build_config(config_path: Path, overrides: tuple[str, ...], run_dir: Path | None, resume: Path | None) -> Recipe:
    """Return the recipe as a flat dict, with this run's folders and the checkpoint from which the run continues."""
    recipe = load_recipe(config_path)
    if overrides:
        recipe = apply_overrides(recipe, overrides)
    recipe = resolve(recipe, click.echo)
    if run_dir is not None:
        recipe["output_dir"] = str(run_dir)
    planned = ATTEMPT in os.environ  # then all ranks take what the attempt's plan has settled, whatever came since
    if not planned:
        apply_ledger(recipe, run_dir or Path(recipe["output_dir"]))
    checkpoint = recipe.setdefault("checkpoint", {})
    checkpoint["save_path"] = checkpoint.get("save_path") or str(Path(recipe["output_dir"]) / "checkpoint")
    if resume is not None:
        checkpoint["load_path"] = str(resume)
        checkpoint["no_load_optim"] = False  # MindFormers' default goes on with fresh moments and step 0
        if not planned:
            keep_cost(recipe, run_dir or Path(recipe["output_dir"]), resume)
    return recipe


def train(recipe: Recipe, when_together: Callable[[int], None] = lambda rank: None) -> None:
    """Train `recipe` on this worker; MindFormers is imported only after the device target is set.

    `when_together` is called with the rank once all ranks are connected: a rank that fails later does not make the
    others wait.
    """
    require_verified()
    refuse_own(recipe)
    if os.environ.get("MS_ROLE") == "MS_SCHED":  # msrun starts this file for its scheduler, too
        if recipe.get("use_parallel"):
            from mindspore.communication import init

            init()  # keeps the cluster together to its end
        return
    operator_fusion.before_mindspore(recipe)
    backend = backend_of(recipe)
    backend.before_mindformers(recipe)
    import_mindformers()
    from mindformers import MindFormerConfig, Trainer, build_context
    from mindformers.tools.utils import get_real_rank

    with temporary_folder() as folder:
        flat = Path(folder) / "recipe.yaml"  # MindFormers applies its defaults only to a file
        dump_recipe(with_bind_file(recipe), flat)
        config = MindFormerConfig(str(flat))
        backend.after_import()
        build_context(config)
    backend.after_context()
    when_together(get_real_rank())
    backend.enable(config)
    from launch.workers import dataset_helpers, metrics, save_on_request
    from plugins import enable_plugins

    dataset_helpers.use_this_python()
    metrics.enable(config, backend.collectives)
    enable_plugins(config)
    save_on_request.enable(all_steps(recipe))
    with backend.own_errors():
        Trainer(config).train()


@click.command()
@click.option("--config", "config_path", required=True, type=click.Path(path_type=Path), help="Train this recipe.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Write this run to this folder.  [default: the recipe's output_dir]",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    help="Continue from the checkpoint in this folder, for instance iteration_00000100.",
)
@overrides_option
@unverified_option
def main(config_path: Path, run_dir: Path | None, resume: Path | None, overrides: tuple[str, ...]) -> None:
    """Train a recipe on this worker."""
    if "TC3_SUPERVISED" in os.environ:  # not by hand: msrun without --join ends at once and leaves its workers
        die_with_parent()
        answer_with_stacks()
    try:
        recipe = build_config(config_path, overrides, run_dir, resume)
        if run_dir is None or ATTEMPT in os.environ or (run_dir / "recipe.yaml").absolute() == config_path.absolute():
            train(recipe)  # by hand, or for an agent, which has checked all this
        else:
            train(recipe, of_script(recipe, run_dir, resume))
    except TC3Error as error:
        click.echo(f"tc3: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo(INTERRUPTED, err=True)
        sys.exit(130)
    except StoppedError as error:
        click.echo(f"{STOPPED}{error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    run_then_hard_exit(main, DONE)
