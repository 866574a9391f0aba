"""The weights of any checkpoint, tensor by tensor, under MindFormers' names and in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError
from tools.recipe.load import Recipe
from tools.weights.convert.plan import model_of, plan_conversion
from tools.weights.hugging_face.sizes import check_config, tied
from tools.weights.source import Source, open_source

Reader = Callable[[str], np.ndarray]


def reader(weights: Path, recipe: Recipe) -> Reader:
    """A function from a parameter's name to its whole value, experts in logical order.

    Args:
        weights: an iteration of a run in any layout, or a Hugging Face folder. recipe: of its model.

    Raises:
        CheckpointError: not whole, or not of this model; the function raises it for what is missing.
    """
    source = open_source(weights)
    return _from_hugging_face(source, recipe) if source.form == "Hugging Face" else _from_mindformers(source)


def _from_mindformers(source: Source) -> Reader:
    def read(name: str) -> np.ndarray:
        if name not in source.headers:
            raise CheckpointError(f"{source.path}: holds no {name}, which the recipe's model has: of another model")
        array, differing = source.read(name)
        if differing:
            ranks = ", ".join(map(str, differing))
            raise CheckpointError(f"{source.path}: {name}: the copies of ranks {ranks} are not the first rank's")
        return array.astype(np.float32)

    return read


def _from_hugging_face(source: Source, recipe: Recipe) -> Reader:
    sizes = model_of(recipe)
    compared = check_config(source.path, sizes)
    one_file = sum(header.bytes for header in source.headers.values())
    plan = plan_conversion(source.headers, sizes, "MindFormers", None, one_file, compared and tied(source.path))
    entries = {entry.mindformers: entry for shard in plan.shards for entry in shard.entries}

    def read(name: str) -> np.ndarray:
        parts = [source.read(plan.stands_for.get(part, part))[0] for part in entries[name].parts]
        return entries[name].join(parts).astype(np.float32)

    return read
