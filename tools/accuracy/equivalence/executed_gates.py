"""Compare an executed sharding with one process of the same graph: losses, norms, gradients by group, optimizer state.

Losses are held to 1e-5 absolute and global norms to 5e-5 relative, tighter than those of trained runs: both sides are
the same graph from the same weights. Gradients go by Table 2, as there; the state after the last step by its row for
the tokens of all steps, which moments accumulate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from plugins.finite_loss.plan import undefined_parts
from tools.accuracy.equivalence.compare import BACKWARD, DTYPE, FORWARD, OPTIMIZER, Comparison, Finding
from tools.accuracy.equivalence.runs import BIAS, FIRST, LOSSES, START, Trained, group_norms, group_of, weight_of
from tools.accuracy.equivalence.sharding import Sharding
from tools.accuracy.equivalence.trained import finding_of, state_rows, unclipped
from tools.accuracy.judge import judge
from tools.accuracy.tolerance import tolerance

LOSS = 1e-5  # absolute
NORM = 5e-5  # relative
SURE = 4  # times what groups' norms are allowed: a wrong global norm that they would show
MOVES = 0.05  # of the moves of a router's biases: a token at a tie turns that of an expert at its share
TWICE = "embedding.word_embeddings.weight"  # its gradient is counted once more by a pipeline with an MTP layer


def compare_executed(run: Trained, reference: Trained, sharding: Sharding) -> Comparison:
    """Findings in the order in which a difference arises; known stock differences apart."""
    if len(run.steps) != len(reference.steps):
        detail = f"{len(run.steps)} steps, should be {len(reference.steps)}"
        return Comparison(1, np.inf, (finding_of(run, 1, FORWARD, "data", "steps", np.inf, 0.0, detail),))
    rows = [*_numbers(run, reference, sharding), *_tensors(run, reference)]
    wrong = list(_starts(run, reference))
    wrong += [finding for finding, _ in rows if not finding.error <= finding.allowed]
    wrong += list(_copies(run))
    wrong += [] if sharding.known else list(unclipped(run))
    known = list(_counted_twice(run, reference)) if sharding.known else []
    return Comparison(len(rows), max(share for _, share in rows), tuple(wrong), tuple(known))


def _starts(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Weights that do not start as those of one process; they are drawn whole, and then cut."""
    for name in (name for name in reference.state.keys() & run.state.keys() if name.startswith(START)):
        if not np.array_equal(run.state[name], reference.state[name]):
            weight = name.removeprefix(START)
            yield finding_of(run, 1, FORWARD, group_of(weight), f"start of {weight}", np.inf, 0.0, "other weights")


def _numbers(run: Trained, reference: Trained, sharding: Sharding) -> Iterator[tuple[Finding, float]]:
    """Losses and norms of each step: (what would be a finding if it is over what is allowed, share of that)."""
    micro_steps = sharding.accumulate or 2  # 0: of a rank's samples each
    undefined = undefined_parts(sharding.pp, micro_steps, float(sharding.aux))
    left_out = ["global_norm", *["load_balancing_loss"] * len(undefined)]
    losses = [name for name in LOSSES if name not in left_out]
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        phase = FORWARD if step == 1 else OPTIMIZER
        told = [name for name in losses if (mine[name], theirs[name]) != (None, None)]
        for name in told:  # a loss that has no other part is that of the language model
            yield _row(run, step, phase, "loss", name if told[1:] else LOSSES[0], mine[name], theirs[name], LOSS, 1.0)
        phase = BACKWARD if step == 1 else OPTIMIZER
        norm = _norm_with_share(run, step, theirs["global_norm"]) if sharding.known else theirs["global_norm"]
        whole = _row(run, step, phase, "gradients", "global norm", mine["global_norm"], norm, NORM, norm)
        found, allowed = group_norms(run.norms[step - 1]), tolerance(DTYPE, theirs["tokens"])
        groups = [
            _row(run, step, phase, group, "gradient norm", found.get(group), want, allowed, want)
            for group, want in group_norms(reference.norms[step - 1]).items()
        ]
        clipped = not sharding.known
        if step == 1:
            yield from sorted(_first_gradients(run, reference, allowed), key=lambda row: -row[1])
        yield _placed(*whole, allowed, clipped and all(share <= 1 for _, share in groups))
        yield from groups


def _first_gradients(run: Trained, reference: Trained, allowed: float) -> Iterator[tuple[Finding, float]]:
    """Every weight's gradient of step 1, element by element: the one that errs most is nearest to the fault."""
    for name in (name for name in reference.state.keys() & run.state.keys() if name.startswith(FIRST)):
        verdict, weight = judge(run.state[name], reference.state[name], allowed, DTYPE), name.removeprefix(FIRST)
        numbers = (verdict.error, allowed, verdict.detail)
        yield finding_of(run, 1, BACKWARD, group_of(weight), f"gradient of {weight}", *numbers), verdict.error / allowed


def _placed(norm: Finding, share: float, allowed: float, alike: bool) -> tuple[Finding, float]:
    """A wrong global norm is the loss's where clipping leaves each group's gradient as it should be.

    Both sides are clipped to one norm: only a factor that all gradients share is lost in that. `allowed`: of groups.
    """
    if alike and SURE * allowed < norm.error < np.inf:
        norm = replace(norm, module="loss", tensor="gradient of the loss", detail=f"global norm {norm.detail}")
    return norm, share


def _row(
    run: Trained,
    step: int,
    phase: str,
    module: str,
    tensor: str,
    got: float | None,
    want: float | None,
    allowed: float,
    size: float | None,
) -> tuple[Finding, float]:
    """A number whose error is told relative to `size`; one that is missing, or not finite, is wrong."""
    number, right, scale = (np.nan if value is None else value for value in (got, want, size))
    finite = np.isfinite(number) and np.isfinite(right)
    error = abs(number - right) / max(abs(scale), 1e-30) if finite else np.inf
    detail = f"{number:.9g}, should be {right:.9g}"
    return finding_of(run, step, phase, module, tensor, error, allowed, detail), error / allowed


def _tensors(run: Trained, reference: Trained) -> Iterator[tuple[Finding, float]]:
    """Weights and moments after the last step; one that only one side has is wrong."""
    last = len(reference.steps)
    for name in sorted(run.state.keys() ^ reference.state.keys()):
        side = "no checkpoint of the run holds it" if name in reference.state else "one process has none"
        yield finding_of(run, last, OPTIMIZER, group_of(weight_of(name)), name, np.inf, 0.0, side), np.inf
    if run.state.keys() == reference.state.keys():
        yield from state_rows(run, reference, sum(step["tokens"] for step in reference.steps))
    for name in (name for name in reference.state.keys() & run.state.keys() if name.startswith(BIAS)):
        yield _bias_row(run, name, run.state[name], reference.state[name])


def _bias_row(run: Trained, name: str, got: np.ndarray, want: np.ndarray) -> tuple[Finding, float]:
    """A router's biases after each step [steps, experts]; how many moves may be others stands at MOVES."""
    moves, right = (np.sign(np.diff(side, axis=0, prepend=np.zeros_like(side[:1]))) for side in (got, want))
    others = float(np.mean(moves != right))
    detail = f"{others:.1%} of the moves of experts' biases are others"
    group = group_of(name.removeprefix(BIAS))
    return finding_of(run, len(want), OPTIMIZER, group, "moves of the bias", others, MOVES, detail), others / MOVES


def _copies(run: Trained) -> Iterator[Finding]:
    for name, ranks in run.differing.items():
        where = group_of(weight_of(name))
        yield finding_of(run, len(run.steps), OPTIMIZER, where, name, np.inf, 0.0, "copies differ", ranks)


def _norm_with_share(run: Trained, step: int, norm: float | None) -> float | None:
    """What a pipeline with an MTP layer takes for the global norm, from that of one process.

    The last stage's share of the embedding's gradient is in the first stage's, and counts once more
    (docs/stock-differences.md).
    """
    return None if norm is None else float(np.hypot(norm, run.shares[step - 1]))


def _counted_twice(run: Trained, reference: Trained) -> Iterator[Finding]:
    """Global norms that are not those of one process."""
    for step, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=True), 1):
        norm, right = mine["global_norm"], theirs["global_norm"]
        share, want = run.shares[step - 1], _norm_with_share(run, step, right)
        if norm is not None and right is not None:
            detail = f"{norm:.9g}, of one process {right:.9g}; with the share {share:.6g} of the last stage {want:.9g}"
            phase, error = BACKWARD if step == 1 else OPTIMIZER, abs(norm - right) / right
            yield finding_of(run, step, phase, "gradients", "global norm", error, NORM, detail)
