"""This module finds the checkpoint from which a run continues, checks that the run may continue from it, and keeps the
checkpoints of different runs apart. (`launch/resume/model.py` compares a checkpoint with the recipe's model.)

`find_checkpoint` finds the checkpoint from which a run goes on: the newest complete one, or the one that the user
names. `check_data_order` and `complete` check whether the run may go on from it, and whether any step is left to train.
`check_save_path`, `clear_save_path` and `leave_behind` keep checkpoints of other runs apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from launch.resume.data import all_steps, differences, guard_is_on, replaced
from launch.resume.model import refuse_other_scale
from launch.run.preflight import PARTS
from plugins.errors import CheckpointError, did_you_mean
from plugins.lines import as_span, number_of, spans_file
from plugins.sealed_checkpoint.plan import (
    MOVING,
    SAVING,
    adopt,
    fault,
    global_batch_of,
    made,
    renew_tracker,
    unfinished,
)
from plugins.sealed_checkpoint.router_state import AVERAGING
from plugins.spike_guard.ledger import read_ledger
from tools.checkpoint.scan import (
    ASIDE,
    CheckpointInfo,
    is_sealed,
    iteration,
    iterations,
    later_than,
    lies_in,
    saved_step,
    scan_checkpoints,
    set_aside,
)
from tools.checkpoint.stored import MODEL_FILE, loaded_from
from tools.files.atomic import real_path
from tools.layout.resolve import keep_sample_cost
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs.attempts import read_attempts, recipe_file
from tools.runs.readings import Follower
from tools.weights.convert_plan import KEPT, changed_settings

_SLOW_TO_READ = 1 << 30  # bytes that take seconds to read


def save_path(recipe: dict[str, Any]) -> Path:
    """Return the folder in which an effective recipe's checkpoints are saved."""
    return Path(recipe["checkpoint"]["save_path"]).absolute()


def find_checkpoint(
    resume: str,
    root: Path,
    unfit: Callable[[Path, int], str | None] = lambda folder, step: None,
    otherwise: str | None = None,
) -> CheckpointInfo | None:
    """Return the checkpoint (iteration) from which the run continues; return None if `auto` finds no complete
    checkpoint. Print for each checkpoint that is skipped the reason why.

    Args:
        resume: `auto`, or a folder.
        root: the root of the run's own iterations.
        unfit: see `scan_checkpoints`.
        otherwise: the folder from which the run began, which `auto` takes if there is no other checkpoint.

    Raises:
        CheckpointError: the folder does not exist, is not that of one iteration, or is not complete.
    """
    if resume != "auto":
        return _named_checkpoint(resume, root)
    say_reading(next(iter(iterations(root)), None))
    best, skipped = scan_checkpoints(root, unfit)
    for path, reason in skipped:
        click.echo(f"skipping checkpoint {path}: {reason}", err=True)
    if best is None and otherwise:
        click.echo(f"no complete checkpoint in {root} yet: going on from {otherwise}, as the run began", err=True)
        return _named_checkpoint(otherwise, root)
    if best is None:
        click.echo(f"no complete checkpoint in {root}: starting from the beginning", err=True)
        return None
    click.echo(f"going on from step {best.step}: {best.path}", err=True)
    return CheckpointInfo(best.path.absolute(), best.step)


def beginning(run_dir: Path, root: Path) -> str | None:
    """Return the checkpoint of another run from which the run in `run_dir` began, as the plans of its attempts say;
    return None if they name no such checkpoint.
    """
    for attempt in reversed(read_attempts(run_dir)):
        resume = attempt.plan.resume if attempt.plan else None
        if resume and real_path(Path(resume).parent) != real_path(root):
            return resume
    return None


def refuse_scratch(run_dir: Path, root: Path) -> None:
    """Raise CheckpointError if a run that has started from a checkpoint before would now begin with random weights, or
    if a run that has saved checkpoints finds none at all in `root`, not even an incomplete one.

    A run may be started again while nobody watches, so a user who wants random weights must name a new folder. Only
    plugins.spike_guard goes back to the beginning by itself, after a spike before the first good checkpoint; what was
    saved before that is set aside, and may be removed.
    """
    spiked, plans = read_ledger(run_dir), [attempt.plan for attempt in read_attempts(run_dir) if attempt.plan]
    began_anew = max((plan.time for plan in plans if spiked and not plan.resume), default=0.0)
    spans = filter(None, map(as_span, Follower(spans_file(run_dir)).records()))
    saved = [span.step for span in spans if span.sealed and span.end > began_anew]
    if saved and not any(chain(iterations(root), root.glob(f"{ASIDE}*"), unfinished(root))):
        raise CheckpointError(
            f"{root}: no checkpoint is in this folder, although this run saved one at step {saved[-1]:,}: mount the "
            "disk of the checkpoints, name their folder in checkpoint.save_path, name a checkpoint with --resume DIR, "
            "or start a new run with another --run-dir"
        )
    last = plans[-1] if plans and not spiked else None
    if last and last.resume:
        raise CheckpointError(
            f"{root}: no complete checkpoint is left, although attempt {last.attempt} of this run continued from step "
            f"{last.step:,} ({last.resume}): restore that checkpoint, name another checkpoint with --resume DIR, or "
            "start a new run with another --run-dir"
        )


def say_reading(folder: Path | None) -> None:
    """Print a line on stderr before a whole checkpoint is read and verified, if it is so large that this takes long."""
    size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) if folder else 0
    if size > _SLOW_TO_READ:
        click.echo(f"{folder}: reading its {size / 1e9:,.0f} GB, to see whether it is whole", err=True)


def _named_checkpoint(resume: str, root: Path) -> CheckpointInfo:
    """Return the iteration that --resume names; an iteration without seals is accepted, because the user named it."""
    folder = one_iteration(resume, ["auto", *map(str, root.glob("iteration_*"))])
    say_reading(folder)
    reason = fault(folder)
    if reason and any(map(is_sealed, [folder, *iterations(folder.parent)])):
        raise CheckpointError(
            f"--resume {resume}: this is not a complete checkpoint: {reason}; --resume auto takes the newest complete "
            "checkpoint"
        )
    if reason:
        click.echo(f"{folder}: this checkpoint has no seals, so nothing shows whether it is complete", err=True)
    return CheckpointInfo(folder, step_in(folder), named=True)


def step_in(folder: Path) -> int:
    """Return the training step of a checkpoint that a user names.

    The step is taken from the folder's name or, if somebody renamed the folder (as `set_aside` does), from the files
    in it; the result is -1 if neither states the step.
    """
    number = iteration(folder)
    step = saved_step(folder) if number < 0 else number
    return -1 if step is None else step


def one_iteration(resume: str, known: Sequence[str] = ()) -> Path:
    """Return the checkpoint folder that the option --resume names; raise CheckpointError if this is not exactly one
    checkpoint.
    """
    folder = Path(resume).absolute()
    try:
        if not folder.is_dir():
            known = [*known, *map(str, Path(resume).parent.glob("iteration_*"))]
            kind = "this is a file; name the folder that it is in" if folder.exists() else "there is no such folder"
            raise CheckpointError(f"--resume {resume}: {kind}{did_you_mean(resume, known)}")
        inside = [*iterations(folder), *iterations(folder / "checkpoint")]
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(f"--resume {resume}: this folder cannot be read ({error.strerror})") from None
    if inside:
        raise CheckpointError(f"--resume {resume}: the folder holds checkpoints; name one of them, such as {inside[0]}")
    if "common.json" not in names or not any(MODEL_FILE.search(name) for name in names):
        raise CheckpointError(
            f"--resume {resume}: this is not a checkpoint, because a checkpoint (such as "
            "RUN/checkpoint/iteration_00000100) holds common.json and *-model-*.safetensors; to begin a new run with "
            "other weights, name them in checkpoint.load_path"
        )
    return folder


def _recipe_of_run(recipe: Recipe, run_dir: Path, checkpoint: Path) -> Path:
    """Return the path of the effective recipe of the run that saved `checkpoint`, which may be this run or another; a
    command that wrote `checkpoint` elsewhere, perhaps in the folder of another run, has kept the recipe in it.
    """
    if lies_in(checkpoint, save_path(recipe)):
        return run_dir / "recipe.yaml"
    beside, kept = checkpoint.parent.parent / "recipe.yaml", checkpoint / KEPT
    elsewhere = kept.exists() and (
        not beside.exists() or load_recipe(kept).get("output_dir") != load_recipe(beside).get("output_dir")
    )
    return kept if elsewhere else beside


def keep_cost(recipe: Recipe, run_dir: Path, checkpoint: Path) -> None:
    """Change `recipe` in place so that `plugins.attention_balance` keeps the costs of a sample with which the run that
    saved `checkpoint` was planned, even if FLOPs are counted in another way now.
    """
    stored = _recipe_of_run(recipe, run_dir, checkpoint)
    if stored.exists():
        for line in keep_sample_cost(recipe, load_recipe(stored)):
            click.echo(line, err=True)


def _these(changes: Sequence[str]) -> str:
    return "this change" if len(changes) == 1 else "these changes"


def check_data_order(recipe: Recipe, run_dir: Path, checkpoint: CheckpointInfo) -> None:
    """Raise CheckpointError if the run would read the data in another order after `checkpoint` than before, or if its
    model would compute something else from the same weights.

    Other data at the same path also counts as another order.
    """
    stored = _recipe_of_run(recipe, run_dir, checkpoint.path)
    if not stored.exists():
        click.echo(f"{stored} is missing, so it is unknown whether the order of the data stays the same", err=True)
        return
    before = load_recipe(stored)
    own = made(checkpoint.path).get("skipped")
    if own is not None and guard_is_on(before):  # what this very checkpoint left out; the file may be an attempt older
        before["plugins"]["spike_guard"] = {**(before["plugins"]["spike_guard"] or {}), "skipped": own}
    _refuse_cut_averages(before, recipe, checkpoint)
    refuse_other_scale(before, recipe, checkpoint.path)
    if changed := changed_settings(before, recipe):
        raise CheckpointError(
            f"{checkpoint.path}: the recipe changes settings of the model, compared with the recipe with which these "
            f"weights were trained ({stored}): {'; '.join(changed)}. Undo {_these(changed)}, or start a new run from "
            f"the weights: --run-dir ANOTHER --set checkpoint.load_path={checkpoint.path}, without --resume"
        )
    batch = global_batch_of(checkpoint.path)  # the file may be of a later attempt with another one
    found = differences(before, recipe, checkpoint.step, batch) or replaced(stored.parent, recipe)
    if found:
        raise CheckpointError(
            f"going on from step {checkpoint.step} would repeat some samples and skip others, because the order of the "
            f"samples differs from that of {stored}: {'; '.join(found)}. Undo {_these(found)}, or start a new run from "
            f"the weights: --run-dir ANOTHER --set checkpoint.load_path={checkpoint.path}, without --resume"
        )


def _refuse_cut_averages(before: Recipe, recipe: Recipe, checkpoint: CheckpointInfo) -> None:
    """Raise CheckpointError if an average of PmaAdamW, which `before` has begun, would end at another length in
    `recipe`.

    Every `fused_num` x `interleave_step` steps the average takes the place of the weights, and begins at zero again.
    The sum of another number of weights is not their average. MindFormers counts steps of the recipe's own batch.
    """
    if any((each.get("optimizer") or {}).get("type") != "PmaAdamW" for each in (before, recipe)):
        return
    old, new = (
        [each["optimizer"].get(key, default) for key, default in AVERAGING.items()] for each in (before, recipe)
    )
    first, late = checkpoint.step, int(bool(recipe["optimizer"].get("use_fused")))  # the fused one counts from -1
    batch = global_batch_of(checkpoint.path) or View(before).global_batch
    second = int((first - late) * (batch / View(recipe).global_batch)) + late
    held, taken = first % (old[0] * old[1]) // old[1], second % (new[0] * new[1]) // new[1]
    if held != taken or (held and old != new):
        raise CheckpointError(
            f"{checkpoint.path}: the checkpoint holds the sum of {held:,} of the {old[0]:,} sets of weights that "
            f"PmaAdamW averages (optimizer.interleave_step {old[1]:,}), but this recipe would count it as the sum "
            f"of {taken:,} of {new[0]:,} sets (interleave_step {new[1]:,}), so the average would be wrong; keep the "
            "optimizer's settings and the global batch, or start a new run from the weights: --run-dir ANOTHER "
            f"--set checkpoint.load_path={checkpoint.path}, without --resume"
        )


def steps_done(recipe: Recipe, checkpoint: CheckpointInfo) -> int:
    """Return after how many steps of `recipe` a run goes on from a checkpoint, as MindFormers counts them: the recipe
    may have another global batch than the run that saved the checkpoint.
    """
    batch = global_batch_of(checkpoint.path)
    return int(checkpoint.step * (batch / View(recipe).global_batch)) if batch else checkpoint.step


def complete(recipe: Recipe, checkpoint: CheckpointInfo) -> str | None:
    """Return a sentence that says that no steps are left to train after `checkpoint`; return None if steps are left, or
    if this cannot be determined.
    """
    wanted, done = all_steps(recipe), steps_done(recipe, checkpoint)
    if not wanted or done < wanted:
        return None
    return (
        f"the run is complete: {checkpoint.path} holds step {done:,} of {wanted:,}; nothing is started (a larger "
        "--steps trains on)"
    )


def check_share(checkpoint: CheckpointInfo, worker: int, workers: int) -> None:
    """Raise CheckpointError if this worker's part of a checkpoint does not match its recorded checksums (its seal);
    together the workers read every file once.

    A checkpoint without seals is accepted, because the user has named it.
    """
    reason = fault(checkpoint.path, (worker, workers)) if is_sealed(checkpoint.path) else None
    if reason:
        raise CheckpointError(
            f"{checkpoint.path}: this is not a complete checkpoint: {reason}; name an older checkpoint"
        )


def check_save_path(root: Path, resume: bool, force: bool) -> None:
    """Raise CheckpointError if a new run would save among the checkpoints of another run."""
    # also one that is not in its place yet, or that a killed launch was setting aside: `adopt` would put it there
    whole = (folder for folder in unfinished(root) if fault(folder, checksums=False) is None)
    moved = filter(is_sealed, unfinished(root, MOVING))
    found = next(chain(filter(is_sealed, iterations(root)), whole, moved), None)
    if found and not (resume or force):
        raise CheckpointError(
            f"checkpoint.save_path: {root} holds checkpoints of another run ({found.name}), and --resume auto would "
            "later load them as if this run had written them; name another folder, continue from these checkpoints "
            f"with --resume auto (in a script, set RESUME={found}), or remove these checkpoints with --force"
        )


def clear_save_path(root: Path) -> None:
    """Remove the checkpoints that an earlier run has completed (sealed) and its unfinished saves,
    and nothing else.
    """
    for folder in [*filter(is_sealed, iterations(root)), *root.glob(f"{SAVING}*"), *root.glob(f"{MOVING}*")]:
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    renew_tracker(root)  # which may name what is gone


def check_kept(recipe: Recipe, run_dir: Path, root: Path) -> None:
    """Raise CheckpointError if --force would remove the weights with which the new run is to begin."""
    path = View(recipe).get(("checkpoint", "load_path"))
    if not isinstance(path, str) or not path:
        return
    wanted = real_path(loaded_from(Path(path)))
    parts = (run_dir / part for part in PARTS)
    removed = [*(part for part in parts if not part.is_symlink()), *filter(is_sealed, iterations(root))]
    if any(each in (wanted, *wanted.parents) for each in map(real_path, removed)):
        raise CheckpointError(
            f"checkpoint.load_path: {path}: --force would remove these weights, with which the new run is to begin; "
            "write the new run to another --run-dir"
        )


def take_stock(run_dir: Path, root: Path) -> None:
    """Move complete checkpoints of ended attempts into `root` (`adopt`). If the run in `run_dir` has gone back to an
    older checkpoint, also rename the newer checkpoints, so that no resume finds them. Call this function before looking
    for the newest checkpoint.

    A host that died or was held up while it set a checkpoint aside had taken its name already; `adopt` gives the name
    back, and the checkpoint would be the newest one. An attempt that saved elsewhere has left nothing behind here.
    """
    adopt(root)
    plans = (attempt.plan for attempt in reversed(read_attempts(run_dir)) if attempt.plan)
    plan = next((plan for plan in plans if plan.branch and plan.resume), None)
    if plan is None or plan.resume is None or not (file := recipe_file(run_dir, plan)).exists():
        return
    taken = Path(plan.resume)
    known = iteration(taken) >= 0 or taken.exists()  # else nothing says which step it had
    if known and real_path(save_path(load_recipe(file))) == real_path(root):
        leave_behind(root, taken, plan.attempt, unnamed=False)


def leave_behind(root: Path, checkpoint: Path, attempt: int, unnamed: bool = True) -> None:
    """Rename the checkpoints of earlier attempts that are newer than `checkpoint`, from which `attempt` continues, so
    that no resume finds these newer checkpoints.

    Checkpoints of that attempt and of later attempts are not changed, because several nodes may call this function, one
    of them late. Checkpoints whose seals name no attempt come from workers that a script or msrun has started; they
    were saved before `attempt` (`unnamed`), or after it began.
    """

    def earlier(folder: Path) -> bool:
        name = made(folder).get("attempt")
        return number_of(name) < attempt if name else unnamed

    for folder in filter(earlier, later_than(root, checkpoint)):
        if aside := set_aside(folder, earlier):
            click.echo(f"{folder} is of the run that is left behind here: renamed {aside.name}", err=True)
