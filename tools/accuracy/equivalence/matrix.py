"""This module compares trainings under parallel strategies that run on CPU with trainings in one process, and shows the
results (the equivalence matrix) on a terminal, as JSON and as HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plugins.errors import RecipeError, did_you_mean
from tools.accuracy.equivalence.executed import ExecutedRuns
from tools.accuracy.equivalence.runs import RunFailedError, Runs, Trained, train
from tools.accuracy.equivalence.sharding import USUAL, Sharding, derive_sharded
from tools.accuracy.equivalence.strategies import (
    BASELINE,
    CASES,
    EXECUTED,
    NOT_EXECUTABLE,
    TRAINED,
    Case,
    Variant,
    baseline_variant,
    batch_of,
    cases_of,
    derive,
    draw_cases,
    one_worker,
)
from tools.accuracy.equivalence.trained import Comparison, Finding, compare_trained, finding_text
from tools.accuracy.judge import plain
from tools.check.check import check_recipe
from tools.files import page as markup
from tools.files.page import Cell
from tools.recipe.load import Recipe

PASS, KNOWN, FAIL, NONE = "pass", "known difference", "fail", "not compared"
STYLES = {PASS: "green", KNOWN: "yellow", FAIL: "bold red", NONE: "dim"}
CLASSES = {PASS: "pass", KNOWN: "pass", FAIL: "fail", NONE: "none"}
LEGEND = "used: the largest share of its tolerance that any number took up"
NOT_TRAINED = "Nothing was trained, so nothing was compared with golden numbers."


@dataclass(frozen=True)
class Row:
    """A `Row` is the result of comparing one parallel strategy with its baseline."""

    case: Case
    status: str  # PASS, FAIL, NONE (not compared, with a reason), or KNOWN (everything else passes)
    reason: str = ""
    tensors: int = 0  # the number of compared tensors
    used: float = 0.0  # the largest error as a share of its tolerance
    findings: tuple[Finding, ...] = ()  # in the order in which they arise; the first shows where the fault is

    @property
    def sharding(self) -> Sharding:
        """Return the parallel degrees of the strategy."""
        return self.case.sharding or Sharding(dp=self.case.variant.workers if self.case.variant else 1)

    def as_json(self) -> dict[str, Any]:
        """Return the row as values for JSON; an infinite number is "inf"."""
        findings = [plain(each) | {"meaning": each.meaning} for each in self.findings]
        found = {"name": self.case.name, "how": self.case.how, "what": self.case.what, "status": self.status}
        used = "inf" if math.isinf(self.used) else self.used
        return found | {"reason": self.reason, "tensors": self.tensors, "used": used, "findings": findings}


@dataclass
class Matrix:
    """A `Matrix` holds a row for each parallel strategy of one recipe, and the compared trainings by name."""

    recipe: str
    steps: int
    rows: list[Row] = field(default_factory=list)
    runs: dict[str, Trained] = field(default_factory=dict)

    def with_status(self, status: str) -> list[Row]:
        """Return the rows that have the given status."""
        return [row for row in self.rows if row.status == status]

    @property
    def passed(self) -> bool:
        """Return whether at least one strategy passed and no strategy failed."""
        return bool(self.with_status(PASS) + self.with_status(KNOWN)) and not self.with_status(FAIL)

    def summary(self) -> str:
        """Return one line that counts the strategies by status."""
        how = [row.case.how for row in self.with_status(PASS)]
        known, failed, left = (len(self.with_status(status)) for status in (KNOWN, FAIL, NONE))
        words = f"{self.recipe}: {len(how)} strategies pass ({how.count(TRAINED)} trained, "
        words += f"{how.count(EXECUTED)} executed), "
        words += f"{known} but for a known difference, " if known else ""
        return f"{words}{failed} fail, {left} not compared"


def choose(names: tuple[str, ...], base: Any = None, drawn: tuple[int, int, int] | None = None) -> list[Case]:
    """Return the strategies whose names or kinds are in `names`; without names, return all trained strategies, and only
    a few of the strategies that are executed as a sharded graph, because each of these takes minutes.

    With `base`, the recipe from `one_worker`, rows that need what its model lacks have a reason. With `drawn`, the
    arguments of `draw_cases`, layouts are drawn, too, or only the named ones of them. Raise RecipeError for an unknown
    name, or if none of the named strategies can be executed.
    """
    if drawn:
        layouts = draw_cases(base, *drawn)
        again = [case for case in layouts if case.name in names]
        others = tuple(name for name in names if name not in {case.name for case in layouts})
        return (choose(others, base) if others else []) + (again or layouts)
    known = [*CASES] if base is None else cases_of(base)
    words = [case.name for case in known] + [TRAINED, EXECUTED, BASELINE]
    for name in names:
        if name not in words:
            if name.startswith("draw_"):
                raise RecipeError(
                    f"--only {name}: this strategy is known only with the --draws, --seed and --most with which it "
                    f"was drawn; give these options, too"
                )
            raise RecipeError(f"--only {name}: there is no such strategy{did_you_mean(name, words)}; --list shows all")
    usual = [case for case in known if case.how != EXECUTED or case.name in USUAL]
    chosen = [case for case in known if {case.name, case.how} & set(names)] if names else usual
    if names and BASELINE not in names and all(case.how == NOT_EXECUTABLE for case in chosen):
        reasons = "; ".join(f"{case.name}: {case.reason}" for case in chosen)
        raise RecipeError(f"none of the strategies of --only can be compared on this machine ({reasons})")
    return chosen


def equivalence(
    path: str,
    names: tuple[str, ...],
    steps: int,
    work: Path,
    started: Callable[[str], None] = lambda name: None,
    drawn: tuple[int, int, int] | None = None,
    finished: Callable[[Row], None] = lambda row: None,
) -> Matrix:
    """Compare each strategy that `choose` returns with its baseline, in runs in the folder `work`. Call `started` with
    the name of each run, and `finished` with each row as soon as it is judged. Raise RecipeError if the
    recipe is wrong, if `names` contains a name that no strategy has, or if none of the named strategies can be executed
    on this machine.
    """
    base = one_worker(path)
    chosen = choose(names, base, drawn)
    matrix = Matrix(path, steps)
    runner = _Runner(base, steps, work, started, matrix.runs)
    executed = ExecutedRuns(base, steps, work, started)
    for row in itertools.chain(
        runner.alone() if BASELINE in names else (),
        (runner.row(case) for case in chosen if case.variant),
        (_executed_row(case, executed) for case in chosen if case.sharding),
        (Row(case, NONE, case.reason) for case in chosen if case.how == NOT_EXECUTABLE),
    ):
        matrix.rows.append(row)
        finished(row)
    return matrix


def refusal(recipe: Recipe) -> str:
    """Return why `tc3 train` would refuse a strategy's recipe (such as 7 experts on 2 ranks); return "" if it would
    accept the recipe.
    """
    errors = check_recipe(recipe).errors
    return f"this recipe cannot be trained so: {errors[0].words}" if errors else ""


class _Runner(Runs):
    """A `_Runner` trains variants of one recipe, each once: baselines when they are first needed."""

    def run(self, name: str, variant: Variant) -> Trained:
        """Return the results of the training of a variant, which runs only once; raise RunFailedError if it failed."""
        return self.once(name, lambda: train(derive(self.base, variant, self.steps, self.corpus()), self.work / name))

    def alone(self) -> list[Row]:
        """Train the strategy `baseline`; return a failed row if this fails, and otherwise no row."""
        try:
            self.run(BASELINE, Variant())
        except RunFailedError as error:
            return [Row(Case(BASELINE, "one worker", variant=Variant()), FAIL, str(error))]
        return []

    def row(self, case: Case) -> Row:
        """Return the comparison of one strategy with its baseline."""
        variant = case.variant
        assert variant is not None, "a trained case"
        baseline = baseline_variant(variant.against)

        def compare() -> Comparison:
            reference = self.run(variant.against, baseline)
            return compare_trained(self.run(case.name, variant), reference)

        misfit = Sharding(dp=variant.workers).misfit(batch_of(self.base))
        recipes = (derive(self.base, each, self.steps, self.corpus()) for each in (variant, baseline))
        return _row(case, misfit, recipes, compare)


def _executed_row(case: Case, runs: ExecutedRuns) -> Row:
    sharding = case.sharding
    assert sharding is not None, "an executed case"
    recipes = (
        derive_sharded(runs.base, each, runs.steps, runs.corpus(each.sample)) for each in (sharding, sharding.alone)
    )
    return _row(case, sharding.misfit(batch_of(runs.base)), recipes, lambda: runs.compare(case.name, sharding))


def _row(case: Case, misfit: str, recipes: Iterator[Recipe], compare: Callable[[], Comparison]) -> Row:
    """Return the comparison of a strategy, unless it does not fit the batch or `tc3 train` refuses its recipes."""
    if why := misfit or next(filter(None, map(refusal, recipes)), ""):
        return Row(case, NONE, why)
    try:
        comparison = compare()
    except RunFailedError as error:
        return Row(case, FAIL, str(error))
    status = FAIL if comparison.findings else KNOWN if comparison.known else PASS
    reason = comparison.reason or case.reason
    findings = comparison.findings or comparison.known
    return Row(case, status, reason, comparison.tensors, comparison.used, findings)


def failure_lines(row: Row, most: int = 3) -> list[str]:
    """Return a line for each of the first differences, or why the training failed."""
    if not row.findings:
        return [row.reason]
    lines = [finding_text(finding, row.sharding) for finding in row.findings[:most]]
    return lines + [f"and {len(row.findings) - most} more"] * (len(row.findings) > most)


def print_matrix(matrix: Matrix, golden: list[str], console: Console) -> None:
    """Write the results of all strategies to `console`."""
    table = _table("how", "compared", "used", "result")
    for row in matrix.rows:
        tensors, used = (str(row.tensors), share(row.used)) if row.tensors else ("-", "-")
        table.add_row(row.case.name, row.case.how, tensors, used, f"[{STYLES[row.status]}]{row.status}[/]")
    console.print(table)
    console.print(LEGEND, style="dim", markup=False)
    for row in matrix.with_status(FAIL):
        for line in failure_lines(row):
            console.print(f"fail: {row.case.name}: {line}", style="red", markup=False, soft_wrap=True)
    for row in matrix.with_status(KNOWN):
        for line in [row.reason, *failure_lines(row)]:
            console.print(f"known: {row.case.name}: {line}", style="yellow", markup=False, soft_wrap=True)
    for line in golden:
        console.print(f"golden: {line}", style="red", markup=False, soft_wrap=True)
    for row in matrix.with_status(NONE):
        console.print(f"not compared: {row.case.name}: {row.reason}", style="dim", markup=False, soft_wrap=True)
    console.print(matrix.summary(), markup=False, soft_wrap=True)


def print_verdict(row: Row, console: Console) -> None:
    """Write the result of one strategy to `console`, unless it was not compared."""
    if row.status == NONE:
        return
    compared = f", {row.tensors} compared, {share(row.used)} of a tolerance used" if row.tensors else ""
    what = f" ({row.case.what})" if row.case.sharding else ""
    verdict = f"{row.case.name}{what}: {row.status}{compared}"
    console.print(verdict, style=STYLES[row.status], markup=False, soft_wrap=True)
    for line in failure_lines(row) if row.status == FAIL else []:
        console.print(f"  {line}", style=STYLES[FAIL], markup=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table()
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")  # names of recipes are whole in 80 columns, too
    return table


def share(used: float) -> str:
    """Return a share of a tolerance in per cent, or as a power of ten if it is tiny."""
    return f"{used:.0%}" if used >= 0.005 else f"{used:.0e}"


def print_list(console: Console) -> None:
    """Write every strategy to `console`, with the reason if it cannot be tested."""
    table = _table("how", "what")
    for case in CASES:
        table.add_row(case.name, case.how, case.what)
    console.print(table)
    for reason in dict.fromkeys(case.reason for case in CASES if case.reason):
        names = ", ".join(case.name for case in CASES if case.reason == reason)
        console.print(f"{names}: {reason}", style="dim", markup=False, soft_wrap=True)


def as_html(matrix: Matrix, golden: list[str]) -> str:
    """Return an HTML page with the results of all strategies."""
    passed = matrix.passed and not golden
    body = [
        markup.text(f"Equivalence of strategies: {'passed' if passed else 'differences found'}", "h1"),
        markup.text(f"{matrix.summary()}; {matrix.steps} steps each."),
        markup.text(LEGEND, kind="note"),
        markup.table(
            ("strategy", "how", "what", "compared", "used", "result"), chain.from_iterable(map(_page_rows, matrix.rows))
        ),
        markup.counted("Differences from the golden numbers", golden)
        if matrix.runs
        else markup.text(NOT_TRAINED, kind="note"),
    ]
    return markup.page("Equivalence", body)


def _page_rows(row: Row) -> list[list[str | Cell]]:
    """Return the table row of a strategy, and below it rows with remarks about the strategy."""
    compared, used = (str(row.tensors), share(row.used)) if row.tensors else ("-", "-")
    result = Cell(row.status, CLASSES[row.status])
    findings = failure_lines(row, len(row.findings)) if row.findings or row.status == FAIL else []
    notes = findings if row.status == FAIL else [*filter(None, [row.reason]), *findings]
    lines: list[list[str | Cell]] = [[row.case.name, row.case.how, row.case.what, compared, used, result]]
    return lines + [["", Cell(note, "note", 5)] for note in notes]
