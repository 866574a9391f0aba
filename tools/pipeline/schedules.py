"""The order in which each pipeline stage runs its work, for every pipeline schedule that MindSpore offers.

Where the orders come from (MindSpore's public sources, `ccsrc/frontend/parallel/pipeline_transformer/`, a state of
2025; "verified" means read there, none was run on a device):

interleaved_1f1b              `pipeline_scheduler.cc`, `InterleavedScheduler::Reorder`: verified, remainders included
interleaved_1f1b_less_memory  the same file, `MemoryOptimizedReorder` (environment ENABLE_LESS_MEM_VPP=1): verified
seqvpp, seqsmartvpp           `seqpipe_scheduler.cc`, `MakeExecuteOrder`: verified for sequences that are not split
zero_bubble_v                 `zero_bubble_v.cc`, steps 1 to 8, `detach_backward.cc`, with ZBV_offset unset: verified
gpipe                         `gpipe_interleave_scheduler.cc`: verified with several chunks, assumed the same with one
1f1b                          one chunk a stage: assumed to be the order of PipeDream-flush, as in Megatron-LM

Not modelled: seqpipe and the sequence chunks of seqvpp and seqsmartvpp (Op has no sequence chunk). Both use the warm-up
of interleaved 1F1B: seqvpp that of the plain order, seqsmartvpp that of the memory-saving one, and differ from it
in where the micro-batches go that do not fill a round of all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.pipeline_layout.order import by_turns, one_forward_one_backward

KINDS = "FBW"  # by number in a table of operations


class Op(NamedTuple):
    """One piece of work of a stage: forward, backward, or the weight gradients split from a backward.

    A "B" without a "W" of the same micro-batch and chunk is the whole backward; with one it is the input gradients.
    """

    kind: str  # "F", "B" or "W"
    micro_batch: int
    chunk: int


def operations(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> list[Op]:
    """Return what `stage` of `stages` runs, in order: each of chunks x micro_batches forward and backward once.

    `chunks` is how many pieces of the model a stage holds (MindFormers' `pp_interleave_num`).

    Raises:
        RecipeError: no such schedule, or one that MindSpore refuses for these numbers; names what it wants.
    """
    return [
        Op(KINDS[kind], *rest) for kind, *rest in order_table(schedule, stage, stages, chunks, micro_batches).tolist()
    ]


def order_table(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return `operations` as numbers [operations, 3]: index in `KINDS`, micro-batch, chunk.

    Raises:
        RecipeError: as `operations`.
    """
    check_schedule(schedule, stages, chunks, micro_batches)
    if not 0 <= stage < stages:
        raise RecipeError(f"stage {stage}: want 0 to {stages - 1}")
    return _ORDERS[schedule](stage, stages, chunks, micro_batches)


def as_table(order: Sequence[Op]) -> np.ndarray:
    """Return an order as numbers, as `order_table` does."""
    return np.array([(KINDS.index(kind), *rest) for kind, *rest in order], int).reshape(-1, 3)


def check_schedule(schedule: str, stages: int, chunks: int, micro_batches: int) -> None:
    """Refuse a schedule that does not exist or cannot run with these numbers.

    Raises:
        RecipeError: as `operations`.
    """
    if schedule not in _ORDERS:
        raise RecipeError(f"pipeline schedule {schedule!r}: want one of {', '.join(SCHEDULES)}{_near(schedule)}")
    if min(stages, chunks, micro_batches) < 1:
        raise RecipeError(
            f"pipeline: {stages} stages, {chunks} chunks, {micro_batches} micro-batches: each must be at least 1"
        )
    wants = {
        "1f1b": (chunks == 1, "one chunk a stage (several: interleaved_1f1b)"),
        "interleaved_1f1b": (micro_batches >= stages, f"at least {stages} micro-batches, one for each stage"),
        "seqvpp": (chunks > 1 and micro_batches >= stages, f"several chunks and at least {stages} micro-batches"),
        "zero_bubble_v": (
            chunks == 2 and micro_batches >= 2 * stages,
            f"2 chunks and at least {2 * stages} micro-batches",
        ),
    }
    wants["interleaved_1f1b_less_memory"] = wants["interleaved_1f1b"]
    even = chunks > 1 and micro_batches >= stages and stages % 2 == 0
    wants["seqsmartvpp"] = (even, f"{wants['seqvpp'][1]}, and an even number of stages")
    possible, want = wants.get(schedule, (True, ""))
    if not possible:
        have = f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches"
        raise RecipeError(f"pipeline schedule {schedule} with {have}: want {want}")


def schedule_of(scheduler: str, chunks: int) -> str:
    """The schedule that MindFormers' `pipeline_scheduler` names, which says 1f1b for the interleaved one, too."""
    return "interleaved_1f1b" if scheduler == "1f1b" and chunks > 1 else scheduler


def scheduler_of(schedule: str) -> str:
    """What `pipeline_scheduler` says for a schedule: the inverse of `schedule_of`."""
    return "1f1b" if schedule.startswith("interleaved_1f1b") else schedule


def is_v_shaped(schedule: str) -> bool:
    """Say whether odd chunks run from the last stage to the first (the model's order then makes a V)."""
    return schedule == "zero_bubble_v"


def _near(schedule: str) -> str:
    return did_you_mean(schedule, list(SCHEDULES))


def _gpipe(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    return np.concatenate([_round("F", range(chunks), 0, micro_batches), _round("B", _back(chunks), 0, micro_batches)])


def _round(kind: str, chunks: Iterable[int], first: int, size: int) -> np.ndarray:
    """All micro-batches of a round through one chunk, then through the next."""
    chunk = np.repeat(list(chunks), size)
    micro_batch = np.resize(np.arange(first, first + size), len(chunk))
    return np.stack([np.full(len(chunk), KINDS.index(kind)), micro_batch, chunk], axis=1)


def _back(chunks: int) -> Iterable[int]:
    return reversed(range(chunks))


def _rounds_extra_first(stages: int, micro_batches: int) -> list[int]:
    """Micro-batches in each round of 1F1B: what does not fill one is added to the first (`SortFuncBetweenMicro`)."""
    return [stages + micro_batches % stages] + [stages] * (micro_batches // stages - 1)


def _rounds_extra_spread(stages: int, micro_batches: int) -> list[int]:
    """As above for seqvpp: one more micro-batch for each of the first rounds (`ComputeCycleList`)."""
    rounds = micro_batches // stages
    whole, extra = divmod(micro_batches, rounds)
    return [whole + (index < extra) for index in range(rounds)]


def _interleaved(rounds: list[int], chunks: int, warm_up: int) -> np.ndarray:
    """`warm_up` forwards, then one forward and one backward by turns, then the backwards that are left.

    A round takes all its micro-batches through chunk 0, then chunk 1, ...; backwards in the reverse order of chunks.
    """
    firsts = np.cumsum([0, *rounds[:-1]])
    forward, backward = (
        np.concatenate([_round(kind, path(), first, size) for first, size in zip(firsts, rounds, strict=True)])
        for kind, path in (("F", lambda: range(chunks)), ("B", lambda: _back(chunks)))
    )
    return by_turns(forward, backward, warm_up)


def _interleaved_1f1b(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    rounds = _rounds_extra_first(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + 2 * (stages - 1 - stage))


def _interleaved_1f1b_less_memory(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    rounds = _rounds_extra_first(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + stages - 1 - stage)


def _seqvpp(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    rounds = _rounds_extra_spread(stages, micro_batches)
    # MindSpore runs one forward before it looks at the warm-up, which must leave one for the steady phase
    warm_up = min((chunks - 1) * rounds[0] + 2 * (stages - 1 - stage), chunks * micro_batches - 1)
    return _interleaved(rounds, chunks, warm_up)


def _seqsmartvpp(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    rounds = _rounds_extra_spread(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + stages - 1 - stage)


def _1f1b(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    return np.insert(one_forward_one_backward(stage, stages, micro_batches), 2, 0, axis=1)  # chunk 0


def _zero_bubble_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Eight phases of MindSpore's `ZeroBubbleV` (which is DualPipeV's order with few weight gradients split off)."""
    after = stages - stage - 1
    half = (stage + 1) // 2
    split = {
        0: list(range(micro_batches - stages + half, micro_batches)),
        1: [*range(after), *range(micro_batches - half, micro_batches)],
    }
    todo = {(kind, v): deque(range(micro_batches)) for kind in "FB" for v in (0, 1)}
    todo |= {("W", v): deque(split[v]) for v in (0, 1)}
    order: list[tuple[int, int, int]] = []

    def run(times: int, *work: str) -> None:
        for _ in range(times):
            order.extend((KINDS.index(w[0]), todo[w[0], int(w[1])].popleft(), int(w[1])) for w in work)

    run(2 * after, "F0")
    run(stage + 1, "F0", "F1")
    run(after, "B1", "W1", "F1")
    run(micro_batches - 2 * stages + stage + 1, "B1", "F0", "B0", "F1")
    run(after, "B1", "B0", "F1")
    run(stage + 1, "B1", "B0")
    run(after, *(["W0", "B0"] if stage else ["B0"]))
    run(len(todo["W", 0]), "W0")
    run(len(todo["W", 1]), "W1")
    return np.array(order)


_ORDERS: dict[str, Callable[[int, int, int, int], np.ndarray]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved_1f1b,
    "interleaved_1f1b_less_memory": _interleaved_1f1b_less_memory,
    "seqvpp": _seqvpp,
    "seqsmartvpp": _seqsmartvpp,
    "zero_bubble_v": _zero_bubble_v,
}
SCHEDULES = tuple(_ORDERS)
