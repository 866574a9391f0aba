"""What a comparison of two runs of one recipe finds, and the comparison of runs that MindFormers trained.

A finding names step, phase, module, tensor and ranks, and what is usually wrong there (report, section 3.2.2). Findings
come in the order in which a difference arises: other samples explain everything; a loss of step 1 is the forward pass,
a gradient norm of step 1 the backward pass, the state (and the losses of later steps) the optimizer.

After each step the bias by which a router's choices are steered goes up by a fixed rate for an expert that got less
than its share of the choices of all ranks, and down for one that got more. That is exact, except that a token at a tie
between two experts may go to the other one and so turn the move of an expert whose load is next to its share. So loads
are recorded as well: the biases of two runs must be equal wherever both runs' loads say that they moved alike, and each
must have moved as its own loads say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tools.accuracy.equivalence.runs import (
    BIAS,
    LEAST,
    LOAD,
    LOSSES,
    MOMENTS,
    START,
    Trained,
    group_norms,
    group_of,
    weight_of,
)
from tools.accuracy.judge import ROUNDOFF, judge, tolerance

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
# share of a step's choices that ties may move between experts: as what they do to the auxiliary loss
MOVED = 2e-3
AT_SHARE = 1e-5  # relative; a float32 mean of ones and zeros errs by less, one choice of a step weighs more
# the auxiliary loss counts tokens: one at a tie between experts that goes to the other moves it by 2e-4
# (seen with the EP-4 mini, tests/training/test_expert_parallel.py)
COUNTED = {"load_balancing_loss": 2e-3}
CLIPPED = 1e-3  # a gradient is clipped if its norm shrinks by more than this share of it


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
        """Return what usually is wrong when a run leaves the other here."""
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


@dataclass(frozen=True)
class Row:
    """One comparison of a router: it is wrong if `error` is over `allowed`."""

    step: int
    router: str
    tensor: str
    error: float
    allowed: float
    detail: str


def bias_rows(run: Trained, reference: Trained) -> Iterator[Row]:
    """For each router that has a bias: the loads of each step, then how the biases moved, then where they ended."""
    for name in (name.removeprefix(BIAS) for name in reference.state if name.startswith(BIAS)):
        loads, wants = (side.state[LOAD + name].astype(np.float64) for side in (run, reference))
        for step, (load, want) in enumerate(zip(loads, wants, strict=True), 1):
            moved = float(np.abs(load - want).sum() / 2 / want.sum())
            moved = moved if np.isfinite(moved) else np.inf
            yield Row(step, name, "loads of experts", moved, MOVED, f"{moved:.2%} of the choices are others")
        got, bias = run.state[BIAS + name], reference.state[BIAS + name]
        directions = np.sign(np.diff(got, axis=0)) == _directions(loads)
        yield from _wrong(name, "moves of the bias", directions | _at_share(loads), "not towards its share of the load")
        alike = (_directions(loads) == _directions(wants)) & ~_at_share(loads) & ~_at_share(wants)
        equal = (got[1:] == bias[1:]) | ~np.logical_and.accumulate(alike, axis=0)
        yield from _wrong(name, "bias", equal & (got[0] == bias[0]), "another than the reference's")


def _directions(loads: np.ndarray) -> np.ndarray:
    """+1 where an expert got less than its share, so that its bias has to rise; -1 where it got more."""
    return np.where(_at_share(loads), 0.0, np.sign(loads.mean(-1, keepdims=True) - loads))


def _at_share(loads: np.ndarray) -> np.ndarray:
    """Where rounding decides the direction."""
    share = loads.mean(-1, keepdims=True)
    return np.abs(loads - share) <= AT_SHARE * share


def _wrong(router: str, tensor: str, right: np.ndarray, what: str) -> Iterator[Row]:
    """One row for an array [steps, experts] of what is right."""
    steps, experts = np.nonzero(~right)
    first = int(steps[0]) + 1 if len(steps) else len(right)
    detail = f"experts {sorted(set(experts[steps == first - 1].tolist()))}: {what}" if len(steps) else ""
    yield Row(first, router, tensor, float(len(steps)), 0.0, detail)


def compare_trained(run: Trained, reference: Trained) -> Comparison:
    """Return the findings in the order above; `used` is the largest share of a tolerance."""
    data = list(_data(run, reference))
    rows = list(_rows(run, reference))
    findings = [finding for finding, _ in rows if not finding.error <= finding.allowed]
    copies = [
        finding_of(run, len(run.steps), OPTIMIZER, group_of(weight_of(name)), name, np.inf, 0.0, "copies differ", ranks)
        for name, ranks in run.differing.items()
    ]
    used = max(share for _, share in rows)
    return Comparison(len(rows), used, (*data, *findings, *copies, *unclipped(run)))


def finding_of(
    run: Trained,
    step: int,
    phase: str,
    module: str,
    tensor: str,
    error: float,
    allowed: float,
    detail: str,
    ranks: tuple[int, ...] = (),
) -> Finding:
    """Return a finding of a run; of all its ranks unless some are named."""
    return Finding(step, phase, module, tensor, error, allowed, ranks or tuple(range(run.workers)), detail)


def _data(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Steps whose samples are not the same, whatever their order and ranks."""
    for step, (mine, theirs) in enumerate(zip(run.samples, reference.samples, strict=True), 1):
        if mine != theirs:
            other = len(set(mine) ^ set(theirs)) // 2
            detail = f"{other} of {len(theirs)} samples of the step are others"
            yield finding_of(run, step, FORWARD, "data", "samples", np.inf, 0.0, detail)
    for name in (name for name in reference.state if name.startswith(START)):
        if not np.array_equal(run.state[name], reference.state[name]):
            weight = name.removeprefix(START)
            yield finding_of(run, 1, FORWARD, group_of(weight), f"start of {weight}", np.inf, 0.0, "other weights")


def unclipped(run: Trained) -> Iterator[Finding]:
    """A run in which no gradient was clipped proves nothing about the clipping; global norms are those before it."""
    norms = [(step["global_norm"], np.sqrt(sum(norm**2 for norm in after.values()))) for step, after in _steps(run)]
    if not any(after < (1 - CLIPPED) * before for before, after in norms):
        before = max(before for before, _ in norms)
        detail = f"no step was clipped (norms up to {before:.4g}), so that a wrong clipping would change nothing"
        yield finding_of(run, len(norms), BACKWARD, "gradients", "clipping", np.inf, 0.0, detail)


def _steps(run: Trained) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Metrics of each step, and the norm of each weight's gradient."""
    return zip(run.steps, run.norms, strict=True)


def _rows(run: Trained, reference: Trained) -> Iterator[tuple[Finding, float]]:
    """(what would be a finding if it is over what is allowed, share of the tolerance), in order."""
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        phase = FORWARD if step == 1 else OPTIMIZER
        for name in (name for name in LOSSES if name != "global_norm" and (mine[name], theirs[name]) != (None, None)):
            allowed = COUNTED.get(name, mean_tolerance(theirs["tokens"]))
            yield _number(run, step, phase, "loss", name, mine[name], theirs[name], allowed)
        phase = BACKWARD if step == 1 else OPTIMIZER
        allowed = tolerance(DTYPE, theirs["tokens"])
        norm = (mine["global_norm"], theirs["global_norm"])
        yield _number(run, step, phase, "gradients", "global norm", *norm, allowed)
        groups = group_norms(reference.norms[step - 1])
        found = group_norms(run.norms[step - 1])
        for group, want in groups.items():
            yield _number(run, step, phase, group, "gradient norm", found[group], want, allowed)
    yield from state_rows(run, reference, reference.steps[0]["tokens"])
    for row in bias_rows(run, reference):
        numbers = (row.error, row.allowed, row.detail)
        share = row.error / row.allowed if row.allowed else np.inf if row.error else 0.0
        yield finding_of(run, row.step, OPTIMIZER, group_of(row.router), row.tensor, *numbers), share


def mean_tolerance(tokens: int) -> float:
    """For a loss: what Table 2 allows the sum over the tokens, less as the errors of so many tokens cancel in the mean.

    Near the start of training a loss hardly depends on the model (it is the logarithm of the vocabulary), so that the
    whole of Table 2 would hide a wrong mask.
    """
    return tolerance(DTYPE, tokens) / tokens**0.5


def _number(run, step, phase, module, tensor, got, want, allowed) -> tuple[Finding, float]:
    """A scalar, relative to what it should be; one that is missing, or not finite on either side, is wrong."""
    got, want = (np.nan if value is None else value for value in (got, want))
    finite = np.isfinite(got) and np.isfinite(want)
    error = abs(got - want) / max(abs(want), 1e-30) if finite else np.inf
    detail = f"{got:.9g}, should be {want:.9g}"
    return finding_of(run, step, phase, module, tensor, error, allowed, detail), error / allowed


def state_rows(run: Trained, reference: Trained, tokens: int) -> Iterator[tuple[Finding, float]]:
    """Moments after the last step, then how far weights have moved; Table 2's row is that of so many tokens."""
    last, allowed = len(reference.steps), tolerance(DTYPE, tokens)
    for name in (name for name in reference.state if name.startswith(MOMENTS)):
        most = 2 * allowed if name.startswith(MOMENTS[1]) else allowed  # a square errs twice as much as its root
        verdict = judge(run.state[name], reference.state[name], most, DTYPE)
        finding = finding_of(run, last, OPTIMIZER, group_of(name.split(".", 1)[1]), name, verdict.error, most, "")
        yield replace(finding, detail=verdict.detail), verdict.error / most
    rate = sum(step["learning_rate"] for step in reference.steps)
    for name in (name.removeprefix(START) for name in reference.state if name.startswith(START)):
        got, want = (side.state[name].astype(np.float64) - side.state[START + name] for side in (run, reference))
        stored = last * 2 * ROUNDOFF[DTYPE] * np.abs(reference.state[name])
        room = leeway(reference.state[LEAST + name], allowed, rate) + stored
        over = np.sign(got - want) * np.maximum(np.abs(got - want) - room, 0)
        verdict = judge(want + over, want, allowed, DTYPE)
        finding = finding_of(run, last, OPTIMIZER, group_of(name), f"change of {name}", verdict.error, allowed, "")
        yield replace(finding, detail=verdict.detail), verdict.error / allowed


def leeway(mean_square: np.ndarray, allowed: float, moved: float) -> np.ndarray:
    """Return how far a weight may be off because its gradients may err by what Table 2 allows.

    AdamW divides a gradient g by its own size, so an error e of it moves a step by up to 2 * e / |g| of the learning
    rate, and where |g| is smaller than its error the step is the sign of noise: up or down by all of it. As `judge`
    measures, e is relative to |g| or to the root mean square of the tensor, whichever is larger.

    Args:
        mean_square: the smallest of any step, whose root stands for |g|. moved: sum of the learning rates of all steps.
    """
    size = np.sqrt(mean_square.astype(np.float64))
    error = allowed * np.maximum(size, np.sqrt(np.mean(np.square(size))))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(2.0, 2.0 * error / size)
    return moved * np.where(size > 0, share, 0.0)  # a gradient that is always zero has no error
