"""This module simulates a pipeline schedule. The result of a simulation is the step time, the idle times, the memory of
each stage over time, and a picture.

The simulation follows these rules:
* a stage runs its operations one after another in the schedule's order, each operation as soon as its inputs are
  available;
* the forward pass of a chunk needs the forward pass of the previous chunk of the model; the backward pass of a chunk
  needs the backward pass of the next chunk (that of the last chunk needs its own forward pass); weight gradients need
  the backward pass of the same chunk;
* a tensor that is sent to another stage takes the time `transfer`. With overlap "full" the transfer runs beside the
  computation. With "none" the transfer keeps both stages busy, the sender after its operation and the receiver before
  its operation; a sender does not wait for its receiver. With "1f1b" (report section 4.1; MindSpore's 1b1f overlap) a
  backward pass and the forward pass right after it run together, so that neither the sending of this backward pass nor
  the receiving of this forward pass keeps the stage busy;
* a pair (see `tools.pipeline.orders`) starts when the inputs of both of its operations are available; both operations
  end at the same time; the time of the pair is the sum of the times of its operations minus the time that they hide
  (`hidden`); its transfers run beside it;
* each part of a sequence is a separate operation; the order of a stage keeps the forward pass of a part before the
  forward passes of later parts, which need its keys and values, and backward passes in the reverse order;
* activations of a chunk are held from the start of its forward pass to the end of its backward pass, or to the end of
  its weight gradients if these are split off. Transfers do not slow each other down. All micro-batches take the same
  time unless each micro-batch has its own `Durations`. Times and memory are in the caller's units.

The number of micro-batches in flight follows from the orders only, not from times. The picture has a row for each stage
with its operations over time, as in the figures of pipeline schedules in papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from tools.pipeline.orders import Op
from tools.pipeline.schedules import operations
from tools.pipeline.timetable import PAIR, Timetable, play, timetable

OVERLAPS = ("none", "1f1b", "full")


@dataclass(frozen=True)
class Durations:
    """A `Durations` holds the time of each operation of a pipeline, as arrays [chunks, stages] in the same unit of
    time.

    If sequences are split, the arrays are [parts, chunks, stages], or [chunks, stages] if all parts take the same time.

    backward    the time of the whole backward pass, including weight gradients and recomputation
    weight      the time of the weight gradients, a part of `backward` (for schedules that split them off)
    transfer    the time to send one activation, or its gradient, to another stage
    hidden      [chunks, chunks, stages] the time that a forward pass of the first chunk and a backward pass of the
                second hide if they run as a pair (without split sequences): the pair takes forward + backward - hidden;
                None if nothing is hidden
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray | None = None
    transfer: float = 0.0
    overlap: str = "full"
    hidden: np.ndarray | None = None


@dataclass(frozen=True)
class Simulation:
    """A `Simulation` holds the simulated time of a step, the busy time of each stage, and the start and the end of each
    operation.
    """

    makespan: float
    busy: np.ndarray  # [stages] time of computation
    starts: tuple[np.ndarray, ...]  # for each stage, by operation
    ends: tuple[np.ndarray, ...]
    table: Timetable

    @property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """Return the simulated operations of each stage."""
        return self.table.orders

    @property
    def idle_share(self) -> float:
        """Return the idle time of all stages divided by their total time, which is (p-1)/(m+p-1) for 1F1B with equal
        stages.
        """
        return 1 - float(self.busy.sum()) / (self.makespan * len(self.busy))


def simulate(
    schedule: str, micro_batches: int, durations: Durations | Sequence[Durations], parts: int = 1
) -> Simulation:
    """Simulate one step of a schedule of `tools.pipeline.schedules`. Each sequence is split into `parts` parts.

    Args:
        durations: the `Durations` of every micro-batch, or a list with the `Durations` of each micro-batch, of which
            the first gives the transfers and the overlap.

    Raises:
        RecipeError: the schedule cannot run, or `overlap` is none of `OVERLAPS`.
    """
    chunks, stages = np.shape((durations if isinstance(durations, Durations) else durations[0]).forward)[-2:]
    return simulate_timetable(timetable(schedule, stages, chunks, micro_batches, parts), durations)


def simulate_timetable(table: Timetable, durations: Durations | Sequence[Durations]) -> Simulation:
    """Simulate one step of a pipeline whose stages run their operations in the given orders (see
    `tools.pipeline.timetable.lay_out`). The argument `durations` has the same form as in the function `simulate`.

    Raises:
        RecipeError: `overlap` is none of `OVERLAPS`.
    """
    if isinstance(durations, Durations):
        times = duration_table(durations, table.parts)[table.work]
    else:
        times = np.array([duration_table(one, table.parts) for one in durations])[table.micro_batches, table.work]
        durations = durations[0]
    sending, receiving, lags = _transfers(table, durations)
    ends = play(table, receiving + times + sending, lags=lags if any(lag.any() for lag in lags) else ())[1:] - sending
    by_stage = list(enumerate(table.places))
    return Simulation(
        makespan=float(ends.max()),
        busy=times.sum(axis=0),
        starts=tuple((ends - times)[levels, stage] for stage, levels in by_stage),
        ends=tuple(ends[levels, stage] for stage, levels in by_stage),
        table=table,
    )


@lru_cache(maxsize=4096)
def filling(schedule: str, stages: int, chunks: int, micro_batches: int) -> float:
    """Return the idle time of a stage (the bubble) for equal stages, divided by the time of one micro-batch on a stage.
    For 1F1B the bubble is (p - 1) / v for p stages with v chunks each.

    A forward pass, the input gradients and the weight gradients are assumed to take equal times, and transfers no time.
    """
    ones = np.ones((chunks, stages))
    makespan = simulate(schedule, micro_batches, Durations(ones, 2 * ones, ones)).makespan
    return makespan / (3 * chunks) - micro_batches


def makespans(
    table: Timetable,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray | None = None,
    hidden: np.ndarray | None = None,
) -> np.ndarray:
    """Return the step times [plans] of many plans, which are simulated together; sequences are not split, and transfers
    take no time.

    `forward`, `backward` and `weight` are [plans, chunks, stages], `hidden` [plans, chunks, chunks, stages], as in
    `Durations`.
    """
    plans, size = len(forward), table.chunks * table.stages
    split = np.zeros_like(backward) if weight is None else weight
    rows = [part.reshape(plans, size).T for part in (forward, backward, backward - split, split)]
    rows.append(np.zeros((1, plans)))
    if table.also is not None:
        pairs = forward[:, :, None] + backward[:, None] - (0 if hidden is None else hidden)
        rows.append(pairs.reshape(plans, -1).T)
    lasting = np.concatenate(rows)
    return play(table, (lasting.take(work, axis=0) for work in table.work), (plans,))[-1].max(axis=0)


def duration_table(durations: Durations, parts: int = 1) -> np.ndarray:
    """Return the durations of operations, 0 for idle places, and the durations of pairs as one vector. The numbers in
    `Timetable.work` are indices into the returned vector.
    """
    given = [durations.forward, durations.backward, 0 if durations.weight is None else durations.weight]
    of_parts = (parts, *np.shape(durations.forward)[-2:])
    # equal parts of what was given whole; indexing would not say which shape was meant
    each = [np.asarray(one, float) / (1 if np.ndim(one) == 3 else parts) for one in given]
    forward, backward, weight = (np.broadcast_to(one, of_parts) for one in each)
    whole, back = forward.sum(axis=0), backward.sum(axis=0)
    pairs = whole[:, None] + back[None] - (0 if durations.hidden is None else np.asarray(durations.hidden, float))
    return np.concatenate([np.ravel([forward, backward, backward - weight, weight]), [0.0], pairs.ravel()])


def _transfers(table: Timetable, durations: Durations) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the time for which a stage is busy sending after an operation and receiving before an operation, both
    [levels, stages], and the time that an operation (and then the backward of a pair) waits after the other stage has
    sent its input.
    """
    if durations.overlap not in OVERLAPS:
        near = did_you_mean(durations.overlap, list(OVERLAPS))
        raise RecipeError(f"overlap {durations.overlap!r}: the overlap must be one of {', '.join(OVERLAPS)}{near}")
    send_hidden = receive_hidden = np.full(table.work.shape, durations.overlap == "full") | (table.paired == PAIR)
    if durations.overlap == "1f1b":
        send_hidden, receive_hidden = send_hidden | (table.paired == 2), receive_hidden | (table.paired == 1)
    sending = np.where(table.sends & ~send_hidden, durations.transfer, 0.0)
    receiving = np.where(table.moves & ~receive_hidden, durations.transfer, 0.0)
    # `play` counts a sender's transfer; its output is ready before that
    sent = np.concatenate([np.zeros(table.stages), sending.ravel()])
    lags = [np.where(table.moves & receive_hidden, durations.transfer, 0.0) - sent[table.needs]]
    if table.also is not None:
        lags.append(np.where(table.also[1], durations.transfer, 0.0) - sent[table.also[0]])
    return sending, receiving, lags


_IRREGULAR = ("gpipe", "seqpipe", "seqvpp", "seqsmartvpp")


def in_flight(order: Sequence[Op], chunks: int) -> np.ndarray:
    """Return the number of micro-batches whose activations are held while each operation runs, [operations, chunks].

    If sequences are split, each part counts as its share of a micro-batch. While a pair runs, the activations of both
    of its operations are held, because its forward pass comes first.
    """
    parts = 1 + max(op.part for op in order)
    takes, frees = _takes_and_frees(order)
    chunk = np.eye(chunks, dtype=int)[[op.chunk for op in order]]
    taken, freed = chunk * takes[:, None], chunk * frees[:, None]
    held = (taken - freed).cumsum(axis=0) + freed  # what ends with an operation is there while it runs
    return held if parts == 1 else held / parts


def _takes_and_frees(order: Sequence[Op]) -> tuple[np.ndarray, np.ndarray]:
    """Return two vectors [operations]: whether an operation begins to hold activations, and whether it is the last
    operation that holds them.
    """
    split = {op[1:] for op in order if op.kind == "W"}
    takes = np.array([op.kind == "F" for op in order])
    return takes, ~takes & np.array([op.kind == "W" or op[1:] not in split for op in order])


def enough(schedule: str, stages: int, micro_batches: Any) -> Any:
    """Return a smaller number of micro-batches with which a step needs as much memory as with `micro_batches`
    micro-batches. The argument and the result may be arrays.

    Most schedules add the micro-batches that do not fill a round to the first round, and all later rounds repeat the
    second round. GPipe has only one round; seqpipe, seqvpp and seqsmartvpp distribute the remaining micro-batches over
    all rounds, so that their first round depends on the number of rounds.
    """
    if schedule in _IRREGULAR:
        return micro_batches
    return np.minimum(micro_batches, 4 * stages + micro_batches % stages)


def peak_vectors(order: Sequence[Op], chunks: int) -> np.ndarray:
    """Return how many micro-batches of each chunk are in flight at the moments at which a stage may need the most
    memory, as an array [moments, chunks]. The result consists of the rows of `in_flight` that no other row exceeds in
    every chunk.

    However large the activations of each chunk are, the peak memory of the stage occurs at one of these moments;
    therefore a solver's memory is exact if it has a constraint for each of them.
    """
    distinct = np.unique(in_flight(order, chunks), axis=0)
    exceeds = (distinct[:, None] <= distinct[None]).all(axis=2) & (distinct[:, None] != distinct[None]).any(axis=2)
    return distinct[~exceeds.any(axis=1)]


@lru_cache(maxsize=4096)
def _peaks(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    return peak_vectors(operations(schedule, stage, stages, chunks, micro_batches), chunks)


def stage_peaks(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return how many micro-batches of each chunk are in flight at the moments at which a stage may need the most
    memory, [moments, chunks]. The function simulates only as many micro-batches as are needed to reach the peak memory.
    """
    return _peaks(schedule, stage, stages, chunks, int(enough(schedule, stages, micro_batches)))


def memory_over_time(
    simulation: Simulation, stage: int, static: float, activation: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory of a stage over one step as two arrays (times, memory). The stage holds memory[i] from times[i]
    to times[i + 1], or to the end of the step for the last i.

    `activation` is the memory of one micro-batch's activations in each chunk; the peak memory is ``memory.max()``.
    """
    order = simulation.orders[stage]
    takes, frees = _takes_and_frees(order)
    held = np.asarray(activation, float)[[op.chunk for op in order]] * (1 / (1 + max(op.part for op in order)))
    times = np.concatenate([[0.0], simulation.ends[stage][frees], simulation.starts[stage][takes]])
    changes = np.concatenate([[0.0], -held[frees], held[takes]])
    # at one moment memory is freed before the next operation takes some
    sequence = times.argsort(kind="stable")
    return times[sequence], static + np.cumsum(changes[sequence])


NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_PALETTES = {"F": "Blues", "B": "Greens", "W": "Oranges"}
_HEIGHT = 0.84


def draw_timeline(axes: Any, simulation: Simulation, numbers: bool = False) -> None:
    """Draw the timeline on matplotlib's `axes`. Later chunks have darker colours, and the two operations of a pair are
    drawn above each other in one frame.

    If `numbers` is True, the number of the micro-batch is written into each operation.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    chunks = simulation.table.chunks
    shades = 0.35 + 0.5 * np.arange(chunks) / max(1, chunks - 1)
    colours = {kind: colormaps[palette](shades) for kind, palette in _PALETTES.items()}  # [chunks, 4] of each
    for stage, order in enumerate(simulation.orders):
        joined = simulation.table.tables[stage][:, -1]
        second = joined > 0
        paired = second | np.append(second[1:], False)
        starts, ends = simulation.starts[stage], simulation.ends[stage]
        for row, mask, bottom, height in (
            (stage, ~paired, -_HEIGHT / 2, _HEIGHT),
            (stage, paired & ~second, -_HEIGHT / 2, _HEIGHT / 2),
            (stage, second, 0.0, _HEIGHT / 2),
        ):
            at = np.flatnonzero(mask)
            spans = np.column_stack([starts, ends - starts])[at]
            faces = [colours[order[index].kind][order[index].chunk] for index in at]
            axes.broken_barh(spans, (row + bottom, height), facecolors=faces, edgecolor="white", linewidth=0.2)
            for index in at if numbers else ():
                _number(axes, simulation, stage, index, row + bottom + height / 2, height < _HEIGHT)
        frames = np.column_stack([starts, ends - starts])[second]
        axes.broken_barh(frames, (stage - _HEIGHT / 2, _HEIGHT), facecolors="none", edgecolor="black", linewidth=0.7)
    axes.set_yticks(range(len(simulation.orders)), [f"stage {stage}" for stage in range(len(simulation.orders))])
    axes.invert_yaxis()
    kinds = [kind for kind in NAMES if any(op.kind == kind for order in simulation.orders for op in order)]
    handles = [
        Patch(color=colours[kind][chunk], label=NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind in kinds
        for chunk in range(chunks)
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=len(handles), fontsize="small")


def _number(axes: Any, simulation: Simulation, stage: int, index: int, height: float, small: bool) -> None:
    """Write the micro-batch of an operation, with its part where sequences are split, in the middle of its bar."""
    op = simulation.orders[stage][index]
    middle = (simulation.starts[stage][index] + simulation.ends[stage][index]) / 2
    text = f"{op.micro_batch}" + (f"{'abcdefgh'[op.part % 8]}" if simulation.table.parts > 1 else "")
    look = {"fontsize": 5 if small else 6, "color": "white" if op.chunk and op.kind != "W" else "black"}
    axes.text(middle, height, text, ha="center", va="center", **look)
