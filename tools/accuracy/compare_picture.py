"""The error over the order of execution, as inline SVG: one point for each span of rows, red where a finding is."""

from __future__ import annotations

import math
import re
from html import escape

from tools.accuracy.compare_rows import Row

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 260, 56, 40, 12
POINTS = 480  # more could not be told apart
LOW, HIGH = -9, 1  # decades shown; smaller errors, and none, are at the bottom, larger ones at the top
_LAYER = re.compile(r"(?:^|[._])layers(?:\.|-CellList_)(\d+)")


def picture(rows: list[Row]) -> str:
    """An <svg> of `rows` (of one phase, in order): error in decades, tolerance as a line, layers marked below."""
    count = len(rows)
    spans = [(n * count // POINTS, (n + 1) * count // POINTS) for n in range(POINTS)] if count > POINTS else None
    groups = [rows[a:b] for a, b in spans] if spans else [[row] for row in rows]
    parts = [_frame(), _layers(groups)]
    limit = " ".join(
        f"{_x(n, len(groups)):.1f},{_y(min(row.tolerance for row in group)):.1f}" for n, group in enumerate(groups)
    )
    parts.append(f'<polyline points="{limit}" class="limit"/>')
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


def _frame() -> str:
    """Lines and names of the decades."""
    found = []
    for decade in range(LOW, HIGH + 1, 2):
        y = _y(10.0**decade)
        name = "0" if decade == LOW else f"1e{decade}"
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    return "".join(found)


def _layers(groups: list[list[Row]]) -> str:
    """The number of the layer, where a new one begins."""
    found, last, free = [], None, 0.0
    for n, group in enumerate(groups):
        match = _LAYER.search(group[0].name)
        layer = match[1] if match else None
        x = _x(n, len(groups))
        if layer is not None and layer != last and x >= free:
            y = HEIGHT - BOTTOM
            found.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y}" class="grid"/>')
            found.append(f'<text x="{x:.1f}" y="{y + 14}">{layer}</text>')
            free = x + 18
        last = layer
    found.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">order of execution; numbers: layers</text>')
    return "".join(found)
