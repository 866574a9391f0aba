"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tools.runs.picture import svg
from tools.runs.render import (
    ATTEMPT_HEADS,
    FAILURE_HEADS,
    Rows,
    attempt_rows,
    failure_rows,
    findings,
    side_by_side,
    time_rows,
)
from tools.runs.study import Study

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .7em; text-align: left; vertical-align: top }
th { border-bottom: 2px solid #888; white-space: nowrap }
td { border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
td:first-child { white-space: nowrap } svg { max-width: 100%; height: auto } .wide { overflow-x: auto }
"""


def page(studies: Sequence[Study]) -> str:
    """The whole file."""
    title = f"Report of {', '.join(one.name for one in studies)}"
    names = [one.name for one in studies]
    body = [
        f"<h1>{escape(title)}</h1>",
        _table(["", *names], side_by_side(studies)),
        svg(studies),
        "<h2>Where the time went</h2>",
        _table(["", *names], time_rows(studies)),
    ]
    for one in studies:
        of = f" of {one.name}" if len(studies) > 1 else ""
        body.append(f"<h2>Attempts{escape(of)}</h2><p>{escape(str(one.run.folder))}</p>")
        body.append(_table(ATTEMPT_HEADS, attempt_rows(one)))
        if one.failures:
            body.append(f"<h2>Failures{escape(of)}</h2>{_table(FAILURE_HEADS, failure_rows(one))}")
        body.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in findings(one)) + "</ul>")
    joined = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{joined}\n</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Rows) -> str:
    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{line("th", heads)}</thead>\n<tbody>{body}</tbody></table></div>'
