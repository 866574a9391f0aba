"""This module checks whether a checkpoint belongs to the recipe's model and optimizer, from the headers of its files.

`check_model` checks this before any worker starts. MindFormers 1.9.0 skips tensors that it does not find
(`checkpoint/reshard.py`: "No source parameters found ..., skipping") and leaves out tensors that it does not know: a
run would continue with newly initialised weights, experts or moments, and only the log would mention it.
`check_load_path` checks the weights with which a new run begins.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from plugins.errors import CheckpointError, RecipeError
from plugins.hugging_face_weights.plan import is_hugging_face
from plugins.lora.plan import KEY as LORA
from plugins.lora.plan import Settings, adapters_of, is_adapter, other_scale
from plugins.sealed_checkpoint.plan import fault
from plugins.settings import value_at
from tools.checkpoint.scan import is_sealed
from tools.checkpoint.stored import (
    METADATA,
    OPTIMIZER_FILE,
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
from tools.model import model_of, parameters
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.convert_plan import model_of as weights_model_of
from tools.weights.convert_plan import recipe_of_run, settings_of_run
from tools.weights.hugging_face_config import check_config
from tools.weights.hugging_face_names import hugging_face_shapes, table
from tools.weights.reshard_target import target_of
from tools.weights.source import is_of_the_model, open_source

_LISTED = 3  # tensors in a message
_HOW_TO_BEGIN = (
    "--set checkpoint.load_path=FOLDER names a run's checkpoint folder (launch/quickstart makes output/quickstart/"
    'checkpoint) or a folder that tc3 weights convert wrote; --set checkpoint.load_path="" begins with random weights'
)
Shapes = dict[str, tuple[int, ...]]  # name -> shape of the whole tensor


def check_model(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError if a resume of `recipe` from `folder` would lose tensors, mix them up or need tensors that
    are not there.

    The error is raised if experts have moved and the recipe does not record placements; if a slice is missing, or a
    file is cut short; or if a weight, or the optimizer's state of it, is missing, has another shape, or does not belong
    to the model.

    A line reports routers' biases that stock MindFormers has saved from a sharded graph, and will not load.

    For a model whose tensor names are not known, only the number of weights is compared; a model whose parameters `tc3
    check` does not count is not compared. The checksums of the sealed files have been compared before.
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
            f"{folder}: the checkpoint holds {number:,} weights, but the recipe's model has {own:,}: this is a "
            "checkpoint of another model; continue with the recipe of the run that saved it (recipe.yaml in that "
            "run's folder)"
        )


def _shapes_in(stored: Stored) -> Shapes:
    """Return the shapes of the tensors of a checkpoint of any number of ranks; raise an error if a slice is missing.

    Raises:
        CheckpointError: one is not, or has another shape than metadata.json says.
    """
    own = {name: stored.files[min(files.values())][name].shape for name, files in stored.unlisted.items()}
    return {**own, **{name: tensor.shape for name, tensor in stored.tensors.items()}}


def _shapes_of(recipe: Recipe) -> Shapes | None:
    """Return the shapes of the weights that MindFormers gives the recipe's model, with the weights of adapters, and of
    the routers' biases; None if they are not known.
    """
    try:
        biased = bool(convert(View(recipe), load_schema()).fields.get("moe_router_enable_expert_bias"))
    except (RecipeError, TypeError, KeyError, ValueError):
        return None
    for names in (_of_the_conversion, _of_the_layout):
        with suppress(RecipeError, TypeError, KeyError, ValueError):
            shapes, biases = names(recipe)
            if _count_trained(shapes.items()) == weights_of(recipe):
                return {**shapes, **(biases if biased else {})}
    return None


def _of_the_conversion(recipe: Recipe) -> tuple[Shapes, Shapes]:
    """Return the shapes of weights and of routers' biases of a model that `tc3 weights convert` knows, in the order of
    the forward pass.
    """
    entries = table(weights_model_of(recipe))
    shapes = {each.mindformers: each.shape for each in entries if each.trained}
    chosen = value_at(recipe, LORA, False)
    adapters = {} if chosen is False else adapters_of(shapes, Settings.read(chosen))
    return {**shapes, **adapters}, {each.mindformers: each.shape for each in entries if not each.trained}


def _of_the_layout(recipe: Recipe) -> tuple[Shapes, Shapes]:
    """Return the same shapes of a model that only `tc3 weights reshard` knows, such as one without shared experts.

    Raises:
        RecipeError: the names of the weights are not known.
    """
    target = target_of(recipe)
    biases = {name: placed.shape for name, placed in target.states.items() if name.endswith(".expert_bias")}
    return {name: placed.shape for name, placed in target.weights.items()}, biases


def _refuse_other_weights(folder: Path, wanted: Shapes, held: Shapes) -> None:
    """Raise CheckpointError if weights differ in name or shape; of the routers' biases, only their existence is
    compared.
    """
    wrong = [
        f"{name} has the shape {list(held[name])}, but {list(shape)} in the recipe's model"
        for name, shape in wanted.items()
        if name in held and held[name] != shape
    ]
    unknown = [name for name in held if kind_of(name) == "weights" and name not in wanted]
    wrong += [f"the recipe's model has no {name}" for name in unknown]
    wrong += [f"no {name}, which the recipe's model has" for name in wanted if name not in held]
    if wrong:
        raise CheckpointError(
            f"{folder}: this is a checkpoint of another model: {_listed(wrong)}; continue with the recipe of the run "
            "that saved it (recipe.yaml in that run's folder)"
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
            f"{folder}: moments of the optimizer are missing or have another shape: {_listed(wrong)}; was the "
            "checkpoint saved with checkpoint.no_save_optim, or with another optimizer? To start a new run only "
            f"from the checkpoint's weights, write --set checkpoint.load_path={folder}, without --resume"
        )


def _listed(wrong: Sequence[str]) -> str:
    more = len(wrong) - _LISTED
    return "; ".join(wrong[:_LISTED]) + (f"; and {more:,} more tensors" if more > 0 else "")


def weights_of(recipe: Recipe) -> int | None:
    """Return the number of trained parameters of the recipe's model; return None for a model that `tc3 check` does not
    count.
    """
    try:
        return parameters(model_of(convert(View(recipe), load_schema()).fields))
    except (TypeError, KeyError, ValueError):
        return None


def weights_in(folder: Path) -> int | None:
    """Return the number of trained parameters in a checkpoint of MindFormers' format, over all ranks; return None if
    the checkpoint does not state this number.

    A checkpoint of several ranks has metadata.json with all shapes; a checkpoint of one rank has no such file, but all
    weights in its file.
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


def check_load_path(recipe: Recipe) -> None:
    """Raise CheckpointError if a new run cannot begin with the weights in `checkpoint.load_path`: the folder is missing
    or holds no weights, its experts are in an order that the recipe does not know, or the weights are of another model
    (for a Hugging Face folder: config.json describes another model).
    """
    path = check_load_folder(recipe)
    if path is None:
        return
    refuse_moved(path, View(recipe).keeps_placements)
    if value_at(recipe, LORA, False) is not False or not is_hugging_face(str(path)):
        _check_beginning(recipe, loaded_from(path))
    else:
        _check_hugging_face(recipe, path)


def check_load_folder(recipe: Recipe) -> Path | None:
    """Return the folder of `checkpoint.load_path`, or None if the recipe names none. The function reads only the names
    of the folder's files, so all nodes of a run may call it.

    Raises:
        CheckpointError: the folder is missing or holds no weights, or MindFormers would resume a run from it.
    """
    path = View(recipe).get(("checkpoint", "load_path"))
    if not isinstance(path, str) or not path:
        return None
    if Path(path).is_file():
        raise CheckpointError(f"checkpoint.load_path: {path}: this is a file; {_HOW_TO_BEGIN}")
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
    _refuse_hidden_resume(recipe, Path(path))
    return Path(path)


def _check_hugging_face(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError if a new run cannot begin with the weights in a Hugging Face folder: a file is missing or
    damaged, or config.json or the shapes of the weights are those of another model.

    The weights of a model whose names in Hugging Face's form are not known are not compared.
    """
    try:
        held = {name: header.shape for name, header in open_source(folder).headers.items()}
        sizes = weights_model_of(recipe)
        check_config(folder, sizes, partial(_say_extended, folder))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load_path: {error}") from None
    except (RecipeError, TypeError, KeyError, ValueError):
        return
    wanted = hugging_face_shapes(sizes)
    if not convert(View(recipe), load_schema()).fields.get("moe_router_enable_expert_bias"):
        wanted = {name: shape for name, shape in wanted.items() if not name.endswith(".e_score_correction_bias")}
    wrong = [
        f"{name} has the shape {list(held[name])}, but {list(shape)} in the recipe's model"
        for name, shape in wanted.items()
        if held.get(name, shape) != shape
    ]
    if wrong := wrong + [f"no {name}" for name in wanted if name not in held]:
        raise CheckpointError(
            f"checkpoint.load_path: {folder}: these are not the weights of the recipe's model: {_listed(wrong)}; name "
            "the folder of this model's weights, or the recipe of these weights"
        )
    _say_left_out(folder, [name for name in held if name.endswith(".e_score_correction_bias") and name not in wanted])


def _say_extended(folder: Path, differences: str) -> None:
    click.echo(
        f"checkpoint.load_path: {folder}: RoPE changes, as in a run that extends the context; undo this change if you "
        f"did not intend it: {differences}",
        err=True,
    )


def _refuse_hidden_resume(recipe: Recipe, path: Path) -> None:
    """Raise CheckpointError if MindFormers would resume a run, although `tc3 train` was not asked to resume one and has
    not checked that it can. (Where `no_load_optim` is missing, MindFormers takes the opposite of `resume_training`,
    which it switches off if `load_checkpoint` names nothing.)
    """
    key = "checkpoint.no_load_optim"
    written = value_at(recipe, key, None)
    old = value_at(recipe, "resume_training", False) is True and bool(value_at(recipe, "load_checkpoint", ""))
    if (old if written is None else written is False) and not is_hugging_face(str(path)):
        raise CheckpointError(
            f"{f'{key} is False' if written is False else 'resume_training is True'}, so MindFormers would resume from "
            f"{path}, and nothing would check that its moments and its order of the data fit this recipe; write "
            f"{key}: True to begin a new run from the weights, or go on with --resume "
            f"{shlex.quote(str(loaded_from(path)))}"
        )


def _check_beginning(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError if a new run cannot begin with the weights in `folder`: they are those of another model, a
    part of them is missing, or the run that saved them refused them.

    MindFormers leaves a weight that it does not find at its initial value. That is meant where the recipe adds
    something to a trained model, such as an MTP layer, and a line says it; a weight that `plugins.lora` freezes would
    stay random.
    """
    if is_sealed(folder) and (reason := fault(folder, checksums=False, without=OPTIMIZER_FILE)):
        raise CheckpointError(
            f"checkpoint.load_path: {folder}: this is not a complete checkpoint: {reason}; name another checkpoint"
        )
    file, changed = settings_of_run(folder, recipe)
    if changed:  # which is meant where a context is extended
        click.echo(
            f"checkpoint.load_path: {folder}: the recipe differs from {file}, the recipe of these weights: "
            f"{'; '.join(changed)}; undo this change if you did not intend it",
            err=True,
        )
    try:
        wanted, held = _shapes_of(recipe) or {}, _shapes_in(open_stored(folder, weights_only=True))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load_path: {error}") from None
    _refuse_adapters(recipe, folder, wanted, held)
    own = {name: shape for name, shape in wanted.items() if kind_of(name) == "weights" and not is_adapter(name)}
    others = [
        f"{name} has the shape {list(held[name])}, but {list(shape)} in the recipe's model"
        for name, shape in own.items()
        if held.get(name, shape) != shape
    ]
    missing = [f"no {name}" for name in own if name not in held]
    lora = f", of which {LORA} trains only adapters" * (value_at(recipe, LORA, False) is not False)
    if others or (missing and (lora or len(missing) == len(own))):
        raise CheckpointError(
            f"checkpoint.load_path: {folder}: these are not the weights of the recipe's model{lora}: "
            f"{_listed(others + missing)}; tc3 weights convert makes the right weights from a Hugging Face folder"
        )
    if missing:
        click.echo(
            f"checkpoint.load_path: {folder}: {_listed(missing)}, which the recipe's model has: what is not there "
            "begins with its initial values",
            err=True,
        )
    _say_left_out(folder, [name for name in held if own and is_of_the_model(name) and name not in wanted])


def _say_left_out(folder: Path, names: Sequence[str]) -> None:
    """Report weights with which a new run does not begin, although the folder holds them."""
    if names:
        click.echo(
            f"checkpoint.load_path: {folder}: the recipe's model does not have {_listed(names)}, which are left out",
            err=True,
        )


def _refuse_adapters(recipe: Recipe, folder: Path, wanted: Shapes, held: Shapes) -> None:
    """Raise CheckpointError if a new run would leave out the adapters in `folder`, or multiply them by another factor.
    `wanted` is empty for a model whose tensor names are not known.
    """
    adapters = {name: shape for name, shape in held.items() if is_adapter(name) and kind_of(name) == "weights"}
    known = bool(wanted) or value_at(recipe, LORA, False) is False
    wrong = [f"{name} {list(shape)}" for name, shape in adapters.items() if known and wanted.get(name) != shape]
    if wrong:
        raise CheckpointError(
            f"checkpoint.load_path: {folder}: the LoRA adapters of these weights do not match {LORA} of this recipe, "
            f"so the run would begin without them: {_listed(wrong)}; write {LORA} as in the recipe that trained them, "
            f"or merge the adapters ({_how_to_merge(folder)}) and start the run from the folder TO"
        )
    if adapters and (before := recipe_of_run(folder)):
        refuse_other_scale(before, recipe, folder)
    elif adapters:
        click.echo(
            f"checkpoint.load_path: {folder}: the recipe of the run that trained the adapters cannot be read, so their "
            f"{LORA}.alpha is unknown; make sure that alpha / rank of this recipe is the same",
            err=True,
        )


def refuse_other_scale(before: Recipe, recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError if the adapters of plugins.lora in `folder`, which a run of the recipe `before` saved, were
    trained with another factor alpha / rank than `recipe` has, because the model would compute something else from the
    first step on. The factor comes from the recipes, because no checkpoint holds it.
    """
    if wrong := other_scale(before, recipe, str(folder)):
        merge = f"merge the adapters ({_how_to_merge(folder)}) and start a new run from the folder TO"
        raise CheckpointError(f"{wrong}, or {merge}")


def _how_to_merge(folder: Path) -> str:
    return f"tc3 weights merge {shlex.quote(str(folder))} TO"
