"""A configuration as a child of the recipe it came from: the MindFormers keys that differ, and the file with them.

Only what differs in effect is written. Values that the recipe shares through anchors change at all their places, and
lists are written whole: a child cannot change an entry of its base's list.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.errors import RecipeError
from plugins.pipeline_layout.plan import offset_of
from tools.check.converter import convert
from tools.check.schema import load_schema
from tools.check.stages import layers_of
from tools.check.view import MODEL, PARALLEL, RUNNER, View, look
from tools.files.whole import write_whole
from tools.recipe.dump import recipe_text
from tools.recipe.load import BASE_CONFIG, KeyPath, Recipe, load_recipe
from tools.recipe.override import shared_paths
from tools.search.configuration import Configuration, Table, spread
from tools.search.overlay_dispatch import dispatch_values

_PIPELINE = ("parallel", "pipeline_config")
_SHARD = ("parallel", "parallel_optimizer_config")
_STRATEGY = ("parallel", "dataset_strategy")
_SCHEDULER, _INTERLEAVE = (*_PIPELINE, "pipeline_scheduler"), (*_PIPELINE, "pipeline_interleave")
# the operators of a partial `select_recompute`: MindFormers' default names mlp.mul and mlp.activation_func.silu alone,
# which a fused SwiGLU has not: `tc3 dryrun` sees no byte less
SELECTED = (r".*\.norm", r"mlp\.mul", r"mlp\.activation_func\.silu", r"mlp\.shared_experts\.activation_func\.silu")
_CHUNKS, _OFFSET = (*MODEL, "pp_interleave_num"), (*MODEL, "offset")
_BY_ENVIRONMENT = "interleaved_1f1b_less_memory"


def overlay(recipe: Recipe, config: Configuration) -> dict[str, Any]:
    """The keys, nested, by which a child of `recipe` runs `config`; {} where the recipe does already.

    Raises:
        RecipeError: the recipe is not for several devices, or MindFormers has no key for something in `config`.
    """
    return _difference(recipe, changed(recipe, config))


def write_overlay(recipe: Recipe, config: Configuration, path: str | os.PathLike[str], notes: Sequence[str]) -> None:
    """Write, atomically, a child of the recipe's own file, with `notes` as comments at its head.

    What was changed in `recipe` since it was read is written, too.

    Raises:
        RecipeError: as `overlay`.
        DataError: the folder cannot be written to.
    """
    target = Path(path)
    keys = _difference(load_recipe(recipe.source), changed(recipe, config))
    base = os.path.relpath(recipe.source, target.parent)
    text = "".join(f"# {line}\n" for note in notes for line in note.splitlines() or [""])
    write_whole(target, text + recipe_text({BASE_CONFIG: base, **keys}))


def changed(recipe: Recipe, config: Configuration) -> Recipe:
    """A copy of `recipe` that runs `config`; errors as `overlay`."""
    view = View(recipe)
    if not view.parallel and config.devices > 1:
        raise RecipeError(f"{recipe.source}: use_parallel: True and parallel.parallel_mode: 1 are what layouts are for")
    if config.schedule == _BY_ENVIRONMENT:
        raise RecipeError(
            f"schedule {_BY_ENVIRONMENT}: the environment asks for it (ENABLE_LESS_MEM_VPP=1), no key does"
        )
    values = {**_degrees(view, config), **_pipeline(view, config), **dispatch_values(view, config)}
    result = copy.deepcopy(recipe)
    for path, value in values.items():
        for other in shared_paths(recipe, path)[1:]:
            if other not in values:
                _set(result, other, value)
    for path, value in values.items():
        _set(result, path, value)
    return result


def _degrees(view: View, config: Configuration) -> dict[KeyPath, Any]:
    """Parallel degrees, batch, optimizer sharding."""
    piped = config.pp > 1
    wanted: list[tuple[KeyPath, Any, Any]] = [
        ((*PARALLEL, "data_parallel"), view.dp, config.dp),
        ((*PARALLEL, "model_parallel"), view.tp, config.tp),
        ((*PARALLEL, "pipeline_stage"), view.pp, config.pp),
        ((*PARALLEL, "context_parallel"), view.cp, config.cp),
        ((*PARALLEL, "expert_parallel"), view.ep, config.ep),
        ((*RUNNER, "batch_size"), view.batch, config.batch),
    ]
    numbers: dict[KeyPath, int] = {
        (*PARALLEL, "micro_batch_num"): config.micro_batches if piped else 1,
        (*RUNNER, "gradient_accumulation_steps"): 1 if piped else config.micro_batches,
    }
    flags: dict[KeyPath, bool] = {
        (*PARALLEL, "use_seq_parallel"): config.sequence_parallel and config.tp > 1,
        ("parallel", "enable_parallel_optimizer"): config.shard_optimizer,
        (*_SHARD, "gradient_accumulation_shard"): config.shard_gradients,
    }
    wanted += [(path, view.number(path, 1), value) for path, value in numbers.items()]
    wanted += [(path, view.flag(path), value) for path, value in flags.items()]
    threshold = (*_SHARD, "parallel_optimizer_threshold")
    wanted.append((threshold, view.number(threshold, 64), config.shard_threshold // 1024))
    rows = view.get(_STRATEGY)
    if isinstance(rows, list):
        wanted.append((_STRATEGY, rows, [[config.dp, *row[1:]] for row in rows]))
    return {path: value for path, now, value in wanted if now != value}


def _pipeline(view: View, config: Configuration) -> dict[KeyPath, Any]:
    """Schedule, chunks, layers and recomputation."""
    chunks = config.chunks
    scheduler = "1f1b" if config.schedule.startswith("interleaved") else config.schedule
    values: dict[KeyPath, Any] = {}
    if view.scheduler != scheduler:
        values[_SCHEDULER] = scheduler
    if view.flag(_INTERLEAVE) != (chunks > 1):
        values[_INTERLEAVE] = chunks > 1
    if view.number(_CHUNKS, 1) != chunks:
        values[_CHUNKS] = chunks
    same_shape = (view.pp, view.chunks) == (config.pp, chunks)
    if not same_shape or layers_of(view, convert(view, load_schema())) != [list(row) for row in config.layers]:
        values[_OFFSET] = offset_of([list(row) for row in config.layers])
    for key, table in {
        "recompute": config.recompute.full,
        "select_recompute": config.recompute.select,
        "select_comm_recompute": config.recompute.communication,
    }.items():
        now = view.get(("recompute_config", key))
        if (isinstance(now, list) and not same_shape) or _read(now, config.layers) != table:
            values["recompute_config", key] = recompute_value(table, config.layers, operators_of(key, now))
    mp = ("recompute_config", "mp_comm_recompute")
    if config.recompute.full and view.flag(mp, True) != config.recompute.replay_tp:
        values[mp] = config.recompute.replay_tp
    return values


def _read(value: Any, layers: Table) -> Table | None:
    """The table of a recompute key; of a mapping of patterns that agree, theirs."""
    if isinstance(value, dict):
        tables = {_read(inner, layers) for inner in value.values()}
        return tables.pop() if len(tables) == 1 else ()
    return spread(value, layers)


def operators_of(key: str, now: Any) -> Any:
    """What stands at a recompute key; of a `select_recompute` that says nothing the operators that save memory."""
    return dict.fromkeys(SELECTED, False) if key == "select_recompute" and now is None else now


def recompute_value(table: Table | None, layers: Table, now: Any) -> Any:
    """A recompute key: a flag, or numbers of layers in offset's shape; for the operator patterns that stand there.

    Raises:
        RecipeError: a list of operators, which a child can only replace by a plain value.
    """
    value: Any = [list(row) for row in table] if table and len(table) > 1 else list(table[0]) if table else False
    value = True if table == layers else value
    if isinstance(now, list) and now and isinstance(now[0], str) and isinstance(value, list):
        raise RecipeError(
            f"recompute_config: {now} says nothing of layers, and a child cannot turn it into a mapping: write "
            f"{{{now[0]}: True, ...}}"
        )
    return dict.fromkeys(now, value) if isinstance(now, dict) else value


def _set(recipe: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        if isinstance(recipe, dict) and not isinstance(recipe.get(key), (dict, list)):
            recipe[key] = {}
        recipe = recipe[key]
    recipe[path[-1]] = value


def _difference(before: Any, after: Any) -> dict[str, Any]:
    """What a child must write, nested, to turn `before` into `after`."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = look(before, (key,))
        if isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            found.update({key: inner} if inner else {})
        elif key not in before or type(old) is not type(value) or old != value:
            found[key] = value
    return found
