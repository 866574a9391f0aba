"""Draw a plan: who runs what when (as the report's figures 2 and 9), and the memory of each stage over the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tools.files.figure import new_figure, save_figure
from tools.pipeline.in_flight import memory_over_time
from tools.pipeline.picture import draw_timeline
from tools.pipeline.simulate import Durations, Simulation, simulate_timetable
from tools.placement.instance import Instance


def draw(instance: Instance, plan: np.ndarray, path: Path) -> Path:
    """Draw the timeline and the memory of a plan [K, C]; returns `path`.

    Raises:
        DataError: as `save_figure`.
    """
    forward, backward = instance.by_stage(instance.times(plan)[:2]).reshape(2, instance.chunks, instance.stages)
    simulation = simulate_timetable(instance.table, Durations(forward, backward))
    figure = new_figure(14, 3 + 0.4 * instance.stages)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw_timeline(above, simulation)
    _layers(above, instance, plan)
    _memory(below, instance, plan, simulation)
    figure.suptitle(
        f"{instance.name}: step {simulation.makespan:.6g}, bubble {100 * simulation.idle_share:.1f} % of all time "
        "(simulated)"
    )
    return save_figure(figure, path)


def _layers(axes: Any, instance: Instance, plan: np.ndarray) -> None:
    """At the right of each row: layers and, below, layers that recompute, by chunk."""
    # the option that costs no time is the one that recomputes nothing
    free = np.array([instance.types[t].options[o].extra_backward == 0 for t, o in instance.columns])
    for stage in range(instance.stages):
        own = plan[:, instance.stage_of == stage]
        layers, recomputed = own.sum(axis=0), own[~free].sum(axis=0)
        text = f"layers by chunk {' '.join(map(str, layers))}\nof them recomputed {' '.join(map(str, recomputed))}"
        axes.annotate(text, (1.005, stage), xycoords=("axes fraction", "data"), va="center", fontsize="x-small")


def _memory(axes: Any, instance: Instance, plan: np.ndarray, simulation: Simulation) -> None:
    from matplotlib import colormaps

    every, kept = instance.by_stage(instance.costs[2:] @ plan).reshape(2, instance.chunks, instance.stages)
    parameters, activation = every.sum(axis=0) + instance.static, kept
    for stage in range(instance.stages):
        times, memory = memory_over_time(simulation, stage, parameters[stage], activation[:, stage])
        times, memory = np.append(times, simulation.makespan), np.append(memory, memory[-1])
        colour = colormaps["viridis"](stage / instance.stages)
        axes.step(times, memory, where="post", color=colour, linewidth=0.8, label=f"stage {stage}")
    axes.axhline(instance.cap, color="red", linestyle="--", linewidth=1)
    axes.annotate(
        "memory_cap",
        (1.005, instance.cap),
        xycoords=("axes fraction", "data"),
        va="center",
        color="red",
        fontsize="x-small",
    )
    axes.set_ylim(0, 1.05 * max(instance.cap, axes.get_ylim()[1]))
    axes.set_ylabel("memory of a stage,\nin the instance's unit")
    axes.set_xlabel("time of one step, in the instance's unit")
    axes.legend(ncols=min(8, instance.stages), fontsize="x-small", loc="lower center")
