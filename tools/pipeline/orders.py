"""This module defines for each pipeline schedule the order of a stage's forward and backward passes. Some orders of
passes come from MindSpore, and others come from papers.

An operation is one piece of work of a stage, such as the forward pass of one chunk for one micro-batch; an order is the
list of a stage's operations, which can also be written as an integer array for NumPy. `tools.pipeline.schedules` lists
the schedules by name.

MindSpore's orders were read in its public sources (`ccsrc/frontend/parallel/pipeline_transformer/`, as of 2025;
"verified" means that the order was read in these sources; no order was run on a device):

interleaved_1f1b              `pipeline_scheduler.cc`, `InterleavedScheduler::Reorder`: verified, remainders included
interleaved_1f1b_less_memory  the same file, `MemoryOptimizedReorder` (environment ENABLE_LESS_MEM_VPP=1): verified
seqpipe, seqvpp, seqsmartvpp  `seqpipe_scheduler.cc`, `MakeExecuteOrder` and the warm-ups: verified, with sequences that
                              are split into parts, too (MindFormers 1.9.0 refuses `seq_split_num` above 1)
zero_bubble_v                 `zero_bubble_v.cc`, steps 1 to 8, `detach_backward.cc`, with ZBV_offset unset: verified
gpipe                         `gpipe_interleave_scheduler.cc`: verified with several chunks, assumed the same with one
1f1b                          one chunk a stage: assumed to be the order of PipeDream-flush, as in Megatron-LM

If sequences are not split, seqpipe is 1F1B with one chunk per stage, and interleaved 1F1B with several chunks. seqvpp
has the warm-up of interleaved_1f1b, and seqsmartvpp has the warm-up of interleaved_1f1b_less_memory. All three
schedules place the micro-batches that do not fill a round of all stages differently from these orders.

ZB-H1 and ZB-H2 are the schedules of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, figure 3), in which weight
gradients fill the bubble.

A backward pass that computes only the gradients of inputs is short, so the previous stage can continue earlier; the
weight gradients are computed when the stage would otherwise be idle. In ZB-H1, stage s of p first runs p - s forward
passes, and its weight gradients lag s micro-batches behind (with the memory of 1F1B). In ZB-H2, stage s first runs
2(p-s)-1 forward passes, and its weight gradients lag 2s micro-batches behind (without a bubble if F = B = W, with 2p-1
micro-batches in flight). The stages of ZB-H2 begin and end one after another, which saves time only if the optimizer
does not wait for all stages.

V-Min, V-Half and V-ZB are V-shaped schedules with controllable memory (arXiv 2405.15362).

In these schedules each stage holds two chunks of the model, which runs from the first stage to the last and back. A
V-shaped schedule repeats a building block every six units of time; the block gives the times at which one micro-batch
passes each stage if every forward pass, backward pass and weight gradient takes one unit. The time for which the block
keeps activations determines the memory for activations: a third of that of 1F1B (V-Min), half of it (V-Half), or all of
it (V-ZB, which has no bubble).

DualPipe and DualPipeV are schedules of DeepSeek (arXiv 2412.19437, figure 5; the public DualPipe repository), which run
forward and backward passes in pairs.

A pair is a forward pass and a backward pass of different micro-batches that run together, so that the expert-parallel
communication of each pass is hidden behind the computation of the other pass. `tools.estimate.time_model` predicts the
time of a pair.

DualPipe feeds micro-batches from both ends of the pipeline: stage r holds as chunk 0 the r-th part of the model, for
one half of the micro-batches, and as chunk 1 the (p - 1 - r)-th part, for the other half, so parameters exist twice.
DualPipeV uses half as many stages, over which the model runs in a V; each of its stages does the work of a stage r of
DualPipe and of its mirror stage p - 1 - r.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from plugins.pipeline_layout import by_turns, one_forward_one_backward

KINDS = "FBW"  # by number in a table of operations
COLUMNS = 5  # of an order: index in `KINDS`, micro-batch, chunk, part, joined

# the way of a micro-batch through the chunks (chunk, stage) of a model
LOOP, V, BOTH_WAYS = "loop", "v", "both ways"


class Op(NamedTuple):
    """An `Op` is one piece of work of a pipeline stage: a forward pass, a backward pass, or the weight gradients that
    are split off from a backward pass.

    The kind "B" means the whole backward pass, or only the input gradients if there is an `Op` of the kind "W" for the
    same micro-batch, chunk and part. `part` is the number of a part of the sequence (0 if sequences are not split): the
    forward passes of a micro-batch go through its parts from the first to the last, because the attention of later
    parts needs the keys and values of earlier parts; backward passes go through the parts in reverse order.
    """

    kind: str  # "F", "B" or "W"
    micro_batch: int
    chunk: int
    part: int = 0


def as_table(order: Sequence[Op | Sequence[Op]]) -> np.ndarray:
    """Return the order of a stage's operations as a table of integers, [operations, COLUMNS].

    An item of the order that holds two operations is a pair: a forward pass, and a backward pass of another
    micro-batch, that run together. In the table, the second row of a pair has a 1 in the last column.
    """
    rows: list[tuple[int, ...]] = []
    for item in order:
        together = (item,) if isinstance(item, Op) else item
        rows += [(KINDS.index(op.kind), *op[1:], int(place > 0)) for place, op in enumerate(together)]
    return np.array(rows, int).reshape(-1, COLUMNS)


def as_operations(table: np.ndarray) -> list[Op]:
    """Convert the integer table of a stage's order to a list of operations. The list of operations does not say which
    operations form a pair.
    """
    return [Op(KINDS[kind], *rest) for kind, *rest in table[:, :4].tolist()]


def neighbours(stages: int, chunks: int, shape: str) -> tuple[dict, dict]:
    """Return two dictionaries with the neighbours of each (chunk, stage) in the model: the first dictionary gives the
    previous (chunk, stage), and the second dictionary gives the next (chunk, stage).
    """
    walks = []
    for chunk in range(chunks):
        walk = range(stages) if shape == LOOP or chunk % 2 == 0 else reversed(range(stages))
        walks.append([(chunk, stage) for stage in walk])
    if shape != BOTH_WAYS:
        walks = [[place for walk in walks for place in walk]]
    pairs = [pair for walk in walks for pair in pairwise(walk)]
    return {later: earlier for earlier, later in pairs}, dict(pairs)


def widened(table: np.ndarray) -> np.ndarray:
    """Return the integer table of a stage's order with the missing columns added. The new columns say that the sequence
    part is 0, and that no operations form a pair.
    """
    return np.pad(table, ((0, 0), (0, COLUMNS - table.shape[1])))


def gpipe(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of the operations of a stage in GPipe: all forward passes, and then all backward passes."""
    return np.concatenate(
        [_round("F", range(chunks), 0, micro_batches), _round("B", reversed(range(chunks)), 0, micro_batches)]
    )


def _round(kind: str, chunks: Iterable[int], first: int, size: int) -> np.ndarray:
    """Return the operations of all micro-batches of a round in one chunk, then in the next chunk, and so on."""
    chunk = np.repeat(list(chunks), size)
    micro_batch = np.resize(np.arange(first, first + size), len(chunk))
    return np.stack([np.full(len(chunk), KINDS.index(kind)), micro_batch, chunk], axis=1)


def _rounds_extra_first(stages: int, micro_batches: int) -> list[int]:
    """Return the number of micro-batches in each round of 1F1B; micro-batches that do not fill a round are added to the
    first round (`SortFuncBetweenMicro`).
    """
    return [stages + micro_batches % stages] + [stages] * (micro_batches // stages - 1)


def _rounds_extra_spread(round_size: int, micro_batches: int) -> list[int]:
    """Return the micro-batches of each round for seqpipe and seqvpp: the first rounds have one more
    (`ComputeCycleList`).

    With fewer micro-batches than a round has places, one round takes them all.
    """
    rounds = max(1, micro_batches // round_size)
    whole, extra = divmod(micro_batches, rounds)
    return [whole + (index < extra) for index in range(rounds)]


def _interleaved(rounds: list[int], chunks: int, warm_up: int) -> np.ndarray:
    """Return the order with `warm_up` forwards, then alternately one forward and one backward, and then the remaining
    backwards.

    A round takes all its micro-batches through chunk 0, then chunk 1, ...; backwards in the reverse order of chunks.
    """
    firsts = np.cumsum([0, *rounds[:-1]])
    forward, backward = (
        np.concatenate([_round(kind, path(), first, size) for first, size in zip(firsts, rounds, strict=True)])
        for kind, path in (("F", lambda: range(chunks)), ("B", lambda: reversed(range(chunks))))
    )
    return by_turns(forward, backward, warm_up)


def interleaved_1f1b(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of the operations of a stage in Megatron-LM's interleaved 1F1B (arXiv 2104.04473, figure 4)."""
    rounds = _rounds_extra_first(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + 2 * (stages - 1 - stage))


def interleaved_1f1b_less_memory(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of the operations of a stage in interleaved 1F1B with the shorter warm-up of plain 1F1B."""
    rounds = _rounds_extra_first(stages, micro_batches)
    return _interleaved(rounds, chunks, (chunks - 1) * rounds[0] + stages - 1 - stage)


def seqpipe(stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """Return the order of a stage's operations in seqpipe: 1F1B with sequences that are split into parts, interleaved
    if a stage has several chunks.
    """
    after = (stages - 1 - stage) * (1 if chunks == 1 else 2)
    return _by_parts(_rounds_extra_spread(stages, micro_batches), chunks, after, parts)


def seqvpp(stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """Return the order of a stage's operations in seqvpp, which runs the micro-batches of seqpipe in rounds. In each
    round the sequence parts of the micro-batches fill all stages.
    """
    return _by_parts(_rounds_extra_spread(stages // parts, micro_batches), chunks, 2 * (stages - 1 - stage), parts)


def seqsmartvpp(stage: int, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> np.ndarray:
    """Return the order of the operations of a stage in MindSpore's scheduler seqsmartvpp. The scheduler seqsmartvpp is
    seqvpp with a shorter warm-up, and needs less memory for activations than seqvpp.
    """
    return _by_parts(_rounds_extra_spread(stages // parts, micro_batches), chunks, stages - 1 - stage, parts)


def _by_parts(rounds: list[int], chunks: int, after: int, parts: int) -> np.ndarray:
    """Return [operations, 4] with the part last: `after` operations of the stages behind, beside the first round's,
    warm up.

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
    """Return the order of the operations of a stage in 1F1B with one chunk on each stage (PipeDream-flush)."""
    return np.insert(one_forward_one_backward(stage, stages, micro_batches), 2, 0, axis=1)  # chunk 0


def zero_bubble_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of the operations of a stage in MindSpore's `ZeroBubbleV`. The schedule `ZeroBubbleV` is a
    DualPipeV that splits off few weight gradients.
    """
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


def zb_h1(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in the pipeline schedule ZB-H1. The bubble of ZB-H1 is (p - 1) (F + B -
    W), where F, B and W are the times of a forward pass, of input gradients and of weight gradients. In ZB-H1, as many
    micro-batches are in flight as in 1F1B.
    """
    return _lagging(stages - stage, stage, micro_batches)


def zb_h2(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in the pipeline schedule ZB-H2. The bubble of a stage between its first
    and its last operation is (p - 1) (F + B - 2 W), where F, B and W are the times of a forward pass, of input
    gradients and of weight gradients. In ZB-H2, 2 p - 1 micro-batches are in flight.
    """
    return _lagging(2 * (stages - stage) - 1, 2 * stage, micro_batches)


def _lagging(warm_up: int, lag: int, micro_batches: int) -> np.ndarray:
    """Return the order with `warm_up` forwards; then alternately a backward, the weight gradients of `lag`
    micro-batches before, and a forward.
    """
    order = [Op("F", number, 0) for number in range(min(warm_up, micro_batches))]
    for number in range(micro_batches):
        order.append(Op("B", number, 0))
        if number >= lag:
            order.append(Op("W", number - lag, 0))
        if number + warm_up < micro_batches:
            order.append(Op("F", number + warm_up, 0))
    left = range(max(0, micro_batches - lag), micro_batches)
    return as_table([*order, *(Op("W", number, 0) for number in left)])


_PERIOD = 6  # forward, backward and weight gradient of two chunks
_BLOCK = (("F", 0), ("F", 1), ("B", 1), ("B", 0))  # in the order in which a micro-batch comes


def v_min(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in V-Min. Each stage runs a micro-batch one unit of time after the
    neighbouring stage, in both directions of the V, and (p + 4) // 3 micro-batches are in flight.
    """
    turn = 2 if stages % 3 == 0 else 0  # without it two operations of a stage would fall on one time
    times = (stage, 2 * stages - 1 - stage, 2 * stages + turn + stage, 4 * stages + turn - 1 - stage)
    return _repeated(times, micro_batches)


def v_half(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in V-Half, where (p + 2) // 2 micro-batches are in flight. Each stage
    runs a micro-batch two units of time after the previous stage on the way from the first to the last stage, and one
    unit later on the way back.
    """
    turn = 3 if stages % 2 == 0 else 0
    there, back = 3 * stages + turn - 1 + 2 * stage, 6 * stages + turn - 2 - stage
    return _repeated((2 * stage, 3 * stages - 2 - stage, there, back), micro_batches)


def _repeated(times: tuple[int, ...], micro_batches: int) -> np.ndarray:
    """Return the order that repeats the block of operations every period; weight gradients fill the slots in which the
    block has no operation.
    """
    slots = {
        time + _PERIOD * number: Op(kind, number, chunk)
        for (kind, chunk), time in zip(_BLOCK, times, strict=True)
        for number in range(micro_batches)
    }
    order: list[Op] = []
    waiting: deque[Op] = deque()
    for slot in range(max(slots) + 1):
        if slot in slots:
            order.append(slots[slot])
            if slots[slot].kind == "B":
                waiting.append(slots[slot]._replace(kind="W"))
        elif waiting:
            order.append(waiting.popleft())
    return as_table([*order, *waiting])


def zb_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in V-ZB. Each stage runs a micro-batch four units of time after the
    previous stage on the way from the first to the last stage, and two units later on the way back. In V-ZB, idle times
    at the beginning and the end of a step are filled, and p micro-batches are in flight.
    """
    return _filled(stages, micro_batches)[stage]


@lru_cache(maxsize=16)
def _filled(stages: int, micro_batches: int) -> tuple[np.ndarray, ...]:
    """Return the orders of all stages: at each moment a stage runs, of the operations that can run, the one that comes
    first in the repeated block. If none can run, or memory is short, the stage runs weight gradients.

    The paper fills the block's warm-up and end by reordering, too, by rules of its own. With these a stage idles at
    most one unit between its first and its last operation.
    """
    last = stages - 1
    times = {  # when the block's operations start, by kind, chunk and stage
        (*operation, stage): time
        for stage in range(stages)
        for operation, time in zip(
            _BLOCK,
            (4 * stage, 6 * last + 1 - 2 * stage, 6 * last + 2 + 4 * stage, 12 * last + 3 - 2 * stage),
            strict=True,
        )
    }
    needs = neighbours(stages, 2, V)
    done: dict[tuple[Op, int], int] = {}
    counts = dict.fromkeys(times, 0)
    orders: list[list[Op]] = [[] for _ in range(stages)]
    waiting: list[deque[Op]] = [deque() for _ in range(stages)]
    held = [0] * stages
    time = 0
    while sum(map(len, orders)) < _PERIOD * micro_batches * stages:
        chosen = [_choice(stage, micro_batches, time, times, needs, counts, done, held) for stage in range(stages)]
        for stage, op in enumerate(chosen):
            short = held[stage] >= 2 * stages - 1
            if waiting[stage] and (op is None or short):
                op = waiting[stage].popleft()
                held[stage] -= 1
            elif op is not None:
                counts[op.kind, op.chunk, stage] += 1
                held[stage] += op.kind == "F"
                if op.kind == "B":
                    waiting[stage].append(op._replace(kind="W"))
            if op is not None:
                orders[stage].append(op)
                done[op, stage] = time + 1
        time += 1
    return tuple(as_table(order) for order in orders)


def _choice(
    stage: int, micro_batches: int, time: int, times: dict, needs: tuple, counts: dict, done: dict, held: list[int]
) -> Op | None:
    """Return the forward or backward that comes first in the repeated block among those that this stage could start
    now.
    """
    ready, stages = [], len(held)
    for kind, chunk in _BLOCK:
        number = counts[kind, chunk, stage]
        if number == micro_batches or (kind == "F" and held[stage] == 2 * stages):
            continue
        op = Op(kind, number, chunk)
        place = needs[kind == "B"].get((chunk, stage))
        need = (op._replace(chunk=place[0]), place[1]) if place else (op._replace(kind="F"), stage)
        if need == (op, stage) or done.get(need, time + 1) <= time:  # the model's first operation needs none
            ready.append((times[kind, chunk, stage] + _PERIOD * number, op))
    return min(ready)[1] if ready else None


def dual_pipe_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in DualPipeV, according to the eight steps of DeepSeek's public
    `dualpipev.py`.
    """
    return as_table(_steps(stage, stages, micro_batches))


def dual_pipe(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order in which a stage runs its forward and backward passes in DualPipe. The stages `stage` and
    `stages` - 1 - `stage` both have the order of one stage of DualPipeV with half as many stages. On the second half of
    the stages, chunks 0 and 1 are exchanged.
    """
    near = stage < stages // 2
    half, mirror = micro_batches // 2, min(stage, stages - 1 - stage)
    table = as_table(_steps(mirror, stages // 2, half))
    table[:, 2] = table[:, 2] if near else 1 - table[:, 2]
    table[:, 1] += half * table[:, 2]  # micro-batches of chunk 1 are the second half
    return table


def _steps(stage: int, stages: int, micro_batches: int) -> list[Op | tuple[Op, Op]]:
    counts: Counter[tuple[str, int]] = Counter()
    waiting: deque[Op] = deque()  # weight gradients that were split off
    order: list[Op | tuple[Op, Op]] = []
    after = stages - 1 - stage

    def take(kind: str, chunk: int) -> Op:
        counts[kind, chunk] += 1
        return Op(kind, counts[kind, chunk] - 1, chunk)

    def split_backward(chunk: int, split: bool = True) -> Op:
        op = take("B", chunk)
        if split:
            waiting.append(op._replace(kind="W"))
        return op

    for _ in range(2 * after):  # 1
        order.append(take("F", 0))
    for _ in range(stage + 1):  # 2
        order += [take("F", 0), take("F", 1)]
    for _ in range(after):  # 3: weight gradients at once, so that the next stage's backward need not wait for them
        order += [split_backward(1), waiting.popleft(), take("F", 1)]
    for number in range(micro_batches - 2 * stages + stage + 1):  # 4: the steady phase
        if number == 0 and stage == stages - 1:  # these two one after the other: the next stage waits for the backward
            order += [take("F", 0), take("B", 1)]
        else:
            order.append((take("F", 0), take("B", 1)))
        order.append((take("F", 1), take("B", 0)))
    for _ in range(after):  # 5
        order += [take("B", 1), (take("F", 1), take("B", 0))]
    for place in range(1, 2 * stage + 3):  # 6: the second half is split
        order.append(split_backward(place % 2, split=place > stage + 1))
    for _ in range(after):  # 7
        order += [waiting.popleft(), split_backward(0)]
    return [*order, *waiting]  # 8


def interleaved_1f1b_pairs(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the order of a stage's operations in interleaved 1F1B with pairs. In the steady phase, each backward pass
    runs at the same time as the next forward pass.

    The report (section 4.1) and Pangu Ultra MoE (arXiv 2505.04519) overlap the communication of adjacent forward and
    backward passes of different micro-batches; they do not say whether a backward pass is paired with the forward pass
    before or after it. The partner of a backward pass cannot be the forward pass before it, because on the last stage
    the backward pass needs the result of this forward pass.
    """
    plain = widened(interleaved_1f1b(stage, stages, chunks, micro_batches))
    backward = plain[:, 0] == KINDS.index("B")
    # a backward and the forward after it become the forward and, joined to it, the backward
    firsts = np.flatnonzero(backward[:-1] & ~backward[1:])
    paired = plain.copy()
    paired[firsts], paired[firsts + 1] = plain[firsts + 1], plain[firsts]
    paired[firsts + 1, -1] = 1
    return paired
