"""This module shows the report of `tc3 runs report` as a picture, as text for a terminal, and as an HTML page.

`draw` draws the work of each attempt over time, and the number of the step over time, which falls back when steps are
lost. `head`, `time_rows`, `attempt_rows`, `failure_rows` and `findings` return the texts and tables of a report.
`print_text` prints these texts and tables, and `page` puts them into one HTML file that needs no other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tools.files import page as markup
from tools.files.figure import label_of, new_figure, save_figure, svg_text
from tools.runs.failures import Failure, untold
from tools.runs.goodput import WORDS, Kind, Ledger, Piece
from tools.runs.readings import loss_in_words
from tools.runs.study import CONFIDENCE, SECOND, Study, content

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
ATTEMPT_HEADS = ("attempt", "began", "took", "hosts", "steps", "ended", "then")
FAILURE_HEADS = ("attempt", "began with", "cause", "at", "says", "fell with it")
Rows = list[list[str]]
_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
_FINE = 1500  # parts of the whole that can be told apart; shorter pieces join the one before
_MOST_POINTS = 2000  # of a curve
_MOST_ROWS = 12  # attempts of a run that get a row each; of more each run has one


def draw(found: Sequence[Study], path: Path) -> Path:
    """Draw the attempts of the runs over time to an .svg or .png file; return `path`.

    Raises:
        DataError: as in `save_figure`.
    """
    return save_figure(_figure(found), path)


def _figure(found: Sequence[Study]) -> Any:
    known = [(one, one.ledger) for one in found if isinstance(one.ledger, Ledger) and one.ledger.wall]
    rows = sum(_row_count(time) for _, time in known)
    figure = new_figure(12, 4.2 + 0.32 * max(rows, 2))
    if not known:
        figure.text(0.5, 0.5, "the times of the steps are unknown", ha="center")
        return figure
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(0.32 * rows + 0.6, 3))
    size, unit = next(
        pair for pair in _UNITS if max(time.wall for _, time in known) / SECOND >= pair[0] or pair[0] == 1
    )
    _draw_attempts(above, known, size)
    _draw_steps(below, known, size)
    below.set_xlabel(f"{unit} since the run began")
    below.set_xlim(left=0)
    return figure


def _row_count(time: Ledger) -> int:
    return len(time.frames) if len(time.frames) <= _MOST_ROWS else 1


def _draw_attempts(axes: Any, known: Sequence[tuple[Study, Ledger]], size: int) -> None:
    """Draw one row an attempt, coloured by what it did; a cross where it failed."""
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
    """Return the pieces that can be seen; a shorter one goes to the longest of those it is drawn with."""
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


def _draw_steps(axes: Any, known: Sequence[tuple[Study, Ledger]], size: int) -> None:
    """Draw the step over time, a line a run; where it falls back, steps were lost. All steps of a run are counted as
    its newest steps are.
    """
    for one, time in known:
        begin = time.pieces[0].begin / SECOND
        xs, ys = [], []
        now = [part.unit for frame in time.frames for part in frame.parts][-1:]
        for frame in time.frames:
            for part in frame.parts:
                at = np.unique(np.linspace(0, len(part) - 1, min(len(part), _MOST_POINTS)).astype(int))
                xs += [np.nan, part.moment or 0.0, *np.asarray(part["time"])[at]]  # a break before each start
                ys += [np.nan, *(np.array([part.start_step, *np.asarray(part["step"])[at]]) * (part.unit / now[0]))]
        axes.plot((np.array(xs) - begin) / size, ys, linewidth=1.4, label=label_of(one.name))
    axes.set_ylabel("step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(known) > 1:
        axes.legend(fontsize="small", frameon=False)


def duration(seconds: float | None) -> str:
    """Return a duration in seconds as text, such as 1 d 3 h, 2 h 5 min, 4 min 10 s or 12.3 s."""
    if seconds is None:
        return "not known"
    if seconds < 60:
        return f"{seconds:.3g} s"
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    left = round(seconds)
    for (name, size), (smaller, part) in pairwise(units):
        if left >= size:
            rest = left % size // part
            return f"{left // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{left} s"


def share(value: float | None) -> str:
    """Return a share of the time, such as 0.123, as a text in per cent, such as 12.3 %."""
    return "not known" if value is None else f"{100 * value:.1f} %"


def head(found: Study) -> Rows:
    """Return the summary of a run as pairs (name, value), with both as text."""
    time = found.ledger
    if isinstance(time, str):
        usual = ["usual step", duration(found.run.usual())]
        begin = [["state", found.state], ["goodput", "not known"], ["wall time", f"not known: {time}"], usual]
        return [*begin, *_held_out_rows(found)]
    lost = f", {time.lost_steps:,} trained again" if time.lost_steps else ""
    return [
        ["state", found.state],
        ["goodput", share(time.goodput)],
        ["wall time", duration(time.wall / SECOND)],
        ["steps that were kept", f"{time.kept_steps:,}{lost}"],
        ["usual step", duration(found.run.usual())],
        ["attempts", f"{len(time.frames):,}"],
        ["failures", f"{found.mtbf.failures:,}" if found.mtbf else "not known"],
        *_held_out_rows(found),
    ]


def _held_out_rows(found: Study) -> Rows:
    """Return the losses of the last evaluation: of all held-out text, and of each corpus of a list."""
    last = found.evaluation
    if last is None:
        return []
    rows = [["held-out loss", f"{loss_in_words(last.loss)} (step {last.step:,})"]]
    return [*rows, *([f"held-out loss, {name}", loss_in_words(loss)] for name, loss in last.corpora.items())]


def time_rows(studies: Sequence[Study]) -> Rows:
    """Return the rows of a table of the time that runs spent: a row for each kind of work (such as training or saving),
    and a column for each run.
    """
    known = [one.ledger.totals() for one in studies if isinstance(one.ledger, Ledger)]
    rows = [
        [words, *(_time_cell(one, kind) for one in studies)]
        for kind, words in WORDS.items()
        if any(totals[kind] for totals in known)
    ]
    walls = ("not known" if isinstance(one.ledger, str) else duration(one.ledger.wall / SECOND) for one in studies)
    return [*rows, ["all", *walls]]


def _time_cell(found: Study, kind: Kind) -> str:
    if isinstance(found.ledger, str):
        return "not known"
    value = found.ledger.totals()[kind]
    return f"{duration(value / SECOND)} ({share(value / found.ledger.wall)})" if value else "-"


def attempt_rows(found: Study) -> Rows:
    """Return the rows of a table with a row for each attempt of a run; the start of each attempt is given in seconds
    after the start of the first attempt.
    """
    if isinstance(found.ledger, str):
        return []
    rows, first = [], found.ledger.frames[0].begin / SECOND
    for one in content(found)["attempts"]:
        hosts = one["hosts"]
        steps = "none" if one["first_step"] is None else f"{one['first_step']:,} to {one['last_step']:,}"
        nodes = "not known" if hosts is None else f"{len(hosts)}"
        took, began = duration(one["end"] - one["begin"]), f"+{duration(one['begin'] - first)}"
        ended = one["state"] or "not known"
        rows.append([str(one["attempt"]), began, took, nodes, steps, ended, one["decision"] or ""])
    return rows


def failure_rows(found: Study) -> Rows:
    """Return the rows of a table with a row for each failure: the worker that caused the failure, the cause, and the
    workers that failed as a consequence.
    """
    return [[str(one.attempt), who(one), one.name, _where(one), _says(one), _fell(one)] for one in found.failures]


def failure_line(one: Failure) -> str:
    """Return sentences that describe one failure of a run."""
    where, fell = _where(one), _fell(one)
    began = f"{who(one)} began it" if one.host or one.rank is not None else "it is unknown which worker failed first"
    says = _says(one).removeprefix(f"{one.name}: ")
    begin = f"Attempt {one.attempt} failed{f' ({where})' if where else ''}: {began}. {says} ({one.name})."
    return begin + (f" With it fell {fell}." if fell else "")


def who(one: Failure) -> str:
    """Return the names of the host and the worker that caused a failure."""
    parts = [one.host or "", f"worker {one.rank}" if one.rank is not None else ""]
    return ", ".join(part for part in parts if part) or "not known"


def _where(one: Failure) -> str:
    return f"step {one.step:,}" if one.step else one.phase or ""


def _says(one: Failure) -> str:
    quoted = "; ".join(one.found.lines) if one.found.telling or not one.message else ""
    words = one.found.words if one.found.name != "unknown" else one.message or one.found.words
    return f"{words}: {quoted}" if quoted else words


def _fell(one: Failure) -> str:
    shown = [f"{name} ({cause})" for name, cause in list(one.victims.items())[:4]]
    return ", ".join(shown) + (f" and {len(one.victims) - 4} more" if len(one.victims) > 4 else "")


def findings(found: Study) -> list[str]:
    """Return sentences about the failures of a run, about how often it should save checkpoints, and about values that
    the user should examine.
    """
    lines = [_mtbf_line(found), *_saving_lines(found)]
    first_of_each = {one.found.name: one for one in reversed(found.failures)}
    lines += [f"{one.found.mend[0].upper()}{one.found.mend[1:]} ({one.name}, attempt {one.attempt})."
              for one in first_of_each.values() if one.found.mend]  # fmt: skip
    shown = found.spikes[:5]
    for one in shown:
        what = (
            "is not finite"
            if one.above is None
            else f"{one.value:.4g}, {one.above:.0f} standard deviations above the mean"
        )
        lines.append(f"Spike at step {one.step:,}: {one.name} {what}{'' if one.stands else ' (trained again since)'}.")
    if len(found.spikes) > len(shown):
        lines.append(f"{len(found.spikes) - len(shown):,} more spikes are in --json.")
    lines += [f"Samples of steps {one.first:,} to {one.step:,} were left out: {one.why}." for one in found.skipped]
    lines += _slow_lines(found)
    return [*lines, *(f"{note[0].upper()}{note[1:]}." for note in found.notes)]


def _slow_lines(found: Study) -> list[str]:
    """Return lines about slow ranks; if no rank was compared, only the reasons why nothing is known."""
    if not found.slow.compared:
        return [f"Slow ranks: {why}." for why in found.slow.unknown]
    lines = [f"Slow: {one}." for one in found.slow.slow] or [
        f"The probes found no slow rank among {found.slow.compared:,}."
    ]
    return [*lines, *(f"Not compared: {why}." for why in found.slow.unknown)]


def _mtbf_line(found: Study) -> str:
    known = found.mtbf
    if known is None:
        ends = not found.run.attempts or untold(found.run)
        why = "the run has no record of how its attempts ended" if ends else "nor is its time"
        return f"Mean time between failures: unknown ({why})."
    sure = f"{100 * CONFIDENCE:.0f} %"
    if known.estimate is None:
        one_sided = f"{100 * (1 + CONFIDENCE) / 2:.0f} %"
        bound = f"the mean time between two failures is above {duration(known.low)} with {one_sided} confidence"
        return f"There was no failure in {duration(known.running)} of running: {bound}."
    of = f"{known.failures} failure{'s' * (known.failures > 1)} in {duration(known.running)} of running"
    between = f"{duration(known.low)} to {duration(known.high)}"
    return f"Mean time between failures: {duration(known.estimate)} ({of}; with {sure} confidence {between})."


def _saving_lines(found: Study) -> list[str]:
    known = found.checkpoints
    used = f"every {known.steps:,} steps, {duration(known.every)} of training" if known.steps and known.every else ""
    risk = f"Steps since checkpoint {known.newest:,}: {known.at_risk:,}." if known.newest and known.at_risk else ""
    if known.best is None:
        return [line for line in (f"Best interval between saves: unknown ({known.why}).", risk) if line]
    best, usual = known.best, found.run.usual() or 1.0
    upper = duration(best.high) if best.high else "more"
    return [line for line in (
        f"A save stops the training for {duration(best.cost)}. The run saves {used}, which costs "
        f"{share(best.cost_used)} of the time, including the steps that failures make the run train again.",
        f"Best interval by Daly's formula: every {max(1, round(best.best / usual)):,} steps, {duration(best.best)} "
        f"({duration(best.low)} to {upper} within the uncertainty of the failures), which costs "
        f"{share(best.cost_best)}.",
        risk,
    ) if line]  # fmt: skip


def print_text(studies: Sequence[Study], console: Console) -> None:
    """Print the report about one run, or about several runs side by side, to `console`."""
    console.print(_text_table(["", *(one.name for one in studies)], side_by_side(studies)))
    console.print(_text_table(["where the time went", *(one.name for one in studies)], time_rows(studies)))
    for one in studies:
        title = f"{one.run.folder}: " if len(studies) > 1 else ""
        if rows := attempt_rows(one):
            console.print(_text_table(ATTEMPT_HEADS, rows, f"{title}attempts"))
        for line in [*map(failure_line, one.failures), *findings(one)]:
            console.print(f"{title}{line}")


def side_by_side(studies: Sequence[Study]) -> Rows:
    """Return a table with the summaries of several runs, with a column for each run."""
    heads = [head(one) for one in studies]
    names = list(dict.fromkeys(row[0] for rows in heads for row in rows))
    tables = [{row[0]: row[1] for row in rows} for rows in heads]
    return [[name, *(table.get(name, "not known") for table in tables)] for name in names]


def _text_table(heads: Sequence[str], rows: Rows, title: str = "") -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in heads:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def page(studies: Sequence[Study]) -> str:
    """Return the report about runs as the text of an HTML file."""
    title = f"Report of {', '.join(one.name for one in studies)}"
    heads = ["", *(one.name for one in studies)]
    body = [
        markup.text(title, "h1"),
        markup.table(heads, side_by_side(studies)),
        svg_text(_figure(studies)),
        markup.text("Where the time went", "h2"),
        markup.table(heads, time_rows(studies)),
    ]
    for one in studies:
        of = f" of {one.name}" if len(studies) > 1 else ""
        body += [markup.text(f"Attempts{of}", "h2"), markup.text(str(one.run.folder))]
        body.append(markup.table(ATTEMPT_HEADS, attempt_rows(one)))
        if one.failures:
            body += [markup.text(f"Failures{of}", "h2"), markup.table(FAILURE_HEADS, failure_rows(one))]
        body.append(markup.bullets(findings(one)))
    return markup.page(title, body)
