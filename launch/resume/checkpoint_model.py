"""Whether a checkpoint is whole, and of the recipe's model: by the headers of its files, before any worker starts.

MindFormers 1.9.0 skips what it does not find (`checkpoint/reshard.py`: "No source parameters found ..., skipping") and
leaves out what it does not know: a run would go on with fresh weights, experts or moments, and say so in a log alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from plugins.errors import CheckpointError, RecipeError
from tools.checkpoint.headers import read_headers
from tools.checkpoint.names import ADAM, kind_of
from tools.checkpoint.scan import is_sealed
from tools.checkpoint.slot_order import refuse_moved
from tools.checkpoint.stored import METADATA, Stored, open_stored
from tools.model.architecture import model_of
from tools.model.weights import parameters
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.hugging_face.names import table
from tools.weights.hugging_face.sizes import sizes_of

Shapes = dict[str, tuple[int, ...]]  # name -> shape of the whole tensor
_LISTED = 3  # tensors in a message


def check_model(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError when training `recipe` on from `folder` would lose, mix up or make up a tensor.

    That is: its experts have moved and the recipe does not know of it; a slice is not there, or a file is cut short; a
    weight, or AdamW's state of one, is missing, of another shape, or one that the model has not.

    Biases of routers that stock MindFormers has saved in a sharded graph, and will not load, are said.

    Models whose tensors are not known by name are compared by their number of weights, and where that is not known
    either (a model that `tc3 check` does not count), by nothing. Their sealed files were compared with checksums.
    """
    refuse_moved(folder, View(recipe).keeps_placements)
    wanted = _shapes_of(recipe)
    if wanted is not None:
        stored = open_stored(folder)
        held = _shapes_in(stored)
        _refuse_other_weights(folder, wanted, held)
        _say_lost_biases(stored)
        if View(recipe).get(("optimizer", "type")) == "AdamW":
            _refuse_fresh_moments(folder, wanted, held)
        return
    if not is_sealed(folder):
        _shapes_in(open_stored(folder))
    number, own = weights_in(folder), _weights_of(recipe)
    if number and own and number != own:
        raise CheckpointError(
            f"{folder}: holds {number:,} weights, the recipe's model has {own:,}: a checkpoint of another model"
        )


def _shapes_in(stored: Stored) -> Shapes:
    """The tensors of a checkpoint, of any number of ranks, each of whose slices is there.

    Raises:
        CheckpointError: one is not, or has another shape than metadata.json says.
    """
    own = {name: stored.files[min(files.values())][name].shape for name, files in stored.unlisted.items()}
    return {**own, **{name: tensor.shape for name, tensor in stored.tensors.items()}}


def _shapes_of(recipe: Recipe) -> Shapes | None:
    """The weights that MindFormers gives the recipe's model, and the routers' biases; None where that is not known."""
    try:
        fields = convert(View(recipe), load_schema()).fields
        entries = table(sizes_of(fields, bias_updated=False))
    except (RecipeError, TypeError, KeyError, ValueError):
        return None
    trained = _count((each.mindformers, each.shape) for each in entries if each.trained)
    if trained != _weights_of(recipe):
        return None  # a variant that the table does not have, such as tied embeddings
    biased = bool(fields.get("moe_router_enable_expert_bias"))
    return {each.mindformers: each.shape for each in entries if each.trained or biased}


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
            f"{folder}: a checkpoint of another model: {_listed(wrong)}; go on with the recipe that saved it "
            "(recipe.yaml in its run's folder)"
        )


def _say_lost_biases(stored: Stored) -> None:
    """See plugins/sealed_checkpoint/router_state.py, which lists them in what is saved here."""
    lost = sorted(name for name in stored.unlisted if name.endswith(".expert_bias"))
    if lost:
        more = f", and of {len(lost) - 1} more routers" * (len(lost) > 1)
        click.echo(
            f"{stored.folder}: {METADATA} does not list {lost[0]}{more}, so that MindFormers does not load it: such "
            "biases begin at zero again",
            err=True,
        )


def _refuse_fresh_moments(folder: Path, wanted: Shapes, held: Shapes) -> None:
    """MindFormers would train on with moments of zero where it finds none."""
    weights = {name: shape for name, shape in wanted.items() if kind_of(name) == "weights"}
    moments = {f"{prefix}{name}": shape for name, shape in weights.items() for prefix in ADAM}
    wrong = [f"no {name}" for name in moments if name not in held]
    wrong += [
        f"{name} is {list(held[name])}, its weight {list(shape)}"
        for name, shape in moments.items()
        if held.get(name, shape) != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{folder}: the optimizer's moments are not all there: {_listed(wrong)}; was it saved with "
            "checkpoint.no_save_optim, or with another optimizer? Weights alone are for a new run: "
            f"--set checkpoint.load_path={folder}, without --resume"
        )


def _listed(wrong: Sequence[str]) -> str:
    more = len(wrong) - _LISTED
    return "; ".join(wrong[:_LISTED]) + (f"; and {more:,} more tensors" if more > 0 else "")


def _weights_of(recipe: Recipe) -> int | None:
    try:
        return parameters(model_of(convert(View(recipe), load_schema()).fields))
    except (TypeError, KeyError, ValueError):
        return None


def weights_in(folder: Path) -> int | None:
    """Trained numbers of a checkpoint in MindFormers' format, whatever its number of ranks; None where it does not say.

    Several ranks have metadata.json with all shapes, one has none, but all weights in its file.
    """
    try:
        whole = folder / METADATA
        if whole.exists():
            shapes = json.loads(whole.read_text(encoding="utf-8"))["state_dict_metadata"]
            return _count((name, each["global_shape"]) for name, each in shapes.items())
        files = list(folder.glob("*-model-0000000-0000001.safetensors"))
        return _count((name, each.shape) for name, each in read_headers(files[0]).items()) if len(files) == 1 else None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever reads the files says what is wrong with them


def _count(shapes: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Numbers in trained parameters."""
    return sum(math.prod(shape) for name, shape in shapes if kind_of(name) == "weights")
