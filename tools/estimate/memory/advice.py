"""What would make a recipe fit that does not, as the memory model finds and not as a rule of thumb has it."""

from __future__ import annotations

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration
from tools.estimate.from_recipe import compiles_sharded_gradients, from_recipe
from tools.estimate.memory.changes import Change, single_changes
from tools.estimate.memory.error import known_errors
from tools.estimate.memory.room import require_known
from tools.hardware.units import GIB
from tools.recipe.load import Recipe

_SHOWN = 3  # changes of each sort


def checked_advice(recipe: Recipe, limit: int) -> str:
    """One line: which single changes that compile fit by the model, less its known error, and what the others leave."""
    try:
        require_known(recipe)
        own = from_recipe(recipe)
        found = [change for change in single_changes(own, limit) if _compiles(change.config, own)]
        changes = sorted(found, key=lambda change: change.peak)
    except RecipeError as error:
        return f"what would make it fit is unknown: {error}"
    room = limit * (1 - known_errors().margin)
    enough = [change for change in changes if change.peak <= room]
    short = [change for change in changes if change.peak > room]
    words = (
        f"fits by the memory model: {_named(enough[::-1])}" if enough else "no single change fits by the memory model"
    )
    rest = f"; not enough alone: {_named(short)}" if short else ""
    return f"{words}{rest}; tc3 memory {recipe.source} --explain-oom has their keys and costs, and pairs"


def _compiles(config: Configuration, own: Configuration) -> bool:
    """Whether a change leaves sharded gradients out where MindSpore would not finish compiling them."""
    return config.shard_gradients == own.shard_gradients or compiles_sharded_gradients(config.pp)


def _named(changes: list[Change]) -> str:
    return ", ".join(f"{change.name} ({change.peak / GIB:.1f} GiB)" for change in changes[:_SHOWN])
