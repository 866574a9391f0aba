"""This module lists the operators by family, and reports the results of `tc3 accuracy ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.accuracy.judge import NAMES, plain
from tools.accuracy.operators.movement import INDEX, LAYOUT
from tools.accuracy.operators.pointwise import ACTIVATION, ELEMENTWISE, OPTIMIZER
from tools.accuracy.operators.products import ATTENTIONS, MATMUL, MOE
from tools.accuracy.operators.reductions import LOSS, NORMALISE, ORDER, REDUCE
from tools.accuracy.operators.run import FAIL, NOT_RUNNABLE, PASS, Row
from tools.accuracy.operators.spec import Spec
from tools.files import page as markup
from tools.files.page import Cell

FAMILIES: dict[str, tuple[Spec, ...]] = {
    "matmul": MATMUL,
    "normalise": NORMALISE,
    "activation": ACTIVATION,
    "attention": ATTENTIONS,
    "moe": MOE,
    "loss": LOSS,
    "elementwise": ELEMENTWISE,
    "reduce": REDUCE,
    "order": ORDER,
    "index": INDEX,
    "layout": LAYOUT,
    "optimizer": OPTIMIZER,
}
SPECS: dict[str, Spec] = {spec.name: spec for specs in FAMILIES.values() for spec in specs}
SHORT = {long: short for short, long in NAMES.items()}
STYLES = {PASS: "green", FAIL: "bold red", NOT_RUNNABLE: "dim"}
LEGEND = (
    "percent: the largest share of its tolerance (report, Table 2) that any tensor used; exact: bit-identical; "
    "FAIL special: wrong for infinities, NaN or denormals only"
)
WORDS = {True: "passed", False: "failures found", None: "unknown"}
CLASSES = {PASS: "pass", FAIL: "fail", NOT_RUNNABLE: "none"}


@dataclass(frozen=True)
class Report:
    """A `Report` holds the results of `tc3 accuracy ops`, with a row for each check of an operator."""

    device: str  # the device on which the operators ran
    seed: int
    reruns: int
    rows: list[Row]

    def cells(self) -> dict[tuple[str, str], list[Row]]:
        """Return the checks of each combination of operator and data type, in the order in which they ran."""
        cells: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            cells.setdefault((row.op, row.dtype), []).append(row)
        return cells

    def with_status(self, status: str) -> list[Row]:
        """Return the rows of all checks that have this status."""
        return [row for row in self.rows if row.status == status]

    @property
    def passed(self) -> bool | None:
        """Return whether no check of an operator failed; return None, which means unknown, if no operator could run
        here.
        """
        if self.with_status(FAIL):
            return False
        return True if self.with_status(PASS) else None

    def counted(self) -> dict[str, int]:
        """Return for each status the number of combinations of operator and data type that have it."""
        found = [status_of(rows) for rows in self.cells().values()]
        return {status: found.count(status) for status in (PASS, FAIL, NOT_RUNNABLE)}

    def summary(self) -> str:
        """Return one line of text that counts the operators that passed, failed and could not run here."""
        counts, partly = self.counted(), sum(row.phase == "backward" for row in self.with_status(NOT_RUNNABLE))
        names = len({row.op for row in self.rows})
        text = f"{names} operator{'s' * (names != 1)} on {self.device}; by data type: {counts[PASS]} pass, "
        text += f"{counts[FAIL]} fail, {counts[NOT_RUNNABLE]} not runnable here"
        text += f"; of {partly} only the forward runs" if partly else ""
        return text + ("; nothing was computed, so the result is unknown" if self.passed is None else "")

    def as_json(self) -> dict[str, Any]:
        """Return the results of all checks as values fit for JSON; an infinite error is the string "inf"."""
        told = {"device": self.device, "seed": self.seed, "reruns": self.reruns}
        return told | {"passed": self.passed, "counts": self.counted(), "rows": [plain(row) for row in self.rows]}


def status_of(rows: list[Row]) -> str:
    """Return FAIL if a check failed, NOT_RUNNABLE if the forward pass did not run here, and PASS in all other cases."""
    if any(row.status == FAIL for row in rows):
        return FAIL
    return NOT_RUNNABLE if rows[0].status == NOT_RUNNABLE else PASS


def cell_text(rows: list[Row]) -> str:
    """Return the text of one cell of the table in which rows are operators and columns are data types."""
    status = status_of(rows)
    if status == NOT_RUNNABLE:
        return "-"
    if status == FAIL:
        return "FAIL special" if all(row.phase == "special" for row in rows if row.status == FAIL) else "FAIL"
    used = [row.error / row.tolerance for row in rows if row.tolerance and row.phase != "special"]
    text = f"{max(used):.0%}" if used else "exact"
    return f"{text}, forward only" if any(row.status == NOT_RUNNABLE for row in rows) else text


def failure_text(row: Row) -> str:
    """Return one line of text about a failed check of an operator."""
    sizes = "x".join(map(str, row.shape))
    which = f"{row.phase} {row.tensor}" if row.phase != "rerun" else "rerun"
    numbers = f"error {row.error:.3g}, tolerance {row.tolerance:.3g} at count {row.count}; " if row.outside else ""
    outside = f"{row.outside} elements; " if row.outside else ""
    return f"{row.op} {SHORT[row.dtype]} {which} [{sizes}]: {numbers}{outside}{row.detail}"


def not_runnable_lines(rows: list[Row]) -> list[str]:
    """Return one line for each operator that cannot run here: its types, the phase and MindSpore's message."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        grouped.setdefault((row.op, row.phase, row.detail), []).append(SHORT[row.dtype])
    return [
        f"{op} {', '.join(dtypes)}{' backward' if phase == 'backward' else ''}: {detail}"
        for (op, phase, detail), dtypes in grouped.items()
    ]


def print_report(report: Report, console: Console) -> None:
    """Write the results of all operators to `console`."""
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    table = Table("operator", *(SHORT[dtype] for dtype in dtypes))
    cells = report.cells()
    for op in dict.fromkeys(row.op for row in report.rows):
        found = (cells.get((op, dtype)) for dtype in dtypes)
        table.add_row(op, *(f"[{STYLES[status_of(rows)]}]{cell_text(rows)}[/]" if rows else "" for rows in found))
    console.print(table)
    console.print(LEGEND, style="dim", markup=False)
    for row in report.with_status(FAIL):
        console.print(f"fail: {failure_text(row)}", style="red", markup=False, soft_wrap=True)
    for text in not_runnable_lines(report.with_status(NOT_RUNNABLE)):
        console.print(f"not runnable: {text}", style="dim", markup=False, soft_wrap=True)
    console.print(report.summary(), markup=False, soft_wrap=True)


def list_lines() -> list[str]:
    """Return a line for every operator: its name for `tc3 accuracy ops`, its data types, family and source."""
    width = max(map(len, SPECS))
    return [
        f"{spec.name:{width}}  {' '.join(map(SHORT.__getitem__, spec.dtypes)):19}  {family:13}  {spec.source}".rstrip()
        for family, specs in FAMILIES.items()
        for spec in specs
    ]


def html(report: Report) -> str:
    """Return the results of all operators as an HTML page."""
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    cells = report.cells()
    family_of = {spec.name: family for family, specs in FAMILIES.items() for spec in specs}
    lines: list[list[str | Cell]] = []
    family = ""
    for op in dict.fromkeys(row.op for row in report.rows):
        if family_of[op] != family:
            family = family_of[op]
            lines.append([Cell(family, "group", len(dtypes) + 2)])
        found = (cells.get((op, dtype)) for dtype in dtypes)
        marks = [Cell(cell_text(rows), CLASSES[status_of(rows)]) if rows else Cell("") for rows in found]
        lines.append([op, *marks, Cell(SPECS[op].source, "note")])
    missing = not_runnable_lines(report.with_status(NOT_RUNNABLE))
    body = [
        markup.text(f"Operator accuracy: {WORDS[report.passed]}", "h1"),
        markup.text(f"{report.summary()}. Seed {report.seed}, {report.reruns} runs each."),
        markup.text(f"{LEGEND}; -: not runnable here, see below.", kind="note"),
        markup.table(["operator", *(SHORT[dtype] for dtype in dtypes), "source"], lines),
        markup.counted("Failures", [failure_text(row) for row in report.with_status(FAIL)]),
        markup.counted("Not runnable on this device, in MindSpore's words", missing),
        markup.folded(f"All {len(report.rows)} checks", _checks(report.rows)),
    ]
    return markup.page("Operator accuracy", body)


def _checks(rows: list[Row]) -> str:
    heads = ["operator", "type", "sizes", "phase", "tensor", "status", "count", "tolerance", "error"]
    lines = []
    for row in rows:
        sizes, numbers = "x".join(map(str, row.shape)), (f"{row.tolerance:.3g}", f"{row.error:.3g}")
        values = [row.op, SHORT[row.dtype], sizes, row.phase, row.tensor, row.status, row.count, *numbers]
        lines.append([str(value) for value in values])
    return markup.table(heads, lines)
