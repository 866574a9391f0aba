"""All checks of one recipe, in the order in which an engineer would want to mend what they find."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tools.check.arithmetic import check_arithmetic
from tools.check.arrival import check_arrival
from tools.check.conflicts import check_conflicts
from tools.check.data_files import check_files
from tools.check.differences import check_differences
from tools.check.plugins import check_plugins
from tools.check.table import table_of
from tools.layout.resolve import UnresolvedError, resolve_for_check
from tools.recipe.findings import ERROR, SEVERITIES, Finding, Findings, Report, refused
from tools.recipe.load import Recipe, read_recipe
from tools.recipe.numbers import bad_numbers
from tools.recipe.override import dotted
from tools.recipe.unresolved import OFFSET
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.keys import check_keys
from tools.schema.schema import load_schema
from tools.schema.stages import check_stages

_SECTIONS = ("runner_config", "context", "parallel", "parallel_config", "trainer", "optimizer", "runner_wrapper")


def check_recipe(
    recipe: str | os.PathLike[str] | dict[str, Any], token_budget: int | None = None, here: bool = False
) -> Report:
    """Check a recipe (a file, or a recipe that is loaded already) without MindFormers and without a device.

    Args:
        recipe: path, `Recipe`, or a plain dict (whose findings then have no line).
        token_budget: tokens to train, for the table's number of steps; the recipe's own by default.
        here: the run starts on this machine: missing data is an error, not a warning.

    Raises:
        RecipeError: the file cannot be read, or is no YAML mapping.
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
    _sections(View(recipe), found)
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


def require_sound(recipe: Recipe) -> None:
    """Refuse a recipe that MindFormers would not run as it is written: no answer about it would be one.

    Raises:
        RecipeError: the first error that `tc3 check` finds, in one line, and how many more there are.
    """
    if errors := check_recipe(recipe).errors:
        raise refused(errors)


def _sorted(found: Findings) -> list[Finding]:
    return sorted(found.found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.file, finding.line))


def _numbers(recipe: Recipe, found: Findings) -> bool:
    """Numbers that no training can mean; whether a size is among them, with which nobody should calculate."""
    keys = {finding.key for finding in found.found}
    known = {mark.ident for path, mark in recipe.marks.items() if dotted(path) in keys}
    refused = list(bad_numbers(recipe))
    for path, _, wrong, right in refused:
        if dotted(path) not in keys and (path not in recipe.marks or recipe.marks[path].ident not in known):
            found.error(path, wrong, right)
    return any(refusal.size for refusal in refused)


def _unresolved(failed: list[UnresolvedError], found: Findings) -> None:
    """Why values stay open. Of a dispatch only where nothing else is wrong: the same is then said of its own keys."""
    for error in failed:
        if error.path == OFFSET:
            found.error(error.path, f"{error.why}; all else is checked with an even layout")
        elif not any(finding.severity == ERROR for finding in found.found):
            found.error(error.path, f"auto: {error.why}")


def is_fragment(source: str) -> bool:
    """Whether a file is a part of recipes (recipes/base/): only its keys can be checked."""
    return Path(source).parent.name == "base"


def _sections(view: View, found: Findings) -> None:
    """Sections without which no training starts."""
    for name in _SECTIONS:
        if not isinstance(view.get((name,)), dict):
            found.error((name,), "this section is missing", "every training recipe has it")
    if not isinstance(view.get(("model", "model_config")), dict):
        found.error(("model", "model_config"), "this section is missing", "every training recipe has it")
    if view.get(("train_dataset",)) is None:
        found.error(("train_dataset",), "this section is missing", "every training recipe has it")
