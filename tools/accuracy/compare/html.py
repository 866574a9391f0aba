"""A comparison as one HTML file without any link to elsewhere."""

from __future__ import annotations

from html import escape

from tools.accuracy.compare.picture import picture
from tools.accuracy.compare.report import Report, finding_text
from tools.accuracy.compare.rows import Row
from tools.accuracy.dumps.names import PHASES
from tools.accuracy.pages import STYLE

MOST = 2000  # rows in the table: a browser gets slow; rows.csv has them all
PLOT = """
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.step { stroke: #888; stroke-dasharray: 3 3; } .wide { overflow-x: auto; }
.grid { stroke: #8884; } .limit { fill: none; stroke: #bf8700; } .good { fill: #1a7f37; } .bad { fill: #cf222e; }
"""
NAMES = {
    "forward": "Forward",
    "backward": "Backward",
    "weights": "Weights",
    "state": "State, which no gradient trains",
}


def html(report: Report) -> str:
    """The whole page."""
    title = "no finding" if report.passed else f"{len(report.findings)} findings"
    first = "".join(_first(phase, report.first[phase]) for phase in PHASES)
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in report.notes())
    plots = "".join(_plot(report, phase) for phase in PHASES)
    shown = report.findings[:MOST]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Dumps compared</title><style>{STYLE}{PLOT}</style></head><body>
<h1>Dumps compared: {title}</h1>
<p>GOLDEN <code>{escape(report.golden)}</code><br>BENCH <code>{escape(report.bench)}</code></p>
<p>{escape(report.summary())}</p>{notes}
<h2>{escape(report.meaning())}</h2>
<ul>{first}</ul>
{plots}
<p class=note>Errors are relative to max(|value|, root mean square) of a tensor; of an update, to the update.</p>
<h2>Findings{f": the first {MOST}" if len(report.findings) > MOST else ""}</h2>{_table(shown)}
<details><summary>All {len(report.rows)} tensors{f": the first {MOST}" if len(report.rows) > MOST else ""}</summary>
{_table(report.rows[:MOST])}</details>
</body></html>
"""


def _first(phase: str, row: Row | None) -> str:
    text = escape(finding_text(row)) if row else "none"
    return f'<li class="{"fail" if row else "pass"}">first {phase}: <code>{text}</code></li>'


def _plot(report: Report, phase: str) -> str:
    rows = [row for row in report.rows if row.phase == phase]
    return f"<h2>{NAMES[phase]}: {len(rows)}</h2>{picture(rows)}" if rows else ""


def _table(rows: list[Row]) -> str:
    names = ["step", "rank", "phase", "tensor", "type", "shape", "count", "tolerance", "error", "finding", "detail"]
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for row in rows:
        shape, numbers = "x".join(map(str, row.shape)), (f"{row.tolerance:.3g}", f"{row.error:.3g}")
        values = [row.step, row.rank, row.phase, row.name, row.dtype, shape, row.count, *numbers, row.kind, row.detail]
        cells = "".join(f"<td>{escape(str(value))}</td>" for value in values)
        lines.append(f'<tr class="{"fail" if row.kind else ""}">{cells}</tr>')
    return f"<div class=wide><table>{''.join(lines)}</table></div>"
