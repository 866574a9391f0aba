"""Where an emulated strategy leaves the unsharded run first: module, phase, tensor and ranks (report 3.2.2, step 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tools.accuracy.emulate.context import BACKWARD, FORWARD, OPTIMIZER, Entry
from tools.accuracy.emulate.run import Emulated
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.judge import Verdict, judge
from tools.accuracy.tolerance import tolerance

DTYPE = "float32"  # the column of Table 2; both sides compute in float64, so that no tie between experts decides
# (phase, beginning of the tensor's name) -> what usually is wrong (report, Table 3); the first that fits
MEANINGS = (
    (FORWARD, "rope", "position offset of a rank's part of the sequence"),
    (FORWARD, "query", "position offset of a rank's part of the sequence, or its heads"),
    (FORWARD, "key", "position offset of a rank's part of the sequence, or its heads"),
    (FORWARD, "softmax", "the softmax itself, or the mask of a split context"),
    (FORWARD, "chosen", "routing: these tokens go to other experts"),
    (FORWARD, "input of each expert", "dispatch: tokens at the wrong expert"),
    (FORWARD, "output of each expert", "expert weights: another expert's, or stale"),
    (FORWARD, "samples", "data: another order, or other shares of the ranks"),
    (FORWARD, "start of", "the weights that training starts from: initialisation, conversion, or a swapped shard"),
    (FORWARD, "lm_loss", "the forward pass: an operator, a mask, a position, a weight"),
    (FORWARD, "mtp_loss", "the forward pass of the MTP layer"),
    (FORWARD, "load_balancing_loss", "routing: tokens go to other experts"),
    (FORWARD, "loss", "loss scaling: not divided by the ranks that share it"),
    (
        FORWARD,
        "out",
        "a missing or doubled reduction behind this module, its combine, or what a pipeline stage was sent",
    ),
    (BACKWARD, "gradient of logits", "loss scaling: the seed is not divided by the ranks that share it"),
    (BACKWARD, "gradient of the loss", "loss scaling: the seed is not divided by the ranks that share it"),
    (BACKWARD, "accumulated", "accumulation over micro-batches, for instance in 16 bits"),
    (BACKWARD, "reduced", "gradient aggregation: a missing AllReduce, or over the wrong group"),
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
class Finding:
    """A tensor that is not the unsharded run's.

    Args:
        where the tensor is: see `Entry`. error, allowed: as `judge` measures, by Table 2. ranks: of the whole run,
            those whose part is wrong. detail: the worst element, or what else is wrong.
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


def compare(run: Emulated, reference: Emulated) -> Comparison:
    """Every recorded tensor of `run`, merged by its layout, against that of `reference`.

    Raises:
        KeyError: the runs did not record the same tensors (a bug of ours).
    """
    wanted = {entry.key: entry.layout.merge(entry.parts).value for entry in reference.entries}
    assert {entry.key for entry in run.entries} == wanted.keys(), "both runs record the same tensors"
    findings, used = [], 0.0
    for entry in run.entries:
        allowed = tolerance(DTYPE, entry.count)
        verdict, differing = _judged(entry, wanted[entry.key], allowed)
        used = max(used, verdict.error / allowed if allowed else 0.0)
        if not verdict.passed or differing:
            findings.append(_finding(entry, wanted[entry.key], allowed, verdict, differing, run.strategy))
    return Comparison(len(run.entries), used, tuple(findings))


def _judged(entry: Entry, want: np.ndarray, allowed: float) -> tuple[Verdict, tuple[int, ...]]:
    """The verdict on the merged tensor, and the ranks whose copies differ; all where parts do not go together."""
    try:
        merged = entry.layout.merge(entry.parts)
    except ValueError as error:
        return Verdict(False, math.inf, want.size, str(error)), tuple(range(len(entry.parts)))
    if not np.isfinite(merged.value).all():  # which `judge` lets pass where the reference is not finite either
        return Verdict(False, math.inf, want.size, "not every element is finite"), merged.differing
    return judge(merged.value, want, allowed, DTYPE), merged.differing


def _finding(
    entry: Entry, want: np.ndarray, allowed: float, verdict: Verdict, differing: Sequence[int], strategy: Strategy
) -> Finding:
    wrong = set(differing)
    if len(wrong) < len(entry.parts):
        pieces = entry.layout.pieces(want)
        for group in entry.layout.adding():
            total = np.sum([entry.parts[rank] for rank in group], 0)
            if not judge(total, pieces[group[0]], allowed, DTYPE).passed:
                wrong.update(group)
    if entry.stage is not None:
        wrong = {entry.stage * strategy.stage_ranks + rank % strategy.stage_ranks for rank in wrong}
    detail = verdict.detail or "copies that should be equal are not"
    return Finding(*entry.key, verdict.error, allowed, tuple(sorted(wrong)), detail)


def describe_ranks(ranks: Iterable[int], strategy: Strategy) -> str:
    """Ranks, and what they have in common: ``ranks 2-3 (dp 1)``."""
    chosen = sorted(ranks)
    sizes = {"pp": strategy.pp, "dp": strategy.dp, "cp": strategy.cp, "tp": strategy.tp}
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


def finding_text(finding: Finding, strategy: Strategy) -> str:
    """One line."""
    where = f"{finding.phase} of step {finding.step}, {finding.module}: {finding.tensor}"
    if finding.error > finding.allowed:
        numbers = f"error {finding.error:.3g}, allowed {finding.allowed:.3g}; {finding.detail}"
    else:
        numbers = finding.detail
    return f"{where}, {describe_ranks(finding.ranks, strategy)}: {numbers}. Usually: {finding.meaning}"
