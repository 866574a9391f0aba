"""This module finds which keys of a recipe free how much memory at what cost in step time: predicted, checked and
ranked.

A proposal is a child of the recipe: it is written as keys, read again, predicted from these keys and given to `tc3
check`. Changes that the model does not predict (swapping to the host, `optimizer_level: level3`) are not proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.changes import Change, pairs_of_changes, single_changes
from tools.estimate.memory.model import all_stages
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, UNKNOWN, Room, fit_between
from tools.estimate.time_model import TimeModel
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.search.overlay import changed, overlay

PAIRS = 10  # pairs that are written, read again and checked


@dataclass(frozen=True)
class Proposal:
    """A `Proposal` is a proposed change of a recipe, with its predicted memory and step time.

    Args:
        name: in words; keys: what to write, by dotted key.
        peak: bytes of the fullest stage, predicted from these keys; freed: of the recipe's own.
        step_s: seconds of a step; slower: over the recipe's own - 1.
        fit: one of `FITS`, `UNKNOWN` (within the model's known error) and `DOES_NOT_FIT`.
        refused: what `tc3 check` finds wrong with it and not with the recipe; "" where nothing.
    """

    name: str
    keys: Mapping[str, Any]
    peak: float
    freed: float
    step_s: float
    slower: float
    fit: str
    refused: str = ""


def verdict(peak: float, room: Room) -> str:
    """Return whether a predicted peak fits into the room, as far as the model's known error allows a statement."""
    return fit_between(peak, peak, room.cap, room.bytes)


def explain(recipe: Recipe, times: TimeModel, room: Room, pairs: bool = True) -> list[Proposal]:
    """Return proposals, the best first: those that fit by step time, then those that might fit, then by freed memory.
    Pairs of changes are tried only if no single change makes the recipe fit.

    Raises:
        RecipeError: the recipe cannot be predicted.
    """
    config = from_recipe(recipe)
    singles = single_changes(config, room.bytes)
    known = _wrong(recipe)
    found = [proposal for change in singles if (proposal := _proposal(recipe, change, times, room, known))]
    if pairs and not any(one.fit == FITS and not one.refused for one in found):
        both = sorted(pairs_of_changes(config, room.bytes), key=lambda change: _order_of(change, times, room))
        found += [one for change in both[:PAIRS] if (one := _proposal(recipe, change, times, room, known))]
    return sorted(found, key=_order)


def _order_of(change: Change, times: TimeModel, room: Room) -> tuple[int, float]:
    fit = verdict(change.peak, room)
    return _RANK[fit], times.step(change.config).total if fit == FITS else change.peak


_RANK = {FITS: 0, UNKNOWN: 1, DOES_NOT_FIT: 2}


def _order(proposal: Proposal) -> tuple[bool, int, float]:
    by = proposal.step_s if proposal.fit == FITS else proposal.peak
    return bool(proposal.refused), _RANK[proposal.fit], by


def _proposal(recipe: Recipe, change: Change, times: TimeModel, room: Room, known: Sequence[str]) -> Proposal | None:
    """Return a change as keys, predicted anew from them; None where MindFormers has no keys for it."""
    before = from_recipe(recipe)
    try:
        child = changed(recipe, change.config)
        config = from_recipe(child)
        peak = max(memory.peak for memory in all_stages(config))
        seconds, own = times.step(config).total, times.step(before).total
        keys = _flat(overlay(recipe, change.config))
    except RecipeError:
        return None
    now = max(memory.peak for memory in all_stages(before))
    if not keys or peak >= now:
        return None
    refused = [finding for finding in _wrong(child) if finding not in known]
    return Proposal(
        name=change.name,
        keys=keys,
        peak=peak,
        freed=now - peak,
        step_s=seconds,
        slower=seconds / own - 1,
        fit=verdict(peak, room),
        refused=refused[0] if refused else "",
    )


def _wrong(recipe: Recipe) -> list[str]:
    """Return what `tc3 check` calls an error, without the places."""
    return [f"{finding.key}: {finding.wrong}" for finding in check_recipe(recipe).errors]


def _flat(nested: Mapping[str, Any], path: tuple[str | int, ...] = ()) -> dict[str, Any]:
    """Return dotted key -> value of an overlay. Callbacks repeat numbers of other keys and are left out."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, (*path, key))
        elif (*path, key) != ("callbacks",):
            found[dotted((*path, key))] = value
    return found
