"""This module makes it possible to continue a run with fewer hosts: the same recipe at a smaller data-parallel size,
with the same global batch.

Tensor, pipeline, context and expert groups stay whole: the run gives up only copies of the model, and the remaining
copies train on the samples of the lost copies. In a pipeline the remaining copies train on more micro-batches
(`micro_batch_num`). Without a pipeline they accumulate gradients over more steps if the recipe has the key for this;
otherwise the batch of each step grows, and with it the memory of activations. A sharded optimizer has fewer shards,
which are larger. A run that would not fit into memory at its smaller size is refused. Steps, learning rate and the
order of the data do not change. As long as every token counts, losses equal those of the uninterrupted run up to the
order in which sums are added. If a mask excludes tokens from the loss, each micro-batch is averaged over its own
tokens; the losses then differ, because micro-batches contain other samples than before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launch.agent.decide import Smaller
from launch.resume.data import differences
from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import peak_memory
from tools.estimate.memory.room import DOES_NOT_FIT, fit_between, require_known
from tools.hardware.units import GIB
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.override import apply_overrides, dotted
from tools.recipe.view import MODEL, PARALLEL, RUNNER, View, limit_of

_BATCH, _ACCUMULATION = (*RUNNER, "batch_size"), (*RUNNER, "gradient_accumulation_steps")
_MICRO, _DP = (*PARALLEL, "micro_batch_num"), (*PARALLEL, "data_parallel")
_STRATEGY = ("parallel", "dataset_strategy")
_LOADS = "TopkBiasBalanceCallback"
_SHARDS = ("parallel", "parallel_optimizer_config", "optimizer_weight_shard_size")


def smaller(recipe: Recipe, hosts: int, slots: int, step: int) -> Smaller | str:
    """Return how `recipe` can continue from `step` with at most `hosts` hosts of `slots` workers each, or the reason
    why it cannot.

    With as many hosts as the recipe needs, the result is the recipe itself.

    `recipe` is the effective recipe (`auto` resolved). Apply the returned overrides to it in a separate call, after the
    user's overrides.
    """
    own = -(-View(recipe).devices // slots)
    if hosts >= own:
        return Smaller(own, [], f"on {own} host{'s' * (own > 1)}, at its own size")
    reasons = []
    for count in range(hosts, 0, -1):
        tried = _at(recipe, count, slots, step)
        if isinstance(tried, Smaller):
            return tried
        reasons.append(tried)
    return max(reasons, key=lambda reason: reason.startswith("with "), default="there is no host")


def _at(recipe: Recipe, hosts: int, slots: int, step: int) -> Smaller | str:
    """Return how the run continues with exactly `hosts` hosts, or the reason why it cannot."""
    view, workers = View(recipe), hosts * slots
    copy = view.tp * view.pp * view.cp
    if workers % copy:
        return (
            f"{workers} workers do not hold a whole number of copies of the model, which needs {copy} workers (tp x pp "
            "x cp)"
        )
    dp = workers // copy
    if dp * view.tp % view.ep:
        return f"{dotted(_DP)} {dp} x tp {view.tp} holds no whole expert group of {view.ep}"
    wrong = ""
    for path in _raised(view):
        each = view.accumulation if path == _BATCH else view.batch  # of what is not raised
        total = view.global_batch // each
        if total % dp:
            unit = "samples" if each == 1 else f"groups of {each} samples"
            wrong = wrong or f"{dotted(_DP)} {dp} does not divide the {total} {unit} of a step"
            continue
        overrides = [f"{dotted(key)}={value}" for key, value in _all_keys(view, dp, path, total // dp)]
        refused = _refused(recipe, overrides, step, dp)
        if not refused:
            return Smaller(hosts, overrides, _words(view, hosts, dp, path, total // dp))
        wrong = wrong or f"with {dotted(_DP)} {dp}: {refused}"
    return wrong


def _raised(view: View) -> list[KeyPath]:
    """Return the keys whose values can be raised so that fewer ranks train the same global batch, the best key
    first.
    """
    if view.parallel and view.pp > 1:
        return [_MICRO]
    return [_ACCUMULATION, _BATCH] if view.parallel and view.has(_ACCUMULATION) else [_BATCH]


def _words(view: View, hosts: int, dp: int, path: KeyPath, value: int) -> str:
    keys = ", ".join(f"{dotted(key)} {now} (was {view.get(key)})" for key, now in [(_DP, dp), (path, value)])
    memory = "; its activations take more memory" * (path == _BATCH)
    return f"on {hosts} host{'s' * (hosts > 1)} with the same global batch: {keys}{memory}"


def _all_keys(view: View, dp: int, path: KeyPath, value: int) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (key path, new value) of every key that must change when the data-parallel size becomes `dp` and the key
    `path` gets `value`.
    """
    yield _DP, dp
    if not view.parallel and dp == 1:
        yield ("use_parallel",), False
    yield path, value
    if path == _BATCH and view.has((*MODEL, "batch_size")):
        yield (*MODEL, "batch_size"), value
    yield from _callbacks(view.get(("callbacks",)) or [], path[-1], value)
    strategy = view.get(_STRATEGY)
    if isinstance(strategy, list):
        yield _STRATEGY, [[dp, *row[1:]] for row in strategy]
    shards, ranks = view.get(_SHARDS), dp if view.get(("optimizer", "type")) == "Muon" else dp * view.cp
    if type(shards) is int and shards > 1 and ranks % shards:
        fewer = max(count for count in range(1, min(shards, ranks) + 1) if ranks % count == 0)
        if fewer > 1:
            yield _SHARDS, fewer


def _callbacks(callbacks: list[Any], key: str, value: int) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the changes of the callbacks that repeat `key`. An override adds no key, so the whole list is set if the
    callback that divides the loads of experts by the accumulated steps lacks their number, which is then 1.
    """
    known = [index for index, each in enumerate(callbacks) if isinstance(each, dict) and key in each]
    lacking = [index for index, each in enumerate(callbacks) if isinstance(each, dict) and each.get("type") == _LOADS]
    if key == _ACCUMULATION[-1] and not {*lacking} <= {*known}:
        changed = {*lacking, *known}
        whole = [{**each, key: value} if index in changed else each for index, each in enumerate(callbacks)]
        text = json.dumps(whole, default=str)
        if json.loads(text) == whole:  # an override can hold no dates
            yield ("callbacks",), text
        return
    yield from ((("callbacks", index, key), value) for index in known)


def _refused(recipe: Recipe, overrides: list[str], step: int, dp: int) -> str:
    """Return the reason why the run cannot continue with `overrides`; "" if it can."""
    try:
        after = apply_overrides(recipe, overrides)
    except RecipeError as error:
        return str(error)
    before, now = View(recipe), View(after)
    whole = [(view.tp, view.pp, view.cp, view.ep, view.global_batch) for view in (before, now)]
    if whole[0] != whole[1] or now.dp != dp:
        return "another key of the recipe shares one that has to change (a YAML anchor)"
    errors = check_recipe(after).errors
    if errors:
        return f"{errors[0].key}: {errors[0].wrong}"
    return _over_memory(recipe, after) or "; ".join(differences(recipe, after, step))


def _over_memory(recipe: Recipe, after: Recipe) -> str:
    """Return the reason why a device has too little memory for the run at its smaller size, by the rule of `tc3
    memory`; "" if it fits, needs no more memory than at its own size, or cannot be predicted.
    """
    limit = limit_of(after)
    if not limit or View(after).on_cpu:
        return ""
    try:
        require_known(after)
        need, own = (peak_memory(from_recipe(one)) for one in (after, recipe))
    except RecipeError:
        return ""
    if need <= own or fit_between(need, need, limit) != DOES_NOT_FIT:
        return ""
    return (
        f"a device would need {need / GIB:.1f} GiB by the memory model, instead of {own / GIB:.1f} at its own size, "
        f"and context.max_device_memory is {limit / GIB:.1f}"
    )
