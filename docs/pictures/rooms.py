"""Draw docs/pictures/rooms.svg, the rooms of docs/architecture.md: `python docs/pictures/rooms.py`.

The rows are those that tests/test_repository.py holds the import graph to.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

FILE = Path(__file__).with_suffix(".svg")
sys.path.insert(0, str(FILE.parents[2]))

from tests.test_repository import ROWS  # noqa: E402

PURPOSE = {
    "launch": "tc3, train.py, the supervisor of msrun, resume, scripts for clusters",
    "accuracy": "right numbers?",
    "data.imbalance": "samples",
    "doctor": "is this host fit?",
    "weights": "in and out",
    "runs": "what went on",
    "experts": "their balance",
    "fusion": "kernels of DVM",
    "prove": "gradients summed once",
    "recipe.cli": "show",
    "dryrun.cli": "command",
    "affinity": "of cores",
    "search": "which strategy is fastest?",
    "memory": "of a step",
    "dryrun": "the sharded graph, compiled on a CPU",
    "check": "will MindFormers run it as written?",
    "profile": "profiled steps by term",
    "layout": "layers to stages, what recomputes, “auto”",
    "measured": "bundles",
    "estimate": "the seconds and bytes of a step, predicted",
    "model": "layers, weights and FLOPs: the only formulas",
    "schema": "MindFormers' keys, types, defaults and refusals",
    "recipe": "load, override, shrink and write recipes",
    "recipe.diff": "two recipes compared",
    "data": "corpora",
    "hardware": "clusters",
    "pipeline": "schedules",
    "checkpoint": "found",
    "process": "signals, children, a host",
    "files": "whole or not there",
    "ranges": "sane numbers",
    "plugins": "plans: pure algorithms, which every room may import; adapters: what makes MindFormers run them",
}
WIDTH, LEFT, HEIGHT, GAP = 880, 64, 34, 12
COLOURS = {"launch": "#dbe9ff", "plugins": "#e5f5dd"}


def picture() -> str:
    """Return the picture as SVG: a box for each part of the repository, its rows from top to bottom, and an arrow for
    the direction of imports.
    """
    rows = [[module.removeprefix("tools.") for module in row] for row in reversed(ROWS)]
    boxes = [_box(name, row, number) for number, row in enumerate(rows) for name in row]
    bottom = GAP + len(ROWS) * (HEIGHT + GAP)
    arrow = f'<path d="M 36 {GAP} V {bottom - 30}" stroke="#555" stroke-width="2" marker-end="url(#end)"/>'
    word = f'<text transform="translate(26 {bottom / 2}) rotate(-90)" text-anchor="middle">imports</text>'
    head = '<marker id="end" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
    head += '<path d="M 0 0 L 8 4 L 0 8 z" fill="#555"/></marker>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" font-family="sans-serif"',
            '     font-size="13">',
            f'<rect width="{WIDTH}" height="{bottom}" fill="#ffffff"/>',
            f"<defs>{head}</defs>",
            arrow,
            word,
            *boxes,
            "</svg>",
            "",
        ]
    )


def _box(name: str, row: list[str], number: int) -> str:
    """Return the box of one part of the repository: its name, and what it is for."""
    place = row.index(name)
    width = (WIDTH - LEFT - GAP * len(row)) / len(row)
    x, y = LEFT + place * (width + GAP), GAP + number * (HEIGHT + GAP)
    fill = COLOURS.get(name, "#f4f1ea")
    text = f'<tspan font-weight="bold">{name}</tspan><tspan dx="8" fill="#444">{escape(PURPOSE[name])}</tspan>'
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="5" fill="{fill}" stroke="#999"/>'
        f'<text x="{x + 10:.0f}" y="{y + 22}">{text}</text>'
    )


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
