"""What the comparison of two runs finds: step, phase, module, tensor and ranks, and what is usually wrong there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"  # the phases of a step
DTYPE = "float32"  # the column of Table 2 by which both sides are judged
# (phase, beginning of the tensor's name) -> what usually is wrong (report, Table 3); the first that fits
MEANINGS = (
    (FORWARD, "samples", "data: another order, or other shares of the ranks"),
    (FORWARD, "start of", "the weights that training starts from: initialisation, conversion, or a swapped shard"),
    (FORWARD, "lm_loss", "the forward pass: an operator, a mask, a position, a weight"),
    (FORWARD, "mtp_loss", "the forward pass of the MTP layer"),
    (FORWARD, "load_balancing_loss", "routing: tokens go to other experts"),
    (FORWARD, "loss", "loss scaling: not divided by the ranks that share it"),
    (BACKWARD, "gradient of the loss", "loss scaling: the seed is not divided by the ranks that share it"),
    (BACKWARD, "global norm", "the backward pass, or the norm: shards counted twice or not at all"),
    (BACKWARD, "clipping", "a max_grad_norm above the norms, or clipping switched off"),
    (BACKWARD, "gradient norm", "gradient aggregation or scaling of this group"),
    (BACKWARD, "gradient", "the backward of this module, or the collective in front of it"),
    (OPTIMIZER, "gradient of the loss", "loss scaling: the seed is not divided by the ranks that share it"),
    (OPTIMIZER, "global norm", "norm: shards counted twice or not at all"),
    (OPTIMIZER, "loads of experts", "routing: tokens go to other experts, or are counted twice or not at all"),
    (OPTIMIZER, "moves of the bias", "the routers' bias: moved by the load of one rank, or the wrong way"),
    (OPTIMIZER, "bias", "the routers' bias: another rate, or another load"),
    (OPTIMIZER, "change", "weight decay of the wrong group, or the learning rate"),
    (OPTIMIZER, "", "the optimizer's update"),
)


@dataclass(frozen=True)
class Mesh:
    """How many ranks share a run by pipeline, data, context and tensor parallelism; tensor ranks are neighbours."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1


@dataclass(frozen=True)
class Finding:
    """A number or tensor of a run that is not the reference's.

    Args:
        step: from 1. phase: FORWARD, BACKWARD or OPTIMIZER. module, tensor: names of what differs.
        error, allowed: as `judge` measures, by Table 2. ranks: of the whole run, those whose part is wrong.
        detail: the worst element, or what else is wrong.
    """

    step: int
    phase: str
    module: str
    tensor: str
    error: float
    allowed: float
    ranks: tuple[int, ...]
    detail: str

    @property
    def key(self) -> tuple[int, str, str, str]:
        """Step, phase, module, tensor."""
        return self.step, self.phase, self.module, self.tensor

    @property
    def meaning(self) -> str:
        """What usually is wrong when a run leaves the other here."""
        fitting = (text for phase, name, text in MEANINGS if phase == self.phase and self.tensor.startswith(name))
        return next(fitting, "this module's own computation")


@dataclass(frozen=True)
class Comparison:
    """All tensors of a run against another's.

    Args:
        tensors: how many were compared; used: the largest share of its tolerance that any used; findings: in order
            of execution, the first is where the fault is; known: differences of MindFormers itself, not judged.
    """

    tensors: int
    used: float
    findings: tuple[Finding, ...]
    known: tuple[Finding, ...] = ()


def describe_ranks(ranks: Iterable[int], mesh: Mesh) -> str:
    """Ranks, and what they have in common: ``ranks 2-3 (dp 1)``."""
    chosen = sorted(ranks)
    sizes = {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp}
    if len(chosen) == math.prod(sizes.values()):
        return "all ranks" if len(chosen) > 1 else "the only rank"
    places = np.array(np.unravel_index(chosen, tuple(sizes.values())))
    found = {axis: sorted(set(row)) for axis, row in zip(sizes, places.tolist(), strict=True)}
    common = ""
    if math.prod(len(values) for values in found.values()) == len(chosen):
        held = [f"{axis} {_spans(values)}" for axis, values in found.items() if len(values) < sizes[axis]]
        common = f" ({', '.join(held)})"
    return f"rank{'s' * (len(chosen) > 1)} {_spans(chosen)}{common}"


def _spans(numbers: list[int]) -> str:
    """``0-2, 5`` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def finding_text(finding: Finding, mesh: Mesh) -> str:
    """One line."""
    where = f"{finding.phase} of step {finding.step}, {finding.module}: {finding.tensor}"
    if finding.error > finding.allowed:
        numbers = f"error {finding.error:.3g}, allowed {finding.allowed:.3g}; {finding.detail}"
    else:
        numbers = finding.detail
    return f"{where}, {describe_ranks(finding.ranks, mesh)}: {numbers}. Usually: {finding.meaning}"
