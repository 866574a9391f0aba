"""`plugins.expert_balance` of a recipe: every default stands here, and where experts can move and be counted.

`read` reads the section; `check` refuses a recipe in which a move would fail in the middle of a run, or leave behind
half of what belongs to an expert. `tc3 check` says so, and so does a launch. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from plugins.errors import RecipeError, did_you_mean
from plugins.settings import section_of, whole_number

KEY = "plugins.expert_balance"
METHODS = ("swaps", "aligned", "greedy", "random")
_BUDGETED = ("swaps", "aligned")  # plan from the placement there is, and may stop anywhere
_OPTIMIZER = "AdamW"  # two moments of each weight, which the executor knows; Muon's state and PMA's averages are others


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
    """Return the section of a recipe, with defaults for what it does not write.

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
        raise RecipeError(f"{KEY}: it neither moves (every: 0) nor records (record: False); write {KEY}: False")
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


@dataclass(frozen=True)
class Sharded:
    """Where MindSpore shards the graph: on Ascend, and in semi-auto parallel on CPU.

    Args:
        stages: of the pipeline; ranks: of a stage; on_cpu: where it trains; weights: their type.
        accumulation: steps whose gradients are added up before an update.
    """

    stages: int
    ranks: int
    on_cpu: bool
    weights: str
    accumulation: int = 1


def check(
    ours: Settings, *, counts: bool, expert_parallel: int, optimizer: str, sharded: Sharded | None = None
) -> None:
    """Refuse what would fail in the middle of a run, or move half of what belongs to an expert.

    Args:
        counts: the routers count their tokens (`moe_router_enable_expert_bias`); expert_parallel: ranks that share the
            experts; optimizer: its type; sharded: None for a recipe that trains on plugins/cpu_backend.

    Raises:
        RecipeError: naming the key, and what to write.
    """
    if not counts:
        raise RecipeError(
            f"{KEY}: the router counts its tokens only with model.model_config.moe_router_enable_expert_bias: True; "
            f"write that, or {KEY}: False"
        )
    if ours.every and expert_parallel == 1:
        raise RecipeError(
            f"{KEY}.every: {ours.every}, but each worker holds all experts (parallel_config.expert_parallel: 1): "
            "nothing can move; write 0 to record loads"
        )
    if ours.every and optimizer != _OPTIMIZER:
        raise RecipeError(
            f"{KEY}.every: {ours.every}: what optimizer.type: {optimizer} keeps of an expert would stay behind when it "
            f"moves; write {_OPTIMIZER} there, or 0 here to record loads"
        )
    if sharded is not None:
        _check_sharded(ours, expert_parallel, sharded)


def _check_sharded(ours: Settings, expert_parallel: int, sharded: Sharded) -> None:
    if sharded.stages > 1:
        raise RecipeError(
            f"{KEY}: not available in a pipeline yet, because each stage counts its own layers, and rank 0 records "
            f"those of the first; write {KEY}: False (parallel_config.pipeline_stage: {sharded.stages})"
        )
    if not ours.every:
        return
    if expert_parallel != sharded.ranks:
        raise RecipeError(
            f"{KEY}.every: {ours.every}: not available yet where several groups of ranks hold the same experts "
            f"(parallel_config.expert_parallel: {expert_parallel} of {sharded.ranks} ranks), because each group would "
            "have to move them alike, and an optimizer sharded over the groups cuts experts apart; write 0 to record "
            "loads"
        )
    if sharded.accumulation > 1:
        raise RecipeError(
            f"{KEY}.every: {ours.every}: not available with accumulated gradients yet, because the sums of experts' "
            f"gradients would stay behind (runner_config.gradient_accumulation_steps: {sharded.accumulation}); write 0 "
            "to record loads"
        )
    if sharded.on_cpu and sharded.weights != "float32":
        raise RecipeError(
            f"{KEY}.every: {ours.every}: MindSpore overwrites only float32 weights on CPU, and model.model_config."
            f"params_dtype is {sharded.weights}; write float32 there, or 0 here to record loads"
        )
