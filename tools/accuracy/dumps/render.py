"""This module shows a comparison of two dumps on the terminal, as JSON and CSV files, and as an HTML page."""

from __future__ import annotations

import csv
import json
import math
import re
from contextlib import ExitStack
from dataclasses import fields
from html import escape
from pathlib import Path

from rich.console import Console

from plugins.lines import locked
from tools.accuracy.dumps.compare import Report, finding_text
from tools.accuracy.dumps.read import PHASES
from tools.accuracy.dumps.rows import Row
from tools.accuracy.judge import plain
from tools.files import page as markup
from tools.files.atomic import atomic_file

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 300, 64, 58, 30
POINTS = 480  # more could not be told apart
LOW, HIGH = -9, 1  # decades shown; smaller errors, and none, are at the bottom, larger ones at the top
_LAYER = re.compile(r"(?:^|[._])layers(?:\.|-CellList_)(\d+)")
SHOWN = 2000  # rows in the table: a browser gets slow; rows.csv has them all
PLOT = """
svg { width: 100% } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.step { stroke: #888; stroke-dasharray: 3 3; }
.grid { stroke: #8884; } .limit { fill: none; stroke: #bf8700; } .good { fill: #1a7f37; } .bad { fill: #cf222e; }
"""
NAMES = {"forward": "Forward", "backward": "Backward", "weights": "Weights", "state": "State, which no gradient trains"}
MOST = 8  # findings shown


def picture(rows: list[Row]) -> str:
    """Return an <svg> plot of one phase: errors by their logarithm, tolerances, layers and steps."""
    count = len(rows)
    spans = [(n * count // POINTS, (n + 1) * count // POINTS) for n in range(POINTS)] if count > POINTS else None
    groups = [rows[a:b] for a, b in spans] if spans else [[row] for row in rows]
    parts = [_frame(), _legend(len(groups) < count), _layers(groups)]
    parts.append(f'<polyline points="{_limit(groups)}" class="limit"/>')
    for n, group in enumerate(groups):
        worst = max(group, key=lambda row: (bool(row.kind), row.error))
        kind = "bad" if worst.kind else "good"
        x, y = _x(n, len(groups)), _y(worst.error)
        title = escape(f"step {worst.step} {worst.name}: {worst.error:.3g}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="{kind}"><title>{title}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _x(index: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - 10) * (index + 0.5) / max(count, 1)


def _y(error: float) -> float:
    decade = LOW if error <= 0 else min(max(math.log10(error), LOW), HIGH) if math.isfinite(error) else HIGH
    return TOP + (HEIGHT - TOP - BOTTOM) * (HIGH - decade) / (HIGH - LOW)


def _limit(groups: list[list[Row]]) -> str:
    """Return the strictest tolerance of each point; tensors that must be equal have none."""
    limits = [min((row.tolerance for row in group if row.tolerance), default=0.0) for group in groups]
    return " ".join(f"{_x(n, len(groups)):.1f},{_y(limit):.1f}" for n, limit in enumerate(limits) if limit)


def _legend(grouped: bool) -> str:
    marks = (
        ('<circle cx="0" cy="-4" r="4" class="good"/>', "within its tolerance"),
        ('<circle cx="0" cy="-4" r="4" class="bad"/>', "a finding"),
        ('<line x1="-8" x2="8" y1="-4" y2="-4" class="limit"/>', "tolerance (Table 2), the strictest nearby"),
    )
    what = "a point is the worst of a few tensors" if grouped else "a point is a tensor"
    found, x = [], LEFT + 10
    for mark, text in (*marks, ("", what)):
        found.append(f'<g transform="translate({x} 16)">{mark}<text x="14">{text}</text></g>')
        x += 44 + 6 * len(text)
    return "".join(found)


def _frame() -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    found = [
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">error (logarithmic)</text>'
    ]
    for decade in range(LOW, HIGH + 1, 2):
        y = _y(10.0**decade)
        name = "0" if decade == LOW else f"1e{decade}"
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    return "".join(found)


def _layers(groups: list[list[Row]]) -> str:
    """Return labels with the number of a layer where a new layer begins, and with the number of the step."""
    found, last, free, step, y = [], None, 0.0, None, HEIGHT - BOTTOM
    for n, group in enumerate(groups):
        match = _LAYER.search(group[0].name)
        layer = f"{'mtp ' if 'mtp' in group[0].name else ''}{match[1]}" if match else None
        x = _x(n, len(groups))
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y}"'
        if group[0].step != step:
            step, last, free = group[0].step, None, 0.0
            found.append(f'{line} class="step"/><text x="{x:.1f}" y="{y + 30}">step {step}</text>')
        if layer is not None and layer != last and x >= free:
            found.append(f'{line} class="grid"/><text x="{x:.1f}" y="{y + 15}">{layer}</text>')
            free = x + 6 * len(layer) + 12
        last = layer
    words = "calls in the order of execution; where a layer and where a step begins"
    return "".join(found) + f'<text x="{LEFT}" y="{HEIGHT - 6}">{words}</text>'


def as_page(report: Report) -> str:
    """Return the HTML page of a comparison."""
    title = "no finding" if report.passed else f"{len(report.findings)} findings"
    cut = {
        name: f": the first {SHOWN}" if len(rows) > SHOWN else ""
        for name, rows in (("found", report.findings), ("all", report.rows))
    }
    body = [
        markup.text(f"Dumps compared: {title}", "h1"),
        markup.text(f"GOLDEN {report.golden}"),
        markup.text(f"BENCH {report.bench}"),
        markup.text(report.summary()),
        *(markup.text(note, kind="note") for note in report.notes()),
        markup.text(report.meaning(), "h2"),
        f"<ul>{''.join(_first(phase, report.first[phase]) for phase in PHASES)}</ul>",
        *(_plot(report, phase) for phase in PHASES),
        markup.text(
            "Errors are relative to max(|value|, root mean square) of a tensor; of an update, to the update.",
            kind="note",
        ),
        markup.text(f"Findings{cut['found']}", "h2"),
        _table(report.findings[:SHOWN]),
        markup.folded(f"All {len(report.rows)} tensors{cut['all']}", _table(report.rows[:SHOWN])),
    ]
    return markup.page("Dumps compared", body, PLOT)


def _first(phase: str, row: Row | None) -> str:
    return markup.text(f"first {phase}: {finding_text(row) if row else 'none'}", "li", "fail" if row else "pass")


def _plot(report: Report, phase: str) -> str:
    rows = [row for row in report.rows if row.phase == phase]
    return markup.text(f"{NAMES[phase]}: {len(rows)}", "h2") + picture(rows) if rows else ""


def _table(rows: list[Row]) -> str:
    heads = ["step", "rank", "phase", "tensor", "type", "shape", "count", "tolerance", "error", "finding", "detail"]
    lines = []
    for row in rows:
        shape, numbers = "x".join(map(str, row.shape)), (f"{row.tolerance:.3g}", f"{row.error:.3g}")
        values = [row.step, row.rank, row.phase, row.name, row.dtype, shape, row.count, *numbers, row.kind, row.detail]
        lines.append([str(value) for value in values])
    return markup.table(heads, lines, kinds=["fail" if row.kind else "" for row in rows])


def print_report(report: Report, console: Console) -> None:
    """Write the findings to `console`."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    line(report.summary(), "green" if report.passed else "bold red")
    for note in report.notes():
        line(f"note: {note}", "dim")
    if report.passed:
        return
    for phase in PHASES:
        row = report.first[phase]
        line(f"first {phase}: {finding_text(row) if row else 'none'}", "red" if row else "green")
    line(report.meaning(), "bold")
    rest = len(report.findings) - MOST
    for row in report.findings[:MOST]:
        line(f"finding: {finding_text(row)}", "red")
    if rest > 0:
        line(f"and {rest} more: --out DIR keeps them all", "dim")


def write_files(report: Report, out: Path, page: bool) -> list[Path]:
    """Write the comparison into compare.json and rows.csv. If `page` is True, also write compare.html; if not, remove
    the compare.html of an earlier comparison.

    Older files stay until all new ones are written beside them. compare.json gets its name last, so that the files
    beside it always belong to it, also after an interruption.
    """
    content, rows, html = (out / name for name in ("compare.json", "rows.csv", "compare.html"))
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), ExitStack() as stack:  # the part that was opened last is renamed first
        stack.enter_context(atomic_file(content)).write_text(json.dumps(report.as_json(), indent=1), "utf-8")
        if page:
            stack.enter_context(atomic_file(html)).write_text(as_page(report), "utf-8")
        with stack.enter_context(atomic_file(rows)).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            for row in report.rows:
                writer.writerow({**plain(row), "shape": "x".join(map(str, row.shape))})
        for old in (content, html):
            if old.is_file():
                old.unlink()
    return [content, rows, *([html] if page else [])]
