"""This module makes HTML pages, with tables and lists, that need no other files. All text is escaped for HTML.

The functions of this module return HTML, and the argument `body` of `page` and of `folded` is HTML; every other
argument is plain text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

BEGINS = "<!DOCTYPE html>"
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 92em; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } .wide { overflow-x: auto } svg { max-width: 100%; height: auto }
th, td { padding: .25em .7em; text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
th { border-bottom: 2px solid #888; white-space: nowrap } td:first-child { white-space: nowrap }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.numbers th, .numbers td { text-align: right; white-space: nowrap }
.numbers th:first-child, .numbers td:first-child, .numbers .word { text-align: left }
.pass { color: #1a7f37 } .fail { color: #cf222e; font-weight: 600 } .none { color: #8889 } .note { color: #888 }
.group { font-weight: 600 } .own { background: #fb03 } .alike { background: #4a43 }
summary { cursor: pointer } code { font-size: .9em } dt { font-weight: 600 } dd { margin: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; margin: .3em 1em; font-size: 90% }
"""


class Cell(NamedTuple):
    """A `Cell` is a cell of an HTML table that has a CSS class or spans several columns."""

    text: str
    kind: str = ""
    columns: int = 1


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """Return the text of a complete HTML file. `style` holds the CSS rules that only this page needs."""
    joined = "\n".join(body)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}{style}</style>'
    return f'{BEGINS}\n<html lang="en"><head>{head}</head>\n<body>\n{joined}\n</body></html>\n'


def text(words: str, tag: str = "p", kind: str = "") -> str:
    """Return an HTML element that holds a text, such as a paragraph or a heading."""
    return f"<{tag}{_class(kind)}>{escape(words)}</{tag}>"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    kind: str = "",
    words: Collection[int] = (),
    kinds: Sequence[str] = (),
) -> str:
    """Return an HTML table, which gets its own scroll bar if the page is narrower than the table.

    Args:
        kind: "numbers" to align all columns right, except the first column and the columns whose positions are in
            `words`.
        kinds: the class of each row in the style of the page.
    """
    marks = ["word" if at in words else "" for at in range(len(heads))]
    lines = [_row("th", [Cell(head, mark) for head, mark in zip(heads, marks, strict=True)])]
    for at, row in enumerate(rows):
        cells = [one if isinstance(one, Cell) else Cell(one, mark) for one, mark in zip(row, marks, strict=False)]
        lines.append(_row("td", cells, kinds[at] if kinds else ""))
    body = "\n".join(lines[1:])
    return f'<div class="wide"><table{_class(kind)}><thead>{lines[0]}</thead>\n<tbody>{body}</tbody></table></div>'


def _row(tag: str, cells: Iterable[Cell], kind: str = "") -> str:
    parts = (
        f"<{tag}{_class(one.kind)}{f' colspan={one.columns}' if one.columns > 1 else ''}>{escape(one.text)}</{tag}>"
        for one in cells
    )
    return f"<tr{_class(kind)}>{''.join(parts)}</tr>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def bullets(lines: Sequence[str]) -> str:
    """Return lines of text as a bulleted list in HTML; return an empty text if there are no lines."""
    return f"<ul>{''.join(text(line, 'li') for line in lines)}</ul>" if lines else ""


def counted(title: str, lines: Sequence[str]) -> str:
    """Return an HTML heading that says how many lines of text follow, and then these lines in a fixed-width font."""
    items = "".join(f"<li>{text(line, 'code')}</li>" for line in lines)
    return f"{text(f'{title}: {len(lines)}', 'h2')}<ul>{items}</ul>"


def legend(title: str, meanings: Mapping[str, str]) -> str:
    """Return an HTML legend that explains marks and names, and that a reader can fold away."""
    return folded(
        title, f"<dl>{''.join(text(name, 'dt') + text(said, 'dd') for name, said in meanings.items())}</dl>", True
    )


def folded(title: str, body: str, unfolded: bool = False) -> str:
    """Return an HTML section with a title, whose content `body` a reader can fold away."""
    return f"<details{' open' if unfolded else ''}>{text(title, 'summary')}{body}</details>"
