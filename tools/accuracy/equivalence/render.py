"""The equivalence matrix on a terminal, and as one HTML file without any link to elsewhere."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.table import Table

from tools.accuracy.equivalence.matrix import FAIL, KNOWN, NONE, PASS, Matrix, Row, failure_lines
from tools.accuracy.equivalence.strategies import cases
from tools.accuracy.pages import STYLE

STYLES = {PASS: "green", KNOWN: "yellow", FAIL: "bold red", NONE: "dim"}
CLASSES = {PASS: "pass", KNOWN: "pass", FAIL: "fail", NONE: "none"}
LEGEND = "used: the largest share of its tolerance (report, Table 2) that any number took up"


NOT_TRAINED = "<p class=note>Nothing was trained, so nothing was compared with golden numbers.</p>"


def print_matrix(matrix: Matrix, golden: list[str], console: Console) -> None:
    """Write everything to `console`."""
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
    """A row as soon as it is judged; what is not executable here has nothing to wait for."""
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
        table.add_column(column)
    return table


def share(used: float) -> str:
    """A share of a tolerance: per cent, or its power of ten where it is next to nothing."""
    return f"{used:.0%}" if used >= 0.005 else f"{used:.0e}"


def print_list(console: Console) -> None:
    """Every strategy: how it is tried, what it is, and why not otherwise."""
    table = _table("how", "what")
    for case in cases():
        table.add_row(case.name, case.how, case.what)
    console.print(table)
    for reason in dict.fromkeys(case.reason for case in cases() if case.reason):
        names = ", ".join(case.name for case in cases() if case.reason == reason)
        console.print(f"{names}: {reason}", style="dim", markup=False, soft_wrap=True)


def as_html(matrix: Matrix, golden: list[str]) -> str:
    """The whole page."""
    rows = "".join(_row(row) for row in matrix.rows)
    passed = matrix.passed and not golden
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Equivalence</title><style>{STYLE}</style></head><body>
<h1>Equivalence of strategies: {"passed" if passed else "differences found"}</h1>
<p>{escape(matrix.summary())}; {matrix.steps} steps each.</p><p class=note>{escape(LEGEND)}</p>
<table><tr><th>strategy</th><th>how</th><th>what</th><th>compared</th><th>used</th><th>result</th></tr>{rows}</table>
{_list("Differences from the golden numbers", golden) if matrix.runs else NOT_TRAINED}
</body></html>
"""


def _row(row: Row) -> str:
    texts = [
        row.case.name,
        row.case.how,
        row.case.what,
        str(row.tensors or "-"),
        share(row.used) if row.tensors else "-",
    ]
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    line = f'<tr>{cells}<td class="{CLASSES[row.status]}">{row.status}</td></tr>'
    findings = failure_lines(row, len(row.findings)) if row.findings or row.status == FAIL else []
    notes = findings if row.status == FAIL else [*filter(None, [row.reason]), *findings]
    return line + "".join(f"<tr><td></td><td colspan=5 class=note>{escape(note)}</td></tr>" for note in notes)


def _list(title: str, lines: list[str]) -> str:
    items = "".join(f"<li><code>{escape(line)}</code></li>" for line in lines)
    return f"<h2>{escape(title)}: {len(lines)}</h2><ul>{items}</ul>"
