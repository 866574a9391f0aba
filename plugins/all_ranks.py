"""This module answers two questions for callbacks, outside the graph: whether a rank computes the loss, and what the
sum of a value over all ranks of the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plugins.settings import count_at, value_at


def pipeline_of(recipe: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the number of pipeline stages and the pipeline scheduler that a flat recipe or a MindFormerConfig sets. A
    run of one process always has one stage, even if the recipe gives another number.
    """
    if not recipe.get("use_parallel"):
        return 1, None
    scheduler = value_at(recipe, "parallel.pipeline_config.pipeline_scheduler")
    return count_at(recipe, "parallel_config.pipeline_stage"), scheduler


def stage_of_loss(stages: int, scheduler: str | None) -> int:
    """Return the pipeline stage that computes the loss: the last stage, or the first stage with the schedule
    zero_bubble_v, whose second chunk passes through the stages in reverse order.
    """
    return 0 if scheduler == "zero_bubble_v" else stages - 1


def has_loss(rank: int, ranks: int, stages: int, scheduler: str | None) -> bool:
    """Return whether a given rank, of `ranks` ranks in the run, is on the pipeline stage that computes the loss."""
    return rank * stages // ranks == stage_of_loss(stages, scheduler)


def by_all_reduce(value: float) -> float:
    """Return the sum of a value over all ranks, computed by MindSpore's AllReduce."""
    from mindspore import Tensor, ops
    from mindspore.common import dtype as mstype

    return float(ops.AllReduce()(Tensor([value], mstype.float32)).asnumpy()[0])


_way: list[Callable[[float], float]] = [by_all_reduce]


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's `value`, in float32; all ranks must call this function."""
    return _way[0](value)


def use(way: Callable[[float], float]) -> None:
    """Let `sum_over_ranks` compute its sums by the function `way` from now on, for runs in which MindSpore's own
    communication cannot compute them.
    """
    _way[0] = way
