"""Reading `plugins.expert_balance`: every default stands here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from plugins.errors import RecipeError, did_you_mean
from plugins.settings import section_of, whole_number

KEY = "plugins.expert_balance"
METHODS = ("swaps", "aligned", "greedy", "random")
_BUDGETED = ("swaps", "aligned")  # plan from the placement there is, and may stop anywhere


@dataclass(frozen=True)
class Settings:
    """When experts move, and where.

    Args:
        every: steps between plans; 0: experts stay, loads are recorded.
        method: swaps (of two experts between two devices, from the placement there is), aligned (swaps between equal
            places of two devices), greedy (from scratch, as EPLB and MindFormers pack), random (shuffles; for tests).
        moves: most experts that change device in a layer and plan; None: no limit.
        gate: a layer moves only if this share of its predicted max/mean goes.
        memory: share of the old prediction that a step keeps.
        record: write `metrics/expert_load.jsonl`.
    """

    every: int = 20
    method: str = "swaps"
    moves: int | None = None
    gate: float = 0.01
    memory: float = 0.8
    record: bool = True


SETTINGS = tuple(field.name for field in fields(Settings))


def read(settings: Any) -> Settings:
    """The section of a recipe, with defaults for what it does not write.

    Raises:
        RecipeError: an unknown key, a value that is no such thing, or settings with which nothing would happen.
    """
    right = f"write {', '.join(SETTINGS)} under it (or {{}} for the defaults), or {KEY}: False"
    section = section_of(KEY, settings, SETTINGS, right)
    wanted = Settings(
        every=whole_number(KEY, section, "every", "write steps between plans, 0 to record only", 0, Settings.every),
        method=_method(section),
        moves=_moves(section),
        gate=_share(section, "gate", Settings.gate),
        memory=_share(section, "memory", Settings.memory),
        record=section.get("record", Settings.record),
    )
    if type(wanted.record) is not bool:
        raise RecipeError(f"{KEY}.record: {wanted.record!r}; write True or False")
    if wanted.moves is not None and wanted.method not in _BUDGETED:
        raise RecipeError(
            f"{KEY}.moves: {wanted.method} plans from scratch and keeps no budget; write moves: null, or method: swaps"
        )
    if not wanted.every and not wanted.record:
        raise RecipeError(f"{KEY}: neither moves (every: 0) nor records (record: False); write {KEY}: False")
    return wanted


def _method(section: Mapping[str, Any]) -> str:
    method = section.get("method", Settings.method)
    if method not in METHODS:
        raise RecipeError(
            f"{KEY}.method: {method!r} is none of {', '.join(METHODS)}{did_you_mean(str(method), list(METHODS))}"
        )
    return method


def _moves(section: Mapping[str, Any]) -> int | None:
    if section.get("moves") is None:
        return None
    return whole_number(KEY, section, "moves", "write null, or a number from 2 on: one swap moves two experts", 2)


def _share(section: Mapping[str, Any], name: str, default: float) -> float:
    value = section.get(name, default)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise RecipeError(f"{KEY}.{name}: {value!r}; write a share from 0 to below 1, such as {default}")
    return float(value)
