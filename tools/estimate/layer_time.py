"""This module computes the seconds of one layer and micro-batch on a device, from the seconds of its operators and of
its expert-parallel communication.

Forward:

    matmuls, attention, elementwise   see `efficiency`; fused attention reaches a share of its own of the peak
    tp            AllGathers and ReduceScatters over the slowest link of the group
    cp            keys and values once round the group; with Ulysses an All-to-All of queries, keys, values and results
                  beside it, which is the least of what compiled graphs show; logits on their way to the loss
                  (`logit_exchanges`)
    ep            dispatch and combine, as far as the device waits for them (below)
    fixed         host and launches, more for MoE layers

The backward pass takes twice the time of the matmuls, of elementwise traffic (except that rows are sorted once in each
direction) and the fixed time, 2.5 times the time of fused attention (which computes the scores again), and the same
communication (keys and values are sent again, except with MindFormers' training_graph, which keeps them). Recomputation
adds the time of the forward pass.

The time of expert-parallel communication is the time that a device waits for it in one MoE layer and micro-batch.

The bytes are the expected bytes of `plugins.hierarchical_ep.traffic`. Every step of dispatch and combine takes the time
of a launch, a latency, and the time of its bytes on the slower one of its links. If `plugins.ep_overlap` cuts the layer
into chunks, its plan computes the hidden part from the seconds of the steps of a chunk. Published runs of other
software have no such plan; the share `Efficiency.hidden_ep` is assumed to be hidden.

A layer that is recomputed sends its tokens again. MindFormers' graphs then repeat dispatch and the part of combine
inside a node, as compiled graphs show; an eager framework repeats all of dispatch and combine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from plugins.ep_overlap.plan import Choice, Chunks, Layer, Passes, Stage, choose
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import Step, backward, expected_steps, hit_probability
from tools.estimate.configuration import Configuration, parts_of
from tools.estimate.efficiency import DeviceTimes
from tools.estimate.layer_model import (
    Matmul,
    Part,
    Work,
    accumulated_bytes,
    cast_bytes,
    repeated_parts,
    routed_part,
    score_bytes,
    score_passes,
    shared_part,
    work,
)
from tools.estimate.memory.training_graph import logit_exchanges
from tools.model import Model

SPARSE = ("deepep", "hybridep")  # a row goes once to each rank, not once to each expert
_BACKWARD = 2  # gradients of inputs and of weights


@dataclass(frozen=True)
class Exposed:
    """An `Exposed` holds the seconds that expert-parallel communication adds to one MoE layer and micro-batch. The
    field `waited` holds the time in which the device waits, and `cutting` holds the extra time for computing in chunks.
    """

    waited: Passes[float]
    cutting: Passes[float]


NOTHING = Exposed(Passes(0.0, 0.0, 0.0), Passes(0.0, 0.0, 0.0))


@lru_cache(maxsize=4096)
def most_nodes(span: int, node: int, devices: int) -> int:
    """Return on how many nodes of `node` devices a group of `span` consecutive ranks lies at most, if the first group
    begins at rank 0 and each other group where the group before it ends.
    """
    starts = range(0, min(devices - span, math.lcm(span, node)) + 1, span)
    return max([(start % node + span - 1) // node + 1 for start in starts], default=-(-span // node))


class ExpertTimes(DeviceTimes):
    """An `ExpertTimes` predicts the time of dispatch, experts and combine on one cluster."""

    def dispatched(self, config: Configuration) -> Configuration:
        """Return the run's configuration with the dispatch mode that applies on this cluster. If an EP group lies
        inside one node, the mode is the global All-to-All, because all dispatch modes are the same inside a node.
        """
        alone = config.ep * (config.tp if config.expert_tp else 1) <= self.hardware.devices_per_node
        return replace(config, ep_mode="global") if alone and config.ep_mode in MODES[1:] else config

    def nodes(self, config: Configuration) -> int:
        """Return the number of nodes on which an EP group lies, rounded up to a divisor of EP. If some groups cross
        more borders between nodes than others, all groups wait for those that cross the most.
        """
        span = config.ep * (config.tp if config.expert_tp else 1)
        nodes = most_nodes(span, self.hardware.devices_per_node, config.devices)
        while config.ep % nodes:
            nodes += 1
        return nodes

    def exchanges(self, config: Configuration) -> tuple[Step, ...]:
        """Return the steps of dispatch and combine in the forward pass, with the bytes of the busiest rank."""
        model, nodes = config.model, self.nodes(config)
        mode = "deduplicated" if config.ep_mode in SPARSE else config.ep_mode
        tokens = routed_part(config).copies / model.top_k
        sizes = (model.experts, tokens, model.top_k, model.hidden, config.item, config.skew)
        outside, inside = (limited_share(model, nodes) if mode == "deduplicated" else 1.0), 1.0
        if config.ep_mode in SPARSE:
            # a row goes once to each rank that holds one of its experts
            inside = config.ep * hit_probability(model.experts, model.experts // config.ep, model.top_k) / model.top_k
        return _steps(mode if nodes > 1 else "global", nodes, config.ep // nodes, *sizes, outside, inside)

    def repeated(self, config: Configuration) -> tuple[Step, ...]:
        """Return the expert-parallel communication steps that a recomputed layer runs again."""
        return _recomputed(self.exchanges(config), config.keep_gathered)

    def exposed(self, config: Configuration) -> Exposed:
        """Return the seconds of an MoE layer's expert-parallel communication that computation does not hide."""
        if config.ep == 1 or not config.model.experts:
            return NOTHING
        if config.ep_cut or config.shared_beside:
            chunks, stride = config.ep_cut or ((1, 1), 1)
            choice = self.plan(config, [chunks] if chunks else [], stride)
            return Exposed(choice.waited_after, choice.cutting)
        if config.overlap_ep and config.schedule == "zero_bubble_v":
            return NOTHING  # forward and backward of two micro-batches run as a pair (DualPipe) and hide it all
        sent = self._sent(config)
        seen = 1 - self.reached.hidden_ep * config.overlap_ep
        forward, back, recomputed = (seen * sum(stage.seconds(1.0) for stage in stages) for stages in sent)
        return Exposed(Passes(forward, back, back + recomputed), NOTHING.cutting)

    def plan(self, config: Configuration, cuts: Sequence[Chunks] = (), stride: int | None = None) -> Choice:
        """Return two schedules of an MoE layer under `plugins.ep_overlap`: one without chunks, and the fastest one with
        chunks. Each entry of `cuts` is an allowed pair (number of parts of the batch, number of parts of a sequence);
        if `cuts` is empty, the pairs that `plugins.ep_overlap.plan.candidates` returns are allowed. Each
        chunk starts `stride` steps after the chunk before it (`plugins.ep_overlap.plan.issue_order`); if `stride` is
        None, the fastest stride is used.

        Raises:
            RecipeError: there are more chunks than samples or tokens.
        """
        return choose(self.expert_layer(config), config.batch, config.rank_sequence, cuts, stride)

    def expert_layer(self, config: Configuration) -> Layer:
        """Return the steps (such as dispatch or experts) that an MoE layer runs for each chunk of tokens, with the
        seconds of each step.
        """
        config = self.dispatched(config)
        forward, back, recomputed = self._sent(config)
        shared = self._part(config, shared_part(config)) + self.hardware.launch_s if config.model.shared_ffn else 0.0
        return Layer(
            self._chain(config, forward, "experts"),
            self._chain(config, back, "experts.backward", _BACKWARD),
            self._chain(config, recomputed, "experts.replay"),
            shared=(shared, _BACKWARD * shared),
            shared_beside=config.shared_beside,
        )

    def _chain(self, config: Configuration, sent: Sequence[Stage], name: str, times: int = 1) -> tuple[Stage, ...]:
        """Return communication around the experts; the replay's ends where combine's rows are back."""
        first = [stage for stage in sent if stage.name.startswith("dispatch") != (times == _BACKWARD)]
        rest = [stage for stage in sent if stage not in first]
        return (*first, Stage(name, "compute", partial(self._routed, config, times)), *rest)

    def _routed(self, config: Configuration, times: int, share: float) -> float:
        """Return seconds of a chunk's routed experts: matmuls, at least as long as reading weights; sorting."""
        return self.hardware.launch_s + times * self._part(config, routed_part(config, share))

    def _part(self, config: Configuration, part: Part) -> float:
        return sum(self.multiplying(config, matmul) for matmul in part.matmuls) + self._moved(config, part.elementwise)

    def _sent(self, config: Configuration) -> tuple[list[Stage], list[Stage], list[Stage]]:
        """Return communication forward, backward, and what a recomputed layer repeats."""
        forward = self.exchanges(config)
        sent = [
            [
                Stage(step.name, step.stream, partial(self._step, step))
                for step in steps
                if step.inter_peers or step.intra_peers
            ]
            for steps in (forward, _back(forward), self.repeated(config))
        ]
        return sent[0], sent[1], sent[2]

    def _step(self, step: Step, share: float) -> float:
        """Return seconds of a step for a chunk; what goes to one rank leaves through one port."""
        inter, intra = self.hardware.inter_node, self.hardware.intra_node
        port = self._speed(inside=False) / inter.ports
        outside = share * step.inter_bytes / port + (inter.latency_s if step.inter_peers else 0.0)
        inside = share * step.intra_bytes / self._speed(inside=True) + (intra.latency_s if step.intra_peers else 0.0)
        return max(outside, inside) + self.hardware.launch_s


def limited_share(model: Model, nodes: int) -> float:
    """Return the share of the expected rows between nodes that remains if routing limits a token to few nodes. The
    limit reduces only the rows that are sent once to each node; the number of copies that are sent to each expert does
    not change.
    """
    if (limit := model.nodes_of_token(nodes)) == nodes:
        return 1.0
    expected = nodes * hit_probability(model.experts, model.experts // nodes, model.top_k)
    return min(1.0, limit / expected)


_back = lru_cache(maxsize=65536)(backward)


@lru_cache(maxsize=65536)
def _recomputed(forward: tuple[Step, ...], graph: bool) -> tuple[Step, ...]:
    """Return what runs again; in a graph nothing reads the rows that come back from other nodes."""
    steps = (step for step in forward if not (graph and step.name.startswith("combine.inter")))
    return tuple(replace(step, name=f"{step.name}.replay") for step in steps)


@lru_cache(maxsize=65536)
def _steps(
    mode: str,
    nodes: int,
    width: int,
    experts: int,
    tokens: float,
    top_k: int,
    hidden: int,
    item: int,
    skew: float,
    outside: float,
    inside: float,
) -> tuple[Step, ...]:
    """Return expected steps whose bytes between nodes and inside one are reduced to a share."""
    steps = expected_steps(mode, Topology(nodes, width, experts), tokens, top_k, hidden, item, skew)
    return tuple(
        replace(
            step,
            inter_bytes=outside * step.inter_bytes,
            intra_bytes=inside * step.intra_bytes,
            inter_forward_only=outside * step.inter_forward_only,
            intra_forward_only=inside * step.intra_forward_only,
        )
        for step in steps
    )


@dataclass(frozen=True)
class Parts:
    """A `Parts` holds the seconds that a device spends on one layer for one micro-batch, by part (such as matmul or
    attention). Time for communication counts only while the device waits for the communication.

    The field `cut` holds the seconds that the chunks of `plugins.ep_overlap` add to the time of the experts.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    fixed: float = 0.0
    cut: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the whole layer, as the sum over all parts."""
        return sum(getattr(self, name) for name in Parts.__dataclass_fields__)

    def less(self, other: Parts) -> Parts:
        """Return, for each part (such as matmul or attention), the seconds of this layer minus the seconds of another
        layer.
        """
        return Parts(**{name: getattr(self, name) - getattr(other, name) for name in Parts.__dataclass_fields__})


@dataclass(frozen=True)
class LayerTime:
    """A `LayerTime` holds the seconds of a layer's forward pass and backward pass, and the seconds that each recompute
    option adds to the backward pass.
    """

    forward: Parts
    backward: Parts
    recomputed: Mapping[str, Parts]

    def again(self, option: str) -> Parts:
        """Return the seconds that a recompute option, or several options joined by `+`, add to the backward pass."""
        if option in self.recomputed:
            return self.recomputed[option]
        every = [self.recomputed[name] for name in parts_of(option)]
        return Parts(*(sum(getattr(part, name) for part in every) for name in Parts.__dataclass_fields__))


class LayerTimes(ExpertTimes):
    """A `LayerTimes` predicts the seconds of layers on one cluster."""

    def layer(self, config: Configuration, kind: str) -> LayerTime:
        """Return the seconds of one layer of the given kind for one micro-batch."""
        config = self.dispatched(config)
        done = work(config, kind)
        exposed = self.exposed(config) if done.copies else NOTHING
        forward = self._forward(config, kind, done, exposed)
        backward = Parts(
            matmul=2 * forward.matmul,
            attention=(2.5 if config.flash else 2) * forward.attention,
            elementwise=2 * forward.elementwise
            # gradients are sorted only once; the efficiencies fitted to MindFormers include this difference
            - self._moved(config, 0.0 if config.keep_gathered else done.sorting)
            + (score_passes(config) - 2) * (self._scores(config) if done.attention else 0.0)
            + sum(self._accumulating(config, matmul) for matmul in done.matmuls),
            tp=forward.tp * self._backward_tp(config),
            cp=(1 if config.training_graph else 2) * forward.cp,
            ep=exposed.waited.backward,
            cut=exposed.cutting.backward,
            fixed=2 * forward.fixed,
        )
        return LayerTime(forward, backward, self._recomputed(config, kind, forward, exposed))

    def _forward(self, config: Configuration, kind: str, done: Work, exposed: Exposed) -> Parts:
        moved = done.elementwise + cast_bytes(config, done.matmuls)
        return Parts(
            matmul=sum(self.multiplying(config, matmul) for matmul in done.matmuls),
            attention=self._attention(config, done.attention),
            elementwise=self._moved(config, moved) + (self._scores(config) if done.attention else 0.0),
            tp=done.collectives * self._tensor(config, done.gathered),
            cp=self._context(config, done) + self._logits(config, kind),
            ep=exposed.waited.forward,
            cut=exposed.cutting.forward,
            fixed=self._fixed(config, kind, done),
        )

    def _accumulating(self, config: Configuration, matmul: Matmul) -> float:
        """Return the seconds by which reading and writing the summed gradients takes longer than the matmul that
        computes and adds them.
        """
        return max(0.0, self.moving(accumulated_bytes(config, matmul)) - self.multiplying(config, matmul))

    def _recomputed(self, config: Configuration, kind: str, forward: Parts, exposed: Exposed) -> dict[str, Parts]:
        """Return what each recompute option adds to a layer's backward; an MTP layer's head does not run again."""
        recomputed = {"none": Parts(), "select": Parts(), "communication": Parts(), "full": Parts()}
        if kind in ("embedding", "head"):
            return recomputed
        tp = forward.tp if config.recompute.replay_tp else 0.0
        waited, cutting = exposed.waited, exposed.cutting
        cut = cutting.replayed - cutting.backward
        full = replace(forward, tp=tp, ep=waited.replayed - waited.backward, cut=cut)
        if kind == "mtp":
            head = self._forward(config, "head", work(config, "head"), NOTHING)
            head = replace(head, tp=head.tp if config.recompute.replay_tp else 0.0)
            return {**recomputed, "full": full.less(head)}
        cheap = {
            "norms": Parts(elementwise=forward.elementwise / 2),
            "attention": Parts()
            if config.flash
            else Parts(attention=forward.attention, elementwise=self._scores(config)),
            "operators": Parts(elementwise=forward.elementwise, matmul=forward.matmul / 2),
        }[config.recompute.selective]
        recomputed |= {"select": cheap, "communication": Parts(tp=forward.tp / 2), "full": full}
        for group, part in repeated_parts(config, kind).items() if config.training_graph else ():
            moved = self._moved(config, part.elementwise + cast_bytes(config, part.matmuls))
            fixed = self._fixed(config, kind, work(config, kind)) - self._fixed(config, kind, Work(()))
            experts = {"ep": full.ep, "fixed": fixed} if part.copies else {}  # they send as in a whole layer
            matmul = sum(self.multiplying(config, one) for one in part.matmuls)
            recomputed[group] = Parts(matmul, elementwise=moved, **experts)
        return recomputed

    def _fixed(self, config: Configuration, kind: str, done: Work) -> float:
        """Return forward seconds that do not depend on sizes; a layer's benchmark keeps its device busy."""
        if kind in ("embedding", "head") or config.layer_only or config.graphs == "step":
            return 0.0
        launched = 0.5 if config.graphs else 1.0  # assumed: experts, dispatch and combine are the other half
        return launched * (self.reached.layer_s + (self.reached.moe_s if done.copies else 0.0))

    def _backward_tp(self, config: Configuration) -> float:
        """Return the share of forward's tp time that backward shows: gradients of weights can hide that of inputs."""
        if not config.overlap_tp_backward:
            return 1.0
        return 0.5 if config.sequence_parallel else 0.0

    def _scores(self, config: Configuration) -> float:
        """Return forward seconds of what an unfused attention moves."""
        return self.moving(score_bytes(config))

    def _exposed(self, overlap: bool) -> float:
        return 1 - self.reached.hidden if overlap else 1.0

    def _tensor(self, config: Configuration, size: float) -> float:
        return self._collective(size, config.tp, 1) * self._exposed(config.overlap_tp)

    def _context(self, config: Configuration, done: Work) -> float:
        gathered = self._collective(done.moved_keys * config.cp, config.cp, config.tp)
        exchanged = self._collective(done.turned_heads, config.head_parts, config.tp)
        return (gathered + exchanged) * self._exposed(True)

    def _logits(self, config: Configuration, kind: str) -> float:
        """Return forward seconds of logits on their way to the loss, with nothing beside them."""
        moved = logit_exchanges(config) if kind in ("head", "mtp") else []
        return sum(self._collective(size, ranks, stride) for size, ranks, stride in moved)
