"""This module defines the comparisons of each stage of `tc3 accuracy align` (section 3.2.1 of the TeleChat3-MoE
report), and finds the first module, gradient or parameter group that differs (`explain_*`), with NumPy only.

A difference over a stage's tolerance is `undecided`, which is neither passed nor failed, if two runs of the reference
whose initial weights differ in the last bit are as far apart, or if a token that chose another expert explains it. A
value that is not finite fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tools.accuracy.align.sides import Arrays, Record
from tools.accuracy.judge import facts
from tools.accuracy.reference.start import Hyper

PASSED, FAILED, UNDECIDED = "passed", "failed", "undecided"
LOGITS, GRADIENT, UPDATE, LOSS, NORM = 1e-5, 1e-4, 1e-4, 1e-4, 1e-4
SINGLE_UPDATE, BIAS = 1e-3, 1e-6  # of one step from equal states: a few of Adam's smallest gradients change sign
TIES = 1e-3  # share of the choices that ties may move
# What a moved choice may do, with room above what was measured: choices of `recipes/mini/pretrain.yaml` at near-ties,
# 1 to 12 of 12,288, moved by force in the reference in steps 2 to 20, a layer at a time.
MOVED_LOSS = 0.3  # nats of one choice, on the sum over a step's tokens (measured: up to 0.036)
MOVED_UPDATE = 4.0  # times the root of the share that moved: relative L2 of the step's update (measured: up to 1.7)
DRIFT = 0.02  # of a step's loss, in runs that parted at a tie (measured: up to 0.0034 within 20 steps)
_NOTHING = 1e-37  # the tolerance beside a zero
NONE = 0.5  # the tolerance of a count that must be 0
FLOOR_FACTOR = 4  # rounding may hit the other side harder than the reference by so much


@dataclass(frozen=True)
class Row:
    """A `Row` is one comparison between two trainings: the error, or the number of differences, with its tolerance."""

    name: str
    error: float  # the error between the two trainings, in the measure that `measure` names
    tolerance: float
    measure: str
    floor: float = 0.0  # the error that rounding causes in the reference, in the same measure
    detail: str = ""
    excuse: float = 0.0  # the largest error that counts as undecided for the reason that `detail` names

    @property
    def status(self) -> str:
        """Return PASSED, UNDECIDED (rounding, or the reason in `detail`, may explain the error) or FAILED."""
        if not (np.isfinite(self.error) and np.isfinite(self.floor)):
            return FAILED
        if self.error <= self.tolerance:
            return PASSED
        return UNDECIDED if self.rounding or self.error <= self.excuse else FAILED

    @property
    def counted(self) -> bool:
        """Return whether `error` is a number of differences, of which there must be none."""
        return self.tolerance == NONE

    @property
    def rounding(self) -> bool:
        """Return whether the error is at most `FLOOR_FACTOR` times what rounding causes in the reference."""
        return self.error <= FLOOR_FACTOR * self.floor


@dataclass
class Stage:
    """A `Stage` holds the comparisons of one stage; `reason` says why it did not run, or what its failure means."""

    name: str
    rows: list[Row] = field(default_factory=list)
    reason: str = ""
    state: str = ""

    @property
    def status(self) -> str:
        """Return `state` if it is set (the stage did not run), and otherwise the worst status of its comparisons."""
        if self.state:
            return self.state
        found = {row.status for row in self.rows}
        return next((status for status in (FAILED, UNDECIDED) if status in found), PASSED)

    @property
    def worst(self) -> Row | None:
        """Return the comparison with the stage's status whose error is the largest share of its tolerance."""
        rows = [row for row in self.rows if row.status == self.status] or self.rows
        return max(rows, key=lambda row: row.error / row.tolerance, default=None)


def forward(ours: Record, theirs: Record, floor: Record | None) -> Stage:
    """Compare the logits and losses of the first batch, computed from the same weights and tokens (stage 2)."""

    def given(kind: str, one: Arrays, other: Arrays) -> list[Row]:
        rows = []
        for name in {**one, **other}:
            mine, theirs = one.get(name), other.get(name)
            comparable = mine is not None and theirs is not None and mine.shape == theirs.shape
            differing = float(np.count_nonzero(mine != theirs)) if comparable else float("inf")
            rows.append(Row(f"{kind} {name}", differing, NONE, "elements that differ"))
        return rows

    rows = [row for row in given("initial", ours.initial, theirs.initial) if row.status != PASSED]
    rows = rows or [Row("initial weights", 0, NONE, "elements that differ")]
    rows += given("batch", ours.batch, theirs.batch)
    sides = ours, theirs, floor
    logits = _each(sides, lambda side: side.trace.get("logits"))
    rows.append(_between("logits", largest, logits, LOGITS, "largest |difference|"))
    for name in ("lm_loss", "mtp_loss", "loss"):
        if name not in ours.curve and name not in theirs.curve:
            continue
        first = _each(sides, lambda side, name=name: _first_of(side, name))
        rows.append(_between(f"step 1 {name}", largest, first, LOSS / 10, "|difference|"))
    return Stage("forward", rows)


def _each(sides: Iterable[Record | None], part: Callable[..., np.ndarray | None]) -> list[np.ndarray | None]:
    return [None if side is None else part(side) for side in sides]


def _first_of(side: Record, name: str) -> np.ndarray | None:
    return side.curve[name][:1] if name in side.curve else None


def backward(ours: Record, theirs: Record, floor: Record | None) -> Stage:
    """Compare the first step's gradient of every weight, and the global norm of all gradients (stage 3)."""
    sides = ours, theirs, floor
    rows = []
    if "global_norm" in ours.curve or "global_norm" in theirs.curve:
        norms = _each(sides, lambda side: _first_of(side, "global_norm"))
        rows.append(_between("global norm", relative, norms, NORM, "relative"))
    for name in {**ours.gradient, **theirs.gradient}:
        gradients = _each(sides, lambda side, name=name: side.gradient.get(name))
        rows.append(_between(name, relative, gradients, GRADIENT, "relative L2"))
    return Stage("backward", rows)


def update(ours: Record, theirs: Record, floor: Record | None) -> Stage:
    """Compare the change of each weight in the first step whose learning rate is above 0; the error is relative to the
    size of the change (stage 4).

    Adam divides a gradient by its own size: if the gradient of an element consists only of rounding errors, the element
    moves by a full step in either direction. A weight that differs only in its last place does not count as different:
    a norm's weight near 1 moves by only a few such places in one step.
    """
    steps = [None if side is None else moved(side) for side in (ours, theirs, floor)]
    rows = []
    for name in {**(steps[0] or {}), **(steps[1] or {})}:
        trio = [None if side is None else side.get(name) for side in steps]
        want = trio[1]
        if want is not None:
            trio = [None if side is None else _snapped(side, want, theirs.updated[name]) for side in trio]
        rows.append(_between(name, trimmed, trio, UPDATE, "relative L2 of the step"))
    return Stage("optimizer", rows)


def curve(ours: Record, theirs: Record, floor: Record | None) -> Stage:
    """Compare the losses and learning rates of all steps, and the results of each step that the reference computed
    separately, from MindFormers' state before the step (stage 5).

    A difference in the last bit sends a token at a tie to another expert, and from there on two right runs of a mixture
    of experts drift apart. Their losses are undecided, up to DRIFT, if every single step agrees and most of the steps
    have no token at a tie.
    """
    rows = _single_steps(ours, theirs) if theirs.single else []
    routed = bool(rows) and theirs.single["choices"].any()
    sound = routed and all(row.status != FAILED for row in rows) and _ties_are_rare(theirs)
    for step in range(max(len(ours.curve["loss"]), len(theirs.curve["loss"]))):
        trio = _each((ours, theirs, floor), lambda side, at=slice(step, step + 1): side.curve["loss"][at])
        row = _between(f"loss of step {step + 1}", largest, trio, LOSS, "|difference|")
        rows.append(replace(row, excuse=DRIFT, detail=row.detail or "each step by itself agrees") if sound else row)
    rates = _each((ours, theirs, floor), lambda side: side.curve["learning_rate"])
    rows.append(_between("learning rates", relative, rates, 1e-6, "relative"))
    return Stage("steps", rows)


def _ties_are_rare(theirs: Record) -> bool:
    """Return whether choices moved in fewer than half of the steps; a wrong router moves some in all."""
    return bool(np.count_nonzero(theirs.single["moved"]) * 2 < len(theirs.single["moved"]))


def _single_steps(ours: Record, theirs: Record) -> list[Row]:
    """Return rows that compare the loss, update and router biases of each step, computed from MindFormers' state.

    Few choices that moved to another expert are ties, and excuse as much of loss and update as they can change; many,
    or some in most steps, are a fault. The biases are not excused: the reference moves them by our counts.
    """
    single, rows, rare = theirs.single, [], _ties_are_rare(theirs)
    for index in range(len(single["loss"])):
        at, zero = slice(index, index + 1), np.zeros(1)
        moved, choices, tokens = (float(single[key][index]) for key in ("moved", "choices", "tokens"))
        ties = max(2.0, TIES * choices)
        share = moved / choices if choices else 0.0  # a model without routers makes none
        by_loss, by_update = rare * MOVED_LOSS * moved / max(tokens, 1.0), rare * MOVED_UPDATE * float(np.sqrt(share))
        found = [
            Row("choices", moved, ties, "choices of an expert that moved"),
            Row("loss", largest(single["loss"][at], ours.curve["loss"][at]), LOSS / 10, "|difference|", excuse=by_loss),
            Row("update", largest(single["update"][at], zero), SINGLE_UPDATE, "relative L2", excuse=by_update),
            Row("router bias", largest(single["bias"][at], zero), BIAS, "|difference|"),
        ]
        name = f"step {index + 1} by itself"
        detail = f"{moved:.0f} of {choices:.0f} choices of an expert differ" if moved else ""
        rows += [replace(row, name=f"{name}: {row.name}", detail=detail) for row in found]
    return rows


def moved(record: Record) -> Arrays:
    """Return for each weight its updated value minus its initial value, in float64."""
    return {
        name: record.updated[name].astype(np.float64) - record.initial[name]
        for name in record.initial
        if name in record.updated
    }


def largest(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest absolute difference of two arrays' elements; return inf if a difference is not finite, or if
    the shapes differ.
    """
    if got.shape != want.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0.0)
    return float(error) if np.isfinite(error) else float("inf")


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Return |got - want| / |want| in the L2 norm; return 0 if both norms are zero, and inf for NaN or different
    shapes.
    """
    return _share(_length(got, want), want)


def _share(apart: float, want: np.ndarray) -> float:
    size = float(np.linalg.norm(want.astype(np.float64)))
    if apart == 0.0:
        return 0.0
    return apart / size if size and np.isfinite(apart) else float("inf")


def _snapped(step: np.ndarray, want: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return `step` with `want`'s value wherever they differ by no more than one unit in the last place of `weight`."""
    if step.shape != want.shape:
        return step
    unit = np.spacing(np.abs(weight.astype(np.float32))).astype(np.float64)
    return np.where(np.abs(step - want) <= unit, want, step)


def trimmed(got: np.ndarray, want: np.ndarray) -> float:
    """Return `relative` without the thousandth of the elements that differ most."""
    if got.shape != want.shape or not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")  # NaN would be among the worst, and left out
    squares = np.sort(np.square(got.astype(np.float64) - want), axis=None)
    return _share(float(np.sqrt(squares[: squares.size - squares.size // 1000].sum())), want)


def _length(got: np.ndarray, want: np.ndarray) -> float:
    """Return |got - want| in the L2 norm; inf for NaN or another shape."""
    apart = float(np.linalg.norm(got.astype(np.float64) - want)) if got.shape == want.shape else float("inf")
    return apart if np.isfinite(apart) else float("inf")


def _between(
    name: str, measure: Callable[[np.ndarray, np.ndarray], float], sides: list, tolerance: float, words: str
) -> Row:
    """Return a row for (MindFormers, the reference, its nudged run or None); what only one side has is a failure.

    Where the reference is zero nothing is relative to it: only what rounding makes of that zero excuses anything.
    """
    got, want, nudged = sides
    if got is None or want is None:
        return Row(name, float("inf"), tolerance, words, detail="only one side has it")
    if measure in (relative, trimmed) and not want.any():
        measure, tolerance, words = _length, _NOTHING, "L2; the reference's is 0"
    floor = measure(nudged, want) if nudged is not None else 0.0
    told = [f"{side} is not finite" for side, array in
            (("ours", got), ("the reference", want), ("its nudged run", nudged if nudged is not None else want))
            if not np.isfinite(array).all()]  # fmt: skip
    return Row(name, measure(got, want), tolerance, words, floor, "; ".join(told))


def first_difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], order: list[str]) -> list[Row]:
    """Return a comparison of each traced module in `order` that both trainings recorded."""
    both = (name for name in order if name in ours and name in theirs)
    return [Row(name, relative(ours[name], theirs[name]), GRADIENT, "relative L2") for name in both]


def explain_forward(stage: Stage, ours: Record, theirs: Record, rope: int) -> str:
    """Return a sentence about the first module whose output differs; `rope` is the number of dimensions, the last ones
    of a head, that RoPE rotates.
    """
    bad = [row.name for row in stage.rows if row.status == FAILED]
    given = [name for name in bad if name.startswith(("initial", "batch"))]
    if given:
        return f"the two sides were not given the same: {', '.join(given[:3])}"
    layers = 1 + max((int(name.split(".")[1]) for name in ours.trace if name.startswith("layers.")), default=-1)
    known = facts("causes")["align"]
    modules = [f"layers.{layer}.{module}" for layer in range(layers) for module in known]
    rows = first_difference(ours.trace, theirs.trace, ["embedding", *modules, "final_norm", "logits"])
    first = next((row for row in rows if row.status == FAILED), None)
    if first is None:
        return "every module agrees: the loss itself differs (mask, labels, auxiliary losses)"
    if not first.name.startswith("layers."):
        return f"first difference: {first.name} (relative {first.error:.1e})"
    _, layer, module = first.name.split(".")
    where, meaning = known[module]
    if module in ("query", "key"):
        meaning = _rotated_only(ours.trace[first.name], theirs.trace[first.name], rope) or meaning
    return f"first difference: layer {layer}, {where} (relative {first.error:.1e}): {meaning}"


def explain_backward(stage: Stage, ours: Record, theirs: Record) -> str:
    """Return a sentence about the wrong gradients: their number, and which of them the backward pass computes first."""
    bad = [row for row in stage.rows if row.status == FAILED]
    weights = [row for row in bad if row.name != "global norm"]
    if not weights:
        return "every gradient agrees, the global norm does not: how the norm is taken"
    last = weights[-1]  # rows are in forward order
    both = last.name in ours.gradient and last.name in theirs.gradient
    factor = _factor(ours.gradient[last.name], theirs.gradient[last.name]) if both else f": {last.detail}"
    count = sum(row.name != "global norm" for row in stage.rows)
    text = f"{len(weights)} of {count} gradients differ; backward meets {last.name} first"
    return f"{text} ({last.error:.1e} relative{factor})"


def explain_update(stage: Stage, ours: Record, theirs: Record, hyper: Hyper) -> str:
    """Return a sentence about the wrong updates, and whether weight decay or the learning rate explains them."""
    bad = [row.name for row in stage.rows if row.status == FAILED]
    biases = [name for name in bad if re.search(r"e_score_correction_bias|expert_bias", name)]
    weights = [name for name in bad if name not in biases]
    if not weights:
        return f"weights agree; the router's bias does not: {biases[0]} (the aux-free update)"
    steps = moved(ours), moved(theirs)
    if lacking := [name for name in weights if name not in steps[0] or name not in steps[1]]:
        return f"only one side moves {', '.join(lacking[:3])}"
    groups = {
        "weight_decay": [name for name in weights if ours.initial[name].ndim > 1],
        "no_weight_decay": [name for name in weights if ours.initial[name].ndim <= 1],
    }
    said = []
    for group, names in groups.items():
        if names:
            name = max(names, key=lambda each: relative(steps[0][each], steps[1][each]))
            said.append(f"group {group}: {len(names)} differ, most {name}{_cause(name, steps, ours, hyper)}")
    return "; ".join(said)


def explain_curve(stage: Stage) -> str:
    """Return a sentence about the first step whose loss differs, and what this usually means."""
    first = next(row for row in stage.rows if row.status == FAILED)
    meaning = "state that one step does not show"
    if "by itself" in first.name:
        meaning = "wrong from equal weights, moments and tokens: what only this step does (schedule, tokens, bias)"
    return f"{first.name} is the first to differ, by {first.error:.1e}: {meaning}"


def _rotated_only(ours: np.ndarray, theirs: np.ndarray, rope: int) -> str:
    """Return a sentence if only the rotated dimensions of the heads differ; "" otherwise."""
    if ours.shape != theirs.shape or not 0 < rope < ours.shape[-1]:
        return ""
    plain, rotated = (relative(ours[..., part], theirs[..., part]) for part in (np.s_[:-rope], np.s_[-rope:]))
    if plain > 1e-4 or rotated <= 1e-4:
        return ""
    first = relative(ours[:, :1, ..., -rope:], theirs[:, :1, ..., -rope:])
    everywhere, later = "from the first position on: RoPE's offset, layout or scale", "not at position 0: RoPE's angles"
    return f"only the rotated dimensions differ, {everywhere if first > 1e-4 else later}"


def _cause(name: str, steps: tuple, ours: Record, hyper: Hyper) -> str:
    """Return whether the difference of two steps is along the weight (decay) or along the step (learning rate)."""
    apart = (steps[0][name] - steps[1][name]).ravel()
    rate = hyper.rates[hyper.first_update - 1]
    along_weight = _cosine(apart, ours.initial[name].ravel())
    if abs(along_weight) > 0.9:
        decay = -float(apart @ ours.initial[name].ravel()) / float(np.square(ours.initial[name]).sum()) / rate
        return f": decayed by {decay:+.3g} more than on the other side (the recipe's weight_decay is {hyper.decay:g})"
    return _factor(steps[0][name], steps[1][name])


def _factor(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Return such as ``, 1.0100 times the other side's`` if one array is a multiple of the other; "" otherwise."""
    if ours.shape != theirs.shape or _cosine(ours.ravel(), theirs.ravel()) < 0.999:
        return ""
    return f", {np.linalg.norm(ours) / np.linalg.norm(theirs):.4f} times the other side's"


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    size = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one.astype(np.float64) @ other / size) if size and np.isfinite(size) else 0.0
