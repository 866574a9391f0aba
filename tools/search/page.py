"""This module writes the results of `tc3 search` as one HTML file that needs no other files. The file shows the table
of layouts, the reasons for their order, pictures, and the numbers of candidates that each rule dropped.

The first picture shows memory over step time for all candidates, with their Pareto frontier and the candidates whose
layers were placed (report Figure 8).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.estimate.time_model import PARTS, TimeModel
from tools.files import page as markup
from tools.files.figure import new_figure, save_figure, svg_text
from tools.hardware.units import GIB
from tools.pipeline.simulate import Durations, draw_timeline, simulate
from tools.search.candidates import RECOMPUTE
from tools.search.doubt import Doubt, doubt_of
from tools.search.ranking.rank import Ranking
from tools.search.ranking.run import Entry, Found
from tools.search.ranking.uneven import HEADS as UNEVEN
from tools.search.ranking.uneven import TABLES
from tools.search.report import HEADS, LEFT, STAGES, assumptions, lost, more_stages, reasons, stage_rows, table_rows
from tools.search.request import PLANNED

_SHOWN = 6000  # points of the space
_SLOWEST = 2.0  # times the fastest: what is slower is not drawn
_NEAR, _NEAR_S = 0.4, 0.03  # GiB and share of the seconds within which two marks' numbers would overlap
_ROUNDS = 2  # micro-batches of a timeline for each stage: filling, steady state and emptying can be seen
_DENSE = 2000  # operations of a timeline that are drawn as an image inside the picture


def frontier(seconds: np.ndarray, peaks: np.ndarray) -> np.ndarray:
    """Return the indices of the layouts on the Pareto frontier of step time and memory, in the order of memory. A
    layout is on the frontier if it is faster than all layouts that need less memory.
    """
    order = np.lexsort((seconds, peaks))
    least = np.minimum.accumulate(seconds[order])
    first = np.ones(len(order), bool)
    first[1:] = seconds[order][1:] < least[:-1]
    return order[first]


def draw(found: Found, times: TimeModel, path: Path) -> Path:
    """Draw the Pareto frontier of step time and memory, and below it the time line of the fastest layout, to one .svg
    or .png file.
    """
    figure = new_figure(13, 11)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    draw_frontier(above, found, doubt_of(found, times))
    draw_entry(below, found.entries[0], times)
    return save_figure(figure, path)


def as_svg(paint: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Draw one picture with the function `paint`, and return the picture as an `<svg>` element for the HTML page."""
    figure = new_figure(*size)
    paint(figure.subplots())
    return svg_text(figure)


def draw_frontier(axes: Any, found: Found, doubt: Doubt | None = None) -> None:
    """Draw the step time and memory of candidate strategies. Candidates that fit are dots coloured by number of stages,
    candidates whose layers were placed are diamonds, and the Pareto frontier is a line.

    The diamonds of layouts that may be the fastest (`doubt`) are filled and carry the number of the layout.

    Candidates with "planned" recomputation have no dot, because all of them that need recomputation to fit would lie
    exactly on the memory limit.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator, NullLocator

    ranking, request = found.ranking, found.request
    shown = _sample(ranking)
    stages = np.array([block.pp for block in ranking.blocks])[ranking.places[shown, 0]]
    distinct = np.unique(stages)
    for place, pp in enumerate(distinct):
        own = shown[stages == pp]
        colour = colormaps["viridis"](place / max(1, len(distinct) - 1))
        look = {"s": 5, "color": colour, "alpha": 0.5, "label": f"pp {pp}", "rasterized": True}
        axes.scatter(ranking.peaks[own] / GIB, ranking.seconds[own], **look)
    best = frontier(ranking.seconds, ranking.peaks)
    best = best[ranking.seconds[best] <= _SLOWEST * ranking.seconds.min()]
    line = {"color": "black", "linewidth": 1, "drawstyle": "steps-post"}
    axes.plot(ranking.peaks[best] / GIB, ranking.seconds[best], label="frontier, as ranked", **line)
    _draw_placed(axes, found.entries, {name for name, _ in doubt.alike} if doubt else set())
    if found.own and not found.request.changed:
        axes.scatter([found.own.peak / GIB], [found.own.seconds], marker="*", s=130, color="tab:orange", label="recipe")
    if request.margin:
        label = f"limit less {100 * request.margin:.1f} %"
        axes.axvline(request.room / GIB, color="tab:orange", linestyle="--", linewidth=1, label=label)
    axes.axvline(request.cap / GIB, color="red", linestyle="--", linewidth=1, label="memory limit")
    axes.set_xlabel("memory of the heaviest stage, GiB")
    axes.set_yscale("log")  # what is near the fastest has most of the height
    axes.yaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("step, s")
    axes.set_title(f"{len(ranking.seconds):,} candidates that fit, of {ranking.funnel.total:,}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_placed(axes: Any, entries: Sequence[Entry], alike: Collection[str]) -> None:
    """Draw a diamond for each; those that may be the fastest have their numbers below, none over another."""
    numbered: list[tuple[float, float]] = []
    for filled, label in ((True, "placed, may be the fastest"), (False, "placed, others")):
        own = {name: entry for name, entry in enumerate(entries, 1) if (str(name) in alike) == filled}
        where = [entry.peak / GIB for entry in own.values()], [entry.seconds for entry in own.values()]
        faces = "tab:red" if filled else "white"
        if own:
            axes.scatter(*where, s=28, marker="D", zorder=3, edgecolors="tab:red", facecolors=faces, label=label)
        for name, place in zip(own, zip(*where, strict=True), strict=True) if filled else ():
            near = sum(abs(x - place[0]) < _NEAR and abs(y / place[1] - 1) < _NEAR_S for x, y in numbered)
            numbered.append(place)
            below = {"xytext": (0, -15 - 11 * near), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            axes.annotate(str(name), place, zorder=4, color="tab:red", bbox=paper, **below)


def _sample(ranking: Ranking) -> np.ndarray:
    """Return indices of at most `_SHOWN` candidates with a uniform policy, evenly by time."""
    uniform = np.flatnonzero(ranking.places[:, 2] != RECOMPUTE.index(PLANNED))
    order = uniform[ranking.seconds[uniform].argsort()]
    order = order[: np.searchsorted(ranking.seconds[order], _SLOWEST * ranking.seconds.min(), side="right")]
    return order[:: max(1, -(-len(order) // _SHOWN))]


def draw_entry(axes: Any, entry: Entry, times: TimeModel) -> None:
    """Draw the passes that each stage runs over time, with a row for each stage. If there are many micro-batches, draw
    a shorter step with a few micro-batches.
    """
    config = entry.config
    forward, backward, _ = times.chunks(config)
    sending = 0.0 if config.overlap_pp else times.transfer(config)
    durations = Durations(forward, backward, backward / 2, sending, "none" if sending else "full")
    step = simulate(config.schedule, config.micro_batches, durations)
    few = min(config.micro_batches, max(_ROUNDS * config.pp, 8))
    simulation = step if few == config.micro_batches else simulate(config.schedule, few, durations)
    draw_timeline(axes, simulation)
    if sum(map(len, simulation.orders)) > _DENSE:
        for bars in axes.collections:
            bars.set_rasterized(True)
    # beside the rows: with many chunks the picture's own legend is wider than the picture
    handles = axes.get_legend().legend_handles
    axes.legend(handles=handles, fontsize="x-small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    shown = "one step" if simulation is step else f"{few} micro-batches of the step's {config.micro_batches}"
    axes.set_xlabel(f"seconds, {shown}")
    axes.set_title(f"{entry.layout}: the pipeline of a step takes {step.makespan:.2f} s, simulated; drawn: {shown}")


_PICTURES = TABLES["picture"]
_ALIKE = "the layouts of which each may be the fastest, within the known error of step times"


def html(found: Found, times: TimeModel, title: str) -> str:
    """Return the text of the HTML file with the answer of a search."""
    request = found.request
    head = (
        f"{request.devices:,} devices of {request.hardware.name}, global batch {request.global_batch:,}, "
        f"sequence {request.base.sequence:,}"
    )
    entries = {str(number): entry for number, entry in enumerate(found.entries, 1)}
    entries |= {"recipe": found.own} if found.own else {}
    parts = [[name, one.layout, *(f"{one.parts[part]:.2f}" for part in PARTS)] for name, one in entries.items()]
    doubt = doubt_of(found, times)
    alike = [name for name, _ in doubt.alike] if doubt and len(doubt.alike) > 1 else []
    body = [
        markup.text(title, "h1"),
        markup.text(head),
        _table(tuple(HEADS), table_rows(found), alike),
        markup.legend(
            "How to read the table",
            {name or "#": said for name, said in HEADS.items()} | ({"green": _ALIKE} if alike else {}),
        ),
        *_under_loads(found),
        markup.bullets(reasons(found, doubt)),
        *_stages(found),
        markup.text("Memory and time", "h2"),
        as_svg(lambda axes: draw_frontier(axes, found, doubt), (12, 6.5)),
        markup.legend("How to read the picture", _PICTURES),
        markup.text("Where a step's time goes, in seconds", "h2"),
        _table(("", "layout", *PARTS), parts),
        markup.legend("What the parts are", PARTS),
        markup.text("The first's pipeline", "h2"),
        markup.text(
            "A row is a pipeline stage, a bar a micro-batch's pass through one of the stage's chunks of layers."
        ),
        as_svg(lambda axes: draw_entry(axes, found.entries[0], times), (12, 2 + 0.4 * found.entries[0].config.pp)),
        *_layers(found.entries[0]),
        markup.text("What was dropped", "h2"),
        _table(("", "candidates"), [[reason, f"{count:,}"] for reason, count in found.ranking.funnel.lines()]),
        markup.bullets(lost(found)),
        markup.text("What the numbers rest on", "h2"),
        markup.bullets(assumptions(found, times)),
    ]
    return markup.page(title, body)


def _stages(found: Found) -> list[str]:
    if not found.stages:
        return []
    return [
        markup.text("The best of each number of stages and chunks", "h2"),
        _table(tuple(STAGES), stage_rows(found)),
        markup.legend("How to read the table", STAGES),
        markup.bullets(more_stages(found)),
    ]


def _under_loads(found: Found) -> list[str]:
    if not found.uneven:
        return []
    return [
        markup.text("Under the loads, by expected seconds; layouts that run out of memory come last", "h2"),
        _table(tuple(UNEVEN), [one.cells for one in found.uneven]),
        markup.legend("How to read this table", {name or "#": said for name, said in UNEVEN.items()}),
    ]


def _layers(entry: Entry) -> tuple[str, str]:
    heads = ["", *(f"stage {stage}" for stage in range(entry.config.pp))]
    rows = [[f"chunk {chunk}", *map(str, row)] for chunk, row in enumerate(entry.config.layers)]
    return markup.text(f"Layers of each chunk; recomputation: {entry.recompute}."), _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], alike: Collection[str] = ()) -> str:
    """Return a table with words at the left, and the rows of the recipe and of `alike` coloured."""
    words = [at for at, head in enumerate(heads) if head in LEFT]
    kinds = ["own" if row[0] == "recipe" else "alike" if row[0] in alike else "" for row in rows]
    return markup.table(heads, rows, "numbers", words, kinds)
