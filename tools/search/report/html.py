"""The answer as one HTML file that needs nothing else: table, reasons, pictures as inline SVG, the funnel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape

from tools.estimate.time_model import TimeModel
from tools.search.ranking.entry import PARTS, Entry
from tools.search.ranking.run import Found
from tools.search.report.frontier import as_svg, draw_frontier, draw_timeline
from tools.search.report.text import HEADS, LEFT, assumptions, lost, reasons, table_rows
from tools.search.sensitivity.of_search import doubt_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 92em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .7em; text-align: right }
th { border-bottom: 2px solid #888 } td { border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }
td.word, th.word { text-align: left } tr.own { background: #fff4df } tr.alike { background: #e8f4e8 }
svg { max-width: 100%; height: auto }
.wide { overflow-x: auto } td, th { white-space: nowrap } dl { display: grid; grid-template-columns: max-content 1fr;
gap: .1em 1em; margin: .3em 1em; font-size: 90% } dt { font-weight: 600 } dd { margin: 0 }
"""
_PICTURES = {  # what is drawn -> what it stands for
    "dot": "a candidate that fits, as ranked, coloured by its pipeline stages",
    "line": "the frontier: no candidate is faster with as little memory",
    "diamond": "placed: the strategies of the table, their layers and recomputation chosen by the pipeline optimiser; "
    "under the line where candidates recompute alike in all layers. Filled, with their numbers: "
    "those that cannot be told apart from the fastest",
    "star": "the recipe as it is written",
    "dashed": "what a device may hold for the job (red), and the same less the margin (orange)",
}
_ALIKE = "the layouts that cannot be told apart: each may be the fastest, within the known error of step times"


def html(found: Found, times: TimeModel, title: str) -> str:
    """The whole file."""
    request = found.request
    head = (
        f"{request.devices:,} devices of {request.hardware.name}, global batch {request.global_batch:,}, "
        f"sequence {request.base.sequence:,}"
    )
    entries = [*found.entries, *([found.own] if found.own else [])]
    doubt = doubt_of(found, times)
    alike = [name for name, _ in doubt.alike] if doubt and len(doubt.alike) > 1 else []
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(head)}</p>",
        _wide(_table(tuple(HEADS), table_rows(found), alike)),
        _key("How to read the table", HEADS | ({"green": _ALIKE} if alike else {})),
        _list(reasons(found, doubt)),
        "<h2>Memory and time</h2>",
        as_svg(lambda axes: draw_frontier(axes, found, doubt), (12, 6.5)),
        _key("How to read the picture", _PICTURES),
        "<h2>Where a step's time goes, in seconds</h2>",
        _wide(
            _table(
                ("", "layout", *PARTS),
                [_parts(name, entry) for name, entry in zip(_names(found), entries, strict=True)],
            )
        ),
        _key("What the parts are", PARTS),
        "<h2>The first's pipeline</h2>",
        "<p>A row is a pipeline stage, a bar a micro-batch's pass through one of the stage's chunks of layers.</p>",
        as_svg(lambda axes: draw_timeline(axes, found.entries[0], times), (12, 2 + 0.4 * found.entries[0].config.pp)),
        _layers(found.entries[0]),
        "<h2>What was dropped</h2>",
        _wide(_table(("", "candidates"), [[reason, f"{count:,}"] for reason, count in found.ranking.funnel.lines()])),
        _list(lost(found)),
        "<h2>What the numbers rest on</h2>",
        _list(assumptions(found, times)),
    ]
    page = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{page}\n</body></html>\n"
    )


def _names(found: Found) -> list[str]:
    return [str(number) for number in range(1, len(found.entries) + 1)] + (["recipe"] if found.own else [])


def _parts(name: str, entry: Entry) -> list[str]:
    return [name, entry.layout, *(f"{entry.parts[part]:.2f}" for part in PARTS)]


def _layers(entry: Entry) -> str:
    """Layers by chunk and stage."""
    heads = ["", *(f"stage {stage}" for stage in range(entry.config.pp))]
    rows = [[f"chunk {chunk}", *map(str, row)] for chunk, row in enumerate(entry.config.layers)]
    return f"<p>Layers of each chunk; recomputation: {escape(entry.recompute)}.</p>" + _wide(_table(heads, rows))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], alike: Collection[str] = ()) -> str:
    words = [head in LEFT or (index == 0 and not head) for index, head in enumerate(heads)]

    def line(tag: str, values: Sequence[str], sort: str = "") -> str:
        marks = (' class="word"' if word else "" for word in words)
        inner = "".join(f"<{tag}{mark}>{escape(value)}</{tag}>" for mark, value in zip(marks, values, strict=True))
        return f'<tr class="{sort}">{inner}</tr>' if sort else f"<tr>{inner}</tr>"

    sorts = ("own" if row[0] == "recipe" else "alike" if row[0] in alike else "" for row in rows)
    body = "\n".join(line("td", row, sort) for row, sort in zip(rows, sorts, strict=True))
    return f"<table><thead>{line('th', heads)}</thead>\n<tbody>{body}</tbody></table>"


def _wide(table: str) -> str:
    """A table that scrolls by itself where the page is narrower."""
    return f'<div class="wide">{table}</div>'


def _key(title: str, words: Mapping[str, str]) -> str:
    """A legend, folded away."""
    rows = "".join(f"<dt>{escape(name or '#')}</dt><dd>{escape(said)}</dd>" for name, said in words.items())
    return f"<details open><summary>{escape(title)}</summary><dl>{rows}</dl></details>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
