"""Seconds of one layer and micro-batch on a device, from those of its operators (`device_time`, `expert_time`).

Forward:

    matmuls, attention, elementwise   see `device_time`; fused attention reaches a share of its own of the peak
    tp            AllGathers and ReduceScatters over the slowest link of the group
    cp            keys and values once round the group; with Ulysses an All-to-All of queries, keys, values and results
                  beside it, which is the least of what compiled graphs show; logits on their way to the loss
                  (`logit_exchanges`)
    ep            dispatch and combine, as far as they are waited for (`expert_time`)
    fixed         host and launches, more for MoE layers

Backward is twice the matmuls, elementwise traffic (but rows are sorted once each way) and fixed time, 2.5 times fused
attention (it computes scores again) and the same communication (keys and values are sent again, but for MindFormers'
training_graph, which keeps them); recomputation adds forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tools.estimate.configuration import Configuration
from tools.estimate.expert_time import NOTHING, ExpertTimes, Exposed
from tools.estimate.layer_model import (
    Matmul,
    Work,
    accumulated_bytes,
    cast_bytes,
    repeated_parts,
    score_bytes,
    score_passes,
    sorted_once,
    work,
)
from tools.estimate.memory.training_graph import logit_exchanges
from tools.estimate.operators import parts_of


@dataclass(frozen=True)
class Parts:
    """Seconds of one layer and micro-batch on a device; of communication those in which it is waited for.

    `cut` is what chunks of `plugins.ep_overlap` add to the experts' own time.
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
        """All of it, one after the other."""
        parts = (self.matmul, self.attention, self.elementwise, self.tp, self.cp, self.ep, self.fixed, self.cut)
        return sum(parts)

    def less(self, other: Parts) -> Parts:
        """What is left of each without another's."""
        return Parts(**{name: getattr(self, name) - getattr(other, name) for name in Parts.__dataclass_fields__})


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward of a layer without recomputation, and what each recompute option adds to backward."""

    forward: Parts
    backward: Parts
    recomputed: Mapping[str, Parts]

    def again(self, option: str) -> Parts:
        """What an option of a layer adds to its backward: one of `recomputed`, or several joined."""
        if option in self.recomputed:
            return self.recomputed[option]
        every = [self.recomputed[name] for name in parts_of(option)]
        return Parts(*(sum(getattr(part, name) for part in every) for name in Parts.__dataclass_fields__))


class LayerTimes(ExpertTimes):
    """The time of layers on one cluster."""

    def layer(self, config: Configuration, kind: str) -> LayerTime:
        """Seconds of one layer of a kind."""
        config = self.dispatched(config)
        done = work(config, kind)
        exposed = self.exposed(config) if done.copies else NOTHING
        forward = self._forward(config, kind, done, exposed)
        backward = Parts(
            matmul=2 * forward.matmul,
            attention=(2.5 if config.flash else 2) * forward.attention,
            elementwise=2 * forward.elementwise
            - self._moved(config, sorted_once(config, done))
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
            matmul=sum(self._matmul(config, matmul) for matmul in done.matmuls),
            attention=self._attention(config, done.attention),
            elementwise=self._moved(config, moved) + (self._scores(config) if done.attention else 0.0),
            tp=done.collectives * self._tensor(config, done.gathered),
            cp=self._context(config, done) + self._logits(config, kind),
            ep=exposed.waited.forward,
            cut=exposed.cutting.forward,
            fixed=self._fixed(config, kind, done),
        )

    def _accumulating(self, config: Configuration, matmul: Matmul) -> float:
        """Seconds by which reading and writing summed gradients outlasts the matmul that makes them (it adds them)."""
        moving = accumulated_bytes(config, matmul) / (self.hardware.hbm_bytes_per_s * self.reached.memory)
        return max(0.0, moving - self._matmul(config, matmul))

    def _recomputed(self, config: Configuration, kind: str, forward: Parts, exposed: Exposed) -> dict[str, Parts]:
        """What each recompute option adds to a layer's backward; an MTP layer's head does not run again."""
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
        groups = self._operators(config, kind, full.ep) if config.training_graph else {}
        return {**recomputed, "select": cheap, "communication": Parts(tp=forward.tp / 2), "full": full, **groups}

    def _operators(self, config: Configuration, kind: str, ep: float) -> dict[str, Parts]:
        """What each group of `tools.estimate.operators` adds when it runs again; experts send as in a whole layer."""
        found = {}
        for group, part in repeated_parts(config, kind).items():
            moved = self._moved(config, part.elementwise + cast_bytes(config, part.matmuls))
            fixed = self._fixed(config, kind, work(config, kind)) - self._fixed(config, kind, Work(()))
            experts = {"ep": ep, "fixed": fixed} if part.copies else {}
            found[group] = Parts(sum(self._matmul(config, one) for one in part.matmuls), elementwise=moved, **experts)
        return found

    def _fixed(self, config: Configuration, kind: str, done: Work) -> float:
        """Forward seconds that do not depend on sizes; a layer's benchmark keeps its device busy."""
        if kind in ("embedding", "head") or config.layer_only or config.graphs == "step":
            return 0.0
        launched = 0.5 if config.graphs else 1.0  # assumed: experts, dispatch and combine are the other half
        return launched * (self.reached.layer_s + (self.reached.moe_s if done.copies else 0.0))

    def _backward_tp(self, config: Configuration) -> float:
        """Share of forward's tensor-parallel time that backward shows: gradients of weights can hide that of inputs."""
        if not config.overlap_tp_backward:
            return 1.0
        return 0.5 if config.sequence_parallel else 0.0

    def _scores(self, config: Configuration) -> float:
        """Forward seconds of what an unfused attention moves."""
        return score_bytes(config) / (self.hardware.hbm_bytes_per_s * self.reached.memory)

    def _exposed(self, overlap: bool) -> float:
        return 1 - self.reached.hidden if overlap else 1.0

    def _tensor(self, config: Configuration, size: float) -> float:
        return self._collective(size, config.tp, 1) * self._exposed(config.overlap_tp)

    def _context(self, config: Configuration, done: Work) -> float:
        gathered = self._collective(done.moved_keys * config.cp, config.cp, config.tp)
        exchanged = self._collective(done.turned_heads, config.head_parts, config.tp)
        return (gathered + exchanged) * self._exposed(True)

    def _logits(self, config: Configuration, kind: str) -> float:
        """Forward seconds of logits on their way to the loss, with nothing beside them."""
        moved = logit_exchanges(config) if kind in ("head", "mtp") else []
        return sum(self._collective(size, ranks, stride) for size, ranks, stride in moved)
