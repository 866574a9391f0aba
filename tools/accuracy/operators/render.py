"""The report on a terminal: a table of operators by data type, then every failure, then what cannot run here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.accuracy.operators.report import SHORT, Report, cell_text, failure_text, not_runnable_lines, status_of
from tools.accuracy.operators.run import FAIL, NOT_RUNNABLE, PASS
from tools.accuracy.operators.specs.table import FAMILIES, SPECS

STYLES = {PASS: "green", FAIL: "bold red", NOT_RUNNABLE: "dim"}
LEGEND = (
    "percent: the largest share of its tolerance (report, Table 2) that any tensor used; exact: bit-identical; "
    "FAIL special: wrong for infinities, NaN or denormals only"
)


def print_report(report: Report, console: Console) -> None:
    """Write everything to `console`."""
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    table = Table("operator", *(SHORT[dtype] for dtype in dtypes))
    cells = report.cells()
    for op in dict.fromkeys(row.op for row in report.rows):
        line = []
        for dtype in dtypes:
            rows = cells.get((op, dtype))
            line.append(f"[{STYLES[status_of(rows)]}]{cell_text(rows)}[/]" if rows else "")
        table.add_row(op, *line)
    console.print(table)
    console.print(LEGEND, style="dim", markup=False)
    for row in report.with_status(FAIL):
        console.print(f"fail: {failure_text(row)}", style="red", markup=False, soft_wrap=True)
    for text in not_runnable_lines(report.with_status(NOT_RUNNABLE)):
        console.print(f"not runnable: {text}", style="dim", markup=False, soft_wrap=True)
    console.print(report.summary(), markup=False, soft_wrap=True)


def list_lines() -> list[str]:
    """A line for every operator: its name, which `tc3 accuracy ops` takes, its data types, family and source."""
    width = max(map(len, SPECS))
    lines = []
    for family, specs in FAMILIES.items():
        for spec in specs:
            dtypes = " ".join(SHORT[dtype] for dtype in spec.dtypes)
            lines.append(f"{spec.name:{width}}  {dtypes:19}  {family:13}  {spec.source}".rstrip())
    return lines
