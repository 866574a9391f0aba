"""This module predicts the seconds of a training step: layers, the pipeline, gradients and weights, the optimizer.

This is the only model of a step's time: `tc3 search`, `tc3 ep-report`, `mode: auto` and `tc3 data imbalance` all use
it.

A stage's micro-batch is the sum over its layers (`layer_time`); the step is the slowest stage's work for all
micro-batches, filling and draining by schedule, then gradients and weights as far as nothing hides them
(below), and the optimizer. `simulated` replays the schedule instead. Data stalls are taken as zero.

Gradients and weights are sent once a step, and the optimizer runs once a step.

Weights are sent during the first forward and gradients during the last backward; with FSDP they are sent in every pass.
With `gradient_accumulation_shard` every micro-batch's gradients are reduced to the shards as they are added up
(MindSpore's documentation of the key: "additional communication (ReduceScatter) at each step when accumulate the
gradients"), not once a step, as published runs of others are taken to. As of other communication that overlaps, the
share `Efficiency.hidden` of it is taken to run beside the micro-batch that made them (assumed: no published run has
it). Where `optimizer_weight_shard_size` makes groups, the groups' shards are summed once a step.

A pair is the forward of one micro-batch and the backward of another, run together through a chunk's layers.

An MoE layer alternates computation and expert parallel communication: attention, dispatch, experts, combine; a backward
runs through it the other way round. By itself, each pass waits for its own communication. Together, the communication
of one runs under the computation of the other (DeepSeek-V3, arXiv 2412.19437, figure 4; report section 4.1; Pangu Ultra
MoE's adaptive pipe overlap). Two streams, each in its order of issue, as in `plugins.ep_overlap.timeline`: the two
passes take turns, and weight gradients, on which no other operator waits, come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from plugins.ep_overlap.timeline import Key, Op
from plugins.ep_overlap.timeline import simulate as run_timeline
from tools.estimate.configuration import Configuration, shard_group, weight_copies, weight_cut, weight_shards
from tools.estimate.layer_time import LayerTimes, Parts
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import layer_options, stage_weights
from tools.model.weights import Weight, flops_per_token
from tools.pipeline.schedules import pairs_up
from tools.pipeline.simulate import Durations, simulate

PARTS = {  # where a step's time goes, by name: in words
    "compute": "matmuls, attention, other operators",
    "recompute": "recomputation",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "send": "pipeline sends",
    "bubble": "pipeline bubble",
    "data": "weights and gradients not hidden",
    "rest": "optimizer and fixed",
}
COMMUNICATION = ("tp", "cp", "ep")  # of a layer; what recomputation repeats of it counts here
_COMPUTE = ("matmul", "attention", "elementwise", "fixed", "cut")
_EXPOSED = (*COMMUNICATION, "send", "data")


@dataclass(frozen=True)
class StepTime:
    """These are the seconds of a step.

    Args:
        pipeline: all micro-batches through the pipeline.
        bubble: the share of `pipeline` in which the slowest stage waits.
        data_parallel: gradients and weights that nothing hides.
        optimizer: the update.
        fixed: beside all that.
        parts: the slowest stage's work by kind.
        sending: what a stage's sends to its neighbours take; in a tight schedule some fall into the waiting.
    """

    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float
    fixed: float
    parts: Mapping[str, float]
    sending: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return self.pipeline + self.data_parallel + self.optimizer + self.fixed

    @property
    def by_part(self) -> dict[str, float]:
        """Return the step's seconds by `PARTS`, on the slowest stage; they add up to it."""
        waiting = self.pipeline - sum(self.parts.values())
        send = min(self.sending, waiting)
        return {
            "compute": sum(self.parts[part] for part in _COMPUTE),
            **{part: self.parts[part] for part in ("recompute", *COMMUNICATION)},
            "send": send,
            "bubble": waiting - send,
            "data": self.data_parallel,
            "rest": self.optimizer + self.fixed,
        }

    @property
    def exposed(self) -> float:
        """Return the seconds of communication that nothing hides."""
        return exposed_of(self.by_part)


def exposed_of(parts: Mapping[str, float]) -> float:
    """Return the seconds of a step's communication that nothing hides, by `PARTS`."""
    return sum(parts[name] for name in _EXPOSED)


_STEPS = ("attention", "dispatch", "experts", "combine")
_SENDS = ("dispatch", "combine")


@dataclass(frozen=True)
class LayerSeconds:
    """These are the seconds of one micro-batch's forward, or backward, through one MoE layer.

    Args:
        attention: all computation before dispatch, the router included; of a backward its input gradients.
        dispatch: communication that brings tokens to their experts; of a backward that takes their gradients back.
        experts: computation of the experts; of a backward the input gradients, recomputation included.
        combine: communication that brings results back; of a backward that takes their gradients to the experts.
        weights: weight gradients of attention and experts (a backward's).
    """

    attention: float
    dispatch: float
    experts: float
    combine: float
    weights: float = 0.0

    @property
    def alone(self) -> float:
        """Return the seconds without any overlap."""
        return self.computation + self.communication

    @property
    def computation(self) -> float:
        """Return the seconds of computation."""
        return self.attention + self.experts + self.weights

    @property
    def communication(self) -> float:
        """Return the seconds of communication."""
        return self.dispatch + self.combine


def pair_seconds(forward: LayerSeconds, backward: LayerSeconds, layers: int) -> float:
    """Return the seconds of a pair of forward and backward through `layers` layers.

    At least the longer of both computations, both communications, and each of the two alone but for weight gradients;
    at most both one after the other.
    """
    chains = _chain(forward, layers, 0), _chain(backward, layers, 1)
    weights = Op("weights", 1, "compute", layers * backward.weights, (chains[1][-1].key,))
    return run_timeline([*(op for both in zip(*chains, strict=True) for op in both), weights]).makespan


def _chain(seconds: LayerSeconds, layers: int, chunk: int) -> list[Op]:
    """The operators of one pass in order, each after the one before; a backward's begin at combine."""
    chain: list[Op] = []
    for layer in range(layers):
        for step in _STEPS if chunk == 0 else _STEPS[::-1]:
            after: tuple[Key, ...] = (chain[-1].key,) if chain else ()
            stream = "inter" if step in _SENDS else "compute"
            chain.append(Op(f"{step} {layer}", chunk, stream, getattr(seconds, step), after))
    return chain


def hidden_seconds(forward: LayerSeconds, backward: LayerSeconds, layers: np.ndarray) -> np.ndarray:
    """Return [chunks, chunks, stages] for `Durations.hidden`: the seconds that pairs save, for `layers` [chunks,
    stages] MoE layers.

    Of two chunks with unequally many layers the fewer are paired.
    """
    fewer = np.minimum(layers[:, None], layers[None])
    saved = [0.0]
    alone = forward.alone + backward.alone
    saved += [count * alone - pair_seconds(forward, backward, count) for count in range(1, int(fewer.max()) + 1)]
    return np.array(saved)[fewer]


def share_hidden(forward: LayerSeconds, backward: LayerSeconds, layers: int) -> float:
    """Return the share of the pair's communication that is hidden, 0 to 1; 1 if there is no communication."""
    sent = layers * (forward.communication + backward.communication)
    saved = layers * (forward.alone + backward.alone) - pair_seconds(forward, backward, layers)
    return saved / sent if sent else 1.0


_OPTIMIZER_BYTES = 28  # of a number: gradient, weight and two moments read, weight and moments written


class GradientTimes(LayerTimes):
    """This times weights, gradients and the optimizer on one cluster."""

    def once_and_each(self, config: Configuration, stage: int) -> tuple[float, float]:
        """Return the seconds for a stage's weights and gradients: those once in a step, and those again for each
        micro-batch.

        FSDP's weights, which travel for each pass, count to the first.
        """
        runs = config.micro_batches if config.shard_weights else 1
        gather = 2 * (2 * runs if config.shard_weights else 1) if config.shard_optimizer else 0
        apart = config.training_graph and config.shard_gradients and not config.shard_weights
        scattered = apart or config.shard_optimizer  # else an AllReduce
        reduce = (4 if config.wide_gradients else 2) * (1 if scattered else 2) * runs
        once = each = 0.0
        for weight, count in _counted(config, stage):
            cut, group = weight_cut(weight, config), shard_group(weight, config)
            local, groups = weight.size / cut, weight_copies(weight, config) // group
            if apart:
                once += count * 2 * self._collective(2 * local, group, cut)
                each += count * self._collective(reduce * local, group, cut)
            else:
                once += count * self._collective(local * (gather + reduce), group, cut)
            # sums of the groups' shards
            once += count * 2 * self._collective(local / group * reduce, groups, cut * group)
        return once, each

    def waited(self, once: Any, each: Any, work: Any, micro_batches: Any, rounds: Any) -> Any:
        """Return the seconds of `once_and_each` that nothing hides, as numbers or arrays.

        Args:
            work: seconds of a micro-batch on the stage, beside which all this runs.
            rounds: of the pipeline, beside which what travels once a step does.
        """
        beside = work * np.where(np.asarray(each) > 0, micro_batches, rounds)
        every = each * micro_batches
        return np.maximum((1 - self.reached.hidden) * every, once + every - beside)

    def _data(self, config: Configuration, stage: int, work: float) -> float:
        """Exposed seconds of gradients and weights."""
        once, each = self.once_and_each(config, stage)
        if not config.overlap_dp:
            return once + each * config.micro_batches
        # a chunk of several is done with its micro-batches, and waits for its first, as long as a round takes
        rounds = min(config.pp, config.micro_batches) if config.chunks > 1 else 1
        rounds = config.micro_batches if config.shard_weights else rounds
        return float(self.waited(once, each, work, config.micro_batches, rounds))

    def optimizer(self, config: Configuration, stage: int) -> float:
        """Return the seconds of the optimizer's update: moving its bytes, and the host's time for each weight."""
        counted = _counted(config, stage)
        held = sum(
            count * weight.size / weight_cut(weight, config) / weight_shards(weight, config)
            for weight, count in counted
        )
        speed = self.hardware.hbm_bytes_per_s * self.reached.memory * self.reached.update
        return _OPTIMIZER_BYTES * held / speed + self.reached.weight_s * sum(count for _, count in counted)


@lru_cache(maxsize=4096)
def _counted(config: Configuration, stage: int) -> tuple[tuple[Weight, int], ...]:
    """The different weights of a stage, with how many of each it holds."""
    return tuple(Counter(stage_weights(config, stage)).items())


_CLOSED = ("gpipe", "1f1b", "interleaved_1f1b", "seqpipe", "seqvpp", "seqsmartvpp")  # `closed_form` holds for these


class TimeModel(GradientTimes):
    """This gives the time of runs on one cluster."""

    def chunks(self, config: Configuration) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return forward and backward seconds [chunks, stages] of one micro-batch, and the parts of their sum
        [stages].
        """
        names = tuple(Parts.__dataclass_fields__)
        forward, backward = np.zeros((config.chunks, config.pp)), np.zeros((config.chunks, config.pp))
        parts = {name: np.zeros(config.pp) for name in (*names, "recompute")}
        for kind, options in _census(config).items():
            layer = self.layer(config, kind)
            for option, count in options.items():
                recomputed, held = layer.again(option), count.sum(axis=0)
                forward += layer.forward.total * count
                backward += (layer.backward.total + recomputed.total) * count
                for name in names:
                    parts[name] += (getattr(layer.forward, name) + getattr(layer.backward, name)) * held
                    parts[name if name in COMMUNICATION else "recompute"] += getattr(recomputed, name) * held
        return forward, backward, parts

    def transfer(self, config: Configuration) -> float:
        """Return the seconds to send one micro-batch's activations to the next stage."""
        if config.pp == 1:
            return 0.0
        rows = config.rank_tokens / config.tp  # every rank of a tp group sends its part
        link = self._link(config.devices)
        # in the compute dtype, also where the residual stream is wider (seen in compiled graphs)
        size = rows * config.model.hidden * (4 if config.dtype == "fp32" else 2)
        return self.hardware.launch_s + link.latency_s + size / self._speed(link)

    def step(self, config: Configuration, simulated: bool = False) -> StepTime:
        """Return the seconds of a step; `simulated` replays the schedule operation by operation."""
        forward, backward, parts = self.chunks(config)
        sending = 0.0 if config.overlap_pp else self.transfer(config)
        stages = (forward + backward).sum(axis=0)
        slowest = int(stages.argmax())
        busy = config.micro_batches * float(stages[slowest])
        if simulated or config.schedule not in _CLOSED:
            hidden = self.hidden(config) if pairs_up(config.schedule) else None
            # the fit's row of DualPipe, whose experts' communication `expert_time` takes as hidden, was fitted so
            fitted = config.overlap_ep and config.schedule == "zero_bubble_v"
            weights = backward / 2 if fitted else self.weight_gradients(config)
            durations = Durations(forward, backward, weights, sending, "none" if sending else "full", hidden)
            replayed = simulate(config.schedule, config.micro_batches, durations)
            pipeline = replayed.makespan
            if hidden is not None:  # under the other one of a pair
                parts["ep"] = parts["ep"] - (busy - replayed.busy[slowest]) / config.micro_batches
                busy = float(replayed.busy[slowest])
        else:
            pipeline = closed_form(forward, backward, config.micro_batches, sending)
        return StepTime(
            pipeline=pipeline,
            bubble=1 - busy / pipeline,
            data_parallel=0.0 if config.layer_only else self._data(config, slowest, float(stages[slowest])),
            optimizer=0.0 if config.layer_only else self.optimizer(config, slowest),
            fixed=0.0 if config.layer_only else self.fixed,
            parts={name: config.micro_batches * float(values[slowest]) for name, values in parts.items()},
            sending=2 * sending * config.chunks * config.micro_batches,
        )

    def weight_gradients(self, config: Configuration) -> np.ndarray:
        """Return the seconds [chunks, stages] of a micro-batch's backward that are weight gradients: half of its
        matmuls.
        """
        found = np.zeros((config.chunks, config.pp))
        for kind, options in _census(config).items():
            found += self.layer(config, kind).backward.matmul / 2 * sum(options.values())
        return found

    def hidden(self, config: Configuration) -> np.ndarray:
        """Return the seconds [chunks, chunks, stages] that a forward and a backward hide when they run as a pair.

        Of MoE layers only. Half of a layer's computation is taken to come before dispatch and half to be the
        experts' (assumed); what a backward recomputes hides nothing.
        """
        layers = sum(_census(config).get("moe", {}).values(), np.zeros((config.chunks, config.pp))).astype(int)
        if not layers.any():
            return np.zeros((config.chunks, config.chunks, config.pp))
        layer = self.layer(config, "moe")
        forward, backward = _halves(layer.forward, 0.0), _halves(layer.backward, layer.backward.matmul / 2)
        return hidden_seconds(forward, backward, layers)

    def mfu(self, config: Configuration, seconds: float) -> float:
        """Return model FLOPs (no recomputation, causal attention) of a step that takes the given seconds, divided by
        the devices' peak.
        """
        rate = flops_per_token(config.model, config.sequence) * config.tokens / seconds / config.devices
        return rate / self._peak(config.dtype)

    @property
    def fixed(self) -> float:
        """Return the seconds of a step that this module does not compute."""
        return self.reached.step_s


def _halves(part: Parts, weights: float) -> LayerSeconds:
    """A layer's forward, or its backward with `weights` seconds of weight gradients."""
    half = (part.total - part.ep - weights) / 2
    return LayerSeconds(half, part.ep / 2, half, part.ep / 2, weights)


@lru_cache(maxsize=4096)
def _census(config: Configuration) -> dict[str, dict[str, np.ndarray]]:
    """kind -> recompute option -> layers of each chunk and stage [chunks, stages]."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for stage in range(config.pp):
        for chunk, every in enumerate(config.stage_kinds(stage)):
            options = iter(layer_options(config, chunk, stage, len(every)))
            for kind in every:
                option = next(options) if kind in ("dense", "moe") else mtp_option(config)
                counts = found.setdefault(kind, {}).setdefault(option, np.zeros((config.chunks, config.pp)))
                counts[chunk, stage] += 1
    return found


def closed_form(forward: np.ndarray, backward: np.ndarray, micro_batches: int, sending: float = 0.0) -> float:
    """Return the seconds of 1F1B, interleaved or not, of [chunks, stages] seconds; see `pipeline_of`."""
    return float(pipeline_of((forward + backward).sum(axis=0), len(forward), micro_batches, sending))


def has_closed_form(schedule: str) -> bool:
    """Return whether `closed_form` holds for a schedule."""
    return schedule in _CLOSED


def pipeline_of(
    work: np.ndarray, chunks: Any, micro_batches: Any, sending: Any = 0.0, transfers: int | None = None
) -> Any:
    """Return the time of all micro-batches on the slowest stage plus the first and last one on the others; `work` is
    [..., stages] for a micro-batch.

    (m + (p - 1) / v) (f + b) for equal stages, as Narayanan et al. (arXiv 2104.04473) have it. Each micro-batch and
    chunk is sent and received once each way; `transfers` are the chunks, where `chunks` are not, which divide the
    other stages' work.
    """
    sent = chunks if transfers is None else transfers
    every = work + np.asarray(2 * sending * sent if work.shape[-1] > 1 else 0 * sending)[..., None]
    slowest = every.max(axis=-1)
    return micro_batches * slowest + (every.sum(axis=-1) - slowest) / chunks
