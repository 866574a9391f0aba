"""In which recipes experts can move, and their loads be counted. Pure: `tc3 check` says it, and so does a launch."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.errors import RecipeError
from plugins.expert_balance.settings import KEY, Settings

_OPTIMIZER = "AdamW"  # two moments of each weight, which the executor knows; Muon's state and PMA's averages are others


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
            f"{KEY}: the router counts its tokens with model.model_config.moe_router_enable_expert_bias: True alone; "
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
            f"{KEY}.every: {ours.every}: MindSpore overwrites float32 weights alone on CPU, and model.model_config."
            f"params_dtype is {sharded.weights}; write float32 there, or 0 here to record loads"
        )
