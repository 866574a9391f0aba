"""Draw docs/pictures/schedules/*.png, the time lines of docs/schedules.md: `python docs/pictures/schedules.py`.

Four devices, a forward as long as input gradients and as weight gradients, and half of a pair's forward hidden.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).with_suffix("")
sys.path.insert(0, str(FOLDER.parents[2]))

from tools.files.figure import new_figure, save_figure  # noqa: E402
from tools.pipeline.simulate import (  # noqa: E402
    Durations,
    Simulation,
    draw_timeline,
    simulate,
)

STAGES, MICRO_BATCHES = 4, 8
# schedule -> (chunks of a stage, parts of a sequence)
DRAWN = {
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, 1),
    "interleaved_1f1b_pairs": (2, 1),
    "seqpipe": (1, 2),
    "zb_h1": (1, 1),
    "zb_h2": (1, 1),
    "zb_v": (2, 1),
    "v_half": (2, 1),
    "v_min": (2, 1),
    "zero_bubble_v": (2, 1),
    "dual_pipe": (2, 1),
    "dual_pipe_v": (2, 1),
}


def simulation_of(schedule: str) -> Simulation:
    """Return a simulated step of equal stages: on each stage the forward of the whole model takes 4 units, and its
    backward twice as long.
    """
    chunks, parts = DRAWN[schedule]
    # dual_pipe's stages hold two models: a half of the micro-batches goes through each
    unit = np.full((chunks, STAGES), 4.0 if schedule == "dual_pipe" else 4.0 / chunks)
    hidden = np.full((chunks, chunks, STAGES), 0.5 * unit[0, 0])
    return simulate(schedule, MICRO_BATCHES, Durations(unit, 2 * unit, unit, hidden=hidden), parts)


def main() -> None:
    """Draw all pictures on one scale of time."""
    FOLDER.mkdir(exist_ok=True)
    found = {schedule: simulation_of(schedule) for schedule in DRAWN}
    longest = max(simulation.makespan for simulation in found.values())
    for schedule, simulation in found.items():
        figure = new_figure(10, 1.6)
        axes = figure.subplots()
        draw_timeline(axes, simulation, numbers=True)
        axes.set_xlim(0, longest)
        axes.set_xticks([])
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "fontsize": "x-small"}
        axes.legend(**beside, frameon=False, handles=axes.get_legend().legend_handles)
        axes.spines[:].set_visible(False)
        save_figure(figure, FOLDER / f"{schedule}.png")


if __name__ == "__main__":
    main()
