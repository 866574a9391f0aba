"""The error over the order of execution, as inline SVG: one point for each span of rows, red where a finding is."""

from __future__ import annotations

import math
import re
from html import escape

from tools.accuracy.compare.rows import Row

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 300, 64, 58, 30
POINTS = 480  # more could not be told apart
LOW, HIGH = -9, 1  # decades shown; smaller errors, and none, are at the bottom, larger ones at the top
_LAYER = re.compile(r"(?:^|[._])layers(?:\.|-CellList_)(\d+)")


def picture(rows: list[Row]) -> str:
    """An <svg> of `rows` (of one phase, in order): error in decades, tolerance as a line, layers and steps below."""
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
    """The strictest tolerance of each point; what must be exact has none."""
    limits = [min((row.tolerance for row in group if row.tolerance), default=0.0) for group in groups]
    return " ".join(f"{_x(n, len(groups)):.1f},{_y(limit):.1f}" for n, limit in enumerate(limits) if limit)


def _legend(grouped: bool) -> str:
    """What the marks are, above the plot."""
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
    """Lines and names of the decades, and what they measure."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    found = [
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">error (logarithmic)</text>',
    ]
    for decade in range(LOW, HIGH + 1, 2):
        y = _y(10.0**decade)
        name = "0" if decade == LOW else f"1e{decade}"
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    return "".join(found)


def _layers(groups: list[list[Row]]) -> str:
    """The number of the layer where a new one begins, and that of the step."""
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
