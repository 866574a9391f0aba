"""This module is `tc3 accuracy dump`: it runs a recipe as `tc3 train` does, with msprobe's debugger in every worker.

The command line is defined in tools/accuracy/cli.py, which replaces itself by this process:

    python launch/run/accuracy_dump.py JOB      JOB is `tools.accuracy.dumps.write.Job` as JSON
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started by path; the repository may not be installed
    sys.path.insert(0, str(ROOT))

from launch.run import preflight
from launch.run.effective import Size, effective_recipe, steps_overrides
from launch.run.failure import Failure
from launch.run.msrun import free_port, msrun_command, optimizer_environment, worker_count, worker_environment
from launch.run.summary import TrainingProgress, complain
from launch.run.supervise import Outcome, supervise
from plugins.errors import DataError, TC3Error
from tools.accuracy.dumps import write
from tools.accuracy.dumps.read import WEIGHTS_FOLDER, open_dump
from tools.accuracy.dumps.write import Job
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.schema.stages import loss_rank

_MSPROBE_PATH = re.compile(r"[A-Za-z0-9_.:/-]+")  # others it refuses, after the model is built


def main() -> None:
    """Make the dump that the job in the first command-line argument describes, and end the process with an exit code: 0
    after a dump, 1 if a worker failed, 2 if the user has to change something first, 130 after Ctrl-C.
    """
    job = Job(**json.loads(sys.argv[1]))
    try:
        sys.exit(run(job))
    except TC3Error as error:
        click.echo(f"tc3: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("tc3: interrupted before anything was started", err=True)
        sys.exit(130)


def run(job: Job) -> int:
    """Check the request, run the recipe, and mark the dump as complete; return the exit code."""
    out = Path(job.out).absolute()
    check_folder(out)
    recipe = effective_recipe(Path(job.recipe), tuple(job.overrides), None, out, Size(job.mini))
    # fewer samples, but the schedule stays: the first steps are those of the real run
    shorter = steps_overrides(recipe, job.steps, ("lr_schedule.warmup_steps",))
    recipe = apply_overrides(recipe, [each for each in shorter if not each.startswith("lr_schedule.")])
    preflight.check_machine(recipe)
    preflight.check_sound(recipe)
    for line in prepare(recipe):
        click.echo(line, err=True)
    preflight.check_data(recipe)
    preflight.check_disk(out)
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    facts = {**asdict(job), "out": str(out), "workers": worker_count(recipe)}
    write.claim(out)
    write.mark(out, False, **facts)
    dump_recipe(recipe, out / "recipe.yaml")
    outcome = _supervised(recipe, out, job)
    if outcome.code and not outcome.failure:
        _clear(out, new)
        click.echo("tc3: interrupted; what was dumped is not whole and was removed", err=True)
        return outcome.code
    if outcome.failure:
        complain(outcome.failure)
        click.echo(f"The dump in {out} is not whole", err=True)
        return outcome.code
    write.mark(out, True, **facts)
    click.echo(
        f"dumped: {out}: {job.steps} step{'s' * (job.steps > 1)}, {len(open_dump(out).ranks)} rank(s), {job.level} "
        f"{job.task}, {dumped_bytes(out) / 1e6:,.0f} MB"
    )
    return 0


def check_folder(out: Path) -> None:
    """Raise DataError if no new dump can be written into `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out}: the folder is not empty, but a dump needs a new folder")
    if not _MSPROBE_PATH.fullmatch(str(out)):
        raise DataError(
            f"--out {out}: msprobe accepts only paths of letters, digits and the characters _ . : / -; "
            "choose another folder"
        )


def full(out: Path) -> Failure | None:
    """Return a failure if the dump must stop because the disk has less free space left than a run needs; return None if
    it need not stop. A dump of values may be larger than any estimate, so the free space is checked while the dump is
    written.
    """
    free = shutil.disk_usage(out).free
    if free >= preflight.MIN_FREE:
        return None
    less = "make room, or dump fewer --steps or --task statistics, and remove this dump"
    return Failure(f"--out {out}: only {free / 1e9:.1f} GB are left free: {less}", out / "logs", user_error=True)


def dumped_bytes(out: Path) -> int:
    """Return the number of bytes in the files that msprobe and this module wrote below a dump's folder, without
    logs.
    """
    places = (*out.glob("step[0-9]*"), *out.glob("rank_[0-9]*"), out / WEIGHTS_FOLDER)
    return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())


def _clear(out: Path, new: bool) -> None:
    """Remove the files that an interrupted dump has left, and the dump's folder if this command has made it."""
    for path in out.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if new:
        out.rmdir()


def prepare(recipe: Recipe) -> list[str]:
    """Make `recipe` deterministic, and switch off parts of it that take time and are not needed for the dump; print
    these changes.
    """
    said = []
    if not recipe.get("train_precision_sync"):
        recipe["train_precision_sync"] = True
        said.append("dump: train_precision_sync is set: a rerun must give the same bits")
    if (recipe.get("plugins") or {}).get("held_out_loss"):
        recipe["plugins"]["held_out_loss"] = False
        said.append("dump: plugins.held_out_loss is left out")
    # steps with NaN are to be looked at, too
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "finite_loss": False, "spike_guard": False}
    recipe["callbacks"] = [each for each in recipe.get("callbacks") or [] if each["type"] != "CheckpointMonitor"]
    return said


def _supervised(recipe: Recipe, out: Path, job: Job) -> Outcome:
    workers = worker_count(recipe)
    train, ours = (str(ROOT / "launch" / name) for name in ("train.py", "workers/accuracy_worker.py"))
    command = [ours if word == train else word for word in msrun_command(recipe, out, free_port())]
    command += ["--level", job.level, "--task", job.task]
    with TrainingProgress(out, Console(stderr=True), loss_rank(View(recipe))) as progress:

        def tick() -> Failure | None:
            progress.tick()
            return full(out)

        environment = {**optimizer_environment(recipe), **worker_environment(workers, out)}
        return supervise(command, environment, out, workers, tick)


if __name__ == "__main__":
    main()
