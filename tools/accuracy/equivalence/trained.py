"""This module compares two MindFormers trainings of one recipe, and lists the differences in the order in which they
arise, each with its usual cause (section 3.2.2 of the TeleChat3-MoE report).

After each step a router's bias rises by a fixed rate for an expert that got less than its share of the choices of all
ranks, and falls by it for one that got more. A token at a tie between two experts may choose the other one, and so
change the direction for an expert whose load is close to its share. Therefore the loads are recorded, too: the biases
of two runs must be equal where the loads of both require the same direction, and each bias must have moved as its own
loads require.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from plugins.sealed_checkpoint.router_state import AVERAGES
from plugins.step_record.plan import MOMENTS
from tools.accuracy.equivalence.runs import (
    BIAS,
    KEPT,
    LEAST,
    LOAD,
    LOSSES,
    START,
    Trained,
    group_norms,
    group_of,
    weight_of,
)
from tools.accuracy.equivalence.sharding import Sharding
from tools.accuracy.judge import ROUNDOFF, facts, judge, tolerance
from tools.process.host import compress

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"  # the phases of a step
DTYPE = "float32"  # the column of Table 2 by which both sides are judged
# how much larger Muon's five steps make the smallest directions of a momentum, and so the rounding of their numbers
GROWTH = 3.4445**5
# share of a step's choices that ties may move between experts: as what they do to the auxiliary loss
MOVED = 2e-3
AT_SHARE = 1e-5  # relative; a float32 mean of ones and zeros errs by less, one choice of a step weighs more
# the auxiliary loss counts tokens: one at a tie between experts that goes to the other moves it by 2e-4
# (seen with the EP-4 mini, tests/training/test_expert_parallel.py)
COUNTED = {"load_balancing_loss": 2e-3}
Ranks = tuple[int, ...]
Number = float | None
CLIPPED = 1e-3  # a gradient is clipped if its norm shrinks by more than this share of it


@dataclass(frozen=True)
class Finding:
    """A `Finding` is a number or tensor that differs from that of the reference training."""

    step: int  # the number of the step, counted from 1
    phase: str  # FORWARD, BACKWARD or OPTIMIZER
    module: str
    tensor: str
    error: float  # as `judge` measures it
    allowed: float  # by Table 2
    ranks: tuple[int, ...]  # the ranks of the whole run whose part is wrong
    detail: str  # a description of the worst element, or of the fault

    @property
    def used(self) -> float:
        """Return the error as a share of its tolerance."""
        return self.error / self.allowed if self.allowed else math.inf if self.error else 0.0

    @property
    def meaning(self) -> str:
        """Return the usual cause of a difference in this tensor, on the condition that no earlier tensor differs."""
        for phase, name, text in facts("causes")["equivalence"]:
            if phase == self.phase and self.tensor.startswith(name):
                return text
        return "this module's own computation"


class At(NamedTuple):
    """An `At` names a step and a phase of a training; its methods make the findings (differences) of that phase."""

    run: Trained
    step: int
    phase: str

    def found(
        self, module: str, tensor: str, detail: str, error: float = np.inf, allowed: float = 0.0, ranks: Ranks = ()
    ) -> Finding:
        """Return a finding about the given ranks, or about all ranks if none are given."""
        ranks = ranks or tuple(range(self.run.workers))
        return Finding(self.step, self.phase, module, tensor, error, allowed, ranks, detail)

    def judged(self, weight: str, tensor: str, got: np.ndarray, want: np.ndarray, allowed: float) -> Finding:
        """Return the comparison of a weight's tensor, such as a moment, with that of the reference training."""
        verdict = judge(got, want, allowed, DTYPE)
        return self.found(group_of(weight), tensor, verdict.detail, verdict.error, allowed)

    def number(self, module: str, tensor: str, got: Number, want: Number, allowed: float, of: Number = None) -> Finding:
        """Return the comparison of two numbers; the error is relative to `of` (default: `want`), and infinite if one of
        the numbers is not finite.
        """
        got, want = (np.nan if value is None else value for value in (got, want))
        finite = np.isfinite(got) and np.isfinite(want)
        error = abs(got - want) / max(abs(want if of is None else of), 1e-30) if finite else np.inf
        return self.found(module, tensor, f"the number is {got:.9g}, but must be {want:.9g}", error, allowed)


@dataclass(frozen=True)
class Comparison:
    """A `Comparison` holds the differences between all compared numbers and tensors of two trainings."""

    tensors: int  # the number of compared tensors
    used: float  # the largest error as a share of its tolerance
    findings: tuple[Finding, ...]  # in the order of execution; the first shows where the fault is
    known: tuple[Finding, ...] = ()  # known differences, which are not judged
    reason: str = ""  # what the known differences come from


def describe_ranks(ranks: Iterable[int], sharding: Sharding) -> str:
    """Return a text that names ranks and the coordinates that they have in common, such as ``ranks 2-3 (dp 1)``."""
    chosen = sorted(ranks)
    # the ranks of a tensor-parallel group have consecutive numbers
    sizes = {"pp": sharding.pp, "dp": sharding.dp, "cp": sharding.cp, "tp": sharding.tp}
    if len(chosen) == math.prod(sizes.values()):
        return "all ranks" if len(chosen) > 1 else "the only rank"
    places = np.array(np.unravel_index(chosen, tuple(sizes.values())))
    found = {axis: sorted(set(row)) for axis, row in zip(sizes, places.tolist(), strict=True)}
    common = ""
    if math.prod(len(values) for values in found.values()) == len(chosen):
        held = [f"{axis} {compress(values)}" for axis, values in found.items() if len(values) < sizes[axis]]
        common = f" ({','.join(held)})"
    return f"rank{'s' * (len(chosen) > 1)} {compress(chosen)}{common}".replace(",", ", ")


def finding_text(finding: Finding, sharding: Sharding) -> str:
    """Return one line of text about a difference."""
    where = f"{finding.phase} of step {finding.step}, {finding.module}: {finding.tensor}"
    if finding.error > finding.allowed:
        numbers = f"error {finding.error:.3g}, allowed {finding.allowed:.3g}; {finding.detail}"
    else:
        numbers = finding.detail
    return f"{where}, {describe_ranks(finding.ranks, sharding)}: {numbers}. Usually: {finding.meaning}"


def _bias_rows(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield for each router with a bias its loads of each step, how the biases moved, where they ended."""
    for name in (name.removeprefix(BIAS) for name in reference.state if name.startswith(BIAS)):
        loads, wants = (side.state[LOAD + name].astype(np.float64) for side in (run, reference))
        for step, (load, want) in enumerate(zip(loads, wants, strict=True), 1):
            moved = float(np.abs(load - want).sum() / 2 / want.sum())
            moved = moved if np.isfinite(moved) else np.inf
            detail = f"{moved:.2%} of the choices are others"
            yield At(run, step, OPTIMIZER).found(group_of(name), "loads of experts", detail, moved, MOVED)
        got, bias = run.state[BIAS + name], reference.state[BIAS + name]
        directions = np.sign(np.diff(got, axis=0)) == _directions(loads)
        moves = directions | _at_share(loads)
        yield _router(run, name, "moves of the bias", moves, "not towards its share of the load")
        alike = (_directions(loads) == _directions(wants)) & ~_at_share(loads) & ~_at_share(wants)
        equal = (got[1:] == bias[1:]) | ~np.logical_and.accumulate(alike, axis=0)
        yield _router(run, name, "bias", equal & (got[0] == bias[0]), "another than the reference's")


def _directions(loads: np.ndarray) -> np.ndarray:
    """Return +1 where an expert got less than its share, so that its bias has to rise; -1 where it got more."""
    return np.where(_at_share(loads), 0.0, np.sign(loads.mean(-1, keepdims=True) - loads))


def _at_share(loads: np.ndarray) -> np.ndarray:
    """Return for each expert whether rounding decides the direction of its bias."""
    share = loads.mean(-1, keepdims=True)
    return np.abs(loads - share) <= AT_SHARE * share


def _router(run: Trained, router: str, tensor: str, right: np.ndarray, what: str) -> Finding:
    """Return a comparison of a router, which is a finding if an entry of `right` [steps, experts] is False."""
    steps, experts = np.nonzero(~right)
    first = int(steps[0]) + 1 if len(steps) else len(right)
    detail = f"experts {sorted(set(experts[steps == first - 1].tolist()))}: {what}" if len(steps) else ""
    return At(run, first, OPTIMIZER).found(group_of(router), tensor, detail, float(len(steps)))


def compare_trained(run: Trained, reference: Trained) -> Comparison:
    """Return the differences between a training and its reference training, in the order in which they arise."""
    if other := other_length(run, reference):
        return other
    if lacking := sorted(reference.state.keys() - run.state.keys()):
        last = At(run, len(run.steps), OPTIMIZER)
        found = (last.found(group_of(weight_of(name)), name, "the run did not record it") for name in lacking)
        return Comparison(len(reference.state), math.inf, tuple(found))
    data = (*samples(run, reference), *starts(run, reference))
    rows = list(_rows(run, reference))
    findings = [finding for finding in rows if not finding.error <= finding.allowed]
    used = max(finding.used for finding in rows)
    return Comparison(len(rows), used, (*data, *findings, *rates(run, reference), *copies(run), *unclipped(run)))


def other_length(run: Trained, reference: Trained) -> Comparison | None:
    """Return a comparison that fails if two trainings have different numbers of steps; return None if the numbers are
    equal.
    """
    if len(run.steps) == len(reference.steps):
        return None
    detail = f"the number of steps is {len(run.steps)}, but must be {len(reference.steps)}"
    return Comparison(1, math.inf, (At(run, 1, FORWARD).found("data", "steps", detail),))


def samples(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield a finding for each step that read another set of samples, whatever their order and ranks."""
    for step, (mine, theirs) in enumerate(zip(run.samples, reference.samples, strict=True), 1):
        if mine != theirs:
            other = len(set(mine) ^ set(theirs)) // 2
            detail = f"{other} of {len(theirs)} samples of the step are others"
            yield At(run, step, FORWARD).found("data", "samples", detail)


def shared(run: Trained, reference: Trained, prefix: str) -> list[str]:
    """Return the names, without the prefix, of the tensors that both trainings recorded and whose names begin with a
    prefix.
    """
    return [name.removeprefix(prefix) for name in reference.state if name.startswith(prefix) and name in run.state]


def starts(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield a finding for each weight whose initial values differ."""
    for name in shared(run, reference, START):
        if not np.array_equal(run.state[START + name], reference.state[START + name]):
            yield At(run, 1, FORWARD).found(group_of(name), f"start of {name}", "other weights")


def rates(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Yield a finding for each step in which the learning rates differ."""
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        one, two = (math.nan if (rate := each["learning_rate"]) is None else rate for each in (mine, theirs))
        if not math.isclose(one, two, rel_tol=1e-6):
            yield At(run, step, OPTIMIZER).found(
                "optimizer", "learning rate", f"the rate is {one:.9g}, but must be {two:.9g}"
            )


def copies(run: Trained) -> Iterator[Finding]:
    """Yield a finding for each tensor whose copies differ between ranks."""
    for name, ranks in run.differing.items():
        where = group_of(weight_of(name))
        yield At(run, len(run.steps), OPTIMIZER).found(where, name, "copies differ", ranks=ranks)


def unclipped(run: Trained) -> Iterator[Finding]:
    """Yield a finding if no step clipped the gradients, because clipping is then not tested."""
    norms = [
        (step["global_norm"], np.sqrt(sum(norm**2 for norm in after.values())))
        for step, after in zip(run.steps, run.norms, strict=True)
    ]
    if not any(after < (1 - CLIPPED) * before for before, after in norms):
        before = max(before for before, _ in norms)
        detail = f"no step was clipped (norms up to {before:.4g}), so that a wrong clipping would change nothing"
        yield At(run, len(norms), BACKWARD).found("gradients", "clipping", detail)


def _rows(run: Trained, reference: Trained) -> Iterator[Finding]:
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        forward, backward = phases(run, step)
        for name in (name for name in LOSSES if name != "global_norm" and (mine[name], theirs[name]) != (None, None)):
            allowed = COUNTED.get(name, mean_tolerance(theirs["tokens"]))
            yield forward.number("loss", name, mine[name], theirs[name], allowed)
        allowed, norm = tolerance(DTYPE, theirs["tokens"]), "global_norm"
        yield backward.number("gradients", "global norm", mine[norm], theirs[norm], allowed)
        yield from group_rows(backward, reference, allowed)
    yield from state_rows(run, reference, reference.steps[0]["tokens"])
    yield from _bias_rows(run, reference)


def phases(run: Trained, step: int) -> tuple[At, At]:
    """Return the phase in which the cause of a wrong loss lies, and the phase for a wrong gradient; in steps after step
    1 both are the optimizer.
    """
    return At(run, step, FORWARD if step == 1 else OPTIMIZER), At(run, step, BACKWARD if step == 1 else OPTIMIZER)


def group_rows(at: At, reference: Trained, allowed: float) -> list[Finding]:
    """Return the comparison of the gradient norm of each part of the model in one step."""
    found, wanted = (group_norms(side.norms[at.step - 1]) for side in (at.run, reference))
    return [at.number(group, "gradient norm", found.get(group), want, allowed) for group, want in wanted.items()]


def mean_tolerance(tokens: int) -> float:
    """Return the tolerance of a mean over `tokens` tokens. It is the tolerance of the sum (Table 2 of the TeleChat3-MoE
    report), divided by the root of `tokens`, because the errors of single tokens partly cancel.

    At the start of training a loss hardly depends on the model (it is the logarithm of the vocabulary size), so the
    full tolerance of Table 2 would hide a wrong mask.
    """
    return tolerance(DTYPE, tokens) / tokens**0.5


def state_rows(run: Trained, reference: Trained, tokens: int) -> Iterator[Finding]:
    """Yield comparisons of the last moments and averages, and of each weight's total change; the tolerances are those
    of sums over `tokens` terms.
    """
    last, allowed = len(reference.steps), tolerance(DTYPE, tokens)
    rate = sum(step["learning_rate"] for step in reference.steps)

    def room(weight: str) -> np.ndarray:
        stored = last * 2 * ROUNDOFF[DTYPE] * np.abs(reference.state[weight])
        squares = reference.state.get(LEAST + weight)  # Muon divides by none
        return stored if squares is None else stored + leeway(squares, allowed, rate)

    def within(got: np.ndarray, want: np.ndarray, room: np.ndarray) -> np.ndarray:
        return want + np.sign(got - want) * np.maximum(np.abs(got - want) - room, 0)

    for name in (name for name in reference.state if name.startswith(KEPT)):
        most = 2 * allowed if name.startswith(MOMENTS[1]) else allowed  # a square errs twice as much as its root
        weight = name.split(".", 1)[1]
        got, want = run.state[name], reference.state[name]
        if name.startswith(AVERAGES):  # a sum of weights, whose updates may each err as below
            got, want = got.astype(np.float64), want.astype(np.float64)
            got = within(got, want, last * room(weight))
        yield At(run, last, OPTIMIZER).judged(weight, name, got, want, most)
    for name in (name.removeprefix(START) for name in reference.state if name.startswith(START)):
        got, want = (side.state[name].astype(np.float64) - side.state[START + name] for side in (run, reference))
        most = allowed + GROWTH * 2 * ROUNDOFF[DTYPE] * (LEAST + name not in reference.state)
        yield At(run, last, OPTIMIZER).judged(name, f"change of {name}", within(got, want, room(name)), want, most)


def leeway(mean_square: np.ndarray, allowed: float, moved: float) -> np.ndarray:
    """Return, for each element of a weight, the largest error that can arise if the element's gradients have errors
    within the tolerance of Table 2 (TeleChat3-MoE report).

    AdamW divides a gradient g by its own size, so an error e of g changes an update by up to 2 * e / |g| of the
    learning rate; below its error, noise decides the sign of the update. As in `judge`, e is relative to |g| or to the
    root mean square of the tensor, whichever is larger. |g| is the root of the smallest mean square of any step;
    `moved` is the sum of all learning rates.
    """
    size = np.sqrt(mean_square.astype(np.float64))
    error = allowed * np.maximum(size, np.sqrt(np.mean(np.square(size))))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(2.0, 2.0 * error / size)
    return moved * np.where(size > 0, share, 0.0)  # a gradient that is always zero has no error
