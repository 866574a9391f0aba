"""Seconds of a training step: layers, the pipeline, gradients and weights, the optimizer.

The only model of a step's time: `tc3 search`, `tc3 ep-report`, `mode: auto` and `tc3 data imbalance` all ask it.

A stage's micro-batch is the sum over its layers (`layer_time`); the step is the slowest stage's work for all
micro-batches, filling and draining by schedule, then gradients and weights as far as nothing hides them
(`gradient_time`), and the optimizer. `simulated` replays the schedule instead. Data stalls are taken as zero.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.gradient_time import GradientTimes
from tools.estimate.layer_time import Parts
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import layer_options
from tools.estimate.step_time import COMMUNICATION, StepTime
from tools.model.flops import flops_per_token
from tools.pipeline.pair import LayerSeconds, hidden_seconds
from tools.pipeline.schedules import pairs_up
from tools.pipeline.simulate import Durations, simulate

_CLOSED = ("gpipe", "1f1b", "interleaved_1f1b", "seqpipe", "seqvpp", "seqsmartvpp")  # `closed_form` holds for these


class TimeModel(GradientTimes):
    """The time of runs on one cluster."""

    def chunks(self, config: Configuration) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Forward and backward seconds [chunks, stages] of one micro-batch, and the parts of their sum [stages]."""
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
        """Seconds to send one micro-batch's activations to the next stage."""
        if config.pp == 1:
            return 0.0
        rows = config.rank_tokens / config.tp  # every rank of a tp group sends its part
        link = self._link(config.devices)
        # in the compute dtype, also where the residual stream is wider (seen in compiled graphs)
        size = rows * config.model.hidden * (4 if config.dtype == "fp32" else 2)
        return self.hardware.launch_s + link.latency_s + size / self._speed(link)

    def step(self, config: Configuration, simulated: bool = False) -> StepTime:
        """Seconds of a step; `simulated` replays the schedule operation by operation."""
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
        """Seconds [chunks, stages] of a micro-batch's backward that are weight gradients: half of its matmuls."""
        found = np.zeros((config.chunks, config.pp))
        for kind, options in _census(config).items():
            found += self.layer(config, kind).backward.matmul / 2 * sum(options.values())
        return found

    def hidden(self, config: Configuration) -> np.ndarray:
        """Seconds [chunks, chunks, stages] that a forward and a backward hide of each other as a pair.

        Of MoE layers alone. Half of a layer's computation is taken to come before dispatch and half to be the
        experts' (assumed); what a backward recomputes hides nothing.
        """
        layers = sum(_census(config).get("moe", {}).values(), np.zeros((config.chunks, config.pp))).astype(int)
        if not layers.any():
            return np.zeros((config.chunks, config.chunks, config.pp))
        layer = self.layer(config, "moe")
        forward, backward = _halves(layer.forward, 0.0), _halves(layer.backward, layer.backward.matmul / 2)
        return hidden_seconds(forward, backward, layers)

    def mfu(self, config: Configuration, seconds: float) -> float:
        """Model FLOPs (no recomputation, causal attention) of a step of so many seconds over the devices' peak."""
        rate = flops_per_token(config.model, config.sequence) * config.tokens / seconds / config.devices
        return rate / self._peak(config.dtype)

    @property
    def fixed(self) -> float:
        """Seconds of a step beside all that is computed here."""
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
    """Seconds of 1F1B, interleaved or not, of [chunks, stages] seconds; see `pipeline_of`."""
    return float(pipeline_of((forward + backward).sum(axis=0), len(forward), micro_batches, sending))


def has_closed_form(schedule: str) -> bool:
    """Whether `closed_form` holds for a schedule."""
    return schedule in _CLOSED


def pipeline_of(
    work: np.ndarray, chunks: Any, micro_batches: Any, sending: Any = 0.0, transfers: int | None = None
) -> Any:
    """All micro-batches on the slowest stage, and the others' first and last one; `work` [..., stages] a micro-batch.

    (m + (p - 1) / v) (f + b) for equal stages, as Narayanan et al. (arXiv 2104.04473) have it. Each micro-batch and
    chunk is sent and received once each way; `transfers` are the chunks, where `chunks` are not, which divide the
    other stages' work.
    """
    sent = chunks if transfers is None else transfers
    every = work + np.asarray(2 * sending * sent if work.shape[-1] > 1 else 0 * sending)[..., None]
    slowest = every.max(axis=-1)
    return micro_batches * slowest + (every.sum(axis=-1) - slowest) / chunks
