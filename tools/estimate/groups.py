"""This module lists the collectives of a run with their predicted times. For each parallel group (tp, cp, ep, dp, pp),
the module finds the operator, the ranks, and the bytes and the predicted seconds of the largest call.

This module contains no formulas. A `Noted` is the estimator's `TimeModel`, and also records each call of the functions
that predict communication (`DeviceTimes._collective`, `DeviceTimes.sending`, `ExpertTimes._step`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plugins.hierarchical_ep.traffic import Step
from tools.estimate.configuration import Configuration
from tools.estimate.time_model import TimeModel
from tools.hardware.load import Hardware

GROUPS = ("tp", "cp", "ep", "dp", "pp")
GATHER, EXCHANGE, SEND = "AllGather", "AlltoAll", "Send"


@dataclass(frozen=True)
class Collective:
    """A `Collective` is the communication call with the most bytes in one kind of group: tp, cp, ep, dp or pp."""

    group: str  # tp, cp, ep, dp or pp
    operator: str  # AllGather (a ReduceScatter takes as long), AlltoAll, or Send
    bytes: int  # of the whole tensor (AllGather), or that one rank sends
    ranks: int
    stride: int  # between the numbers of neighbouring ranks of a group
    seconds: float  # predicted

    def groups(self, devices: int) -> list[list[int]]:
        """Return the groups of ranks, among the first `devices` ranks, in which this collective runs; each rank is in
        at most one group.
        """
        span = self.ranks * self.stride
        return [
            [start + first + self.stride * number for number in range(self.ranks)]
            for start in range(0, devices - span + 1, span)
            for first in range(self.stride)
        ]


class Noted(TimeModel):
    """A `Noted` is a `TimeModel` that also lists the communication calls whose seconds it predicts."""

    def __init__(self, hardware: Hardware):
        super().__init__(hardware)
        self.group = ""
        self.stages = 1  # of the pipeline
        self.found: list[Collective] = []

    @contextmanager
    def _of(self, group: str) -> Iterator[None]:
        before, self.group = self.group, group
        try:
            yield
        finally:
            self.group = before

    def _note(self, operator: str, size: float, ranks: int, stride: int, seconds: float) -> float:
        if self.group and ranks > 1 and size > 0:
            self.found.append(Collective(self.group, operator, round(size), ranks, stride, seconds))
        return seconds

    def _collective(self, size: float, ranks: int, stride: int) -> float:
        return self._note(GATHER, size, ranks, stride, super()._collective(size, ranks, stride))

    def _tensor(self, config: Configuration, size: float) -> float:
        with self._of("tp"):
            return super()._tensor(config, size)

    def _context(self, config: Configuration, done: Any) -> float:
        with self._of("cp"):
            return super()._context(config, done)

    def once_and_each(self, config: Configuration, stage: int) -> tuple[float, float]:
        """Return the seconds of communicating gradients and weights (as `TimeModel.once_and_each` does), and list the
        communication calls under the data-parallel group.
        """
        with self._of("dp"):
            return super().once_and_each(config, stage)

    def exchange(self, config: Configuration) -> None:
        """Add the slowest call that exchanges the experts' tokens to the list of calls. A dispatch in two steps
        (`plugins.hierarchical_ep`) adds two calls: the slowest call between nodes and the slowest call inside a node.
        """
        if config.ep == 1 or not config.model.experts:
            return
        config = self.dispatched(config)
        ranks = config.ep * (config.tp if config.expert_tp else 1)
        slowest: dict[str, Step] = {}
        for step in self.exchanges(config):
            if step.inter_peers or step.intra_peers:
                before = slowest.setdefault(step.stream, step)
                slowest[step.stream] = max(before, step, key=lambda one: self._step(one, 1.0))
        nodes = slowest["inter"].inter_peers + 1 if "inter" in slowest else 1
        with self._of("ep"):
            for stream, step in slowest.items():
                seconds, size = self._step(step, 1.0), step.inter_bytes + step.intra_bytes
                if stream != "inter":
                    self._note(EXCHANGE, size, ranks // nodes, 1, seconds)
                elif config.ep_mode == "hierarchical":  # every rank of the group gets all rows
                    self._note(GATHER, size * nodes / step.inter_peers, nodes, ranks // nodes, seconds)
                else:
                    self._note(EXCHANGE, size, nodes, ranks // nodes, seconds)

    def sending(self, size: float, span: int) -> float:
        """Return the seconds to send one message between two ranks (as `TimeModel.sending` does), and list this
        communication call.
        """
        stride = span // self.stages if self.group == "pp" else 1
        return self._note(SEND, size, 2, stride, super().sending(size, span))

    def transfer(self, config: Configuration) -> float:
        """Return the seconds to send activations between two pipeline stages (as `TimeModel.transfer` does), and list
        this communication call under the pipeline group.
        """
        self.stages = config.pp
        with self._of("pp"):
            return super().transfer(config)


def collectives_of(config: Configuration, hardware: Hardware) -> list[Collective]:
    """Return the largest communication call of each kind of group of a run, in the order tp, cp, ep, dp, pp. Groups of
    the same name (such as dp) with different numbers of ranks count as different kinds, because gradients of experts
    have fewer copies than other gradients.
    """
    model = Noted(hardware)
    for kind in sorted({kind for chunk in config.stage_kinds(0) for kind in chunk}):
        model.layer(config, kind)
    model.exchange(config)
    for stage in range(config.pp):
        model.once_and_each(config, stage)
    model.transfer(config)
    largest: dict[tuple[str, str, int, int], Collective] = {}
    for one in model.found:
        key = (one.group, one.operator, one.ranks, one.stride)
        if key not in largest or one.bytes > largest[key].bytes:
            largest[key] = one
    return sorted(largest.values(), key=lambda one: (GROUPS.index(one.group), one.ranks, one.stride))
