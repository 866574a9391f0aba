"""This module predicts the seconds of a training step, from the times of layers, the pipeline, the communication of
gradients and weights, and the optimizer.

The repository has no other model of step time: `tc3 search`, `tc3 ep-report`, `mode: auto` and `tc3 data imbalance` all
use this model.

The time of a stage's micro-batch is the sum over its layers (`layer_time`). The time of a step is the sum of the
slowest stage's work for all micro-batches, the filling and draining of the schedule, the communication of gradients and
weights that computation does not hide (below), and the optimizer, including the matmuls and AllGathers of Muon
(`muon`). With `simulated`, the schedule is replayed operation by operation, and this formula is not used. Data stalls
are assumed to be zero.

Devices of an expert-parallel group wait for each other in dispatch and combine of every MoE layer, so the time of a
layer is its time on the fullest device. `TimeModel.step` takes max/mean by micro-batch and layer, and `TimeModel.under`
averages over the steps of loads (`tools.estimate.loads`). Time that a group loses in one micro-batch is not recovered
in a later micro-batch.

Gradients and weights are sent once a step, and the optimizer runs once a step.

Weights are sent during the first forward and gradients during the last backward; with FSDP they are sent in every pass.
With `gradient_accumulation_shard` every micro-batch's gradients are reduced to the shards as they are added up
(MindSpore's documentation of the key: "additional communication (ReduceScatter) at each step when accumulate the
gradients"), not once a step, as in published runs of other software. The share `Efficiency.hidden` of this
communication is assumed to overlap with the micro-batch that computed the gradients, as for other communication (no
published run measures it). If `optimizer_weight_shard_size` divides the copies into groups, the gradient shards of the
groups are summed once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration, shard_group, weight_copies, weight_cut, weight_shards
from tools.estimate.layer_time import LayerTime, LayerTimes, Parts
from tools.estimate.loads import Loads, moe_layers
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import counted_weights, layer_options
from tools.estimate.muon import gathers, matrices
from tools.estimate.pair_time import LayerSeconds, hidden_seconds, pair_of
from tools.model import Weight, flops_per_token
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


def require_step_time(config: Configuration) -> None:
    """Raise an error for a run whose step time the estimator does not model.

    Raises:
        RecipeError: the run trains adapters and keeps the other weights frozen.
    """
    if config.adapters:
        wrong = (
            "the step time of training with adapters cannot be predicted, because the estimator would count gradients "
            "of frozen weights"
        )
        raise RecipeError(f"{wrong}; switch the adapters off with plugins.lora: False", "plugins.lora")


@dataclass(frozen=True)
class StepTime:
    """A `StepTime` holds the predicted seconds of a step, by part."""

    pipeline: float  # of all micro-batches
    bubble: float  # share of `pipeline` in which the slowest stage waits
    data_parallel: float  # communication of gradients and weights that computation does not hide
    optimizer: float  # of its update
    fixed: float  # fitted, of no other part
    parts: Mapping[str, float]  # of the slowest stage's work, by kind of work
    # in which a stage sends to its neighbours; in a tight schedule it would otherwise wait in some of these
    sending: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return self.pipeline + self.data_parallel + self.optimizer + self.fixed

    @property
    def by_part(self) -> dict[str, float]:
        """Return the seconds of a step on the slowest stage, divided into `PARTS`, which add up to the whole step."""
        waiting = max(0.0, self.pipeline - sum(self.parts.values()))  # of one stage a rounding error would be left
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
        """Return the seconds of communication in the step that computation does not hide."""
        return exposed_of(self.by_part)


def exposed_of(parts: Mapping[str, float]) -> float:
    """Return the seconds of a step's communication that computation does not hide, given the seconds of each part of
    the step.
    """
    return sum(parts[name] for name in _EXPOSED)


_OPTIMIZER_BYTES = 28  # of a number: gradient, weight and two moments read, weight and moments written


class GradientTimes(LayerTimes):
    """A `GradientTimes` predicts the seconds for the communication of weights and gradients, and for the optimizer, on
    one cluster.
    """

    def once_and_each(self, config: Configuration, stage: int) -> tuple[float, float]:
        """Return the seconds in which a stage communicates weights and gradients: the seconds once in a step, and the
        seconds for each micro-batch. For FSDP, which sends weights and gradients in each pass, the seconds once in a
        step include all passes of a step.
        """
        runs = config.micro_batches if config.shard_weights else 1
        # weights are cast before they are gathered where that makes them narrower
        gathered = min(config.item, config.weight_item)
        gather = gathered * (2 * runs if config.shard_weights else 1) if config.shard_optimizer else 0
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
        """Return the seconds for the communication of weights and gradients that computation does not hide. The
        argument `work` is the seconds of computation for one micro-batch on the stage. The computation of all
        micro-batches can hide communication for each micro-batch, but only the computation of `rounds` micro-batches
        can hide communication once in a step. All arguments may be arrays.
        """
        beside = work * np.where(np.asarray(each) > 0, micro_batches, rounds)
        every = each * micro_batches
        return np.maximum((1 - self.reached.hidden) * every, once + every - beside)

    def _data(self, config: Configuration, stage: int, work: float) -> float:
        """Return exposed seconds of gradients and weights."""
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
            if not weight.frozen
        )
        speed = self.hardware.hbm_bytes_per_s * self.reached.memory * self.reached.update
        every = _OPTIMIZER_BYTES * held / speed + self.reached.weight_s * sum(count for _, count in counted)
        return every + self._orthogonalized(config, counted)

    def _orthogonalized(self, config: Configuration, counted: Sequence[tuple[Weight, int]]) -> float:
        """Return the seconds of Muon's Newton-Schulz steps, and of the AllGathers before them; 0 with AdamW. The steps
        are in bfloat16 whatever the run computes in, and nothing runs beside them.
        """
        low = replace(config, dtype="bf16")
        return sum(
            count
            * (
                sum(self.multiplying(low, matmul) for matrix in matrices(weight, config) for matmul in matrix.matmuls)
                + sum(self._collective(*gather) for gather in gathers(weight, config))
            )
            for weight, count in (counted if config.muon else ())
        )


@lru_cache(maxsize=4096)
def _counted(config: Configuration, stage: int) -> tuple[tuple[Weight, int], ...]:
    """Return the different weights of a stage, with how many of each it holds."""
    return tuple(counted_weights(config, stage))


CLOSED = ("gpipe", "1f1b", "interleaved_1f1b", "seqpipe", "seqvpp", "seqsmartvpp")  # `closed_form` holds for these


class TimeModel(GradientTimes):
    """A `TimeModel` predicts the time of a run's steps on one cluster."""

    def chunks(self, config: Configuration, ratios: Row = ()) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return the forward and the backward seconds of one micro-batch, each as an array [chunks, stages], and a
        dictionary part -> seconds [stages] that divides their sum into parts (such as matmul). The argument `ratios`
        holds for each MoE layer the load of the fullest device divided by the mean load; the default is the
        configuration's `skew`.
        """
        names = tuple(Parts.__dataclass_fields__)
        forward, backward = np.zeros((config.chunks, config.pp)), np.zeros((config.chunks, config.pp))
        parts = {name: np.zeros(config.pp) for name in (*names, "recompute")}
        for (kind, ratio), options in _census(config, ratios).items():
            layer = self._at(config, kind, ratio)
            for option, count in options.items():
                recomputed, held = layer.again(option), count.sum(axis=0)
                forward += layer.forward.total * count
                backward += (layer.backward.total + recomputed.total) * count
                for name in names:
                    parts[name] += (getattr(layer.forward, name) + getattr(layer.backward, name)) * held
                    parts[name if name in COMMUNICATION else "recompute"] += getattr(recomputed, name) * held
        return forward, backward, parts

    def _at(self, config: Configuration, kind: str, ratio: float) -> LayerTime:
        if ratio == config.skew:
            return self.layer(config, kind)
        return _layer_at(self, replace(config, skew=ratio), kind)

    def transfer(self, config: Configuration) -> float:
        """Return the seconds to send one micro-batch's activations to the next stage."""
        if config.pp == 1:
            return 0.0
        rows = config.rank_tokens / config.tp  # every rank of a tp group sends its part
        # in the compute dtype, also where the residual stream is wider (seen in compiled graphs)
        width = config.model.hidden * config.model.streams
        return self.sending(rows * width * config.item, config.devices)

    def step(self, config: Configuration, simulated: bool = False, ratios: np.ndarray | None = None) -> StepTime:
        """Return the predicted seconds of a step. If `simulated` is True, the pipeline schedule is simulated operation
        by operation.

        Args:
            ratios: the max/mean of a step, [micro-batches, layers], as in `tools.estimate.loads.Loads`; an axis of
                length 1 applies to all micro-batches or layers. None: the configuration's `skew` in every layer. If
                micro-batches differ, the schedule is always replayed; if `ratios` has fewer micro-batches than the
                step, they are used in turn. A schedule of pairs uses the mean over micro-batches, because it is unknown
                which two micro-batches run together.

        Raises:
            RecipeError: the run trains adapters, or its schedule cannot be simulated.
        """
        require_step_time(config)
        config, rows = _rows(config, ratios)
        made = [self.chunks(config, row) for row in rows]
        turns = np.arange(config.micro_batches) % len(rows)  # which row each micro-batch has
        often = np.bincount(turns, minlength=len(rows)) / config.micro_batches
        forward = np.average([one[0] for one in made], axis=0, weights=often)
        backward = np.average([one[1] for one in made], axis=0, weights=often)
        parts = {name: np.average([one[2][name] for one in made], axis=0, weights=often) for name in made[0][2]}
        sending = 0.0 if config.overlap_pp else self.transfer(config)
        stages = (forward + backward).sum(axis=0)
        slowest = int(stages.argmax())
        busy = config.micro_batches * float(stages[slowest])
        if simulated or config.schedule not in CLOSED or len(rows) > 1:
            hidden = self.hidden(config, rows[0]) if pairs_up(config.schedule) else None
            # the fit's row of DualPipe, whose experts' communication `expert_time` takes as hidden, was fitted so
            fitted = config.overlap_ep and config.schedule == "zero_bubble_v"
            durations = [
                Durations(
                    one[0],
                    one[1],
                    one[1] / 2 if fitted else self.weight_gradients(config, row),
                    sending,
                    "none" if sending else "full",
                    hidden,
                )
                for one, row in zip(made, rows, strict=True)
            ]
            each = durations[0] if len(rows) == 1 else [durations[row] for row in turns]
            replayed = simulate(config.schedule, config.micro_batches, each)
            pipeline = replayed.makespan
            if hidden is not None:  # under the other one of a pair
                parts["ep"] = parts["ep"] - (busy - replayed.busy[slowest]) / config.micro_batches
            if hidden is not None or len(rows) > 1:
                busy = float(replayed.busy[slowest])
        else:
            pipeline = closed_form(forward, backward, config.micro_batches, sending)
        # uneven loads hide no gradients: those of the longest wait would seem to end sooner
        beside = stages if not any(rows) and config.skew == 1 else _even_stages(self, replace(config, skew=1.0))
        last = int(beside.argmax())
        return StepTime(
            pipeline=pipeline,
            bubble=1 - busy / pipeline,
            data_parallel=0.0 if config.layer_only else self._data(config, last, float(beside[last])),
            optimizer=0.0 if config.layer_only else self.optimizer(config, last),
            fixed=0.0 if config.layer_only else self.fixed,
            parts={name: config.micro_batches * float(values[slowest]) for name, values in parts.items()},
            sending=2 * sending * config.chunks * config.micro_batches,
        )

    def under(self, config: Configuration, loads: Loads, simulated: bool = False) -> StepTime:
        """Return the predicted seconds of a step under uneven loads, as the mean over the steps in `loads`. If
        `simulated` is True, the pipeline schedule is simulated operation by operation.

        If there are many steps, `_SAMPLED` of them are used, at equal distances in the order of their max/mean. Each
        max/mean is rounded to a `_GRAIN`th, which is less than the error of counted tokens, so that many layers take
        equally long. A max/mean that is the same everywhere is not rounded.
        """
        ratios = loads.ratios
        if ratios.min() == ratios.max():
            return self.step(config, simulated, ratios[0])
        order = np.argsort(ratios.mean(axis=(1, 2)), kind="stable")
        places = (np.arange(min(_SAMPLED, len(order))) + 0.5) * len(order) / min(_SAMPLED, len(order))
        taken = np.round(ratios[order[places.astype(int)]] * _GRAIN) / _GRAIN
        return _mean([self.step(config, simulated, one) for one in taken])

    def weight_gradients(self, config: Configuration, ratios: Row = ()) -> np.ndarray:
        """Return the seconds [chunks, stages] of the weight gradients in the backward pass of a micro-batch, which are
        half of the seconds of the matmuls in this pass. The argument `ratios` holds for each MoE layer the load of the
        fullest device over the mean load.
        """
        found = np.zeros((config.chunks, config.pp))
        for (kind, ratio), options in _census(config, ratios).items():
            found += self._at(config, kind, ratio).backward.matmul / 2 * sum(options.values())
        return found

    def hidden(self, config: Configuration, ratios: Row = ()) -> np.ndarray:
        """Return the seconds that are saved when a forward pass and a backward pass run as a pair (at the same time),
        as an array [chunk of the forward pass, chunk of the backward pass, stage]. Running passes as a pair saves time
        only in MoE layers. The function assumes that half of a layer's computation comes before the dispatch of tokens,
        and that the other half is the computation of experts. The function also assumes that recomputation in a
        backward pass hides no communication. The argument `ratios` holds for each MoE layer the load of the fullest
        device over the mean load.
        """
        if ratios:
            return self._hidden_unevenly(config, ratios)
        options = _census(config, ()).get(("moe", config.skew), {})
        layers = sum(options.values(), np.zeros((config.chunks, config.pp))).astype(int)
        if not layers.any():
            return np.zeros((config.chunks, config.chunks, config.pp))
        return hidden_seconds(*self._passes(config, config.skew), layers)

    def _passes(self, config: Configuration, ratio: float) -> tuple[LayerSeconds, LayerSeconds]:
        layer = self._at(config, "moe", ratio)
        return _halves(layer.forward, 0.0), _halves(layer.backward, layer.backward.matmul / 2)

    def _hidden_unevenly(self, config: Configuration, ratios: Row) -> np.ndarray:
        """Return `hidden` of layers that differ: a forward's first layers meet the last ones of a backward."""
        found = np.zeros((config.chunks, config.chunks, config.pp))
        of = dict(zip(moe_layers(config), ratios, strict=False))
        for stage in range(config.pp):
            numbers = iter(config.layer_numbers(stage))
            chunks = [[next(numbers) for kind in kinds if kind in LAYERS] for kinds in config.stage_kinds(stage)]
            held = [[self._passes(config, of[number]) for number in chunk if number in of] for chunk in chunks]
            for first, second in np.ndindex(config.chunks, config.chunks):
                count = min(len(held[first]), len(held[second]))
                ahead = [forward for forward, _ in held[first][:count]]
                back = [backward for _, backward in held[second][::-1][:count]]
                alone = sum(one.serial for one in (*ahead, *back))
                found[first, second, stage] = alone - pair_of(ahead, back) if count else 0.0
        return found

    def mfu(self, config: Configuration, seconds: float) -> float:
        """Return the model FLOPs (without recomputation, with causal attention) of a step that takes the given seconds,
        divided by the FLOPs that the devices could compute in these seconds at their peak.
        """
        rate = flops_per_token(config.model, config.sequence) * config.tokens / seconds / config.devices
        return rate / self._peak(config.dtype)

    @property
    def fixed(self) -> float:
        """Return the constant seconds of a step that are in no modelled part of the step, as the fit to measured steps
        found them.
        """
        return self.reached.step_s


def _halves(part: Parts, weights: float) -> LayerSeconds:
    """Return a layer's forward, or its backward with `weights` seconds of weight gradients."""
    half = (part.total - part.ep - weights) / 2
    return LayerSeconds(half, part.ep / 2, half, part.ep / 2, weights)


LAYERS = ("dense", "moe")  # kinds of decoder layers
Row = tuple[float, ...]  # max/mean of each MoE layer of a micro-batch, those of MTP last; none: the configuration's
_SAMPLED = 32  # steps of which `TimeModel.under` takes the mean
_GRAIN = 200  # of max/mean, parts of 1


@lru_cache(maxsize=16384)
def _layer_at(times: TimeModel, config: Configuration, kind: str) -> LayerTime:
    return times.layer(config, kind)


@lru_cache(maxsize=1024)
def _even_stages(times: TimeModel, config: Configuration) -> np.ndarray:
    """Return [stages] seconds of a micro-batch at even loads."""
    forward, backward, _ = times.chunks(config)
    return (forward + backward).sum(axis=0)


def _rows(config: Configuration, ratios: np.ndarray | None) -> tuple[Configuration, list[Row]]:
    """Return the run and its rows of max/mean, one or one for each micro-batch; an even row becomes the skew."""
    if ratios is None:
        return config, [()]
    if ratios.min() == ratios.max():
        return replace(config, skew=float(ratios.max())), [()]
    layers = len(moe_layers(config)) + config.model.mtp
    taken = np.minimum(np.arange(layers), ratios.shape[1] - 1)
    alike = pairs_up(config.schedule) or (ratios == ratios[:1]).all()
    rows = ratios.mean(axis=0, keepdims=True) if alike else ratios[: config.micro_batches]
    return config, [tuple(map(float, row[taken])) for row in rows]


def _mean(steps: Sequence[StepTime]) -> StepTime:
    names = [field.name for field in fields(StepTime) if field.name != "parts"]
    numbers = {name: float(np.mean([getattr(step, name) for step in steps])) for name in names}
    parts = {part: float(np.mean([step.parts[part] for step in steps])) for part in steps[0].parts}
    return StepTime(**numbers, parts=parts)


@lru_cache(maxsize=4096)
def _census(config: Configuration, ratios: Row) -> dict[tuple[str, float], dict[str, np.ndarray]]:
    """Return (kind, max/mean) -> recompute option -> layers of each chunk and stage [chunks, stages]."""
    found: dict[tuple[str, float], dict[str, np.ndarray]] = {}
    decoder = moe_layers(config)
    of = dict(zip(decoder, ratios, strict=False))
    for stage in range(config.pp):
        numbers = iter(config.layer_numbers(stage))
        for chunk, every in enumerate(config.stage_kinds(stage)):
            options = iter(layer_options(config, chunk, stage, len(every)))
            extra = iter(ratios[len(decoder) :])
            for kind in every:
                layer = kind in LAYERS
                option = next(options) if layer else mtp_option(config)
                number = next(numbers, -1) if layer else -1
                ratio = config.skew
                if ratios and kind in ("moe", "mtp"):
                    ratio = next(extra) if kind == "mtp" else of[number]
                counts = found.setdefault((kind, ratio), {}).setdefault(option, np.zeros((config.chunks, config.pp)))
                counts[chunk, stage] += 1
    return found


def closed_form(forward: np.ndarray, backward: np.ndarray, micro_batches: int, sending: float = 0.0) -> float:
    """Return the seconds of a step's passes under (interleaved) 1F1B by a closed formula, from the forward and backward
    seconds of a micro-batch, each [chunks, stages].
    """
    return float(pipeline_of((forward + backward).sum(axis=0), len(forward), micro_batches, sending))


def pipeline_of(
    work: np.ndarray, chunks: Any, micro_batches: Any, sending: Any = 0.0, transfers: int | None = None
) -> Any:
    """Return the seconds of a pipeline: all micro-batches on the slowest stage, plus one micro-batch on each other
    stage. The argument `work` [..., stages] holds the seconds of one micro-batch on each stage.

    For equal stages this is (m + (p - 1) / v) (f + b), as in Narayanan et al. (arXiv 2104.04473). Each micro-batch and
    chunk is sent and received once in each direction. The work of the other stages is divided by `chunks`; `transfers`
    is the number of chunks that are sent, if this number is not `chunks`.
    """
    sent = chunks if transfers is None else transfers
    every = work + np.asarray(2 * sending * sent if work.shape[-1] > 1 else 0 * sending)[..., None]
    slowest = every.max(axis=-1)
    return micro_batches * slowest + (every.sum(axis=-1) - slowest) / chunks
