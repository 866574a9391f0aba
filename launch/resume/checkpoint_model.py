"""Whether a checkpoint is of the recipe's model: by the number of its weights, before any worker starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError
from tools.checkpoint.whole import BUFFERS
from tools.model.architecture import model_of
from tools.model.weights import parameters
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

_TRAINED = ("weight", "weight1", "weight2", "bias")  # how names of trained parameters end; others count, or balance
_BESIDE = ("adam_", "moment", BUFFERS)  # of names that end with a parameter's name


def check_model(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError when `folder` holds another number of weights than the model of `recipe` has.

    Where one of both is not known (a model that `tc3 check` does not count, files of another kind) nothing is said.
    """
    held, wanted = weights_in(folder), _weights_of(recipe)
    if held and wanted and held != wanted:
        raise CheckpointError(
            f"{folder}: holds {held:,} weights, the recipe's model has {wanted:,}: a checkpoint of another model"
        )


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
        whole = folder / "metadata.json"
        if whole.exists():
            shapes = json.loads(whole.read_text(encoding="utf-8"))["state_dict_metadata"]
            return _count((name, each["global_shape"]) for name, each in shapes.items())
        files = list(folder.glob("*-model-0000000-0000001.safetensors"))
        return _count((name, each["shape"]) for name, each in _header(files[0]).items()) if len(files) == 1 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever reads the files says what is wrong with them


def _header(file: Path) -> dict[str, Any]:
    """name -> type, shape and place of each tensor in a safetensors file."""
    with file.open("rb") as data:
        header: dict[str, Any] = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _count(shapes: Iterable[tuple[str, list[int]]]) -> int:
    """Numbers in trained parameters, not in moments and gradients, which bear their names behind a prefix."""
    return sum(
        math.prod(shape)
        for name, shape in shapes
        if name.rsplit(".", 1)[-1] in _TRAINED and not name.startswith(_BESIDE)
    )
