"""What is predicted of a training step: its seconds, and where they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Seconds of a step.

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
        """Seconds of the step."""
        return self.pipeline + self.data_parallel + self.optimizer + self.fixed

    @property
    def by_part(self) -> dict[str, float]:
        """The step's seconds by `PARTS`, on the slowest stage; they add up to it."""
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
        """Seconds of communication that nothing hides."""
        return exposed_of(self.by_part)


def exposed_of(parts: Mapping[str, float]) -> float:
    """Seconds of communication that nothing hides, of a step by `PARTS`."""
    return sum(parts[name] for name in _EXPOSED)
