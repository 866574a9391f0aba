"""`auto` in a recipe becomes values, here and nowhere else: every command calls `resolve` once it has its recipe.

    1. A Megatron layout string at `model.model_config.offset`: the offset that places layers so (`layout`).
    2. `plugins.hierarchical_ep.mode: auto` and `plugins.ep_overlap.chunks: auto`: what `tc3 ep-report` advises
       (`dispatch`), for an even layout with nothing recomputed where `offset` is `auto`, too.
    3. `model.model_config.offset: auto`: layout and recompute tables of the file beside the recipe (`layout_file`),
       which is for the dispatch of step 2.
    4. What `plugins.attention_balance` weighs samples by, where the recipe gives no costs (`sample_cost`).

Values depend on the recipe, the hardware file that it names and the layout file alone: every rank, node, day and
command sees the same ones. `tools.recipe.unresolved` refuses a recipe that has not come by here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Literal

from plugins.errors import RecipeError
from plugins.pipeline_layout.plan import is_layout
from tools.auto.dispatch import Values, dispatch_values
from tools.auto.layout import even_layout, even_values, file_values, put, remedy, string_values
from tools.auto.layout_file import LayoutFile, path_of, read_layout
from tools.auto.sample_cost import write_sample_cost
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.override import dotted
from tools.recipe.unresolved import AUTO, CHUNKS, MODE, OFFSET
from tools.recipe.view import look

Say = Callable[[str], None]
Layout = Literal["file", "search", "even"]
Step = Callable[[Recipe], tuple[Values, list[str]]]  # values for what is open, and what to say of them
_KEY = dotted(OFFSET)
_BROKEN = (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError)  # by values that `tc3 check` refuses
_PLAIN = {MODE: "global", CHUNKS: [1, 1]}


class UnresolvedError(RecipeError):
    """The value at `path` stays open, because of `why`, which may name another key."""

    def __init__(self, source: str, path: KeyPath, why: str):
        super().__init__(why if why.startswith(f"{source}:") else f"{source}: {why}")
        self.path, self.why = path, why.removeprefix(f"{source}: ").removeprefix(f"{dotted(path)}: ")


def resolve(recipe: Recipe, say: Say = lambda line: None, layout: Layout = "file", dispatch: bool = True) -> Recipe:
    """A copy of `recipe` in which nothing is `auto`, with the costs of its samples; all else is as it was.

    Args:
        say: hears what became of each open value, a line each.
        layout: what `offset: auto` stands for. "file": the layout in the file beside the recipe. "search": the same,
            and where there is no file, a search makes it. "even": layers spread evenly, nothing recomputed, for who
            looks for a layout or asks what does not depend on it.
        dispatch: False leaves mode and chunks open, for who compares what they may be.

    Raises:
        RecipeError: no layout file, or one for another run; a layout that MindFormers cannot express; settings or
            sizes that fit no dispatch.
    """
    return _resolved(recipe, say, layout, dispatch, None)


def resolve_for_check(recipe: Recipe) -> tuple[Recipe, list[UnresolvedError]]:
    """As `resolve`, with an even layout and the plainest dispatch in the place of what cannot be; and why it cannot."""
    failed: list[UnresolvedError] = []
    return _resolved(recipe, lambda line: None, "file", True, failed), failed


def _resolved(recipe: Recipe, say: Say, layout: Layout, dispatch: bool, failed: list[UnresolvedError] | None) -> Recipe:
    resolved = copy.deepcopy(recipe)
    steps: list[tuple[KeyPath, Step, Callable[[Recipe], Values]]] = [
        (OFFSET, _string, even_values),
        *([(MODE, _dispatch, _plain_dispatch)] if dispatch else []),
        (OFFSET, partial(_auto_layout, layout=layout, say=say), even_values),
    ]
    for path, step, plain in steps:
        try:
            values, lines = step(resolved)
        except RecipeError as error:
            problem = UnresolvedError(recipe.source, path, _why(recipe, path, error))
            if failed is None:
                raise problem from None
            failed.append(problem)
            values, lines = plain(resolved), []
        put(resolved, values)
        for line in lines:
            say(line)
    if layout == "even":  # not what a run recomputes, which counts
        return resolved
    try:
        write_sample_cost(resolved)
    except RecipeError as error:
        if failed is None:  # `tc3 check` says itself which sizes make no model
            raise RecipeError(f"{recipe.source}: {error}") from None
    return resolved


def _why(recipe: Recipe, path: KeyPath, error: RecipeError) -> str:
    text = str(error).removeprefix(f"{recipe.source}: ")
    return f"{_KEY}: {text.removeprefix(f'{_KEY}: ')}" if path == OFFSET else text


def _string(recipe: Recipe) -> tuple[Values, list[str]]:
    """Step 1."""
    text = look(recipe, OFFSET)
    if not is_layout(text):
        return {}, []
    values = string_values(recipe, text)
    return values, [f"{_KEY}: {text} -> {values[OFFSET]}"]


def _dispatch(recipe: Recipe) -> tuple[Values, list[str]]:
    """Step 2."""
    try:
        return dispatch_values(even_layout(recipe) if look(recipe, OFFSET) == AUTO else recipe)
    except RecipeError:
        raise
    except _BROKEN:
        right = f"tc3 check {recipe.source} says what is wrong with it"
        raise RecipeError(f"{dotted(MODE)}: no value follows from this recipe: {right}") from None


def _plain_dispatch(recipe: Recipe) -> Values:
    return {path: value for path, value in _PLAIN.items() if look(recipe, path) == AUTO}


def _auto_layout(recipe: Recipe, layout: Layout, say: Say) -> tuple[Values, list[str]]:
    """Step 3."""
    if look(recipe, OFFSET) != AUTO:
        return {}, []
    if layout == "even":
        return even_values(recipe), [f"{_KEY}: auto -> an even layout here, nothing recomputed"]
    found = _layout_file(recipe, layout == "search", say)
    values = file_values(recipe, found)
    return values, [f"{_KEY}: auto -> {found.offset}, recompute_config with it ({path_of(recipe.source)})"]


def _layout_file(recipe: Recipe, search: bool, say: Say) -> LayoutFile:
    """The answer that is kept beside the recipe, made where there is none and `search` says so."""
    if not recipe.source:
        raise RecipeError("auto: stands for a file beside the recipe, and this recipe comes from none")
    path = path_of(recipe.source)
    if path.is_file():
        return read_layout(path)
    if not search:
        raise RecipeError(f"auto: there is no {path}: {remedy(recipe)}")
    from tools.auto.make_layout import make_beside  # a solver comes with it, which ranks need not load

    return make_beside(recipe, say)
