"""This module makes the value of the key `model.model_config.offset`, which sets the number of layers of each stage and
chunk. The value comes from a Megatron layout string, from a layout file, or from an even distribution of the layers.

A layout string says on which stage each layer runs, and is translated to an offset. The value `auto` means a result of
the pipeline optimiser that is stored in a file beside the recipe (`LayoutFile`); this file also determines the tables
of `recompute_config`.

Like the lock file of a package manager, the layout file is made once and read at every launch. The layout file of
`pretrain.yaml` is `pretrain.layout.yaml`. The layout file holds the inputs of the optimiser (`inputs`, and their
digest), its result in the form of MindFormers' keys, and the predicted time and memory of this result. A launch whose
recipe has other inputs refuses the file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plugins.errors import RecipeError, refuse_unknown
from plugins.pipeline_layout import counts_of, counts_of_offset, offset_of
from tools.estimate.configuration import MODEL_VERSION, Recompute, even_layers, spread
from tools.estimate.from_recipe import from_recipe, grouped_value, names_groups, swapped_value, with_patterns
from tools.files.atomic import write_atomically
from tools.hardware.load import read_yaml
from tools.model import words_of
from tools.pipeline.schedules import is_v_shaped
from tools.recipe.dump import recipe_text
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import OFFSET, View, limit_of
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import RECOMPUTE, swaps

ENDING = ".layout.yaml"
_HEAD = "# What `offset: auto` stands for."
_MADE_BY = re.compile(re.escape(_HEAD) + r" Made by `(.*)`; read at every launch\.\n")


@dataclass(frozen=True)
class LayoutFile:
    """A `LayoutFile` holds one result of the pipeline optimiser, which is stored in a file beside the recipe."""

    digest: str  # of `inputs`
    inputs: Mapping[str, Any]  # what the answer depends on, by dotted name
    cluster: str  # what times were predicted for
    offset: Any  # of `model.model_config`
    recompute: Any  # the three tables of `recompute_config`
    select_recompute: Any
    select_comm_recompute: Any
    # step_s and bound_s in seconds; stage_gib and cap_gib of memory, memory_margin of it that had to stay free, and how
    # many published runs would fit so near to the limit
    predicted: Mapping[str, Any]


def path_of(recipe: str) -> Path:
    """Return the path of the layout file that belongs to a recipe's file."""
    return Path(recipe).with_suffix(ENDING)


def is_layout_file(path: Path) -> bool:
    """Return whether a file is a layout file, which tc3 may replace without asking."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().startswith(_HEAD)
    except (OSError, UnicodeDecodeError):
        return False


def digest_of(inputs: Mapping[str, Any]) -> str:
    """Return a digest of sixteen hexadecimal digits that identifies the inputs of a layout file."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def write_layout(layout: LayoutFile, path: Path, command: str) -> None:
    """Write a layout file made by `command`. DataError is raised if the file's folder is not writable."""
    head = f"{_HEAD} Made by `{command}`; read at every launch.\n"
    write_atomically(path, head + recipe_text(asdict(layout)))


def maker_of(path: Path) -> str:
    """Return the command that made a layout file, as the file's first line names it; return "" if it names none."""
    with path.open(encoding="utf-8") as file:
        made = _MADE_BY.fullmatch(file.readline())
    return made[1] if made else ""


def read_layout(path: Path) -> LayoutFile:
    """Return the content of a layout file. RecipeError is raised if the file cannot be read or lacks a key."""
    content = read_yaml(path, RecipeError)
    wanted = [field.name for field in fields(LayoutFile)]
    if missing := [name for name in wanted if not isinstance(content, dict) or name not in content]:
        raise RecipeError(
            f"{path}: the file must be a mapping with the keys {', '.join(wanted)}, but it lacks {', '.join(missing)}; "
            "make it again with tc3 search layout"
        )
    refuse_unknown(f"{path}: ", content, wanted)
    return LayoutFile(**content)


def layout_at(path: Path) -> LayoutFile | None:
    """Return the content of a layout file; return None if there is no layout file, or if it cannot be read."""
    try:
        return read_layout(path) if is_layout_file(path) else None
    except RecipeError:
        return None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words the differences between two sets of inputs of a layout file, such as "pp 8, was 4"."""
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} {now.get(name, 'absent')}, was {before.get(name, 'absent')}"
        for name in names
        if now.get(name) != before.get(name)
    ]


Values = dict[KeyPath, Any]
_ANSWERS = ("layers", "recompute")  # what of a run is asked for
_OF_DATA = ("attended",)  # what no recipe says: a corpus does
# left out at these values, which layout files of before took for granted
_TAKEN = {"weight_item": 4, "state_item": 8, "matrix_state_item": None, "adapters": None, "keeps_scores": False}
_TAKEN |= {"model.streams": 1, "model.sinkhorn": 0}


def put(recipe: Recipe, values: Values) -> None:
    """Set values of a recipe in place. The sections that hold the values are copied first, because YAML anchors may
    share these sections with other keys.
    """
    for path, value in values.items():
        section: Any = recipe
        for key in path[:-1]:
            inner = section.get(key)
            section[key] = dict(inner) if isinstance(inner, dict) else {}
            section = section[key]
        section[path[-1]] = value


def string_values(recipe: Recipe, text: str) -> Values:
    """Return the value of the key `offset` that describes the same distribution of layers as a Megatron layout string.

    Raises:
        RecipeError: the text is not a layout string, or does not fit the model or the pipeline.
    """
    view = View(recipe)
    built = convert(View(even_layout(recipe)), load_schema())
    stages, chunks = (view.pp, view.chunks) if view.parallel else (1, 1)
    if is_v_shaped(view.scheduler):
        raise RecipeError(
            f"layout {text!r}: a layout string cannot describe {view.scheduler}, whose second chunks run from the last "
            "stage back to the first"
        )
    counts, mtp = counts_of(text, stages)
    if len(counts) != chunks:
        raise RecipeError(
            f"layout {text!r}: the layout has {len(counts)} chunks on each of {stages} stages, but the recipe has "
            f"{chunks} on each stage; pp_interleave_num takes effect only with "
            "parallel.pipeline_config.pipeline_interleave: True"
        )
    for name, have, want in (
        ("decoder layers", sum(map(sum, counts)), built.number("num_layers")),
        ("MTP layers", mtp, built.number("mtp_num_layers")),
    ):
        if have != want:
            raise RecipeError(f"layout {text!r}: the layout has {have} {name}, but the model has {want}")
    return {OFFSET: offset_of(counts)}


def even_values(recipe: Recipe) -> Values:
    """Return the values of the keys `offset` and `recompute_config` for a layout with evenly distributed layers and
    without recomputation.
    """
    flat = copy.deepcopy(recipe)
    put(flat, {OFFSET: 0})
    view = View(flat)
    stages, chunks = (view.pp, view.chunks) if view.parallel else (1, 1)
    layers = even_layers(convert(view, load_schema()).number("num_layers"), stages, chunks)
    offset = offset_of([list(row) for row in layers])
    return {OFFSET: offset, **{("recompute_config", name): False for name in RECOMPUTE}}


def even_layout(recipe: Recipe) -> Recipe:
    """Return a copy of a recipe in which each `auto` of the layout is replaced by an even layout without
    recomputation.
    """
    even = copy.deepcopy(recipe)
    put(even, even_values(recipe))
    return even


def file_values(recipe: Recipe, layout: LayoutFile) -> Values:
    """Return the values of the keys `offset` and `recompute_config` that a layout file holds.

    Raises:
        RecipeError: the layout file was made for another run, or has another number of layers than the model.
    """
    inputs = inputs_of(recipe)
    if layout.digest != digest_of(inputs):
        changed = "; ".join(differences(layout.inputs, inputs)) or "its digest is not that of its inputs"
        raise RecipeError(
            f"auto: {path_of(recipe.source)} was made for another recipe or other settings ({changed}); "
            f"{remedy(recipe)}"
        )
    view, config = View(recipe), from_recipe(even_layout(recipe))
    counts = counts_of_offset(layout.offset, config.model.layers, config.pp, config.chunks)
    layers = tuple(tuple(row) for row in counts)
    # a layout recomputes no groups of operators
    placed = replace(config, layers=layers, recompute=Recompute(select=spread(layout.select_recompute, layers)))
    values: Values = {OFFSET: layout.offset}
    for name in RECOMPUTE:
        value, now = getattr(layout, name), view.get(("recompute_config", name))
        if name == "select_recompute" and names_groups(now):
            values["recompute_config", name] = grouped_value(view, placed, now, False)
        elif swaps(view):  # the file counts layers, as launches without swapping read them
            values["recompute_config", name] = swapped_value(name, spread(value, layers), placed, now)
        else:
            values["recompute_config", name] = with_patterns(name, value, now)
    return values


def remedy(recipe: Recipe) -> str:
    """Return the command that makes the layout file of a recipe, as advice if the file is missing or belongs to another
    run.
    """
    return f"run tc3 search layout {recipe.source} (with the --set of this run, if any)"


def inputs_of(recipe: Recipe) -> dict[str, Any]:
    """Return the inputs on which a layout file depends: the values of the recipe that the models of time and memory
    read, and the version of these models. The cluster is not one of the inputs of a layout file.
    """
    config = from_recipe(even_layout(recipe))
    run = {name: value for name, value in asdict(config).items() if name not in (*_ANSWERS, *_OF_DATA, "model")}
    sizes = {f"model.{name}": value for name, value in asdict(config.model).items() if name != "pattern"}
    run, sizes = (
        {name: value for name, value in each.items() if name not in _TAKEN or value != _TAKEN[name]}
        for each in (run, sizes)
    )
    sizes |= {"model.layers": config.model.layers, "model.pattern": words_of(config.model.pattern)}
    run |= {"chunks": config.chunks, "replay_tp": config.recompute.replay_tp}
    run["ep_cut"] = [list(config.ep_cut.chunks or ()), config.ep_cut.stride] if config.ep_cut else None
    return {**run, **sizes, "max_device_memory": limit_of(recipe), "model_version": MODEL_VERSION}
