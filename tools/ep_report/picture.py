"""Draw a layer's streams before and after it is cut into chunks (report figure 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugins.ep_overlap.plan import WHOLE, Passes
from plugins.ep_overlap.timeline import STREAMS, Timeline
from tools.ep_report.advise import Advice
from tools.files.figure import new_figure, save_figure

_ROWS = {"compute": "compute", "inter": "between nodes", "intra": "inside a node"}
_GREY = "0.75"


def draw(advice: Advice, path: Path) -> Path:
    """Draw the recommended mode's layer, uncut above and cut below, forward then backward; returns `path`.

    Raises:
        DataError: as `save_figure`.
    """
    choice = advice.best.choice
    figure = new_figure(11, 5)
    above, below = figure.subplots(2, 1, sharex=True)
    b, s = choice.chunks
    again = bool(advice.config.recompute.full)
    _panel(above, _shown(choice.before, again), "uncut")
    _panel(below, _shown(choice.after, again), f"{b * s} chunks (batch {b} x sequence {s})")
    label = "ms of one MoE layer and micro-batch, forward then backward (modelled)"
    below.set_xlabel(f"{label}; a colour for each chunk, grey: shared expert")
    shared = ", recomputed" if again else ""
    figure.suptitle(f"{advice.mode} dispatch, EP {advice.topology.ep} on {advice.hardware.name}{shared}")
    return save_figure(figure, path)


def _shown(timelines: Passes[Timeline], again: bool) -> tuple[Timeline, Timeline]:
    """Forward, and the backward that a layer of this recipe has."""
    return timelines.forward, timelines.replayed if again else timelines.backward


def _panel(axes: Any, timelines: tuple[Timeline, Timeline], name: str) -> None:
    """One row for each stream; backward starts where forward ends."""
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    chunks = 1 + max(span.op.chunk for timeline in timelines for span in timeline.spans)
    offset = 0.0
    for timeline, way in zip(timelines, ("forward", "backward"), strict=True):
        for row, stream in enumerate(reversed(STREAMS)):
            for span in timeline.on(stream):
                colour = _GREY if span.op.chunk == WHOLE else colours(span.op.chunk / chunks)
                place = (1e3 * (offset + span.start), 1e3 * span.op.seconds)
                axes.broken_barh([place], (row - 0.4, 0.8), facecolor=colour)
        offset += timeline.makespan
        axes.axvline(1e3 * offset, color="black", linewidth=0.8)
        axes.text(1e3 * offset, -0.85, f"{way} ends ", ha="right", va="bottom", fontsize="x-small")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.9, len(STREAMS) - 0.4)
    axes.set_yticks(range(len(STREAMS)), [_ROWS[stream] for stream in reversed(STREAMS)])
    axes.set_title(f"{name}: {1e3 * offset:.2f} ms", loc="left", fontsize="medium")
