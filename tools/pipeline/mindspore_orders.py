"""The orders in which MindSpore's pipeline schedulers run a stage's work.

Where they come from (MindSpore's public sources, `ccsrc/frontend/parallel/pipeline_transformer/`, a state of
2025; "verified" means read there, none was run on a device):

interleaved_1f1b              `pipeline_scheduler.cc`, `InterleavedScheduler::Reorder`: verified, remainders included
interleaved_1f1b_less_memory  the same file, `MemoryOptimizedReorder` (environment ENABLE_LESS_MEM_VPP=1): verified
seqpipe, seqvpp, seqsmartvpp  `seqpipe_scheduler.cc`, `MakeExecuteOrder` and the warm-ups: verified, with sequences that
                              are split into parts, too (MindFormers 1.9.0 refuses `seq_split_num` above 1)
zero_bubble_v                 `zero_bubble_v.cc`, steps 1 to 8, `detach_backward.cc`, with ZBV_offset unset: verified
gpipe                         `gpipe_interleave_scheduler.cc`: verified with several chunks, assumed the same with one
1f1b                          one chunk a stage: assumed to be the order of PipeDream-flush, as in Megatron-LM

seqpipe is 1F1B with one chunk and interleaved 1F1B with several, as long as sequences are whole. seqvpp has the warm-up
of the interleaved order, seqsmartvpp that of the memory-saving one; all three differ from these in where the
micro-batches go that do not fill a round of all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from plugins.pipeline_layout.order import by_turns, one_forward_one_backward
from tools.pipeline.operation import KINDS


def gpipe(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """All forwards, then all backwards."""
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


def _rounds_extra_spread(round_size: int, micro_batches: int) -> list[int]:
    """As above for seqpipe and seqvpp: one more micro-batch for each of the first rounds (`ComputeCycleList`).

    With fewer micro-batches than a round has places, one round takes them all.
    """
    rounds = max(1, micro_batches // round_size)
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


def interleaved_1f1b(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Interleaved 1F1B of Megatron-LM (arXiv 2104.04473, figure 4)."""
    rounds = _rounds_extra_first(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + 2 * (stages - 1 - stage))


def interleaved_1f1b_less_memory(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Interleaved 1F1B with the shorter warm-up of plain 1F1B."""
    rounds = _rounds_extra_first(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + stages - 1 - stage)


def seqpipe(stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """1F1B, interleaved with several chunks, of parts of sequences."""
    after = (stages - 1 - stage) * (1 if chunks == 1 else 2)
    return _by_parts(_rounds_extra_spread(stages, micro_batches), chunks, after, parts)


def seqvpp(stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """As seqpipe, but a round has as many micro-batches as their parts fill the stages."""
    return _by_parts(_rounds_extra_spread(stages // parts, micro_batches), chunks, 2 * (stages - 1 - stage), parts)


def seqsmartvpp(stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """As seqvpp, with the shorter warm-up that holds less memory."""
    return _by_parts(_rounds_extra_spread(stages // parts, micro_batches), chunks, stages - 1 - stage, parts)


def _by_parts(rounds: list[int], chunks: int, after: int, parts: int) -> np.ndarray:
    """[operations, 4] with the part last: `after` operations of the stages behind, beside the first round's, warm up.

    A round takes its micro-batches, part by part, through chunk 0, then chunk 1, ...; backwards take the micro-batches
    in the same order, each from its last chunk and part to its first.
    """
    firsts = np.cumsum([0, *rounds[:-1]])
    forward = np.array(
        [
            (KINDS.index("F"), first + micro_batch, chunk, part)
            for first, size in zip(firsts, rounds, strict=True)
            for chunk in range(chunks)
            for micro_batch in range(size)
            for part in range(parts)
        ]
    )
    # backwards mirror the forwards of their micro-batch; within a round, chunk for chunk
    backward = np.array([KINDS.index("B"), 0, chunks - 1, parts - 1]) + forward * [0, 1, -1, -1]
    # MindSpore runs one forward before it looks at the warm-up, which must leave one for the steady phase
    warm_up = min(after + (chunks - 1) * rounds[0] * parts + parts - 1, len(forward) - 1)
    return by_turns(forward, backward, warm_up)


def plain_1f1b(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """PipeDream-flush."""
    return np.insert(one_forward_one_backward(stage, stages, micro_batches), 2, 0, axis=1)  # chunk 0


def zero_bubble_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
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
