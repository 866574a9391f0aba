"""Memory against time: what the space offers, its frontier, and the candidates that were placed (report Figure 8)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.estimate.time_model import TimeModel
from tools.files.figure import new_figure, save_figure, svg_text
from tools.hardware.units import GIB
from tools.pipeline import picture as pipeline_picture
from tools.pipeline.simulate import Durations, simulate
from tools.search.ranking.entry import Entry
from tools.search.ranking.rank import Ranking
from tools.search.ranking.run import Found
from tools.search.space.candidates import RECOMPUTE
from tools.search.space.limits import PLANNED

_SHOWN = 6000  # points of the space
_SLOWEST = 2.5  # times the fastest: what is slower is not drawn
_DENSE = 2000  # operations of a timeline that are drawn as an image inside the picture


def frontier(seconds: np.ndarray, peaks: np.ndarray) -> np.ndarray:
    """Indices of the points that no other beats in both, by memory: each is faster than all that need less."""
    order = np.lexsort((seconds, peaks))
    least = np.minimum.accumulate(seconds[order])
    first = np.ones(len(order), bool)
    first[1:] = seconds[order][1:] < least[:-1]
    return order[first]


def draw(found: Found, times: TimeModel, path: Path) -> Path:
    """Both pictures in one file (.svg or .png): the frontier above, the winner's timeline below."""
    figure = new_figure(13, 11)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    draw_frontier(above, found)
    draw_timeline(below, found.entries[0], times)
    return save_figure(figure, path)


def as_svg(paint: Callable[[Any], None], size: tuple[float, float]) -> str:
    """The `<svg>` element of one picture."""
    figure = new_figure(*size)
    paint(figure.subplots())
    return svg_text(figure)


def draw_frontier(axes: Any, found: Found) -> None:
    """Candidates that fit as dots coloured by their stages, the frontier as a line, those placed as marks.

    "Planned" ones have no dot: as ranked, all that the limit binds lie on it.
    """
    from matplotlib import colormaps

    ranking, request = found.ranking, found.request
    shown = _sample(ranking)
    stages = np.array([block.pp for block in ranking.blocks])[ranking.places[shown, 0]]
    distinct = np.unique(stages)
    for place, pp in enumerate(distinct):
        own = shown[stages == pp]
        colour = colormaps["viridis"](place / max(1, len(distinct) - 1))
        axes.scatter(
            ranking.peaks[own] / GIB,
            ranking.seconds[own],
            s=5,
            color=colour,
            alpha=0.5,
            label=f"pp {pp}",
            rasterized=True,
        )
    best = frontier(ranking.seconds, ranking.peaks)
    best = best[ranking.seconds[best] <= _SLOWEST * ranking.seconds.min()]
    line = {"color": "black", "linewidth": 1, "drawstyle": "steps-post"}
    axes.plot(ranking.peaks[best] / GIB, ranking.seconds[best], label="frontier, as ranked", **line)
    entries = found.entries
    marks = {"marker": "D", "color": "tab:red", "zorder": 3}
    axes.scatter([e.peak / GIB for e in entries], [e.seconds for e in entries], s=28, label="placed", **marks)
    if found.own and not found.request.changed:
        axes.scatter([found.own.peak / GIB], [found.own.seconds], marker="*", s=130, color="tab:orange", label="recipe")
    if request.margin:
        label = f"limit less {100 * request.margin:.1f} %"
        axes.axvline(request.room / GIB, color="tab:orange", linestyle="--", linewidth=1, label=label)
    axes.axvline(request.cap / GIB, color="red", linestyle="--", linewidth=1, label="memory limit")
    axes.set_xlabel("memory of the heaviest stage, GiB")
    axes.set_ylabel("step, s")
    axes.set_title(f"{len(ranking.seconds):,} candidates that fit, of {ranking.funnel.total:,}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))


def _sample(ranking: Ranking) -> np.ndarray:
    """Indices of at most `_SHOWN` candidates with a uniform policy, evenly by time."""
    uniform = np.flatnonzero(ranking.places[:, 2] != RECOMPUTE.index(PLANNED))
    order = uniform[ranking.seconds[uniform].argsort()]
    order = order[: np.searchsorted(ranking.seconds[order], _SLOWEST * ranking.seconds.min(), side="right")]
    return order[:: max(1, -(-len(order) // _SHOWN))]


def draw_timeline(axes: Any, entry: Entry, times: TimeModel) -> None:
    """Who runs what when, a row for each stage."""
    config = entry.config
    forward, backward, _ = times.chunks(config)
    sending = 0.0 if config.overlap_pp else times.transfer(config)
    durations = Durations(forward, backward, backward / 2, sending, "none" if sending else "full")
    simulation = simulate(config.schedule, config.micro_batches, durations)
    pipeline_picture.draw_timeline(axes, simulation)
    if sum(map(len, simulation.orders)) > _DENSE:
        for bars in axes.collections:
            bars.set_rasterized(True)
    # beside the rows: with many chunks the picture's own legend is wider than the picture
    handles = axes.get_legend().legend_handles
    axes.legend(handles=handles, fontsize="x-small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_xlabel("seconds of one step")
    axes.set_title(f"{entry.layout}: pipeline {simulation.makespan:.2f} s, simulated")
