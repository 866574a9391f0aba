"""This module tells callbacks, outside the graph, whether a rank computes the loss, and computes the sum of a value
over all ranks of the run.
"""

from __future__ import annotations

from collections.abc import Callable


def has_loss(rank: int, ranks: int, stages: int, scheduler: str | None) -> bool:
    """Return whether a rank computes the loss: the ranks of the last stage do; with zero_bubble_v the first stage does.

    Args:
        ranks: the number of ranks; stages, scheduler: the stages and the scheduler of the pipeline.
    """
    return rank * stages // ranks == (0 if scheduler == "zero_bubble_v" else stages - 1)


def by_all_reduce(value: float) -> float:
    """Return a sum over all ranks through MindSpore's communication."""
    from mindspore import Tensor, ops
    from mindspore.common import dtype as mstype

    return float(ops.AllReduce()(Tensor([value], mstype.float32)).asnumpy()[0])


_way: list[Callable[[float], float]] = [by_all_reduce]


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's `value`, in float32; all ranks must call it."""
    return _way[0](value)


def use(way: Callable[[float], float]) -> None:
    """Let `sum_over_ranks` call `way` from now on, for runs in which MindSpore's own communication cannot compute the
    sum.
    """
    _way[0] = way
