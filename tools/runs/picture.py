"""Draw runs: what each attempt did over time, and the step over time, in which lost steps fall back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.files.figure import new_figure, save_figure, svg_text
from tools.runs.goodput import WORDS, Kind, Ledger, Piece
from tools.runs.study import SECOND, Study

COLOURS: dict[Kind, str] = {
    "kept": "tab:green",
    "lost": "tab:red",
    "compile": "tab:purple",
    "start": "tab:blue",
    "save": "tab:orange",
    "evaluation": "tab:cyan",
    "between": "0.75",
    "stop": "0.45",
    "waiting": "gold",
    "unknown": "0.9",
}
_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
_FINE = 1500  # parts of the whole that can be told apart; shorter pieces join the one before
_POINTS = 2000  # of a curve
_ROWS = 12  # attempts of a run that get a row each; of more each run has one


def draw(found: Sequence[Study], path: Path) -> Path:
    """Draw to an .svg or .png; returns `path`.

    Raises:
        DataError: as `save_figure`.
    """
    return save_figure(_figure(found), path)


def svg(found: Sequence[Study]) -> str:
    """The same as an element of a page."""
    return svg_text(_figure(found))


def _figure(found: Sequence[Study]) -> Any:
    known = [(one, one.ledger) for one in found if isinstance(one.ledger, Ledger) and one.ledger.wall]
    rows = sum(_row_count(time) for _, time in known)
    figure = new_figure(12, 4.2 + 0.32 * max(rows, 2))
    if not known:
        figure.text(0.5, 0.5, "when the steps were made is not known", ha="center")
        return figure
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(0.32 * rows + 0.6, 3))
    size, unit = next(
        pair for pair in _UNITS if max(time.wall for _, time in known) / SECOND >= pair[0] or pair[0] == 1
    )
    _bars(above, known, size)
    _steps(below, known, size)
    below.set_xlabel(f"{unit} since the run began")
    below.set_xlim(left=0)
    return figure


def _row_count(time: Ledger) -> int:
    return len(time.frames) if len(time.frames) <= _ROWS else 1


def _bars(axes: Any, known: Sequence[tuple[Study, Ledger]], size: int) -> None:
    """One row an attempt, coloured by what it did; a cross where it failed."""
    names: list[str] = []
    kinds: dict[Kind, None] = {}
    for one, time in known:
        single = _row_count(time) == 1
        begin, top = time.pieces[0].begin, len(names)
        place = {frame.number: 0 if single else at for at, frame in enumerate(time.frames)}
        for kind in WORDS:
            for row in sorted(set(place.values())):
                own = [piece for piece in _coarse(time) if piece.kind == kind and place[piece.attempt] == row]
                bars = [
                    ((piece.begin - begin) / SECOND / size, (piece.end - piece.begin) / SECOND / size) for piece in own
                ]
                if bars:
                    kinds[kind] = None
                    axes.broken_barh(bars, (top + row - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        ends = {frame.number: (frame.end - begin) / SECOND / size for frame in time.frames}
        bad = [failure.attempt for failure in one.failures if failure.attempt in ends]
        axes.plot([ends[at] for at in bad], [top + place[at] for at in bad], "x", color="black", markersize=7)
        names += [one.name] if single else [f"{one.name}, attempt {frame.number}" for frame in time.frames]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    handles = [axes.barh([0], [0], color=COLOURS[kind])[0] for kind in WORDS if kind in kinds]
    labels = [WORDS[kind] for kind in WORDS if kind in kinds]
    if any(one.failures for one, _ in known):
        handles.append(axes.plot([], [], "x", color="black")[0])
        labels.append("failed")
    axes.legend(
        handles, labels, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4
    )


def _coarse(time: Ledger) -> list[Piece]:
    """The pieces that can be seen; a shorter one goes to the longest of those it is drawn with."""
    least, found = time.wall / _FINE, list[Piece]()
    group: list[Piece] = []
    for piece in time.pieces:
        if group and (piece.attempt != group[0].attempt or piece.end - piece.begin >= least):
            found.append(_joined(group))
            group = []
        group.append(piece)
        if group[-1].end - group[0].begin >= least:
            found.append(_joined(group))
            group = []
    return [*found, _joined(group)] if group else found


def _joined(group: Sequence[Piece]) -> Piece:
    longest = max(group, key=lambda piece: piece.end - piece.begin)
    return Piece(group[0].begin, group[-1].end, longest.kind, longest.attempt)


def _steps(axes: Any, known: Sequence[tuple[Study, Ledger]], size: int) -> None:
    """The step over time, a line a run; where it falls back, steps were lost."""
    for one, time in known:
        begin = time.pieces[0].begin / SECOND
        xs, ys = [], []
        for frame in time.frames:
            for part in frame.parts:
                at = np.unique(np.linspace(0, len(part) - 1, min(len(part), _POINTS)).astype(int))
                xs += [np.nan, part.moment or 0.0, *np.asarray(part["time"])[at]]  # a break before each start
                ys += [np.nan, part.start_step, *np.asarray(part["step"])[at]]
        axes.plot((np.array(xs) - begin) / size, ys, linewidth=1.4, label=one.name)
    axes.set_ylabel("step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(known) > 1:
        axes.legend(fontsize="small", frameon=False)
