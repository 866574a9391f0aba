"""This module makes the effective recipe that `tc3 train` runs: it shrinks the recipe for `--mini`, applies the user's
overrides, and replaces each `auto` by a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from launch.run.preflight import check_sound
from launch.run.script import outside
from plugins.attention_balance.samples import padding_under
from plugins.batch_ramp import plan as batch_ramp
from plugins.errors import DataError, RecipeError
from plugins.held_out_loss.plan import KEY as HELD_OUT
from plugins.packed_labels.plan import KEY as PACKED
from plugins.packed_labels.plan import LOADER, PACKING
from tools.data.instructions import count_samples, read_tokenizer
from tools.layout.resolve import resolve
from tools.recipe.dump import is_of_run
from tools.recipe.findings import refusal
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.mini_strategy import WORKERS
from tools.recipe.override import also_changed, apart, apply_overrides, dotted, get_path, shared_paths, with_part
from tools.recipe.view import LOADER as LOADER_PATH
from tools.recipe.view import RUNNER, View

_WARMUP = "lr_schedule.warmup_steps"
_HANDLER = "AlpacaInstructDataHandler"
_DATA_FILES = f"{LOADER}.data_files"
_HANDLERS = (*LOADER_PATH, "handler")
_TOKENIZER = f"{LOADER}.handler.0.tokenizer.pretrained_model_dir"


@dataclass(frozen=True)
class Size:
    """A `Size` holds the values of the options --mini, --parallel and --workers.

    Attributes:
        mini: whether it is a mini recipe;
        workers: the number of workers of a mini recipe that keeps its parallel strategy; None for any other.
    """

    mini: bool = False
    workers: int | None = None

    @classmethod
    def chosen(cls, mini: bool, parallel: bool, workers: int | None) -> Size:
        """Return the size that the options --mini, --parallel and --workers give; raise click.UsageError if the options
        contradict each other.
        """
        if parallel and not mini:
            raise click.UsageError("--parallel works only with --mini: add --mini")
        if workers is not None and not parallel:
            raise click.UsageError("--workers works only with --mini --parallel: add both")
        return cls(mini, (workers or WORKERS) if parallel else None)

    def load(self, path: Path) -> Recipe:
        """Load a recipe from a file, in full size or, with --mini, as its small version for CPU."""
        return load_mini(path, workers=self.workers) if self.mini else load_recipe(path)

    def run_dir(self, recipe: Path) -> Path:
        """Return the default folder of a run, ``output/<recipe's folder>-<recipe>`` below the working folder; for a
        small version of the recipe the name ends with ``-mini`` or ``-mini-parallel``. If the recipe is the
        ``recipe.yaml`` in the folder of a run, return the folder of this run.
        """
        if not self.mini and is_of_run(recipe):
            return recipe.absolute().parent
        kind = "-mini" * self.mini + "-parallel" * bool(self.workers)
        return Path("output") / f"{recipe.absolute().parent.name}-{recipe.stem}{kind}"

    def words(self) -> list[str]:
        """Return the options of `tc3 train` that choose this size of the model."""
        workers = ["--workers", str(self.workers)] if self.workers not in (None, WORKERS) else []
        return ["--mini"] * self.mini + ["--parallel"] * bool(self.workers) + workers


FULL_SIZE = Size()


def effective_recipe(
    path: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: Path,
    size: Size = FULL_SIZE,
    make_layout: bool = True,
) -> Recipe:
    """Return the flat recipe that will run, with overrides, number of steps and this run's folders filled in.

    With `make_layout`, the layout of a recipe with `offset: auto` is searched and stored if there is none yet.
    """
    flat = chosen_recipe(path, overrides, size)
    flat = resolved(apply_overrides(flat, steps_overrides(flat, steps, overrides)), make_layout)
    flat["output_dir"] = str(run_dir)
    checkpoint = flat["checkpoint"] = flat.get("checkpoint") or {}
    checkpoint["save_path"] = checkpoint.get("save_path") or str(run_dir / "checkpoint")
    return flat


def chosen_recipe(path: Path, overrides: tuple[str, ...], size: Size = FULL_SIZE) -> Recipe:
    """Return the recipe, or its mini recipe (a small version for CPU), with the user's overrides applied."""
    flat = size.load(path)
    before, checkpoint = Path(str(flat.get("output_dir"))), flat.get("checkpoint")
    if checkpoint and before.is_absolute() and checkpoint.get("save_path") == str(before / "checkpoint"):
        checkpoint["save_path"] = ""  # the effective recipe of a run, or a copy of it, names where that run saved
        if not is_of_run(path):
            click.echo(
                f"{path}: checkpoint.save_path: {before / 'checkpoint'} is where a run in {before} saves; this run "
                "saves in its own folder, unless --set checkpoint.save_path=FOLDER says otherwise",
                err=True,
            )
    changed = apply_overrides(flat, overrides)
    if place := next((text for text in overrides if text.partition("=")[0].strip() == "output_dir"), None):
        raise RecipeError(f"--set {place}: a run writes to the folder that --run-dir names; write --run-dir FOLDER")
    for override in overrides:
        if others := also_changed(flat, override, changed):
            click.echo(f"--set {override} also sets {', '.join(others)} (one value, shared by an anchor)", err=True)
    return changed


def checked_recipe(
    file: Path, overrides: tuple[str, ...], steps: int | None, resume: str | None, run_dir: Path | None
) -> tuple[Recipe, list[str]]:
    """Return the resolved recipe that other hosts are to train, and the overrides that together have the same effect as
    `overrides` and `steps`.

    This function checks the recipe. Notes on stderr say which paths of the recipe lie outside the checkout.
    """
    chosen = chosen_recipe(file, overrides)
    more = steps_overrides(chosen, steps, overrides)
    flat = resolved(apply_overrides(chosen, more), make_layout=True)
    check_sound(flat)
    for line in outside(file, flat, resume, run_dir):
        click.echo(f"note: {line}", err=True)
    return flat, [*overrides, *more]


def resolved(flat: Recipe, make_layout: bool) -> Recipe:
    """Return the recipe with a value in place of each `auto`. If the pipeline layout is `auto` and no file gives a
    layout, a layout is searched for only if `make_layout` is true.
    """
    return resolve(flat, partial(click.echo, err=True), "search" if make_layout else "file")


def steps_overrides(recipe: Recipe, steps: int | None, given: tuple[str, ...] = ()) -> list[str]:
    """Return the overrides that make a recipe train `steps` steps: the number of samples, one pass over these samples,
    and the schedule.

    If the warm-up is longer than all steps, it is shortened so that it keeps its share of the recipe's steps; a line on
    stderr says so. A warm-up that the user's own overrides set stays unchanged, and is refused if it is too long, as
    that of a recipe is.

    Args:
        given: the user's overrides, which `recipe` has.

    Raises:
        RecipeError: the recipe lacks a key, or one of the user's overrides asks for another number of steps.
    """
    if steps is None:
        return []
    view = View(recipe)
    if not _takes_steps(view):
        raise RecipeError(
            f"{recipe.source}: --steps cannot work, because the recipe lacks a key that --steps needs: add "
            "runner_config.batch_size and train_dataset.data_loader.sizes (for HFDataLoader: a last handler of type "
            "`take`), or leave --steps out"
        )
    found = _number_of_steps(recipe, view, steps)
    if view.number(("lr_schedule", "total_steps"), 0):
        found += _shorter_warmup(view, batch_ramp.scheduled(recipe, view.ramp, steps), given)
    for each in found:
        _refuse_other(recipe, each, steps, given)
    return found


def _takes_steps(view: View) -> bool:
    return bool(view.samples_key and view.samples and view.has((*RUNNER, "batch_size")))


def _number_of_steps(recipe: Recipe, view: View, steps: int) -> list[str]:
    """Return the overrides of the keys that determine the number of steps of a run; the override of the number of
    samples comes first.
    """
    found = [f"{dotted(view.samples_key or ())}={view.ramp.samples_until(steps)}"]
    if view.number((*RUNNER, "epochs"), 1) > 1:
        found.append("runner_config.epochs=1")
    if view.number(("lr_schedule", "total_steps"), 0):
        found.append(f"lr_schedule.total_steps={batch_ramp.scheduled(recipe, view.ramp, steps)}")
    return found


def beside_steps(recipe: Recipe, steps: int | None, given: Sequence[str]) -> list[str]:
    """Return the user's overrides without the keys that `--steps` sets, so that they do not contradict `--steps`. If
    the user's override sets a whole list, and `--steps` determines one entry of the list, this entry gets the value
    that `--steps` determines.

    Args:
        recipe: the recipe that has these overrides.
    """
    view, kept = View(recipe), list(given)
    if steps is None or not _takes_steps(view):
        return kept
    for wanted in _number_of_steps(recipe, view, steps):
        name, _, value = wanted.partition("=")
        places = _places(recipe, name)
        others = [each for each in apart(kept, *places) if each.partition("=")[0].strip() not in places]
        kept = [with_part(each, places, int(value)) for each in others]
    return kept


def _places(recipe: Recipe, name: str) -> list[str]:
    """Return the dotted names of all keys that share the value of `name` through anchors, including `name` itself."""
    path = tuple(int(word) if word.isdigit() else word for word in name.split("."))
    wholes = [(path[:end], path[end:]) for end in range(1, len(path) + 1)]
    return [dotted((*place, *rest)) for whole, rest in wholes for place in shared_paths(recipe, whole)]


def _refuse_other(recipe: Recipe, wanted: str, steps: int, given: tuple[str, ...]) -> None:
    """Raise RecipeError if one of the user's overrides has given the key of the override `wanted` another value."""
    name, _, value = wanted.partition("=")
    if str(get_path(recipe, tuple(int(word) if word.isdigit() else word for word in name.split(".")))) == value:
        return
    places = _places(recipe, name)
    for override in apart(given, *places):
        key = override.partition("=")[0].strip()
        if any(place == key or place.startswith(f"{key}.") for place in places):
            raise RecipeError(
                f"--set {override}: this contradicts --steps {steps}, which sets {wanted}; keep one of the two"
            )


def _shorter_warmup(view: View, steps: int, given: tuple[str, ...]) -> list[str]:
    warmup, total = (view.number(("lr_schedule", name), 0) for name in ("warmup_steps", "total_steps"))
    if warmup <= steps or total < warmup or any(each.startswith(_WARMUP) for each in apart(given, _WARMUP)):
        return []
    share = max(1, round(steps * warmup / total))
    click.echo(f"{steps} steps: a warm-up of {share}, not {warmup} steps (--set {_WARMUP}=N for another)", err=True)
    return [f"{_WARMUP}={share}"]


def fitted_to_conversations(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe with as many steps as its conversations allow, if the recipe itself (not the user) asks for
    more.

    Args:
        steps: the number of steps that the user asked for, which is refused if there are too few samples.

    Raises:
        DataError: a row is not a conversation, there is no tokenizer, or there are fewer samples than requested.
    """
    view = View(recipe)
    handler = _conversation_handler(view)
    section = view.get(tuple(HELD_OUT.split(".")))
    held_out = section if isinstance(section, Mapping) else {}
    files = [*map(Path, view.instruction_files), *([Path(str(held_out.get("data_path")))] if held_out else [])]
    if handler is None or not view.instruction_files or not all(file.is_file() for file in files):
        return recipe  # of another form, or missing: `preflight.check_data` says so
    folder = (handler.get("tokenizer") or {}).get("pretrained_model_dir")
    tokenizer = read_tokenizer(_TOKENIZER, Path(folder)) if isinstance(folder, str) else None
    if tokenizer is None:
        return recipe
    if held_out:
        _check_held_out(view, held_out, handler, tokenizer)
    named = [(_DATA_FILES, Path(file)) for file in view.instruction_files]
    packed = count_samples(named, handler["seq_length"], tokenizer)
    if packed is None:
        return recipe
    _check_room(view, packed if _shuffled(view) else packed[: view.samples or None], _DATA_FILES)
    made, batch = len(packed), view.global_batch
    if not view.samples or view.samples <= made:
        return recipe
    least = made // batch
    what = (
        f"{_DATA_FILES}: {', '.join(view.instruction_files)} makes {made:,} samples of {handler['seq_length']:,} tokens"
    )
    if not least:
        fewer = made // (batch // view.batch)  # of a micro-batch of one rank, of which a step has several
        smaller = f", or --set runner_config.batch_size={fewer}" if fewer else ""
        raise DataError(f"{what}, but a step takes {batch:,} samples: add conversations{smaller}")
    if steps is not None:
        raise DataError(
            f"{what}, but --steps {steps:,} takes {view.samples:,}: choose --steps {least} at most, or add "
            "conversations; for several passes over the data choose --set runner_config.epochs=N, without --steps"
        )
    changes = steps_overrides(recipe, least)
    if not any(each.startswith(_WARMUP) for each in changes) and view.number(tuple(_WARMUP.split(".")), 0) >= least:
        changes.append(f"lr_schedule.warmup_steps={least // 10}")
    click.echo(f"{what}: {least:,} steps, and not what takes {view.samples:,} ({'; '.join(changes)})", err=True)
    return apply_overrides(recipe, changes)


def _conversation_handler(view: View) -> dict[str, Any] | None:
    """Return the handler that makes conversations, and its index, if its samples can be counted."""
    handlers = view.get(_HANDLERS)
    if view.get(tuple(PACKED.split("."))) in (None, False) or not isinstance(handlers, list) or len(handlers) < 2:
        return None
    first, second = handlers[:2]
    known = isinstance(first, dict) and first.get("type") == _HANDLER and not first.get("padding", True)
    packs = isinstance(second, dict) and second.get("type") == PACKING
    length = first.get("seq_length") if known else None
    return first if packs and type(length) is int and second.get("seq_length") == length else None


def _shuffled(view: View) -> bool:
    """Return whether a handler shuffles the packed samples before some are taken, so that any may be trained."""
    return any(isinstance(each, dict) and each.get("type") == "shuffle" for each in view.get(_HANDLERS)[2:])


def _check_room(view: View, packed: list[int], key: str) -> None:
    """Raise RecipeError if the compressed mask has no room for the conversations of a sample: MindFormers ends the run
    in the step that reads it.
    """
    algorithm = view.get(("parallel_config", "context_parallel_algo"), "colossalai_cp")
    padding = padding_under(view.cp if view.parallel else 1, algorithm)
    place = (*LOADER_PATH, "compressed_eod_mask_length")
    room = view.number(place, 128) - padding
    if view.flag((*LOADER_PATH, "create_compressed_eod_mask")) and max(packed, default=0) > room:
        wrong = f"the mask has room for {room} conversations, but a sample of {key} holds {max(packed)}"
        raise refusal(view.recipe, place, f"{wrong}; write {max(packed) + padding}, or more")


def _check_held_out(view: View, settings: Mapping[str, Any], handler: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise DataError if the held-out conversations make fewer samples than the recipe asks for, or than a step has."""
    file = Path(settings["data_path"])
    packed = count_samples([(f"{HELD_OUT}.data_path", file)], handler["seq_length"], tokenizer)
    if packed is None:
        return
    made = len(packed)
    what = f"{file} makes {made:,} samples of {handler['seq_length']:,} tokens"
    if made < view.global_batch:
        raise DataError(
            f"{HELD_OUT}.data_path: {what}, but a step takes {view.global_batch:,} samples: hold out more "
            f"conversations, or --set {HELD_OUT}=False"
        )
    wanted = settings.get("samples")
    _check_room(view, packed[: wanted if type(wanted) is int else None], f"{HELD_OUT}.data_path")
    if type(wanted) is int and wanted > made:
        raise DataError(
            f"{HELD_OUT}.samples: {wanted:,} samples are asked for, but {what}: --set {HELD_OUT}.samples={made}, or "
            "leave this key out to read all samples"
        )
