"""Into how many chunks to cut a micro-batch, and in which order to issue their steps. Report section 4.4.

One MoE layer is a chain of steps: dispatch between nodes, dispatch inside the node, the experts, and the same way back.
Cut into chunks, one chunk's AllGather between nodes, another's All-to-All inside a node and a third's experts run at
once. More chunks hide more and cost more: launches, latencies of messages and the reading of expert weights
do not shrink with the chunk. `choose` weighs the two by simulation; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from plugins.ep_overlap.timeline import Op, Timeline, simulate
from plugins.errors import RecipeError
from plugins.hierarchical_ep.traffic import Step

FORWARD_STEPS = ("dispatch.inter", "dispatch.intra", "experts", "combine.intra", "combine.inter")
WHOLE = -1  # the chunk number of what is not cut into chunks: the shared expert
BATCH_CHUNKS, SEQUENCE_CHUNKS, MOST_CHUNKS = (1, 2, 4), (1, 2, 4, 8), 8
DIGITS = 12  # of seconds that are compared: below them is rounding, which must not decide
_BACKWARD_COST = 2  # backward of a matmul is two matmuls
Chunks = tuple[int, int]


@dataclass(frozen=True)
class Links:
    """What links and launches cost one device: bytes/s that a collective reaches, seconds a message and an operator."""

    inter_bytes_per_s: float
    intra_bytes_per_s: float
    inter_latency: float
    intra_latency: float
    launch: float


@dataclass(frozen=True)
class Layer:
    """One MoE layer on one micro-batch, uncut, as the busiest rank sees it.

    Args:
        forward, backward: communication (`traffic.expected_steps` or `planned_steps`, and `traffic.backward` of it).
        experts: seconds of the routed experts' matmuls, forward; backward takes twice that, as of the following.
        shared: seconds of the shared expert.
        permutation: seconds to sort copies by expert and back.
        weights: seconds to read the expert weights once, below which no chunk's matmuls get.
        replay: backward runs dispatch and experts again first, because the layer is recomputed.
        shared_beside: without `ep_overlap`, too, the shared expert runs beside communication (MindFormers'
            `moe_shared_expert_overlap`).
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    experts: float
    shared: float = 0.0
    permutation: float = 0.0
    weights: float = 0.0
    replay: bool = False
    shared_beside: bool = False


@dataclass(frozen=True)
class Stage:
    """One step of a chunk's chain: its stream, and seconds as the larger of the lines fixed + share * scaled."""

    name: str
    stream: str
    lines: tuple[tuple[float, float], ...]

    def seconds(self, share: float) -> float:
        """Seconds for a chunk that holds `share` of the tokens."""
        return max(fixed + share * scaled for fixed, scaled in self.lines)


Phases = tuple[tuple[Stage, ...], ...]


@dataclass(frozen=True)
class Choice:
    """What was chosen for a layer, and what it is expected to bring. Seconds of one layer and micro-batch.

    Args:
        mode: dispatch mode.
        chunks: (b, s) parts of batch and sequence.
        stride: the order of issue, see `issue_order`.
        ep_seconds: all EP communication, uncut and one after the other, forward and backward.
        compute_seconds: experts and shared expert alone, uncut.
        before, after: (forward, backward) timelines uncut and cut.
    """

    mode: str
    chunks: Chunks
    stride: int
    ep_seconds: float
    compute_seconds: float
    before: tuple[Timeline, Timeline] = field(repr=False)
    after: tuple[Timeline, Timeline] = field(repr=False)

    @property
    def makespan_before(self) -> float:
        """Seconds of the layer uncut."""
        return sum(timeline.makespan for timeline in self.before)

    @property
    def makespan_after(self) -> float:
        """Seconds of the layer in chunks."""
        return sum(timeline.makespan for timeline in self.after)

    @property
    def exposed_before(self) -> float:
        """Seconds that communication adds to the computation, uncut."""
        return self.makespan_before - self.compute_seconds

    @property
    def exposed_after(self) -> float:
        """The same in chunks; what cutting itself costs counts as exposed."""
        return self.makespan_after - self.compute_seconds

    def exposed_fraction(self, seconds: float) -> float:
        """`exposed_before` or `exposed_after` as a fraction of EP communication; 0 when there is none."""
        return seconds / self.ep_seconds if self.ep_seconds else 0.0


def chunk_slices(batch: int, sequence: int, chunks: Chunks) -> list[np.ndarray]:
    """Token indices of each chunk of a batch-major token list.

    Args:
        batch, sequence: the list holds batch * sequence tokens, token (i, j) at i * sequence + j.
        chunks: (b, s) parts along each axis; parts differ by at most one row.

    Returns:
        b * s ascending index arrays, batch part first; together every token once.

    Raises:
        RecipeError: more parts than rows, or no part.
    """
    for axis, (rows, parts) in enumerate(zip((batch, sequence), chunks, strict=True)):
        if not 1 <= parts <= rows:
            what = ("samples", "tokens of a sequence")[axis]
            raise RecipeError(
                f"plugins.ep_overlap.chunks[{axis}]: {parts} parts of {rows} {what} on a rank; use 1 to {rows}"
            )
    tokens = np.arange(batch * sequence).reshape(batch, sequence)
    bands = np.array_split(tokens, chunks[0], axis=0)
    return [part.reshape(-1) for band in bands for part in np.array_split(band, chunks[1], axis=1)]


def chunk_shares(batch: int, sequence: int, chunks: Chunks) -> tuple[float, ...]:
    """The share of the tokens in each of `chunk_slices`; they add up to 1."""
    return tuple(len(part) / (batch * sequence) for part in chunk_slices(batch, sequence, chunks))


def candidates(batch: int, sequence: int) -> list[Chunks]:
    """The cuts that `choose` tries, fewest chunks first."""
    pairs = product(BATCH_CHUNKS, SEQUENCE_CHUNKS)
    fitting = [(b, s) for b, s in pairs if b <= batch and s <= sequence and b * s <= MOST_CHUNKS]
    return sorted(fitting, key=lambda pair: (pair[0] * pair[1], pair[1]))


def issue_order(chunks: int, steps: Sequence[str] = FORWARD_STEPS, stride: int = 1) -> list[tuple[int, str]]:
    """The one order in which every rank issues the steps of all chunks: (chunk, step) pairs.

    Step i of chunk c stands at place stride * c + i, the earlier chunk first: a chunk starts `stride` steps after the
    one before it.

        stride 0            step by step: all chunks' first step, then all chunks' second
        stride 1            wavefront: chunk c is one step behind chunk c - 1 (report figure 5)
        stride 2            two steps behind: a later dispatch alternates with an earlier combine
        stride len(steps)   chunk by chunk

    A step comes after all earlier steps of its chunk, so in-order streams cannot wait for each other, and the order
    depends on nothing but the arguments, so ranks cannot differ. Read backwards, as automatic differentiation does, it
    is the same order with chunks counted from the last.
    """
    places = [(stride * chunk + index, chunk, step) for chunk in range(chunks) for index, step in enumerate(steps)]
    return [(chunk, step) for _, chunk, step in sorted(places, key=lambda place: place[:2])]


def stages(layer: Layer, links: Links) -> tuple[Phases, Phases]:
    """What one chunk goes through forward and backward, without steps in which a rank has no peer (EP in one node).

    A phase is issued for all chunks before the next: backward replays the whole layer before it takes gradients.
    """
    half = len(layer.forward) // 2
    dispatch, combine = layer.forward[:half], layer.forward[half:]
    forward = (*_sent(dispatch, links), _computed("experts", layer, links), *_sent(combine, links))
    gradient = (
        *_sent(layer.backward[:half], links),
        _computed("experts.backward", layer, links, _BACKWARD_COST),
        *_sent(layer.backward[half:], links),
    )
    replay = (*_sent(dispatch, links, ".replay"), _computed("experts.replay", layer, links))
    return (forward,), (replay, gradient) if layer.replay else (gradient,)


def _computed(name: str, layer: Layer, links: Links, times: int = 1) -> Stage:
    """The experts: matmuls or the reading of weights, whichever is longer, after the permutation."""
    moved = times * layer.permutation
    matmuls = (links.launch, times * layer.experts + moved)
    return Stage(name, "compute", (matmuls, (links.launch + times * layer.weights, moved)))


def _sent(steps: Sequence[Step], links: Links, suffix: str = "") -> list[Stage]:
    """Communication: launch, a latency a message, bytes; over both classes of links the slower one counts."""
    sent = []
    for step in steps:
        lines = []
        if step.inter_peers:
            fixed = links.launch + step.inter_peers * links.inter_latency
            lines.append((fixed, step.inter_bytes / links.inter_bytes_per_s))
        if step.intra_peers:
            fixed = links.launch + step.intra_peers * links.intra_latency
            lines.append((fixed, step.intra_bytes / links.intra_bytes_per_s))
        if lines:
            sent.append(Stage(step.name + suffix, step.stream, tuple(lines)))
    return sent


def layer_ops(phases: Phases, shares: Sequence[float], stride: int, shared: float = 0.0) -> list[Op]:
    """One direction of a layer in chunks, in order of issue; the shared expert first, it depends on nothing.

    Args:
        phases: the steps of a chunk, each after the one before (`stages`).
        shares: of the tokens in each chunk.
        shared: seconds of the shared expert with its launch, 0 without one.
    """
    named = {stage.name: stage for phase in phases for stage in phase}
    before = dict(zip(list(named)[1:], named, strict=False))
    ops = [Op("shared", WHOLE, "compute", shared)] if shared else []
    for phase in phases:
        for chunk, step in issue_order(len(shares), [stage.name for stage in phase], stride):
            after = ((chunk, before[step]),) if step in before else ()
            ops.append(Op(step, chunk, named[step].stream, named[step].seconds(shares[chunk]), after))
    return ops


def uncut_ops(phases: Phases, shared: float = 0.0, shared_beside: bool = False) -> list[Op]:
    """One direction without chunks; the shared expert last, after everything, unless it runs beside."""
    if shared_beside or not shared:
        return layer_ops(phases, (1.0,), 1, shared)
    return [*layer_ops(phases, (1.0,), 1), Op("shared", WHOLE, "compute", shared, ((0, phases[-1][-1].name),))]


def choose(layers: Mapping[str, Layer], links: Links, batch: int, sequence: int, cuts: Sequence[Chunks] = ()) -> Choice:
    """The dispatch mode, cut and order with the shortest layer, forward and backward.

    Args:
        layers: dispatch mode -> the layer in it.
        batch, sequence: samples and tokens of a sequence that a rank holds of a micro-batch.
        cuts: (b, s) to try; `candidates` when empty.

    Equal times prefer fewer chunks, then stride 1, then the mode named first: all ranks choose alike.

    Raises:
        RecipeError: a cut has more parts than rows.
    """
    best: Choice | None = None
    for mode, layer in layers.items():
        for cut in cuts or candidates(batch, sequence):
            choice = cut_layer(mode, layer, links, cut, chunk_shares(batch, sequence, cut))
            if best is None or _rank(choice) < _rank(best):
                best = choice
    assert best is not None, "no dispatch mode to choose from"
    return best


def _rank(choice: Choice) -> tuple[float, int]:
    return round(choice.makespan_after, DIGITS), choice.chunks[0] * choice.chunks[1]


def cut_layer(mode: str, layer: Layer, links: Links, chunks: Chunks, shares: Sequence[float]) -> Choice:
    """One cut of one layer, in its best order; both directions share the order's stride."""
    ways = stages(layer, links)
    shared = [cost * layer.shared + links.launch if layer.shared else 0.0 for cost in (1, _BACKWARD_COST)]
    if layer.replay and layer.shared:
        shared[1] += shared[0]
    directions = list(zip(ways, shared, strict=True))
    uncut = [simulate(uncut_ops(phases, extra, layer.shared_beside)) for phases, extra in directions]
    seconds = [(stage.stream == "compute", stage.seconds(1.0)) for way in ways for phase in way for stage in phase]
    runs = []
    for stride in range(len(layer.forward) + 2) if len(shares) > 1 else ():  # a single chunk is the layer uncut
        cut = [simulate(layer_ops(phases, shares, stride, extra)) for phases, extra in directions]
        runs.append((sum(timeline.makespan for timeline in cut), stride, cut))
    best = min(runs, key=lambda run: (round(run[0], DIGITS), run[1] != 1, run[1]), default=(0.0, 1, uncut))
    _, stride, after = best
    return Choice(
        mode,
        chunks,
        stride,
        ep_seconds=sum(time for compute, time in seconds if not compute),
        compute_seconds=sum(time for compute, time in seconds if compute) + sum(shared),
        before=(uncut[0], uncut[1]),
        after=(after[0], after[1]),
    )
