"""Compare two training runs of one recipe: data, losses, gradient norms by group, optimizer state, routers' biases.

In the order in which a difference arises: other samples explain everything; a loss of step 1 is the forward pass, a
gradient norm of step 1 the backward pass, the state (and the losses of later steps) the optimizer (report 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tools.accuracy.equivalence.bias import bias_rows
from tools.accuracy.equivalence.compare import BACKWARD, DTYPE, FORWARD, OPTIMIZER, Comparison, Finding
from tools.accuracy.equivalence.runs import LEAST, LOSSES, MOMENTS, START, Trained, group_norms, group_of, weight_of
from tools.accuracy.judge import judge
from tools.accuracy.promotion import ROUNDOFF
from tools.accuracy.tolerance import tolerance

# the auxiliary loss counts tokens: one at a tie between experts that goes to the other moves it by 2e-4
# (seen with the EP-4 mini, tests/training/test_expert_parallel.py)
COUNTED = {"load_balancing_loss": 2e-3}
CLIPPED = 1e-3  # a gradient is clipped if its norm shrinks by more than this share of it


def compare_trained(run: Trained, reference: Trained) -> Comparison:
    """Findings in the order above; `used` is the largest share of a tolerance."""
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
    """A finding of a run; of all its ranks unless some are named."""
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
    """How far a weight may be off because its gradients may err by what Table 2 allows.

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
