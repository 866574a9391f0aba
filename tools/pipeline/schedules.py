"""This module lists pipeline schedules by name. The module knows for each schedule the order of operations on a stage,
the allowed numbers of stages and micro-batches, and the software that can run the schedule.

A recipe can choose one of MindSpore's schedules (`SCHEDULES`, see `tools.pipeline.orders`). The other schedules
(`PAPER_SCHEDULES`) are published in papers, and are only simulated in this repository:

zb_h1, zb_h2             weight gradients fill the bubble (arXiv 2401.10241)
zb_v, v_half, v_min      the model runs through the stages in a V, with controllable memory (arXiv 2405.15362)
dual_pipe, dual_pipe_v   a forward and a backward pass run as one overlapped pair (DeepSeek)
interleaved_1f1b_pairs   interleaved 1F1B with such pairs in its steady phase (report section 4.1, Pangu Ultra MoE)

`why_not` says which schedules MindFormers 1.9.0 on MindSpore 2.9.0 cannot run (docs/schedules.md); these schedules are
only simulated, except interleaved_1f1b_less_memory, which an environment variable chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.pipeline_layout import fewest_to_fill
from tools.pipeline import orders
from tools.pipeline.orders import BOTH_WAYS, LOOP, Op, V, as_operations, widened


class _Schedule(NamedTuple):
    """A `_Schedule` describes a schedule; `order` takes stage, stages, chunks and micro-batches, and also parts if the
    schedule `splits` sequences.

    `weights`: weight gradients are split off some backwards.
    """

    order: Callable[..., np.ndarray]
    shape: str = LOOP
    splits: bool = False
    weights: bool = False


_MINDSPORE = {
    "gpipe": _Schedule(orders.gpipe),
    "1f1b": _Schedule(orders.plain_1f1b),
    "interleaved_1f1b": _Schedule(orders.interleaved_1f1b),
    "interleaved_1f1b_less_memory": _Schedule(orders.interleaved_1f1b_less_memory),
    "seqpipe": _Schedule(orders.seqpipe, splits=True),
    "seqvpp": _Schedule(orders.seqvpp, splits=True),
    "seqsmartvpp": _Schedule(orders.seqsmartvpp, splits=True),
    "zero_bubble_v": _Schedule(orders.zero_bubble_v, V, weights=True),
}
_PAPERS = {
    "zb_h1": _Schedule(orders.zb_h1, weights=True),
    "zb_h2": _Schedule(orders.zb_h2, weights=True),
    "zb_v": _Schedule(orders.zb_v, V, weights=True),
    "v_half": _Schedule(orders.v_half, V, weights=True),
    "v_min": _Schedule(orders.v_min, V, weights=True),
    "dual_pipe": _Schedule(orders.dual_pipe, BOTH_WAYS, weights=True),
    "dual_pipe_v": _Schedule(orders.dual_pipe_v, V, weights=True),
    "interleaved_1f1b_pairs": _Schedule(orders.interleaved_1f1b_pairs),
}
_ORDERS = _MINDSPORE | _PAPERS
SCHEDULES = tuple(_MINDSPORE)
PAPER_SCHEDULES = tuple(_PAPERS)
_PAIRS = ("dual_pipe", "dual_pipe_v", "interleaved_1f1b_pairs")


def operations(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> list[Op]:
    """Return the operations that the stage `stage` of `stages` stages runs, in order. Each micro-batch has one forward
    and one backward pass in each chunk.

    `chunks` is the number of model chunks on a stage (MindFormers' `pp_interleave_num`), and `parts` is the number of
    parts into which a sequence is split (`seq_split_num`). In dual_pipe one half of the micro-batches goes through each
    chunk.

    Raises:
        RecipeError: the schedule does not exist, or cannot run with these numbers; the message says which numbers it
            needs.
    """
    return as_operations(order_table(schedule, stage, stages, chunks, micro_batches, parts))


def order_table(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """Return the order of a stage's operations as an integer table [operations, COLUMNS], which also says which
    operations form pairs. The function raises the same errors as the function `operations`.
    """
    check_schedule(schedule, stages, chunks, micro_batches, parts)
    if not 0 <= stage < stages:
        raise RecipeError(f"stage {stage}: the stage must lie between 0 and {stages - 1}")
    found = _ORDERS[schedule]
    more = (parts,) if found.splits else ()
    return widened(found.order(stage, stages, chunks, micro_batches, *more))


def check_schedule(schedule: str, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> None:
    """Raise the same errors as the function `operations` for a schedule that does not exist or cannot run."""
    if schedule not in _ORDERS:
        near = did_you_mean(schedule, list(_ORDERS))
        raise RecipeError(f"pipeline schedule {schedule!r}: the schedule must be one of {', '.join(_ORDERS)}{near}")
    if min(stages, chunks, micro_batches, parts) < 1:
        numbers = f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches, {parts} parts of a sequence"
        raise RecipeError(f"pipeline: {numbers}: each number must be at least 1")
    possible, need = _needs(schedule, stages, chunks, micro_batches, parts)
    if not possible:
        have = f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches"
        split = f", sequences in {parts} parts" if parts > 1 else ""
        raise RecipeError(f"pipeline schedule {schedule} with {have}{split}: the schedule needs {need}")


@lru_cache(maxsize=65536)
def can_run(schedule: str, stages: int, chunks: int, micro_batches: int) -> bool:
    """Return whether a known schedule can run with the given numbers of stages, chunks and micro-batches, without
    splitting sequences.
    """
    return _needs(schedule, stages, chunks, micro_batches, 1)[0]


def _needs(schedule: str, stages: int, chunks: int, micro_batches: int, parts: int) -> tuple[bool, str]:
    """Return whether a schedule can run with these numbers, and what it needs."""
    if parts > 1 and not _ORDERS[schedule].splits:
        splitting = ", ".join(name for name, found in _ORDERS.items() if found.splits)
        return False, f"whole sequences (parts of them: {splitting})"
    one = chunks == 1, "one chunk a stage (several: interleaved_1f1b)"
    full = micro_batches >= stages, f"at least {stages} micro-batches, one for each stage"
    least = fewest_to_fill(stages, "zero_bubble_v")  # dual_pipe_v, which is V-shaped, too, needs as many
    twice = chunks == 2 and micro_batches >= least, f"2 chunks and at least {least} micro-batches"
    # of parts that leave stages over, the order as read waits for itself
    several = (
        chunks > 1 and stages % parts == 0 and micro_batches >= stages // parts,
        f"several chunks and at least {-(-stages // parts)} micro-batches"
        + (f", and a number of parts that divides {stages}" if parts > 1 else ""),
    )
    return {
        "1f1b": one,
        "zb_h1": one,
        "zb_h2": one,
        "interleaved_1f1b": full,
        "interleaved_1f1b_less_memory": full,
        "interleaved_1f1b_pairs": full,
        "seqvpp": several,
        "seqsmartvpp": (several[0] and stages % 2 == 0, f"{several[1]}, and an even number of stages"),
        "zero_bubble_v": twice,
        "dual_pipe_v": twice,
        "dual_pipe": (
            chunks == 2 and stages % 2 == 0 and micro_batches % 2 == 0 and micro_batches >= 2 * stages,
            f"2 chunks, an even number of stages and an even one of micro-batches, at least {2 * stages}",
        ),
        **dict.fromkeys(("zb_v", "v_half", "v_min"), (chunks == 2, "2 chunks")),
    }.get(schedule, (True, ""))


def schedule_of(scheduler: str, chunks: int) -> str:
    """Return this module's name for the schedule that a value of MindFormers' key `pipeline_scheduler` chooses; 1f1b
    with several chunks is "interleaved_1f1b".
    """
    return "interleaved_1f1b" if scheduler == "1f1b" and chunks > 1 else scheduler


def scheduler_of(schedule: str) -> str:
    """Return the value of the recipe's key `pipeline_scheduler` for a schedule; this function is the inverse of
    `schedule_of`.
    """
    return "1f1b" if schedule.startswith("interleaved_1f1b") else schedule


def shape_of(schedule: str) -> str:
    """Return the path of a micro-batch through the chunks of a schedule: `LOOP`, `V` or `BOTH_WAYS`."""
    return _ORDERS[schedule].shape


def splits_backward(schedule: str) -> bool:
    """Return whether a schedule splits some weight gradients off from their backward passes."""
    return schedule in _ORDERS and _ORDERS[schedule].weights


def pairs_up(schedule: str) -> bool:
    """Return whether a schedule runs forward and backward passes together as pairs."""
    return schedule in _PAIRS


def is_v_shaped(schedule: str) -> bool:
    """Return whether odd chunks of a schedule run from the last stage to the first, so that the model's order forms a
    V.
    """
    return schedule in _ORDERS and shape_of(schedule) == V


BY_ENVIRONMENT = "interleaved_1f1b_less_memory"
_REFUSED = {
    BY_ENVIRONMENT: "the environment (ENABLE_LESS_MEM_VPP=1) asks for it, and no key of a recipe does",
    "seqvpp": "MindFormers refuses it without seq_split_num, and refuses seq_split_num in graph mode",
    "interleaved_1f1b_pairs": "MindSpore has pp_1f1b_overlap, but it is unknown which pairs of passes that makes",
    "dual_pipe": "it keeps two copies of the model, for which a recipe has no key",
    **dict.fromkeys(("zb_h1", "zb_h2"), "MindSpore separates the gradients of weights only in zero_bubble_v"),
    **dict.fromkeys(
        ("zb_v", "v_half", "v_min", "dual_pipe_v"), "the only V-shaped pipeline that MindSpore has is zero_bubble_v"
    ),
}


def why_not(schedule: str) -> str:
    """Return the reason why no recipe can use a schedule; return "" if MindFormers can run the schedule."""
    assert set(PAPER_SCHEDULES) <= set(_REFUSED)
    return _REFUSED.get(schedule, "")


def interleaves(schedule: str, chunks: int) -> bool:
    """Return the value that the key `pipeline_interleave` must have for a schedule. Every pipeline scheduler except
    1f1b needs the value True.
    """
    return chunks > 1 or scheduler_of(schedule) != "1f1b"
