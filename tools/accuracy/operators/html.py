"""The report as one HTML file without any link to elsewhere."""

from __future__ import annotations

from html import escape

from tools.accuracy.operators.render import LEGEND
from tools.accuracy.operators.report import SHORT, Report, cell_text, failure_text, not_runnable_lines, status_of
from tools.accuracy.operators.run import FAIL, NOT_RUNNABLE, PASS, Row
from tools.accuracy.operators.specs.table import FAMILIES, SPECS
from tools.accuracy.pages import STYLE

CLASSES = {PASS: "pass", FAIL: "fail", NOT_RUNNABLE: "none"}


def html(report: Report) -> str:
    """The whole page."""
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    head = "".join(f"<th>{escape(text)}</th>" for text in ["operator", *(SHORT[d] for d in dtypes), "source"])
    cells = report.cells()
    family_of = {spec.name: family for family, specs in FAMILIES.items() for spec in specs}
    body, family = [], ""
    for op in dict.fromkeys(row.op for row in report.rows):
        if family_of[op] != family:
            family = family_of[op]
            body.append(f'<tr><th colspan="{len(dtypes) + 2}">{escape(family)}</th></tr>')
        columns = "".join(_cell(cells.get((op, dtype))) for dtype in dtypes)
        body.append(f"<tr><td>{escape(op)}</td>{columns}<td class=note>{escape(SPECS[op].source)}</td></tr>")
    failures, missing = report.with_status(FAIL), report.with_status(NOT_RUNNABLE)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Operator accuracy</title><style>{STYLE}</style></head><body>
<h1>Operator accuracy: {"passed" if report.passed else "failures found"}</h1>
<p>{escape(report.summary())}. Seed {report.seed}, {report.reruns} runs each.</p>
<p class=note>{escape(LEGEND)}; -: not runnable here, see below.</p>
<table><tr>{head}</tr>{"".join(body)}</table>
{_list("Failures", [failure_text(row) for row in failures])}
{_list("Not runnable on this device, in MindSpore's words", not_runnable_lines(missing))}
<details><summary>All {len(report.rows)} checks</summary>{_checks(report.rows)}</details>
</body></html>
"""


def _cell(rows: list[Row] | None) -> str:
    return f'<td class="{CLASSES[status_of(rows)]}">{escape(cell_text(rows))}</td>' if rows else "<td></td>"


def _list(title: str, lines: list[str]) -> str:
    items = "".join(f"<li><code>{escape(line)}</code></li>" for line in lines)
    return f"<h2>{escape(title)}: {len(lines)}</h2><ul>{items}</ul>"


def _checks(rows: list[Row]) -> str:
    names = ["operator", "type", "sizes", "phase", "tensor", "status", "count", "tolerance", "error"]
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = []
    for row in rows:
        sizes, numbers = "x".join(map(str, row.shape)), (f"{row.tolerance:.3g}", f"{row.error:.3g}")
        values = [row.op, SHORT[row.dtype], sizes, row.phase, row.tensor, row.status, row.count, *numbers]
        lines.append(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in values)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
