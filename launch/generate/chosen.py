"""What a user names: a run or weights, and the recipe of their model; refused where it cannot speak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import click

from plugins.errors import CheckpointError, RecipeError
from tools.checkpoint.names import kind_of
from tools.checkpoint.scan import scan_checkpoints
from tools.layout.resolve import resolve
from tools.model.architecture import model_of
from tools.model.weights import parameters
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View, look
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.source import Source, open_source

LARGEST = 1_000_000_000  # parameters: 4 GB in float32
RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Chosen:
    """Weights, and the resolved recipe of their model."""

    source: Source
    recipe: Recipe

    @property
    def weights(self) -> Path:
        """Their folder."""
        return self.source.path

    @property
    def length(self) -> int:
        """Tokens of a training sample: as far as the model looks back."""
        return int(self.recipe["model"]["model_config"]["seq_length"])

    @property
    def vocabulary(self) -> int:
        """Ids that the model knows."""
        return int(self.recipe["model"]["model_config"]["vocab_size"])


def choose(path: Path, recipe_file: Path | None) -> Chosen:
    """The newest checkpoint of a run, or the weights at `path`.

    Args:
        path: a run's folder, an iteration, other weights in MindFormers' names, or a Hugging Face folder.
        recipe_file: of the model; None for that of the run which `path` is of.

    Raises:
        CheckpointError: no weights there, not whole ones, or of another model. RecipeError: no recipe, or of a model
            that one CPU process cannot run.
    """
    if (path / RECIPE).is_file() and not any(path.glob("*.safetensors")):
        recipe_file = recipe_file or path / RECIPE
        path = _newest(path)
    source = open_source(path)
    if source.form == "one file":
        raise CheckpointError(f"{path}: one file; give the folder that it is in")
    if reason := source.seal_fault(checksums=False):
        raise CheckpointError(f"{path}: not a whole checkpoint: {reason}")
    recipe = resolve(load_recipe(recipe_file or _beside(path)))
    _check(recipe, source)
    return Chosen(source, recipe)


def _newest(run: Path) -> Path:
    """The newest whole checkpoint of a run, wherever it saves; its folder may have moved since."""
    saves = look(load_recipe(run / RECIPE), ("checkpoint", "save_path"))
    roots = [run / "checkpoint", *([Path(saves)] if isinstance(saves, str) and saves else [])]
    for root in roots:
        best, skipped = scan_checkpoints(root)
        for folder, reason in skipped:
            click.echo(f"skipping checkpoint {folder}: {reason}", err=True)
        if best:
            return best.path
    raise CheckpointError(f"{run}: no whole checkpoint in {roots[0]}: the run has saved none yet")


def _beside(weights: Path) -> Path:
    """RUN/recipe.yaml of RUN/checkpoint/iteration_*."""
    file = weights.absolute().parent.parent / RECIPE
    if not file.is_file():
        raise RecipeError(f"--recipe: {weights} is in no run's folder: name the recipe of its model")
    return file


def _check(recipe: Recipe, source: Source) -> None:
    """Raise CheckpointError for weights of another model, RecipeError for a model that is too large."""
    if not isinstance(look(recipe, ("model", "model_config", "seq_length")), int):
        raise RecipeError(f"{recipe.source}: model.model_config.seq_length: missing; the model looks back so far")
    wanted, held = _parameters(recipe), _held(source)
    if wanted and held and held != wanted:
        raise CheckpointError(
            f"{source.path}: holds {held:,} weights, the model of {recipe.source} has {wanted:,}: name the recipe of "
            "this model by --recipe; that of a mini is recipe.yaml in its run's folder"
        )
    if (wanted or held or 0) > LARGEST:
        size = wanted or held or 0
        raise RecipeError(
            f"{recipe.source}: {size:,} parameters, {size * 4 / 1e9:,.0f} GB in float32: tc3 generate is for minis of "
            f"up to {LARGEST:,}, in one CPU process that computes the whole window anew for each token. `tc3 weights "
            "convert` writes what vLLM, SGLang and transformers serve"
        )


def _parameters(recipe: Recipe) -> int | None:
    """Of the recipe's model; None of one that `tc3 check` does not count."""
    try:
        return parameters(model_of(convert(View(recipe), load_schema()).fields))
    except (TypeError, KeyError, ValueError):
        return None


def _held(source: Source) -> int | None:
    """Trained numbers in MindFormers' names; Hugging Face's are compared tensor by tensor."""
    if source.form == "Hugging Face":
        return None
    return sum(math.prod(each.shape) for name, each in source.headers.items() if kind_of(name) == "weights")
