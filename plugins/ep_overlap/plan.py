"""This module chooses into how many chunks an MoE layer cuts the tokens of a micro-batch, and in which order it issues
the steps of the chunks. The module implements section 4.4 of the TeleChat3-MoE report.

One MoE layer is a chain of steps: dispatch between nodes, dispatch inside the node, the experts, and the two steps of
the combine in reverse order. With chunks, the AllGather between nodes of one chunk, the All-to-All inside a node of
another chunk, and the experts of a third chunk run at the same time. More chunks hide more communication, but they also
cost more time: launches, latencies of messages and the reading of expert weights do not shrink with the chunk, and
small matmuls are slower. `choose` finds the best number by simulation; the caller provides the duration of each step of
a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Generic, TypeVar

import numpy as np

from plugins.ep_overlap.timeline import Op, Timeline, simulate
from plugins.errors import RecipeError
from plugins.settings import Section, setting

FORWARD_STEPS = ("dispatch.inter", "dispatch.intra", "experts", "combine.intra", "combine.inter")
WHOLE = -1  # the chunk number of what is not cut into chunks: the shared expert
BATCH_CHUNKS, SEQUENCE_CHUNKS, MOST_CHUNKS = (1, 2, 4), (1, 2, 4, 8), 8
DIGITS = 12  # of seconds that are compared: below them is rounding, which must not decide
Chunks = tuple[int, int]
T = TypeVar("T")
U = TypeVar("U")
KEY = "plugins.ep_overlap"


def _chunks(written: Any) -> Chunks | str:
    if written == "auto":
        return "auto"
    chunks = tuple(written) if isinstance(written, (list, tuple)) else ()
    if len(chunks) != 2 or not all(type(parts) is int and parts > 0 for parts in chunks):
        raise RecipeError(
            f"{written!r} is neither auto nor [b, s], the numbers (1 or more) of parts into which the batch and the "
            "sequence are cut"
        )
    return chunks


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says into how many chunks a micro-batch is cut, and how its tokens are divided over the chunks."""

    KEY = KEY
    RIGHT = "write `chunks:` under it, auto or [parts of the batch, parts of the sequence]"
    CHANGE = ("layout", "routes tokens between devices differently")

    chunks: Chunks | str = setting(MISSING, "`[b, s]`: parts of batch and sequence, or `auto`", parse=_chunks)
    stride: int = setting(
        1,
        "steps by which a chunk follows the one before it",
        "write a whole number of steps, 1 for a wavefront",
        least=0,
    )


@dataclass(frozen=True)
class Stage:
    """A `Stage` is one step through which each chunk of tokens passes: its name, its stream, and the seconds that it
    takes as a function of the chunk's share of the tokens.
    """

    name: str
    stream: str
    seconds: Callable[[float], float]


Chain = tuple[Stage, ...]


@dataclass(frozen=True)
class Passes(Generic[T]):
    """A `Passes` holds one value for each kind of pass: forward, backward, and backward with recomputation, which first
    repeats the forward pass.
    """

    forward: T
    backward: T
    replayed: T

    def map(self, function: Callable[[T], U]) -> Passes[U]:
        """Apply a function to the value of each kind of pass (forward, backward, ...), and return the results."""
        return Passes(function(self.forward), function(self.backward), function(self.replayed))


@dataclass(frozen=True)
class Layer:
    """A `Layer` holds the seconds that each step of one MoE layer takes on the busiest rank for one micro-batch.

    Args:
        forward, backward: the steps of a chunk, one after the other: dispatch, experts, combine; in the backward pass
            their adjoints in reverse order. Steps in which a rank has no peer are left out.
        replay: the steps that run before the backward pass if the layer is recomputed.
        shared: the seconds of the shared expert in the forward and the backward pass; 0 without one.
        shared_beside: whether the shared expert runs during communication also without `ep_overlap` (MindFormers'
            `moe_shared_expert_overlap`).
    """

    forward: Chain
    backward: Chain
    replay: Chain = ()
    shared: tuple[float, float] = (0.0, 0.0)
    shared_beside: bool = False

    @cached_property
    def passes(self) -> Passes[tuple[Sequence[Chain], float]]:
        """Return for each kind of pass (see `Passes`) the steps through which a chunk of tokens goes, and the seconds
        of the shared expert.

        All chunks pass through one chain of steps before the next chain begins: a recomputed layer first repeats the
        forward pass for all chunks, and then computes gradients.
        """
        forward, backward = self.shared
        both = (self.replay, self.backward) if self.replay else (self.backward,)
        again = forward + backward if self.replay else backward
        return Passes(((self.forward,), forward), ((self.backward,), backward), (both, again))


@dataclass(frozen=True)
class Choice:
    """A `Choice` holds the division into chunks and the order of issue that were chosen for an MoE layer, with the
    predicted times. All times of a `Choice` are in seconds, for one layer and one micro-batch.

    Args:
        chunks: (b, s), the numbers of parts of batch and sequence.
        stride: the order of issue, see `issue_order`.
        compute: the seconds of experts and shared expert without chunks.
        communication: the seconds of all other steps without chunks, one after the other.
        before, after: the timelines without and with chunks.
    """

    chunks: Chunks
    stride: int
    compute: Passes[float]
    communication: Passes[float]
    before: Passes[Timeline] = field(repr=False)
    after: Passes[Timeline] = field(repr=False)

    @property
    def waited_after(self) -> Passes[float]:
        """Return the seconds in which the device computes nothing if the layer runs in chunks."""
        return _waited(self.after)

    @property
    def cutting(self) -> Passes[float]:
        """Return the additional seconds of computation that chunks cost, because matmuls are smaller, more kernels are
        launched, and weights are read more than once.
        """
        busy, uncut = self.after.map(lambda timeline: timeline.busy("compute")), self.compute
        return Passes(busy.forward - uncut.forward, busy.backward - uncut.backward, busy.replayed - uncut.replayed)


def _waited(timelines: Passes[Timeline]) -> Passes[float]:
    return timelines.map(lambda timeline: timeline.makespan - timeline.busy("compute"))


def chunk_slices(batch: int, sequence: int, chunks: Chunks) -> list[np.ndarray]:
    """Return the token indices of each chunk of a batch-major token list.

    Args:
        batch, sequence: the list holds batch * sequence tokens, token (i, j) at i * sequence + j.
        chunks: (b, s), the numbers of parts along the two axes; parts differ by at most one row.

    Returns:
        b * s ascending index arrays, ordered by batch part first; together they hold every token once.

    Raises:
        RecipeError: there are more parts than rows, or fewer than one part.
    """
    _check(batch, sequence, chunks)
    tokens = np.arange(batch * sequence).reshape(batch, sequence)
    bands = np.array_split(tokens, chunks[0], axis=0)
    return [part.reshape(-1) for band in bands for part in np.array_split(band, chunks[1], axis=1)]


def chunk_shares(batch: int, sequence: int, chunks: Chunks) -> tuple[float, ...]:
    """Return the share of the tokens in each chunk of `chunk_slices`; the shares add up to 1."""
    _check(batch, sequence, chunks)
    rows = [
        [whole // parts + (part < whole % parts) for part in range(parts)]
        for whole, parts in zip((batch, sequence), chunks, strict=True)
    ]
    return tuple(b * s / (batch * sequence) for b, s in product(*rows))


def _check(batch: int, sequence: int, chunks: Chunks) -> None:
    for axis, (rows, parts) in enumerate(zip((batch, sequence), chunks, strict=True)):
        if not 1 <= parts <= rows:
            what = ("samples", "tokens of a sequence")[axis]
            raise RecipeError(
                f"{rows} {what} on a rank cannot be cut into {parts} parts (chunks[{axis}]); write 1 to {rows}",
                f"{KEY}.chunks",
            )


def candidates(batch: int, sequence: int) -> list[Chunks]:
    """Return the pairs (parts of the batch, parts of the sequence) that `choose` tries, the pairs with the fewest
    chunks first.
    """
    pairs = product(BATCH_CHUNKS, SEQUENCE_CHUNKS)
    fitting = [(b, s) for b, s in pairs if b <= batch and s <= sequence and b * s <= MOST_CHUNKS]
    return sorted(fitting, key=lambda pair: (pair[0] * pair[1], pair[1]))


def issue_order(chunks: int, steps: Sequence[str] = FORWARD_STEPS, stride: int = 1) -> list[tuple[int, str]]:
    """Return the order in which every rank issues the steps of all chunks, as (chunk, step) pairs; all ranks have the
    same order.

    Step i of chunk c stands at place stride * c + i, the earlier chunk first: a chunk starts `stride` steps after the
    one before it.

        stride 0            step by step: all chunks' first step, then all chunks' second
        stride len(steps)   chunk by chunk

    A step comes after all earlier steps of its chunk, so in-order streams cannot wait for each other; the order depends
    only on the arguments, so it cannot differ between ranks. Automatic differentiation reads the order backwards, which
    gives the same order with the chunks counted from the last one.
    """
    places = [(stride * chunk + index, chunk, step) for chunk in range(chunks) for index, step in enumerate(steps)]
    return [(chunk, step) for _, chunk, step in sorted(places, key=lambda place: place[:2])]


def layer_ops(chains: Sequence[Chain], shares: Sequence[float], stride: int, shared: float = 0.0) -> list[Op]:
    """Return the operators of one pass of a layer in chunks, in the order in which they are issued; the shared expert
    comes first, because it depends on no other operator.

    Args:
        chains: the steps of a chunk (`Layer.passes`).
        shares: the shares of the tokens in each chunk.
        shared: seconds of the shared expert, 0 without one.
    """
    named = {stage.name: stage for chain in chains for stage in chain}
    before = dict(zip(list(named)[1:], named, strict=False))
    seconds = {(name, share): stage.seconds(share) for name, stage in named.items() for share in set(shares)}
    ops = [Op("shared", WHOLE, "compute", shared)] if shared else []
    for chain in chains:
        for chunk, step in issue_order(len(shares), [stage.name for stage in chain], stride):
            after = ((chunk, before[step]),) if step in before else ()
            ops.append(Op(step, chunk, named[step].stream, seconds[step, shares[chunk]], after))
    return ops


def uncut_ops(chains: Sequence[Chain], shared: float = 0.0, shared_beside: bool = False) -> list[Op]:
    """Return the operators of one pass without chunks; the shared expert comes last, unless it runs in parallel with
    the routed experts.
    """
    if shared_beside or not shared:
        return layer_ops(chains, (1.0,), 1, shared)
    return [*layer_ops(chains, (1.0,), 1), Op("shared", WHOLE, "compute", shared, ((0, chains[-1][-1].name),))]


def choose(layer: Layer, batch: int, sequence: int, cuts: Sequence[Chunks] = (), stride: int | None = None) -> Choice:
    """Return the division into chunks and the order of issue for which the layer's forward plus backward time is
    shortest; if the layer is recomputed, the backward pass repeats the forward pass.

    Args:
        batch, sequence: the numbers of samples and of tokens of a sequence that a rank holds of a micro-batch.
        cuts: the pairs (b, s) to try; if empty, those of `candidates`.
        stride: the order of issue; by default the fastest. Among equal times, fewer chunks are chosen, then stride 1,
            so that all ranks choose the same.

    Raises:
        RecipeError: a cut has more parts than rows.
    """
    strides = range(len(layer.forward) + 1) if stride is None else (stride,)
    best: tuple[Chunks, int, tuple[float, ...]] = ((1, 1), 1, (1.0,))
    least, tried = (float("inf"), 0, False, 0), set[tuple[float, ...]]()
    for cut in cuts or candidates(batch, sequence):
        shares = chunk_shares(batch, sequence, cut)
        if shares in tried:  # two halves are two halves, of the batch or of the sequence
            continue
        tried.add(shares)
        for order in strides if len(shares) > 1 else (1,):  # a single chunk is the layer uncut
            timelines = [_timeline(layer, one, shares, order) for one in (layer.passes.forward, layer.passes.replayed)]
            seconds = round(sum(timeline.makespan for timeline in timelines), DIGITS)
            rank = (seconds, len(shares), order != 1, order)
            if rank < least:
                best, least = (cut, order, shares), rank
    return cut_layer(layer, *best)


def cut_layer(layer: Layer, chunks: Chunks, stride: int, shares: Sequence[float]) -> Choice:
    """Return the predicted times of a layer whose forward, recomputed and backward passes all use the same number of
    chunks and the same order of issue.
    """
    passes = layer.passes
    each = (passes.forward, passes.backward, passes.replayed)
    compute, communication = [], []
    for chains, shared in each:
        seconds = [(stage.stream == "compute", stage.seconds(1.0)) for chain in chains for stage in chain]
        compute.append(sum(time for own, time in seconds if own) + shared)
        communication.append(sum(time for own, time in seconds if not own))
    return Choice(
        chunks,
        stride,
        Passes(*compute),
        Passes(*communication),
        before=Passes(*(_timeline(layer, one, (1.0,), 1) for one in each)),
        after=Passes(*(_timeline(layer, one, shares, stride) for one in each)),
    )


def _timeline(layer: Layer, one: tuple[Sequence[Chain], float], shares: Sequence[float], stride: int) -> Timeline:
    chains, shared = one
    if len(shares) == 1:
        return simulate(uncut_ops(chains, shared, layer.shared_beside))
    return simulate(layer_ops(chains, shares, stride, shared))


def read(settings: Any) -> tuple[Any, int]:
    """Return (chunks, stride) of `plugins.ep_overlap`, as `Settings` describes them; this raises the errors that
    `Settings.read` raises.
    """
    ours = Settings.read(settings)
    return ours.chunks, ours.stride


def slices(batch: int, chunks: tuple[int, int], config: Any) -> list[np.ndarray]:
    """Return for each chunk the indices of its tokens among the tokens of a rank.

    Args:
        batch: the number of samples in a micro-batch of one data-parallel rank.
        chunks: (b, s).
        config: TransformerConfig; its tensor and context parallel ranks split the sequence.
    """
    split = config.tensor_model_parallel_size * config.context_parallel_size
    return chunk_slices(batch, config.seq_length // split, chunks)
