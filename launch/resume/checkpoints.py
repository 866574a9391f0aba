"""This module finds the checkpoint that a run goes on from, checks it, and keeps checkpoints of different runs apart.

`check_model` checks before any worker starts whether a checkpoint is complete and belongs to the recipe's model, from
the headers of its files. MindFormers 1.9.0 skips tensors that it does not find (`checkpoint/reshard.py`: "No source
parameters found ..., skipping") and leaves out tensors that it does not know: a run would go on with fresh weights,
experts or moments, and only a log would say so.

`find_checkpoint` finds the checkpoint from which a run goes on: the newest complete one, or the one that the user
names. `check_data_order` and `complete` check whether the run may go on from it, and whether any step is left to train.
`check_save_path`, `clear_save_path` and `leave_behind` keep checkpoints of other runs apart.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from launch.resume.data import all_steps, differences, guard_is_on, replaced
from plugins.errors import CheckpointError, RecipeError, did_you_mean
from plugins.lines import number_of
from plugins.lora.plan import KEY as LORA
from plugins.lora.plan import Settings, adapters_of, is_adapter
from plugins.sealed_checkpoint.plan import MOVING, SAVING, fault, made, renew_tracker, unfinished
from plugins.settings import value_at
from plugins.spike_guard.ledger import read_ledger
from tools.checkpoint.scan import (
    CheckpointInfo,
    is_sealed,
    iteration,
    iterations,
    later_than,
    saved_step,
    scan_checkpoints,
    set_aside,
)
from tools.checkpoint.stored import (
    METADATA,
    OPTIMIZERS,
    TRACKER,
    Stored,
    kind_of,
    loaded_from,
    moments_of,
    open_stored,
    refuse_moved,
)
from tools.checkpoint.tensor_files import read_headers
from tools.files.atomic import real_path
from tools.layout.resolve import keep_sample_cost
from tools.model import model_of, parameters
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.runs.attempts import read_attempts
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.convert_plan import model_of as weights_model_of
from tools.weights.hugging_face_names import table

_LISTED = 3  # tensors in a message
_WEIGHTS_FILE = re.compile(r"(^|-)model-\d+-\d+\.safetensors$")  # a rank's weights, MindFormers' prefix before it
_SLOW_TO_READ = 1 << 30  # bytes that take seconds to read
_HOW_TO_BEGIN = (
    "--set checkpoint.load_path=FOLDER names a run's checkpoint folder (launch/quickstart makes output/quickstart/"
    'checkpoint) or what tc3 weights convert wrote; --set checkpoint.load_path="" begins with random weights'
)
Shapes = dict[str, tuple[int, ...]]  # name -> shape of the whole tensor


def check_model(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError if a resume of `recipe` from `folder` would lose tensors, mix them up or need tensors that
    are not there.

    The error is raised if experts have moved and the recipe does not record placements; if a slice is missing, or a
    file is cut short; or if a weight, or the optimizer's state of it, is missing, has another shape, or does not belong
    to the model.

    A line reports routers' biases that stock MindFormers has saved from a sharded graph, and will not load.

    Models whose tensors are not known by name are compared by their number of weights; a model that `tc3 check` does
    not count is not compared. Their sealed files were compared with checksums.
    """
    refuse_moved(folder, View(recipe).keeps_placements)
    wanted = _shapes_of(recipe)
    if wanted is not None:
        stored = open_stored(folder)
        held = _shapes_in(stored)
        _refuse_other_weights(folder, wanted, held)
        _say_lost_biases(stored)
        optimizer = recipe.get("optimizer") or {}
        if optimizer.get("type") in OPTIMIZERS:
            _refuse_fresh_moments(folder, wanted, held, optimizer)
        return
    if not is_sealed(folder):
        _shapes_in(open_stored(folder))
    number, own = weights_in(folder), weights_of(recipe)
    if number and own and number != own:
        raise CheckpointError(
            f"{folder}: the checkpoint holds {number:,} weights, but the recipe's model has {own:,}: "
            "this is a checkpoint of another model; go on with the recipe that saved it (recipe.yaml in its run's "
            "folder)"
        )


def _shapes_in(stored: Stored) -> Shapes:
    """Return the shapes of the tensors of a checkpoint of any number of ranks; raise an error if a slice is missing.

    Raises:
        CheckpointError: one is not, or has another shape than metadata.json says.
    """
    own = {name: stored.files[min(files.values())][name].shape for name, files in stored.unlisted.items()}
    return {**own, **{name: tensor.shape for name, tensor in stored.tensors.items()}}


def _shapes_of(recipe: Recipe) -> Shapes | None:
    """Return the weights that MindFormers gives the recipe's model, and the routers' biases; None where that is not
    known.
    """
    try:
        fields = convert(View(recipe), load_schema()).fields
        entries = table(weights_model_of(recipe))
        lora = Settings.read(chosen) if (chosen := value_at(recipe, LORA, False)) is not False else None
    except (RecipeError, TypeError, KeyError, ValueError):
        return None
    trained = _count_trained((each.mindformers, each.shape) for each in entries if each.trained)
    if trained != weights_of(recipe):
        return None  # a variant that the table does not have, such as tied embeddings
    biased = bool(fields.get("moe_router_enable_expert_bias"))
    shapes = {each.mindformers: each.shape for each in entries if each.trained or biased}
    return {**shapes, **(adapters_of(shapes, lora) if lora else {})}


def _refuse_other_weights(folder: Path, wanted: Shapes, held: Shapes) -> None:
    """Compare weights by name and shape; of the balance of routers, only that it is there."""
    wrong = [
        f"{name} is {list(held[name])}, the recipe's model has {list(shape)}"
        for name, shape in wanted.items()
        if name in held and held[name] != shape
    ]
    unknown = [name for name in held if kind_of(name) == "weights" and name not in wanted]
    wrong += [f"the recipe's model has no {name}" for name in unknown]
    wrong += [f"no {name}, which the recipe's model has" for name in wanted if name not in held]
    if wrong:
        raise CheckpointError(
            f"{folder}: this is a checkpoint of another model: {_listed(wrong)}; go on with the recipe that saved it "
            "(recipe.yaml in its run's folder)"
        )


def _say_lost_biases(stored: Stored) -> None:
    """Print that the routers' biases will not be loaded if a checkpoint does not list them;
    plugins/sealed_checkpoint/router_state.py lists them in what this repository saves.
    """
    lost = sorted(name for name in stored.unlisted if name.endswith(".expert_bias"))
    if lost:
        more = f", and of {len(lost) - 1} more routers" * (len(lost) > 1)
        click.echo(
            f"{stored.folder}: {METADATA} does not list {lost[0]}{more}, so that MindFormers does not load it: such "
            "biases begin at zero again",
            err=True,
        )


def _refuse_fresh_moments(folder: Path, wanted: Shapes, held: Shapes, optimizer: Mapping[str, Any]) -> None:
    """Raise CheckpointError if moments are missing, because MindFormers would go on with moments of zero."""
    weights = {name: shape for name, shape in wanted.items() if kind_of(name) == "weights"}
    if adapters := {name: shape for name, shape in weights.items() if is_adapter(name)}:
        weights = adapters  # the others are frozen
    moments = {each: shape for name, shape in weights.items() for each in moments_of(optimizer, name, len(shape))}
    wrong = [f"no {name}" for name in moments if name not in held]
    wrong += [
        f"{name} is {list(held[name])}, its weight {list(shape)}"
        for name, shape in moments.items()
        if held.get(name, shape) != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{folder}: moments of the optimizer are missing or have another shape: {_listed(wrong)}; was it saved "
            "with checkpoint.no_save_optim, or with another optimizer? To start a new run from its weights only, "
            f"write --set checkpoint.load_path={folder}, without --resume"
        )


def _listed(wrong: Sequence[str]) -> str:
    more = len(wrong) - _LISTED
    return "; ".join(wrong[:_LISTED]) + (f"; and {more:,} more tensors" if more > 0 else "")


def weights_of(recipe: Recipe) -> int | None:
    """Return the number of trained parameters of the recipe's model; None for a model that `tc3 check` does not
    count.
    """
    try:
        return parameters(model_of(convert(View(recipe), load_schema()).fields))
    except (TypeError, KeyError, ValueError):
        return None


def weights_in(folder: Path) -> int | None:
    """Return the number of trained parameters in a checkpoint of MindFormers' format, over all ranks; None if the
    checkpoint does not say.

    Several ranks have metadata.json with all shapes, one has none, but all weights in its file.
    """
    try:
        whole = folder / METADATA
        if whole.exists():
            shapes = json.loads(whole.read_text(encoding="utf-8"))["state_dict_metadata"]
            return _count_trained((name, each["global_shape"]) for name, each in shapes.items())
        (file,) = folder.glob("*-model-0000000-0000001.safetensors")
        return _count_trained((name, each.shape) for name, each in read_headers(file).items())
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever reads the files says what is wrong with them


def _count_trained(shapes: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Return the number of elements in the model's own weights, without adapters."""
    return sum(math.prod(shape) for name, shape in shapes if kind_of(name) == "weights" and not is_adapter(name))


def save_path(recipe: dict[str, Any]) -> Path:
    """Return the folder in which an effective recipe's checkpoints are saved."""
    return Path(recipe["checkpoint"]["save_path"]).absolute()


def find_checkpoint(
    resume: str,
    root: Path,
    unfit: Callable[[Path, int], str | None] = lambda folder, step: None,
    otherwise: str | None = None,
) -> CheckpointInfo | None:
    """Return the iteration to go on from; None if `auto` finds no complete one. Print which checkpoints are skipped,
    and why.

    Args:
        resume: `auto`, or a folder; root: the root of the run's own iterations; unfit: see `scan_checkpoints`.
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
    otherwise None.
    """
    for attempt in reversed(read_attempts(run_dir)):
        resume = attempt.plan.resume if attempt.plan else None
        if resume and real_path(Path(resume).parent) != real_path(root):
            return resume
    return None


def refuse_scratch(run_dir: Path, root: Path) -> None:
    """Raise CheckpointError if a run that has started from a checkpoint before would now begin with random weights.

    A run may be started again while nobody watches, so a user who wants random weights must name a new folder. Only
    plugins.spike_guard goes back to the beginning by itself, after a spike before the first good checkpoint.
    """
    if read_ledger(run_dir):
        return
    last = next((attempt.plan for attempt in reversed(read_attempts(run_dir)) if attempt.plan), None)
    if last and last.resume:
        raise CheckpointError(
            f"{root}: no complete checkpoint is left, although attempt {last.attempt} of this run continued from "
            f"step {last.step:,} ({last.resume}): restore that checkpoint, name another one with --resume DIR, or "
            "begin anew with another --run-dir"
        )


def say_reading(folder: Path | None) -> None:
    """Print on stderr that a checkpoint is read completely, if this takes a while."""
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
            "one"
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
    """Return the folder that `resume` names; raise CheckpointError if it is not exactly one checkpoint."""
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
        raise CheckpointError(
            f"--resume {resume}: the folder holds several checkpoints; name one of them, such as {inside[0]}"
        )
    if "common.json" not in names or not any(_WEIGHTS_FILE.search(name) for name in names):
        raise CheckpointError(
            f"--resume {resume}: this is not a checkpoint, because a checkpoint (such as "
            "RUN/checkpoint/iteration_00000100) holds common.json and *-model-*.safetensors; to begin a new run with "
            "other weights, name them in checkpoint.load_path"
        )
    return folder


def _recipe_of_run(recipe: Recipe, run_dir: Path, checkpoint: Path) -> Path:
    """Return the path of the effective recipe of the run that saved `checkpoint`, which may be this run or another."""
    if real_path(checkpoint).parent != real_path(save_path(recipe)):
        return checkpoint.parent.parent / "recipe.yaml"
    return run_dir / "recipe.yaml"


def keep_cost(recipe: Recipe, run_dir: Path, checkpoint: Path) -> None:
    """Change `recipe` in place so that `plugins.attention_balance` keeps the costs of a sample with which the run that
    saved `checkpoint` was planned, even if FLOPs are counted in another way now.
    """
    stored = _recipe_of_run(recipe, run_dir, checkpoint)
    if stored.exists():
        for line in keep_sample_cost(recipe, load_recipe(stored)):
            click.echo(line, err=True)


def check_data_order(recipe: Recipe, run_dir: Path, checkpoint: CheckpointInfo) -> None:
    """Raise CheckpointError if the run would read the data in another order after `checkpoint` than before.

    Other data at the same path counts, too.
    """
    stored = _recipe_of_run(recipe, run_dir, checkpoint.path)
    if not stored.exists():
        click.echo(f"{stored} is missing: whether the order of the data stays the same cannot be told", err=True)
        return
    before = load_recipe(stored)
    own = made(checkpoint.path).get("skipped")
    if own is not None and guard_is_on(before):  # what this very checkpoint left out; the file may be an attempt older
        before["plugins"]["spike_guard"] = {**(before["plugins"]["spike_guard"] or {}), "skipped": own}
    found = differences(before, recipe, checkpoint.step) or replaced(stored.parent, recipe)
    if found:
        raise CheckpointError(
            f"going on from step {checkpoint.step} would repeat some samples and skip others, because the samples' "
            f"order differs from that of {stored}: {'; '.join(found)}. Undo this change, or start a new run from the "
            f"weights: --run-dir ANOTHER --set checkpoint.load_path={checkpoint.path}, without --resume"
        )


def complete(recipe: Recipe, checkpoint: CheckpointInfo) -> str | None:
    """Return a sentence that says that no steps are left to train after `checkpoint`; None if steps are left, or if
    this cannot be determined.
    """
    wanted, done = all_steps(recipe), checkpoint.step
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        common = json.loads((checkpoint.path / "common.json").read_text(encoding="utf-8"))
        done = int(done * (common["global_batch_size"] / View(recipe).global_batch))  # as MindFormers counts them
    if not wanted or done < wanted:
        return None
    return f"the run is complete: {checkpoint.path} holds step {done:,} of {wanted:,}; nothing is started"


def check_share(checkpoint: CheckpointInfo, worker: int, workers: int) -> None:
    """Raise CheckpointError if this worker's part of a checkpoint does not match its recorded checksums (its seal);
    together the workers read every file once.

    A checkpoint without seals is accepted, because the user named it.
    """
    reason = fault(checkpoint.path, (worker, workers)) if is_sealed(checkpoint.path) else None
    if reason:
        raise CheckpointError(f"{checkpoint.path}: this is not a complete checkpoint: {reason}; name an older one")


def check_load_path(recipe: Recipe) -> None:
    """Raise CheckpointError if a new run is to begin with weights of a folder that does not exist or holds none, with
    experts in an order that the recipe does not know, or with adapters beside the weights of another model.
    """
    path = View(recipe).get(("checkpoint", "load_path"))
    if not isinstance(path, str) or not path or Path(path).is_file():
        return  # one file is of MindFormers' legacy format
    try:
        names = {each.name for each in Path(path).iterdir()}
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.load_path: {path}: this is not a folder that can be read ({error.strerror}); {_HOW_TO_BEGIN}"
        ) from None
    if TRACKER not in names and not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(
            f"checkpoint.load_path: {path}: the folder holds no weights (*.safetensors); {_HOW_TO_BEGIN}"
        )
    refuse_moved(Path(path), View(recipe).keeps_placements)
    if value_at(recipe, LORA, False) is not False:
        _refuse_other_base(recipe, loaded_from(Path(path)))


def _refuse_other_base(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError if weights that `plugins.lora` freezes are not in `folder`: MindFormers would leave them
    random, and no training would mend that.
    """
    wanted, held = _shapes_of(recipe) or {}, _shapes_in(open_stored(folder))
    frozen = {name: shape for name, shape in wanted.items() if kind_of(name) == "weights" and not is_adapter(name)}
    wrong = [
        f"{name} is {list(held[name])}, the recipe's model has {list(shape)}" if name in held else f"no {name}"
        for name, shape in frozen.items()
        if held.get(name) != shape
    ]
    if wrong:
        raise CheckpointError(
            f"checkpoint.load_path: {folder}: these are not the weights of the recipe's model, of which {LORA} trains "
            f"only adapters: {_listed(wrong)}; tc3 weights convert makes the right weights from a Hugging Face folder"
        )


def check_save_path(root: Path, resume: bool, force: bool) -> None:
    """Raise CheckpointError if a new run would save among the checkpoints of another run."""
    # also one that is not in its place yet, or that a killed launch was setting aside: `adopt` would put it there
    whole = (folder for folder in unfinished(root) if fault(folder, checksums=False) is None)
    moved = filter(is_sealed, root.glob(f"{MOVING}*/iteration_*"))
    found = next(chain(filter(is_sealed, iterations(root)), whole, moved), None)
    if found and not (resume or force):
        raise CheckpointError(
            f"checkpoint.save_path: {root} holds checkpoints of another run ({found.name}), and --resume auto would "
            "later load them as if this run had written them; name another folder, go on from them with --resume auto "
            f"(in a script, set RESUME={found}), or remove them with --force"
        )


def clear_save_path(root: Path) -> None:
    """Remove the checkpoints that an earlier run has completed (sealed) and its unfinished saves,
    and nothing else.
    """
    for folder in [*filter(is_sealed, iterations(root)), *root.glob(f"{SAVING}*"), *root.glob(f"{MOVING}*")]:
        shutil.rmtree(folder)
    renew_tracker(root)  # which may name what is gone


def leave_behind(root: Path, checkpoint: Path, attempt: int) -> None:
    """Set aside the checkpoints of earlier attempts that are newer than `checkpoint`, from which `attempt` goes on.

    Checkpoints of that attempt and of later ones stay, because several nodes may do this, one of them late.
    """

    def earlier(folder: Path) -> bool:
        return number_of(made(folder).get("attempt")) < attempt

    for folder in filter(earlier, later_than(root, checkpoint)):
        if aside := set_aside(folder, earlier):
            click.echo(f"{folder} is of the run that is left behind here: renamed {aside.name}", err=True)
