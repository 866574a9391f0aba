"""This module compares two dumps tensor by tensor, in the order of execution, by the tolerances of Table 2 of the
TeleChat3-MoE report, and names the usual cause of the earliest difference, which may have caused all later differences.
Within a step, the tensors of the weights come first, followed by those of the batch, the forward pass and the backward
pass.

A difference in the first step has arisen before any update. If a later step is the first to differ, the optimizer has
moved weights, or the code between two steps has moved a state.

msprobe's own `compare` is not used: its result is "pass" for a bfloat16 cast, for a softmax scaled by 1.01, and for an
API that one side lacks, and it takes many times as long as reading the data (benchmarks/accuracy_compare.py).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from plugins.errors import DataError, TC3Error
from tools.accuracy.dumps.read import BACKWARD, FORWARD, PHASES, STATE, WEIGHTS, Dump, Entry
from tools.accuracy.dumps.rows import (
    DTYPE,
    EXTRA,
    MISSING,
    NAN,
    NOTHING,
    SHAPE,
    UPDATE,
    Pair,
    Row,
    Trained,
    judged,
    pairs,
)
from tools.accuracy.dumps.updates import ONCE, Updates, judge_updates
from tools.accuracy.judge import plain, systematic
from tools.recipe.load import load_recipe
from tools.recipe.view import View

STRUCTURE = (MISSING, EXTRA, SHAPE)
ROLES = ("input", "parameters", "output")  # of one call, in order of time
RECIPE = "recipe.yaml"  # beside the steps: the recipe of the dumped run, as `tc3 accuracy dump` writes it
WIDE = 0.01  # a tolerance that needs to be said
BATCH = 64  # tensors that a thread takes at a time
THREADS = min(8, os.cpu_count() or 1)  # NumPy and the reads let go of the interpreter


def first_findings(findings: Iterable[Row]) -> dict[str, Row | None]:
    """Return the earliest finding of each phase. Findings are ordered by step, within a step by call, and within a call
    by rank.
    """
    found: dict[str, Row | None] = dict.fromkeys(PHASES)
    for row in sorted(findings, key=lambda row: (row.step, row.order, row.rank)):
        found[row.phase] = found[row.phase] or row
    return found


def meaning(rows: list[Row], trained_known: bool) -> str:
    """Return what the earliest finding usually means, and where to look for its cause.

    Args:
        rows: the compared tensors, in the order of execution.
        trained_known: whether trained weights are distinguished from other state; otherwise all parameters are
            `weights`.
    """
    findings = [row for row in rows if _differs(row)]
    if not findings:
        return _agree(rows, [row for row in rows if row.kind])
    start, step = (min(row.step for row in some) for some in (rows, findings))
    rows, findings = [row for row in rows if row.step == step], [row for row in findings if row.step == step]
    first = first_findings(findings)
    weights, state, forward, backward = (first[phase] for phase in (WEIGHTS, STATE, FORWARD, BACKWARD))
    arrived = _arrived(rows)
    if weights and weights.role == "parameters" and (trained_known or not _follows(weights, forward, backward)):
        return _initial(weights, rows, arrived) if step == start else _moved(weights, rows)
    if arrived:
        return _data(arrived, step == start)
    if state and not _follows(state, forward, backward):
        return _state(state, step == start)
    if forward:
        return _forward(forward, step == start)
    if backward:
        when = "the first step" if step == start else f"step {step}"
        return (
            f"The forward pass of {when} agrees, its backward pass does not: {origin(backward)}. Look at how that "
            "gradient is computed, scaled or reduced."
        )
    assert weights is not None, "state without a forward finding follows nothing"
    return _moved(weights, rows)  # a kernel of the optimizer


def _differs(row: Row) -> bool:
    """Return whether a finding is a difference, and not the same NaN in both dumps."""
    return bool(row.kind) and not (row.kind == NAN and row.error <= row.tolerance)


def _agree(rows: list[Row], findings: list[Row]) -> str:
    """Return a sentence about dumps without a difference; `findings` are the same NaN in both."""
    unknown = sum(row.by == NOTHING for row in rows)
    if unknown == len(rows):
        return "No tensor could be judged."
    weak = sum(row.by == "statistics" for row in rows)
    how = " by max, min, mean and norm" if weak else ""
    how = f" ({weak} of {len(rows)} are judged{how} only)" if 0 < weak < len(rows) - unknown else how
    how += f" of those that could be judged; {unknown} of {len(rows)} are unknown" if unknown else ""
    if findings:
        return f"Both dumps have NaN, first {findings[0].name}: look at what computes it. Nothing else diverges{how}."
    return f"No tensor diverges{how}."


def origin(row: Row) -> str:
    """Return a text about the call or update that computed a tensor."""
    if row.kind == UPDATE:
        return f"the update of {row.place}"
    if row.role == "input":
        around = _path(row).rpartition(".")[0]
        inside = f" in {around}" if around else ""
        return f"what arrives at {row.place} is wrong already, made{inside} between the calls that were dumped"
    return f"{row.place} is the first whose result differs"


def _path(row: Row) -> str:
    return row.place.split(" ")[0]


def _follows(parameter: Row, forward: Row | None, backward: Row | None) -> bool:
    """Return whether a value differs before the call that uses this parameter, other than in the parameter's cell."""
    if backward and backward.order < parameter.order:
        return True  # an optimizer's state
    if forward is None or forward.role not in ROLES:
        return False
    if (forward.order, ROLES.index(forward.role)) > (parameter.order, ROLES.index(parameter.role)):
        return False
    return not (forward.role == "input" and _path(forward).startswith(f"{_path(parameter)}."))


def _arrived(rows: list[Row]) -> Row | None:
    """Return the first part of a step's batch that differs: an input of the outermost or first call."""
    # behind the backward pass: an optimizer's cells
    turn = min((row.order for row in rows if row.phase == BACKWARD), default=math.inf)
    forward = [row for row in rows if row.phase == FORWARD and row.order < turn]
    if not forward:
        return None
    root = min((_path(row) for row in forward), key=len)
    if all(f"{_path(row)}.".startswith(f"{root}.") for row in forward):
        inputs = [row for row in forward if _path(row) == root]
    else:
        inputs = [row for row in forward if row.order == forward[0].order]
    return next((row for row in inputs if _differs(row) and row.role == "input"), None)


def _initial(row: Row, rows: list[Row], arrived: Row | None) -> str:
    if row.kind in STRUCTURE:
        return f"The sides have not the same weights: {row.name} ({row.detail}). Look at the model's structure first."
    if row.kind == DTYPE:
        return f"The weights have other data types, first {row.place} ({row.detail}): look at params_dtype first."
    weights = [each for each in rows if each.phase == WEIGHTS and each.role == "parameters"]
    wrong = sum(map(_differs, weights))
    both = " The batch differs too: another seed, or another recipe, explains both." if arrived else ""
    return (
        f"The weights differ before any update ({wrong} of {len(weights)}), first {row.place}: look at initialisation, "
        f"seed or the loaded checkpoint before any arithmetic.{both}"
    )


def _moved(row: Row, rows: list[Row]) -> str:
    wrong = [each for each in rows if each.phase == WEIGHTS and _differs(each)]
    weights = sum(each.phase == WEIGHTS and each.role == row.role for each in rows)
    cause, times = Counter(each.cause for each in wrong).most_common(1)[0]
    where = (
        f"Forward and backward agree until the weights of step {row.step} differ ({len(wrong)} of {weights}), first "
        f"{row.place}: the optimizer: "
    )
    if cause and 2 * times > len(wrong):
        example = next(each for each in wrong if each.cause == cause)
        return (
            f"{where}{cause}: {example.detail}. The same in {times} of the {len(wrong)}; look at its value and groups."
        )
    return (
        f"{where}weight decay and its groups, learning rate, betas, epsilon, clipping, or the reduction of gradients "
        "between backward and optimizer."
    )


def _data(row: Row, initial: bool) -> str:
    look = "look at the dataset's order, tokens and masks, not at arithmetic"
    if initial:
        return f"The inputs of the first step differ ({row.name}): {look}."
    return f"Everything agrees until step {row.step}, whose inputs differ ({row.name}): {look}, and at its seed."


def _state(row: Row, initial: bool) -> str:
    kept = f"{row.name.rpartition('.parameters.')[2]} of {row.place}"
    if row.kind in STRUCTURE:
        return f"The sides do not keep the same state: {kept} ({row.detail}). Look at the model's structure first."
    what = f"{kept}, which no gradient trains (a counter, a bias, a cache)"
    if initial:
        return (
            f"The first that differs is {what}; nothing before it does. It started differently (the loaded checkpoint, "
            "its initial value), or this call fills it differently."
        )
    return (
        f"Everything agrees until {what}, differs in step {row.step}. Look at what moves it between two steps (a "
        "callback, such as the one that moves a router's bias, and its rate), and at how this call fills it."
    )


def _forward(row: Row, initial: bool) -> str:
    if row.kind in (MISSING, EXTRA):
        return f"The sides do not call the same: {row.name} ({row.detail}). Look at the model's structure first."
    if "dropout" in row.place.lower() and row.role == "output":
        return f"{row.place} gets the same and gives another result: look at the seed and at the share that it drops."
    if initial:
        return (
            f"The initial loss is affected: {origin(row)}. Look at the forward computation there: the operator's "
            "precision, or a structure that is not the same."
        )
    return (
        f"Everything agrees until the forward pass of step {row.step}, its weights and inputs too: {origin(row)}. Look "
        "at what is drawn at random there, and at state that is not a weight and was not dumped."
    )


@dataclass(frozen=True)
class Report:
    """A `Report` is a comparison of two dumps: a row for each tensor, in the order of execution."""

    golden: str  # its path
    bench: str
    level: str  # of msprobe, as `task`
    task: str
    marked: bool  # whether both dumps state that they are complete; msprobe's own dumps do not state this
    rows: list[Row]
    judged: Updates = field(default_factory=Updates)  # the numbers of judged updates of weights, see `Updates`
    trained_known: bool = True  # whether the dumps show which parameters are trained by a gradient
    layouts: str = ""  # the parallel layouts of both dumps, if their recipes give different ones

    @property
    def updates(self) -> int:
        """Return the number of weight updates that were judged."""
        return self.judged.judged

    @cached_property
    def findings(self) -> list[Row]:
        """Return the rows that did not pass."""
        return [row for row in self.rows if row.kind]

    @property
    def passed(self) -> bool:
        """Return whether at least one tensor was compared, and all passed."""
        return any(row.by != NOTHING for row in self.rows) and not self.findings

    @cached_property
    def first(self) -> dict[str, Row | None]:
        """Return the earliest finding of each phase."""
        return first_findings(self.findings)

    def summary(self) -> str:
        """Return one line with the numbers of tensors, of identical tensors and of findings."""
        exact = sum(not row.error and row.by != NOTHING for row in self.rows)
        weak = sum(not row.error and row.by == "statistics" for row in self.rows)
        how = (" by statistics" if weak == exact else f" ({weak} by statistics)") if weak else ""
        unknown = sum(row.by == NOTHING and not row.kind for row in self.rows)
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in self.findings).items())
        text = f"{len(self.rows)} tensors ({self.level}, {self.task}), {exact} identical{how}, "
        text += f"{len(self.findings)} findings"
        return text + (f": {kinds}" if kinds else "") + (f"; {unknown} unknown" if unknown else "")

    def notes(self) -> list[str]:
        """Return sentences about the limits of the comparison."""
        found = []
        weak = sum(row.by == "statistics" for row in self.rows)
        if weak and self.task == "statistics":
            found.append("judged by max, min, mean and norm only: values that changed places or cancel are not seen")
        elif weak:
            found.append(
                f"{weak} tensors without values judged by max, min, mean and norm only: values that changed places or "
                "cancel are not seen"
            )
        unseen = [row for row in self.rows if row.by == NOTHING and not row.kind]
        if silent := [row.name for row in unseen if not row.detail]:
            words = "tensors have neither values nor statistics that say enough of them, so they are unknown"
            found.append(f"{len(silent)} {words}: {silent[0]}")
        if hidden := [row for row in unseen if row.detail]:
            found.append(f"{len(hidden)} tensors are unknown: {hidden[0].name}: {hidden[0].detail}")
        found += self._about_updates()
        widest = max((row.tolerance for row in self.rows if row.by in ("values", "statistics")), default=0.0)
        if widest > WIDE:
            found.append(
                f"Table 2 lets single values be off by up to {100 * widest:.2g} % where sums are long; what scales a "
                f"whole tensor is found from {100 * systematic('bfloat16')[0]:.2g} % on, given some hundred values"
            )
        if self.layouts:
            found.append(
                f"the dumps are of different parallel layouts ({self.layouts}), but are paired rank by rank, so that "
                "differences may be intended; `tc3 accuracy equivalence` compares layouts"
            )
        if not self.marked:
            found.append("a dump without tc3_dump.json does not say whether it is whole")
        return found

    def _about_updates(self) -> list[str]:
        judged, found = self.judged, []
        if self.updates > judged.exact:
            least = "they moved the same on both sides, or not at all in GOLDEN"
            if judged.least:
                share = 100 * median(judged.least)
                least = f"one that is off by less than {share:.2g} % of itself is not seen (median)"
            count = self.updates - judged.exact
            found.append(f"{count} updates of weights judged by how max, min, mean and norm moved: {least}")
        for reason, count in judged.unknown.items():
            found.append(f"{count} updates of weights unknown: {reason}" + "; --task tensor tells" * (reason != ONCE))
        if not self.updates and not judged.unknown:
            found.append("updates not judged, so that the optimizer is not: that takes weights in two steps")
        return found

    def meaning(self) -> str:
        """Return a sentence that says what the earliest difference usually means."""
        said, layouts = meaning(self.rows, self.trained_known), self.layouts if any(map(_differs, self.rows)) else ""
        return f"The parallel layouts differ ({layouts}), which may be all. {said}" if layouts else said

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as values for JSON, without rows that passed."""
        return {
            **{name: getattr(self, name) for name in ("golden", "bench", "level", "task", "passed")},
            "tensors": len(self.rows),
            "updates": self.updates,
            "updates_unknown": dict(self.judged.unknown),
            "updates_seen_from": median(self.judged.least) if self.judged.least else None,
            "summary": self.summary(),
            "notes": self.notes(),
            "first": {phase: plain(row) if row else None for phase, row in self.first.items()},
            "meaning": self.meaning(),
            "findings": [plain(row) for row in self.findings],
        }


def finding_text(row: Row) -> str:
    """Return one line of text about a finding."""
    rank = f" rank {row.rank}" if row.rank else ""
    numbers = f"error {row.error:.3g}, tolerance {row.tolerance:.3g} at count {row.count}; " if row.shape else ""
    return f"step {row.step}{rank} {row.name}: {row.kind}: {numbers}{row.detail}"


def compare_dumps(
    golden: Dump, bench: Dump, promoted: bool = False, progress: Callable[[int, int], object] = lambda done, total: None
) -> Report:
    """Compare two dumps tensor by tensor. If `promoted` is True, a tensor whose data type is wider in `golden` than in
    `bench` is not reported as a difference (TeleChat3-MoE report, section 3.1 (1)). `progress` is called with two
    numbers: how many tensors have been compared, and how many there are. Raise DataError if the dumps are not of the
    same kind, if one dump is broken, or if neither dump holds a tensor.
    """
    check_alike(golden, bench)
    found: list[Pair] = []
    entries: list[Entry] = []
    for step in golden.steps:
        for rank in golden.ranks:
            sides = golden.entries(step, rank), bench.entries(step, rank)
            entries += [*sides[0], *sides[1]]
            found += pairs(step, rank, *sides)
    trained = Trained(entries)
    batches = [found[start : start + BATCH] for start in range(0, len(found), BATCH)]
    rows: list[Row | None] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for batch in pool.map(lambda batch: [judged(pair, promoted, trained) for pair in batch], batches):
            rows += batch
            progress(len(rows), len(found))
    rows, updates = judge_updates(found, rows)
    sound = golden.marker is not None and bench.marker is not None
    kept = [row for row in rows if row is not None]
    if not kept:
        raise DataError(
            f"{golden.folder} and {bench.folder} hold no tensor, so there is nothing to compare; make both dumps again"
        )
    return Report(
        str(golden.folder),
        str(bench.folder),
        golden.level,
        golden.task,
        sound,
        kept,
        updates,
        trained.known,
        _layouts(golden, bench),
    )


def _layouts(golden: Dump, bench: Dump) -> str:
    found = []
    for dump in (golden, bench):
        try:
            view = View(load_recipe(dump.folder / RECIPE))
            degrees = {"dp": view.dp, "tp": view.tp, "pp": view.pp, "cp": view.cp, "ep": view.ep}
        except TC3Error:
            return ""
        found.append(" ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "one process")
    return "" if found[0] == found[1] else f"GOLDEN {found[0]}, BENCH {found[1]}"


def check_alike(golden: Dump, bench: Dump) -> None:
    """Raise DataError if the two dumps cannot be compared."""
    for name, ours, theirs in (("level", golden.level, bench.level), ("task", golden.task, bench.task)):
        if ours != theirs:
            raise DataError(
                f"{golden.folder} was dumped with --{name} {ours}, but {bench.folder} with --{name} {theirs}: dump "
                f"both with --{name} {ours}"
            )
    if len(golden.ranks) != len(bench.ranks):
        raise DataError(
            f"{golden.folder} has {len(golden.ranks)} rank(s), but {bench.folder} has {len(bench.ranks)}: the "
            "command pairs dumps rank by rank; for two parallel layouts of one model use `tc3 accuracy equivalence`"
        )
    if golden.ranks != bench.ranks:
        raise DataError(
            f"{golden.folder} has ranks {golden.ranks}, but {bench.folder} has ranks {bench.ranks}; only dumps of "
            "the same ranks can be compared"
        )
    if golden.steps != bench.steps:
        raise DataError(
            f"{golden.folder} has steps {golden.steps}, but {bench.folder} has {bench.steps}: "
            "dump both with the same --steps"
        )
    if list(golden.weights) != list(bench.weights):
        raise DataError(
            f"{golden.folder} has weights of steps {list(golden.weights)}, but {bench.folder} has weights of steps "
            f"{list(bench.weights)}: dump both with this version of `tc3 accuracy dump`"
        )
