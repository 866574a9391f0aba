"""This module runs all checks of one recipe, in the order in which an engineer would want to correct the findings.

`table_of` makes the table of a recipe that passes: parameters, tokens per step, layers and parameters by stage, FLOPs
and steps.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from rich.table import Table

from plugins.errors import RecipeError
from plugins.held_out_loss.plan import paths_of
from tools.check.arithmetic import check_arithmetic
from tools.check.build import check_arrival
from tools.check.conflicts import check_conflicts
from tools.check.data_files import check_files
from tools.check.differences import check_differences
from tools.check.plugins import check_plugins
from tools.data.index import read_whole
from tools.estimate.from_recipe import adapters_of
from tools.layout.resolve import UnresolvedError, resolve_for_check
from tools.model import (
    FORMULA,
    Model,
    active_parameters,
    adapter_parameters,
    flops_per_token,
    model_of,
    parameters,
    stage_parameters,
)
from tools.ranges import recipe_range
from tools.recipe.findings import ERROR, SEVERITIES, Finding, Findings, Report, refused
from tools.recipe.load import KeyPath, Recipe, bad_numbers, look, read_recipe
from tools.recipe.override import dotted
from tools.recipe.view import LOADER, OFFSET, View
from tools.schema.converter import Built, convert
from tools.schema.keys import check_keys, check_model
from tools.schema.schema import Schema, load_schema
from tools.schema.stages import Layers, check_stages, layers_of, runs_back, stage_layers_of

_SECTIONS = (
    *(("runner_config",), ("context",), ("parallel",), ("parallel_config",), ("trainer",), ("optimizer",)),
    *(("runner_wrapper",), ("model", "model_config"), ("train_dataset_task",)),
)
_MODEL: KeyPath = ("model", "model_config")
_MADE_UP = "made-up data"


def check_recipe(
    recipe: str | os.PathLike[str] | dict[str, Any], token_budget: int | None = None, here: bool = False
) -> Report:
    """Check a recipe (a file, or one that is loaded) without MindFormers and without a device.

    Args:
        token_budget: tokens to train, for the table's number of steps; the recipe's own by default.
        here: the run starts on this machine: missing data is an error, not a warning.

    Raises:
        RecipeError: the file cannot be read, or is not a YAML mapping.
    """
    if not isinstance(recipe, dict):
        recipe = read_recipe(recipe)
    elif not isinstance(recipe, Recipe):
        recipe = Recipe(recipe)
    schema = load_schema()
    found = Findings(recipe, schema.line)
    if is_fragment(recipe.source):
        check_keys(recipe, schema, found)
        _numbers(recipe, found)
        return Report(recipe, found.found)
    _sections(View(recipe), schema, found)
    check_keys(recipe, schema, found)
    if _numbers(recipe, found):
        return Report(recipe, _sorted(found))
    recipe, unresolved = resolve_for_check(recipe)
    view = View(recipe)
    built = convert(view, schema)
    if view.get(("model", "model_config")) is not None:
        check_arrival(view, schema, built, found)
        check_stages(view, built, found)
        check_arithmetic(view, built, found)
        check_conflicts(view, built, found)
        check_plugins(view, built, found)
        check_differences(view, built, found)
        check_files(view, built, found, here)
    _unresolved(unresolved, found)
    return Report(recipe, _sorted(found), table_of(view, built, token_budget))


def require_sound(recipe: Recipe, own_data: bool = True) -> None:
    """Refuse a recipe that MindFormers would refuse or change, because results about such a recipe would be wrong. If
    `own_data` is False, the recipe's data files are not checked, because the command trains on made-up data.

    Raises:
        RecipeError: the first error that `tc3 check` finds, in one line, and how many more there are.
    """
    if not own_data:
        recipe = copy.deepcopy(recipe)
        config, held_out = look(recipe, (*LOADER, "config")), look(recipe, ("plugins", "held_out_loss"))
        if View(recipe).megatron and isinstance(config, dict):
            read_whole(config, _MADE_UP)
            if isinstance(held_out, dict) and paths_of(held_out.get("data_path")):
                held_out["data_path"] = _MADE_UP
    if errors := check_recipe(recipe).errors:
        raise refused(errors)


def new_errors(before: Recipe, after: Recipe) -> list[str]:
    """Return what `tc3 check` finds wrong with the changed recipe `after` and not with the recipe `before`, without the
    places in the files.
    """
    found = [f"{one.key}: {one.wrong}" for one in check_recipe(after).errors]
    known = [f"{one.key}: {one.wrong}" for one in check_recipe(before).errors] if found else []
    return [error for error in found if error not in known]


def require_sections(recipe: Recipe) -> None:
    """Refuse a recipe if it lacks a section or a key without which no training starts; all other errors are accepted,
    so that recipes with errors can be compared, too.

    Raises:
        RecipeError: the first missing section or key, in one line, and how many more there are.
    """
    schema = load_schema()
    found = Findings(recipe, schema.line)
    _sections(View(recipe), schema, found)
    if found.found:
        raise refused(found.found)


def _sorted(found: Findings) -> list[Finding]:
    return sorted(found.found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.file, finding.line))


def _numbers(recipe: Recipe, found: Findings) -> bool:
    """Add numbers that no training can mean, and return whether a size is among them or is no number at all: nobody
    should calculate with it, because rules about other keys would give advice for the default of that size.
    """
    keys = {finding.key for finding in found.found}
    known = {mark.ident for path, mark in recipe.marks.items() if dotted(path) in keys}
    refused = list(bad_numbers(recipe))
    for path, _, wrong, right in refused:
        if dotted(path) not in keys and (path not in recipe.marks or recipe.marks[path].ident not in known):
            found.error(path, wrong, right)
    return any(refusal.size for refusal in refused) or any(_is_no_size(recipe, key.split(".")) for key in keys)


def _is_no_size(recipe: Recipe, path: list[str]) -> bool:
    """Return whether a whole number belongs at a key path, and 8.0, True or nothing stands there."""
    span, value = recipe_range(path), look(recipe, tuple(path), "")
    return span is not None and span.whole and (value is None or isinstance(value, bool | float))


def _unresolved(failed: list[UnresolvedError], found: Findings) -> None:
    """Say why values stay open; of a dispatch only where nothing else is wrong, which has the same cause."""
    for error in failed:
        if error.path == OFFSET:
            found.error(error.path, f"{error.why}; everything else is checked with an even layout")
        elif not any(finding.severity == ERROR for finding in found.found):
            found.error(error.path, f"auto: {error.why}")


def is_fragment(source: str) -> bool:
    """Return whether a file holds only a part of a recipe (recipes/base/), so that only the keys that it has can be
    checked.
    """
    return Path(source).parent.name == "base"


def _sections(view: View, schema: Schema, found: Findings) -> None:
    """Check sections and keys without which no training starts."""
    missing: list[KeyPath] = [path for path in _SECTIONS if not isinstance(view.get(path), dict)]
    data = view.get(("train_dataset",))
    if data is None or (isinstance(data, dict) and not isinstance(data.get("data_loader"), dict)):
        missing.append(("train_dataset",) if data is None else ("train_dataset", "data_loader"))
    for path in missing:
        found.error(path, f"the section {path[-1]} is missing", "every training recipe needs this section")
    if _MODEL not in missing:
        check_model(view.recipe, schema, found)


def table_of(view: View, built: Built, token_budget: int | None = None) -> dict[str, Any] | None:
    """Return the sizes of the recipe as a table; return None if its model is invalid, and a table without stages if its
    pipeline offset is invalid. The keys of the table name units (parameters, layers, tokens, FLOPs); lists have one
    value for each pipeline stage.
    """
    if view.get((*_MODEL, "model_type")) not in load_schema().trained:
        return None  # its sizes are those of another model
    layers = stage_layers_of(view, built)
    try:
        model = model_of(built.fields)
        total = parameters(model)
        if total <= 0:
            return None
        if layers is not None and sum(map(sum, layers)) != model.layers:
            layers = None
        tokens = view.global_batch * built.fields["seq_length"]  # of a step of the largest batch
        flops = flops_per_token(model, built.fields["seq_length"])
        adapters = adapters_of(view, built.fields)
    except (RecipeError, TypeError, KeyError, ValueError):
        return None
    length = built.fields["seq_length"]
    budget = token_budget or _own_budget(view, length)
    return {
        "parameters_total": total,
        "parameters_active": active_parameters(model),
        "parameters_trained": adapter_parameters(model, adapters) if adapters else total,
        "devices": view.devices,
        "layout": {"dp": view.dp, "tp": view.tp, "pp": view.pp, "cp": view.cp, "ep": view.ep, "chunks": view.chunks},
        "global_batch_samples": view.global_batch,
        "batch_ramp": [list(stage) for stage in view.ramp.stages],
        "tokens_per_step": tokens,
        "stage_layers": [sum(rows) for rows in zip(*layers, strict=True)] if layers else None,
        "stage_chunk_layers": layers,
        "stage_parameters": _stage_parameters(view, built, model) if layers else None,
        "flops_per_token": flops,
        "flops_formula": FORMULA,
        "flops_per_step": flops * tokens,
        "token_budget": budget,
        "steps": _steps(view, length, budget) if budget else None,
    }


def _stage_parameters(view: View, built: Built, model: Model) -> list[int]:
    """Return weights on each stage; where the pipeline runs back up, the end is on the first."""
    in_order: Layers = layers_of(view, built) or []
    if not runs_back(view):
        return stage_parameters(model, in_order)
    chunks = stage_parameters(model, [[*in_order[0], *in_order[1]]])
    return [down + up for down, up in zip(chunks[: view.pp], reversed(chunks[view.pp :]), strict=True)]


def _own_budget(view: View, length: int) -> int | None:
    """Return the number of tokens that the recipe itself asks for, by its number of samples or by its schedule."""
    epochs = view.number(("runner_config", "epochs"), 1)
    if view.samples:
        return epochs * view.ramp.samples_until(view.ramp.steps_of(view.samples)) * length or None
    steps = view.get(("lr_schedule", "total_steps"))
    return view.ramp.samples_until(steps) * length if type(steps) is int and steps > 0 else None


def _steps(view: View, length: int, budget: int) -> int:
    """Return steps that train at least `budget` tokens."""
    samples = -(-budget // length)
    whole = view.ramp.steps_of(samples)
    return whole + (view.ramp.samples_until(whole) < samples)


def side_by_side(tables: list[tuple[str, dict[str, Any]]]) -> Table:
    """Return the sizes of several recipes as one table of the library rich, with a column for each recipe."""
    shown = Table(show_edge=False, pad_edge=False)
    shown.add_column("")
    for name, _ in tables:
        shown.add_column(name, justify="right", overflow="fold")
    rows = [_rows(table) for _, table in tables]
    for index, (label, _) in enumerate(rows[0]):
        shown.add_row(label, *(row[index][1] for row in rows))
    return shown


def _samples(table: dict[str, Any]) -> str:
    """Return the samples of a step, of each stage where they grow."""
    stages = [f"{batch:,} until step {end:,}" for end, batch in table["batch_ramp"]]
    return ", ".join([*stages, f"{table['global_batch_samples']:,}"])


def _rows(table: dict[str, Any]) -> list[tuple[str, str]]:
    layout = " ".join(f"{name}{size}" for name, size in table["layout"].items() if size > 1) or "one device"
    adapters = table["parameters_trained"] if table["parameters_trained"] != table["parameters_total"] else 0
    trained = f" (frozen; adapters: {adapters:,})" if adapters else ""
    steps = f"{table['steps']:,} for {_short(table['token_budget'])} tokens" if table["steps"] else "unknown"
    return [
        ("parameters", f"{table['parameters_total']:,}{trained}"),
        ("active parameters per token", f"{table['parameters_active']:,}"),
        ("devices", f"{table['devices']:,} ({layout})"),
        ("samples per step", _samples(table)),
        ("tokens per step", f"{table['tokens_per_step']:,}"),
        ("layers by stage", " ".join(map(str, table["stage_layers"] or ["unknown"]))),
        ("parameters by stage", " ".join(map(_short, table["stage_parameters"] or [])) or "unknown"),
        ("FLOPs per token", f"{table['flops_per_token']:.4g}"),
        ("FLOPs per step", f"{table['flops_per_step']:.4g}"),
        ("steps", steps),
    ]


def _short(number: int) -> str:
    """Return a number in short form: 1234567 as 1.23M."""
    units = {10**12: "T", 10**9: "B", 10**6: "M", 10**3: "K"}
    return next((f"{number / unit:.3g}{name}" for unit, name in units.items() if number >= unit), str(number))
