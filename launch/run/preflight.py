"""This module finds errors before anything starts: in devices, data, disk and the run's folder."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import psutil

from launch.run.msrun import ROOT, on_ascend, worker_count
from plugins.errors import CheckpointError, ClusterError, DataError, RecipeError, did_you_mean
from plugins.held_out_loss.plan import paths_of
from plugins.sealed_checkpoint.plan import fault
from plugins.semi_auto_cpu.chosen import chosen
from tools.check.check import check_recipe
from tools.check.differences import modelled
from tools.check.plugins import check_dispatch
from tools.checkpoint.scan import is_sealed, iterations
from tools.data.index import read_blend
from tools.data.outputs import read_sidecar
from tools.files.atomic import becomes
from tools.files.locks import LOCK, only_command_in, refuse_busy
from tools.hardware.units import GIB
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.readings import CURVE

MOST_FINDINGS = 5
MIN_FREE = 1 << 30  # bytes a run must find free for logs and checkpoints
# what a run's folder holds that --force removes, in this order: as long as something is left, recipe.yaml says that the
# folder holds a run, and the ledger of left-out samples, by which checkpoints are judged, outlives these
PARTS = (
    *(CURVE, "logs", "metrics", "strategy", "checkpoint", "attempts"),
    *("skipped.json", "data.json", "recipe.yaml"),
)
AGENTS = "agents of tc3 agent"
WORKER_MEMORY = 1 * GIB  # of one worker that compiles and runs a toy's sharded graph: 0.5 to 0.9 were seen
_DATA_PATH = "train_dataset.data_loader.config.data_path"
_DATA_FILES = "train_dataset.data_loader.data_files"
_HELD_OUT = "plugins.held_out_loss.data_path"


def check_machine(recipe: Mapping[str, Any], here: int | None = None) -> None:
    """Raise ClusterError when the recipe is for Ascend and this host lacks its NPUs (/dev/davinci*).

    `here`: the number of workers on this host, if the run has several hosts.
    """
    if not on_ascend(recipe):
        return
    wanted = here or worker_count(recipe)
    visible = len(list(Path("/dev").glob("davinci[0-9]*")))
    if visible < wanted:
        mini = os.path.relpath(ROOT / "recipes" / "mini" / "pretrain.yaml")
        raise ClusterError(
            f"context.device_target: Ascend: this recipe needs {wanted} NPU{'s' * (wanted > 1)}, but this machine has "
            f"{visible or 'none'} (/dev/davinci*); on this machine, train a CPU recipe: tc3 train {mini}"
        )


def check_memory(recipe: Mapping[str, Any]) -> None:
    """Raise ClusterError if a sharded run on CPU needs more memory than this host has, because the kernel would kill
    the run.
    """
    if not chosen(recipe):
        return
    wanted, free = worker_count(recipe) * WORKER_MEMORY, psutil.virtual_memory().available
    if wanted > free:
        raise ClusterError(
            f"{worker_count(recipe)} workers take about {wanted / GIB:.0f} GiB while they compile, but only "
            f"{free / GIB:.1f} GiB are free: choose smaller parallel sizes, or, with --mini --parallel, a smaller "
            "number for --workers"
        )


def check_sound(recipe: Recipe) -> None:
    """Raise RecipeError with the errors of `tc3 check`, because the run would fail, or would train something else than
    the recipe says.

    Raise ClusterError if the ranks of an expert-parallel group would wait for each other for ever. A warning in a model
    card against training a recipe is only printed, because a user may want to train the recipe at toy size or with its
    plugins.
    """
    if (mode := recipe.get("run_mode") or "train") not in ("train", "finetune", "predict_with_train_model"):
        raise RecipeError(
            f"{recipe.source}: run_mode: {mode}: this mode is not for training, but MindFormers would train "
            "nevertheless, with the settings of this mode; write train or finetune"
        )
    if said := modelled(recipe):
        click.echo(said, err=True)
    errors = check_recipe(recipe).errors
    if errors:
        shown = [str(error) for error in errors[:MOST_FINDINGS]]
        more = len(errors) - len(shown)
        rest = f"the recipe has {more} more error{'s' * (more > 1)}; tc3 check lists them"
        raise RecipeError("\n     ".join([*shown, *[rest] * bool(more)]))
    check_dispatch(recipe)


def check_data(recipe: Mapping[str, Any]) -> None:
    """Raise DataError if a Megatron dataset of the recipe has no .bin or .idx file; the error says how to make the
    missing file.

    The function also raises DataError if two datasets of the recipe, including the held-out dataset, are known to use
    different tokenizers, or if a file of instructions is missing.
    """
    _check_instructions(recipe)
    loader = (recipe.get("train_dataset") or {}).get("data_loader") or {}
    if loader.get("type") != "BlendedMegatronDatasetDataLoader":
        return
    prefixes = data_prefixes((loader.get("config") or {}).get("data_path"))
    datasets = [(_DATA_PATH, prefix) for prefix in prefixes] + [(_HELD_OUT, prefix) for prefix in held_out(recipe)]
    for key, prefix in datasets:
        missing = [prefix + end for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
        if missing:
            used = {os.path.normpath(each) for _, each in datasets if key == _HELD_OUT}  # training data is not held out
            known = {str(index.with_suffix("")) for index in Path(prefix).parent.glob("*.idx")} - used
            hint = did_you_mean(os.path.normpath(prefix), sorted(known))
            make = _hold_out(prefix, prefixes, recipe) if key == _HELD_OUT else _prepare(prefix, recipe)
            raise DataError(f"{key}: {' and '.join(missing)} cannot be found{hint}; make the dataset with: {make}")
    _say_trained(prefixes, recipe)
    _check_tokenizers(datasets)


def _say_trained(training: Iterable[str], recipe: Mapping[str, Any]) -> None:
    """Print on stderr that the held-out data is also trained on; its loss then says nothing about other text."""
    used = set(map(os.path.realpath, training))
    if same := next((name for name in held_out(recipe) if os.path.realpath(name) in used), None):
        click.echo(
            f"{_HELD_OUT}: {same} is also in the training data, so the held-out loss says nothing about unseen text",
            err=True,
        )


def _check_instructions(recipe: Mapping[str, Any]) -> None:
    """Check the files of HFDataLoader if the recipe names them one by one; everything else that `datasets` can read is
    not checked.
    """
    files = View(Recipe(recipe)).instruction_files
    if not files:
        return
    named = [(_DATA_FILES, file) for file in files] + [(_HELD_OUT, file) for file in held_out(recipe)]
    for key, file in named:
        if "://" not in file and not any(letter in file for letter in "*?[") and not Path(file).is_file():
            known = [str(other) for other in Path(file).parent.glob(f"*{Path(file).suffix}")]
            output = os.path.normpath(file).removesuffix(".jsonl").removesuffix("_heldout")
            share = " --held-out 0.05" if held_out(recipe) else ""
            make = f"tc3 data instructions --input stdlib{share} --output {shlex.quote(output)}"
            hint = did_you_mean(os.path.normpath(file), known)
            raise DataError(
                f"{key}: {file} was not found{hint}; name a file with your own conversations, or make a file of "
                f"examples: {make}"
            )
    _say_trained(files, recipe)


def _check_tokenizers(datasets: list[tuple[str, str]]) -> None:
    """Compare the tokenizers that `tc3 data prepare` recorded for each (key, prefix); data of other programs has no
    such record and is not compared.
    """
    known = [(key, prefix, mark) for key, prefix in datasets if (mark := _fingerprint(prefix))]
    for key, prefix, mark in known[1:]:
        _, first, wanted = known[0]
        if mark != wanted:
            raise DataError(
                f"{key}: {prefix} was prepared with another tokenizer ({mark[:12]}) than {first} ({wanted[:12]}), so "
                "the same token ids stand for different text; prepare both with one tokenizer: tc3 data prepare "
                "--tokenizer FOLDER"
            )


def _fingerprint(prefix: str) -> str | None:
    """Return the fingerprint of a dataset's tokenizer; None if the dataset does not record it."""
    try:
        return str(read_sidecar(prefix)["tokenizer"]["fingerprint"])
    except (DataError, OSError, KeyError, TypeError):
        return None


def held_out(recipe: Mapping[str, Any]) -> list[str]:
    """Return the prefixes or the file that plugins.held_out_loss reads; the result is empty if the plugin is off."""
    settings = (recipe.get("plugins") or {}).get("held_out_loss")
    return list(paths_of(settings.get("data_path"))) if isinstance(settings, dict) else []


def data_prefixes(data_path: Any) -> list[str]:
    """Return the prefixes in a `data_path`: a list of prefixes, or a list in which weights and prefixes alternate
    (MindFormers distinguishes these two forms in the same way).
    """
    try:
        return read_blend(data_path).prefixes
    except DataError as error:
        raise RecipeError(f"{_DATA_PATH}: {error}") from None


def _prepare(prefix: str, recipe: Mapping[str, Any]) -> str:
    """Return the `tc3 data prepare` command that makes a prefix; a prefix called `stdlib` is made from Python's
    standard library.
    """
    corpus = "stdlib" if Path(prefix).name == "stdlib" else "YOUR_TEXT"
    own = os.path.normpath(f"{prefix}_heldout") in map(os.path.normpath, held_out(recipe))
    output = shlex.quote(os.path.normpath(prefix))
    return f"tc3 data prepare --input {corpus}{' --held-out 0.05' * own} --output {output}"


def _hold_out(prefix: str, training: list[str], recipe: Mapping[str, Any]) -> str:
    """Return the command that makes a held-out prefix together with the training data or from other text, or advice on
    how to train without held-out data.
    """
    if prefix.endswith("_heldout"):
        make = _prepare(prefix.removesuffix("_heldout"), recipe)
    else:  # its name is not what `--held-out` would give it
        known = [f"{os.path.normpath(each)}_tokenizer" for each in training if Path(f"{each}_tokenizer").is_dir()]
        tokenizer = f"--tokenizer {shlex.quote(known[0]) if known else 'FOLDER_OF_THE_TRAINING_DATA'}"
        output = shlex.quote(os.path.normpath(prefix))
        make = f"tc3 data prepare --input TEXT_NOT_TRAINED_ON {tokenizer} --output {output}"
    return f"{make}; or train without it: --set {_HELD_OUT.rpartition('.')[0]}=False"


def check_disk(folder: Path) -> None:
    """Raise ClusterError if less than `MIN_FREE` bytes are free on the disk of `folder`, or the disk is read-only."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ClusterError(f"{folder}: nothing can be written into {existing}; choose another folder")
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE:
        raise ClusterError(
            f"{folder}: {free / 1e9:.1f} GB are free, but a run needs {MIN_FREE / 1e9:.1f} GB: delete some files first"
        )


def check_run_dir(run_dir: Path, resume: bool, force: bool | None, saves: Path | None = None) -> None:
    """Raise CheckpointError if `run_dir` holds another run (unless `resume` or `force` is true) or files that are not
    those of a run.

    `force` is None if the command has no option --force. `saves`: the folder of that run's checkpoints.

    Raises:
        ClusterError: a run is in progress in one of the two (agents may join it, and get no error).
    """
    if outer := next((folder for folder in run_dir.parents if is_sealed(folder)), None):
        raise CheckpointError(
            f"{run_dir}: this folder would lie in the checkpoint {outer}, and be removed together with it; choose "
            "another --run-dir"
        )
    if force is not None:
        for folder in filter(None, (run_dir, saves)):  # two runs may have a folder of checkpoints in common
            refuse_busy(folder, _in_progress)
    try:
        names = [path.name for path in run_dir.iterdir()] if run_dir.exists() else []
    except OSError as error:
        raise CheckpointError(
            f"--run-dir {run_dir}: this is not a folder that can be read ({error.strerror}); choose another folder"
        ) from None
    if not {*names} - {LOCK}:
        return
    if "recipe.yaml" not in names:
        strange = [name for name in names if becomes(name) not in (*PARTS, LOCK)]  # also what a kill left unfinished
        if strange:
            raise CheckpointError(
                f"{run_dir}: this is not a run's folder (it holds {strange[0]}); choose another --run-dir"
            )
    elif not (resume or force):
        saved = saves is None or any(fault(folder, checksums=False) is None for folder in iterations(saves))
        ways = ["go on with --resume auto"] * saved
        ways += ["start over with --force (removes its logs, metrics and checkpoints)"] * (force is not None)
        holds = "this folder already holds a run" + ("" if saved else ", which has no complete checkpoint")
        raise CheckpointError(
            f"{run_dir}: {holds}; {', '.join([*ways, 'or ' * bool(ways) + 'choose another --run-dir'])}"
        )


def clear_run_dir(run_dir: Path) -> None:
    """Remove the files of an earlier run from its folder, and nothing else; the lock file stays, because this process
    holds it.
    """
    unfinished = [path.name for path in run_dir.iterdir() if path.name not in PARTS and becomes(path.name) in PARTS]
    for name in [*unfinished, *PARTS]:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            _clear(path)
        else:
            path.unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    """Remove a folder, or all files in it except its lock."""
    if not (folder / LOCK).exists():
        shutil.rmtree(folder)
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _in_progress(folder: Path, who: str) -> ClusterError:
    return ClusterError(
        f"{folder}: a run is in progress in this folder ({who or AGENTS}); follow it with tc3 runs watch, or choose "
        "another --run-dir"
    )


def only_run_in(*folders: Path, together: bool = False) -> AbstractContextManager[None]:
    """Hold the locks of a run's folders (`tools.files.locks`); raise ClusterError if another run holds one.

    `together`: the run is shared with the agents of other nodes, which lock out all other processes.
    """
    return only_command_in(folders, _in_progress, together)
