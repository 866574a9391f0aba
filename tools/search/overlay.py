"""This module finds the MindFormers keys in which a configuration differs from its recipe, and writes them as a child
recipe (a file with this recipe as its base).

The child recipe contains only keys whose change has an effect, including the keys of the cluster that the search
assumed. Values that the recipe shares through YAML anchors change at all their places. Lists are written as a whole,
because a child cannot change single entries of its base's list. The child recipe never replaces the recipe itself or a
file from which the recipe inherits.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import RecipeError, did_you_mean
from plugins.expert_balance.settings import Settings, without_moves
from plugins.held_out_loss import plan as held_out_loss
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER, DISPATCHER_OF
from plugins.pipeline_layout import offset_of
from tools.estimate.configuration import Configuration, Table
from tools.estimate.from_recipe import (
    GRADIENTS,
    LEVEL,
    grouped_value,
    has_counts,
    named_layers,
    names_groups,
    not_empty,
    numbers_of,
    patterns_of,
    plain_value,
    reader_of,
    shards_gradients,
    swapped_value,
    table_of,
    with_patterns,
)
from tools.files.atomic import real_path, write_atomically
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB
from tools.pipeline.schedules import interleaves, scheduler_of, why_not
from tools.recipe.dump import recipe_text
from tools.recipe.load import BASE_CONFIG, KeyPath, Recipe, load_recipe
from tools.recipe.override import shared_paths
from tools.recipe.view import (
    CHUNKS,
    DISPATCH,
    MODE,
    MODEL,
    OFFSET,
    OVERLAP,
    PARALLEL,
    RUNNER,
    View,
    limit_of,
    look,
    unresolved,
)
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import EXCLUDE, RECOMPUTE, stage_layers_of, swaps


def files_of(recipe: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the file of a recipe that can be loaded, and all files from which it inherits."""
    path = Path(recipe)
    yield path
    bases = yaml.safe_load(path.read_text(encoding="utf-8")).get(BASE_CONFIG) or []
    for base in bases if isinstance(bases, list) else [bases]:
        yield from files_of(path.parent / base)


def keep_files_of(recipe: str | os.PathLike[str], option: str, target: str | os.PathLike[str] | None) -> None:
    """Raise RecipeError if `target`, the value of `option`, is one of the recipe's own files, even under another
    path.
    """
    if target is None or not os.path.exists(target):
        return
    for file in files_of(recipe):
        if os.path.samefile(target, file):
            own = "is the recipe itself" if os.path.samefile(file, recipe) else f"is a base of {recipe}"
            raise RecipeError(f"{option} {target}: this file {own} and would be overwritten; name another file")


_MOVES, _GROUPED = ("plugins", "expert_balance"), ("plugins", "grouped_gradient")
_EVERY = (*_MOVES, "every")
_HELD_OUT, _SEPARATE = ("plugins", "held_out_loss"), ("print_separate_loss",)
_HELD_SAMPLES = (*_HELD_OUT, "samples")
_DISPATCHER = (*MODEL, "moe_token_dispatcher_type")
NODE = (*MODEL, "npu_nums_per_device")
_LIMIT, _POOL = ("context", "max_device_memory"), ("context", "mempool_block_size")


@dataclass(frozen=True)
class Site:
    """A `Site` describes the cluster for which the search writes a recipe: the number of devices of a node, the
    hardware file and, if the user changed it, the memory limit of a device.
    """

    node: int  # devices
    hardware: str  # file or name, as `plugins.hierarchical_ep.hardware` takes it
    memory: float | None = None  # bytes of a device for the job, where the recipe's limit is not what was asked for


def stays_plugged(view: View, config: Configuration, node: int) -> bool:
    """Return whether a recipe can keep `plugins.hierarchical_ep`. To keep the plugin, EP groups must have several
    ranks, and must cover whole nodes or divide a node evenly.
    """
    aligned = config.ep % node == 0 or node % config.ep == 0
    return bool(view.get(DISPATCH)) and config.ep > 1 and aligned


def site_values(view: View, config: Configuration, site: Site) -> dict[KeyPath, Any]:
    """Return the recipe keys (with new values) that must change so that `config` runs on the cluster `site`, such as
    the number of devices of a node. If the size of the memory pool equals the old memory limit, both keys change
    together.
    """
    values: dict[KeyPath, Any] = {}
    plugged = stays_plugged(view, config, site.node)
    # other commands, such as `tc3 check` and `tc3 ep-report`, take the node from the recipe, whatever the dispatch
    if view.node != site.node and (config.model.experts or config.tp > view.node):
        values[NODE] = site.node
    if config.model.experts and config.ep > 1 and (plugged or config.ep_mode != "global"):
        hardware = (*DISPATCH, "hardware")
        # the chunks that `auto` stands for depend on the cluster
        if plugged and CHUNKS in unresolved(view.recipe) and view.get(hardware, DEFAULT_HARDWARE) != site.hardware:
            values[hardware] = site.hardware
    if site.memory is not None and limit_of(view.recipe) != int(site.memory):
        values[_LIMIT] = f"{math.ceil(site.memory / (GIB / 100)) / 100:g}GB"  # MindSpore's GB are 2^30 bytes
        if view.get(_POOL) is not None and view.get(_POOL) == view.get(_LIMIT):
            values[_POOL] = values[_LIMIT]
    return values


def dispatch_values(view: View, config: Configuration, node: int | None = None) -> dict[KeyPath, Any]:
    """Return the recipe keys, with new values, that must change so that tokens are dispatched to experts as in
    `config`. Return {} if the recipe already dispatches tokens in this way, or has no experts.

    `node` is the number of devices of a node, if it is not the recipe's. `auto` is replaced by the mode that it means
    for the recipe's own degrees and cluster.

    A recipe with the plugin `hierarchical_ep` keeps it, and a recipe without it gets it for the dispatch mode that
    MindFormers lacks. The plugin is switched off if one device has all experts, because then no tokens are dispatched,
    or if EP groups cross node boundaries, because the plugin refuses such groups.

    Raises:
        RecipeError: MindFormers does not have the dispatch mode of `config`.
    """
    if not config.model.experts:
        return {}
    if config.ep_mode not in MODES:
        near = did_you_mean(config.ep_mode, list(MODES))
        raise RecipeError(f"EP mode {config.ep_mode!r}: the mode must be one of {', '.join(MODES)}{near}")
    node = node or view.node
    if stays_plugged(view, config, node):
        return {} if view.get(MODE) == config.ep_mode else {MODE: config.ep_mode}
    values: dict[KeyPath, Any] = {}
    if view.get(DISPATCH):
        values[DISPATCH] = False
        values.update({OVERLAP: False} if view.get(OVERLAP) else {})
    mode = config.ep_mode
    if config.ep == 1 or (mode == "hierarchical" and config.ep < node):
        mode = "global"  # MindFormers' hierarchical dispatch wants whole nodes
    if mode == "deduplicated":
        values[DISPATCH] = {"mode": mode}
    dispatcher = DISPATCHER_OF.get(mode, DEFAULT_DISPATCHER)
    if view.get(_DISPATCHER, DEFAULT_DISPATCHER) != dispatcher:
        values[_DISPATCHER] = dispatcher
    return values


_DEGREES = {
    **{"dp": "data_parallel", "tp": "model_parallel", "pp": "pipeline_stage"},
    **{"cp": "context_parallel", "ep": "expert_parallel"},
}
_PIPELINE = ("parallel", "pipeline_config")
_SHARD = ("parallel", "parallel_optimizer_config")
_LISTS = [("recompute_config", key) for key in (*RECOMPUTE, *EXCLUDE)]
_STRATEGY = ("parallel", "dataset_strategy")
_SCHEDULER, _INTERLEAVE = (*_PIPELINE, "pipeline_scheduler"), (*_PIPELINE, "pipeline_interleave")
_CHUNKS = (*MODEL, "pp_interleave_num")


def overlay(recipe: Recipe, config: Configuration, site: Site | None = None) -> dict[str, Any]:
    """Return the nested keys of a child recipe (a file with `recipe` as its base) that runs `config`; return {} if
    `recipe` already runs `config`.

    Raises:
        RecipeError: the recipe is not for several devices, or MindFormers has no key for a setting of `config`.
    """
    return _difference(recipe, changed(recipe, config, site))


def write_overlay(
    recipe: Recipe, config: Configuration, path: str | os.PathLike[str], notes: Sequence[str], site: Site | None = None
) -> None:
    """Write atomically a child recipe (a file with the recipe's own file as its base), with `notes` as comments at its
    head.

    Changes that were made in `recipe` after it was read are written, too. If a mapping replaces a plain value or a
    list, which a child cannot express, the file holds the whole recipe instead.

    Raises:
        RecipeError: as for `overlay`; or `path` is the recipe or a file from which it inherits.
        DataError: the folder cannot be written to.
    """
    keep_files_of(recipe.source, "overlay", path)
    target = Path(path)
    before, after = load_recipe(recipe.source), changed(recipe, config, site)
    lines = [line for note in (*notes, *left_off(recipe, config)) for line in note.splitlines() or [""]]
    if (key := _not_for_a_child(before, after)) is not None:
        lines.append(f"The whole of {os.path.basename(recipe.source)}: a child cannot turn its {key} into a mapping.")
        text = recipe_text(after)
    else:
        # `..` behind a linked folder leads out of the folder that it points to
        source = Path(recipe.source)
        base = os.path.relpath(real_path(source.parent) / source.name, real_path(target.parent))
        text = recipe_text({BASE_CONFIG: base, **_difference(before, after)})
    write_atomically(target, "".join(f"# {line}\n" for line in lines) + text)


def require_layouts(recipe: Recipe, devices: int) -> None:
    """Raise RecipeError for a recipe that does not split its model over devices and therefore has no layout."""
    if not View(recipe).parallel and devices > 1:
        raise RecipeError(
            f"{recipe.source}: a layout on several devices needs use_parallel: True and parallel.parallel_mode: 1"
        )


def changed(recipe: Recipe, config: Configuration, site: Site | None = None) -> Recipe:
    """Return a copy of `recipe` that runs `config` on the cluster `site`, which is the recipe's own cluster by default.
    The function raises the same errors as `overlay`.
    """
    view = View(recipe)
    require_layouts(recipe, config.devices)
    if reason := why_not(config.schedule):
        raise RecipeError(f"no recipe can ask for the schedule {config.schedule}: {reason}")
    values = {**_degrees(view, config), **_pipeline(view, config)}
    values |= {**dispatch_values(view, config, site.node if site else None), **_idle_plugins(view, config)}
    values |= _held_out(view, config)
    values |= site_values(view, config, site) if site else {}
    result = copy.deepcopy(recipe)
    shared = {other: value for path, value in values.items() for other in shared_paths(recipe, path)[1:]}
    for path, value in (*(item for item in shared.items() if item[0] not in values), *values.items()):
        section: Any = result
        for key in path[:-1]:
            if isinstance(section, dict) and not isinstance(section.get(key), (dict, list)):
                section[key] = {}
            section = section[key]
        section[path[-1]] = value
    return result


def _degrees(view: View, config: Configuration) -> dict[KeyPath, Any]:
    piped = config.pp > 1
    wanted: list[tuple[KeyPath, Any, Any]] = [
        ((*PARALLEL, key), getattr(view, name), getattr(config, name)) for name, key in _DEGREES.items()
    ]
    wanted.append(((*RUNNER, "batch_size"), view.batch, config.batch))
    if type(repeated := view.get((*MODEL, "batch_size"))) is int:  # MindFormers replaces it, and tc3 check compares
        wanted.append(((*MODEL, "batch_size"), repeated, config.batch))
    numbers: dict[KeyPath, int] = {
        (*PARALLEL, "micro_batch_num"): config.micro_batches if piped else 1,
        (*RUNNER, "gradient_accumulation_steps"): 1 if piped else config.micro_batches,
    }
    flags: dict[KeyPath, bool] = {
        (*PARALLEL, "use_seq_parallel"): config.sequence_parallel and config.tp > 1,
        ("parallel", "enable_parallel_optimizer"): config.shard_optimizer,
    }
    wanted += [(path, view.number(path, 1), value) for path, value in numbers.items()]
    for index, callback in enumerate(view.get(("callbacks",), []) or []):
        if callback.get("type") == "TopkBiasBalanceCallback":  # it repeats both numbers
            for (*_, key), value in numbers.items():
                if key in callback or key == "gradient_accumulation_steps":  # that is 1 unless it is written
                    wanted.append((("callbacks", index, key), callback.get(key, 1), value))
    wanted += [(path, view.flag(path), value) for path, value in flags.items()]
    # beside an optimizer_level MindSpore takes the flag that shards accumulated gradients only at level2
    now, then = shards_gradients(view), config.shard_gradients
    if view.get(LEVEL) is None:
        wanted.append((GRADIENTS, now, then))
    else:
        wanted.append((LEVEL, f"level{1 + now}", f"level{1 + then}"))
    threshold = (*_SHARD, "parallel_optimizer_threshold")
    wanted.append((threshold, view.number(threshold, 64), config.shard_threshold // 1024))
    rows = view.get(_STRATEGY)
    if isinstance(rows, list):
        wanted.append((_STRATEGY, rows, [[config.dp, *row[1:]] for row in rows]))
    return {path: value for path, now, value in wanted if now != value}


def _pipeline(view: View, config: Configuration) -> dict[KeyPath, Any]:
    chunks = config.chunks
    scheduler = scheduler_of(config.schedule)
    values: dict[KeyPath, Any] = {}
    if view.scheduler != scheduler:
        values[_SCHEDULER] = scheduler
    turns = interleaves(config.schedule, chunks) if config.pp > 1 else chunks > 1
    if view.flag(_INTERLEAVE) != turns:
        values[_INTERLEAVE] = turns
    if view.number(_CHUNKS, 1) != chunks:
        values[_CHUNKS] = chunks
    same_shape = (view.pp, view.chunks) == (config.pp, chunks)
    kept = same_shape and OFFSET not in unresolved(view.recipe)
    if not kept or stage_layers_of(view, convert(view, load_schema())) != [list(row) for row in config.layers]:
        values[OFFSET] = offset_of([list(row) for row in config.layers])
    for key, wanted in {
        "recompute": config.recompute.full,
        "select_recompute": config.recompute.select,
        "select_comm_recompute": config.recompute.communication,
    }.items():
        now, table = view.get(("recompute_config", key)), not_empty(wanted)
        if key == "select_recompute" and (config.recompute.operators or names_groups(now)):
            kept = same_shape and not (swaps(view) and OFFSET in values)  # numbers hold for these very layers
            written = grouped_value(view, config, now, kept)
            values |= {} if written == now else {("recompute_config", key): written}
        elif swaps(view):
            if not _swapped_alike(view, key, now, config, table, same_shape and OFFSET not in values):
                values["recompute_config", key] = swapped_value(key, table, config, now)
        elif (not same_shape and has_counts(now)) or table_of(key, now, config.layers) != table:
            values["recompute_config", key] = with_patterns(key, plain_value(table, config.layers), now)
    for key in EXCLUDE:
        now = view.get(("recompute_config", key))
        if not same_shape and has_counts(now):  # of stages that are no more; the model does not count exclusions
            values["recompute_config", key] = dict.fromkeys(now, False) if isinstance(now, dict) else False
    if scheduler == "zero_bubble_v":
        # lists of one operator pattern become mappings: zero_bubble_v turns round the second entry of any list
        lists = {path: values.get(path, view.get(path)) for path in _LISTS}
        one = {path: value for path, value in lists.items() if isinstance(value, list) and len(patterns_of(value)) == 1}
        values |= {path: {value[0]: True} for path, value in one.items()}
    mp = ("recompute_config", "mp_comm_recompute")
    if config.recompute.full and view.flag(mp, True) != config.recompute.replay_tp:
        values[mp] = config.recompute.replay_tp
    return values


def _idle_plugins(view: View, config: Configuration) -> dict[KeyPath, Any]:
    """Return the keys that switch off what has nothing to do in `config` and is refused there: experts that move where
    one device holds all, and the experts' gradients of a pipeline's micro-batches where there is no pipeline.
    """
    values: dict[KeyPath, Any] = {}
    balance, _ = Settings.look(view.get(_MOVES))
    if config.ep == 1 and balance is not None and balance.every:
        values[_MOVES] = without_moves(view.get(_MOVES))
    if config.pp == 1 and view.get(_GROUPED) not in (None, False):
        values[_GROUPED] = False
    return values


def _held_out(view: View, config: Configuration) -> dict[KeyPath, Any]:
    """Return the keys that `plugins.held_out_loss` needs in `config`: at least the samples of a step, and with
    micro-batches the loss of the language model apart from other losses.
    """
    values: dict[KeyPath, Any] = {}
    settings, _ = held_out_loss.Settings.look(view.get(_HELD_OUT))
    if settings is None:
        return values
    if settings.samples is not None and settings.samples < config.global_batch:
        values[_HELD_SAMPLES] = config.global_batch
    if config.micro_batches > 1 and view.get(_SEPARATE) is False:
        values[_SEPARATE] = True
    return values


def left_off(recipe: Recipe, config: Configuration) -> list[str]:
    """Return a line of text (in a list) if a child recipe for `config` will not move experts because `recipe` has no
    expert parallelism; otherwise return an empty list. An earlier search that wrote `recipe` may have switched off
    moving experts; the setting in the original recipe is then unknown.
    """
    view = View(recipe)
    balance, _ = Settings.look(view.get(_MOVES))
    if view.ep > 1 or config.ep == 1 or balance is None or balance.every:
        return []
    return [
        f"{'.'.join(_EVERY)} stays 0, which expert_parallel: 1 needs, so that no experts move; with expert_parallel: "
        f"{config.ep} they can: write the number of steps between plans, such as {Settings().every}."
    ]


def _swapped_alike(
    view: View, key: str, now: Any, config: Configuration, table: Table | None, same_layers: bool
) -> bool:
    """Return whether a key of a recipe that swaps says what is wanted: as many layers on each chunk, or those."""
    if table_of(key, now, config.layers, reader_of(view)) != table:
        return False
    return (
        same_layers
        or not table
        or named_layers(now, config.layers) == set(numbers_of(table, config.layers, config.schedule))
    )


def _difference(before: Any, after: Any) -> dict[str, Any]:
    """Return the nested keys that a child recipe must write to turn `before` into `after`."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = look(before, (key,))
        if isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            found.update({key: inner} if inner else {})
        elif key not in before or type(old) is not type(value) or old != value:
            found[key] = value
    return found


def _not_for_a_child(before: Any, after: Any, path: KeyPath = ()) -> str | None:
    """Return the first key whose mapping in `after` replaces a plain value, which MindFormers cannot merge."""
    for key, value in after.items():
        old = look(before, (key,))
        if isinstance(value, dict) and old is not None:
            where = (*path, key)
            found = _not_for_a_child(old, value, where) if isinstance(old, dict) else ".".join(map(str, where))
            if found is not None:
                return found
    return None
