"""A study as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tools.experts.picture import svg
from tools.experts.render import LAYER_HEADS, POLICY_HEADS, head, layer_rows, notes, policy_rows
from tools.experts.study import Study

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .7em; text-align: right }
th, td { white-space: nowrap }
th { border-bottom: 2px solid #888 } td { border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } svg { max-width: 100%; height: auto } .wide { overflow-x: auto }
"""


def page(found: Study) -> str:
    """The whole file."""
    title = f"Expert loads of {found.source.file}"
    body = [
        f"<h1>Expert loads</h1><p>{escape(str(found.source.file))}: {escape(head(found))}</p>",
        svg(found),
        "<h2>Policies, replayed</h2>",
        _table(POLICY_HEADS, policy_rows(found)),
        "<h2>Layers, the most uneven first</h2>",
        _table(LAYER_HEADS, layer_rows(found)),
        "<h2>What the numbers are</h2>",
        f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes(found))}</ul>",
    ]
    page = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{page}\n</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{line("th", heads)}</thead>\n<tbody>{body}</tbody></table></div>'
