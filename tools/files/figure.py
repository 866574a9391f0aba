"""This module draws pictures with matplotlib, without a display. If a picture is drawn again from the same data, the
new file has the same bytes as the old file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from tools.files.atomic import atomic_file

ENDINGS = (".svg", ".png")
PAGES = (".html", ".htm")
_SEEN = "\u200b"  # has no width; removed before the picture is written, because few fonts have it


def check_ending(path: Path, option: str = "--picture", endings: Sequence[str] = ENDINGS) -> None:
    """Raise an error if the ending of a picture's path (such as `.svg`) is not the ending of a supported format.
    Commands call this function before long work begins.

    Raises:
        DataError: the path has none of the `endings`.
    """
    if path.suffix not in endings:
        raise DataError(f"{option} {path}: the name of the file must end in {' or '.join(endings)}")


def check_page(path: Path) -> None:
    """Raise an error if an HTML page would replace a file that is probably not an HTML page. The function also raises
    the errors of `check_ending`.
    """
    check_ending(path, "--html", PAGES)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; its size is given in inches. The function imports matplotlib only when it is called, so
    that commands without pictures need not load it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure to the .svg or .png file `path`, and return `path`.

    Raises:
        DataError: as for `check_ending`, or the file cannot be written.
    """
    check_ending(path)
    with atomic_file(path) as part:
        _save(figure, part, path.suffix[1:])
    return path


def svg_text(figure: Any) -> str:
    """Return a matplotlib figure as an `<svg>` element for an HTML page."""
    text = io.StringIO()
    _save(figure, text, "svg")
    written = text.getvalue()
    return written[written.index("<svg") :]


def _save(figure: Any, target: Any, form: str) -> None:
    import matplotlib

    _read_dollars_as_text(figure)
    # element ids are random and files dated by default
    with matplotlib.rc_context({"svg.hashsalt": "tc3", "svg.fonttype": "none"}):
        figure.savefig(target, format=form, metadata={"Date": None} if form == "svg" else None, dpi=120)


def _read_dollars_as_text(figure: Any) -> None:
    """Escape the dollar signs in the texts of a figure, such as names of runs, because matplotlib would read the text
    between two of them as a formula. Matplotlib's own labels of logarithmic axes stay formulas.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        given = axis.get_major_formatter()
        if isinstance(given, FixedFormatter | FuncFormatter):
            axis.set_major_formatter(FuncFormatter(lambda value, at, given=given: _escaped(given(value, at))))
    for text in figure.findobj(Text):
        if not text.get_text().startswith(r"$\mathdefault"):
            text.set_text(_escaped(text.get_text()))


def label_of(name: str) -> str:
    """Return the label of a line that shows `name` in a legend; matplotlib leaves out labels that begin with `_`."""
    return f"{_SEEN}{name}" if name.startswith("_") else name


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\\)\$", r"\\$", text.removeprefix(_SEEN))
