"""This module writes the output of `tc3 search pipeline`: the solution file, a summary for people, one JSON object
for programs, and a picture.

The picture shows the operations of each stage over time (as figures 2 and 9 of the report), and the memory of each
stage over the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tools.files.figure import new_figure, save_figure
from tools.layout.instance import Instance
from tools.layout.optimise import Outcome
from tools.pipeline.simulate import Durations, Simulation, draw_timeline, memory_over_time, simulate_timetable


def solution_json(outcome: Outcome) -> dict[str, Any]:
    """Return the content of the solution file: the name of the problem, the numbers of layers
    n[type][chunk][stage][option], the step time, and the peak memory of each stage.
    """
    assert outcome.plan is not None
    return {
        "name": outcome.instance.name,
        "solution": outcome.instance.to_solution(outcome.plan),
        "time": outcome.time,
        "peak_mem": outcome.peak.tolist(),
    }


def report_json(outcome: Outcome) -> dict[str, Any]:
    """Return the best plan with its step time and bounds as a dictionary for JSON; if no plan was found, the key `why`
    holds the reason.
    """
    known = {
        "lower_bound": _finite(outcome.bound),
        "work_bound": outcome.work_bound,
        "gap": _finite(outcome.gap),
        "proven": outcome.finished,
        "ended_by_time_limit": outcome.cut,
        "seconds": round(outcome.seconds, 2),
    }
    if outcome.plan is None:
        return {"name": outcome.instance.name, "solution": None, "why": outcome.why, **known}
    return {**solution_json(outcome), **known}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def print_text(outcome: Outcome, console: Console) -> None:
    """Print the step time of the best plan, its lower bound, and a table row for each stage."""
    instance, plan = outcome.instance, outcome.plan
    assert plan is not None
    proof = "proven best" if outcome.finished else f"at most {100 * outcome.gap:.2f} % from the best"
    console.print(
        f"{instance.name}: simulated step {outcome.time:.6g}, no plan under {outcome.bound:.6g}: {proof} "
        f"({outcome.seconds:.0f} s)"
    )
    console.print(
        f"{instance.stages} stages x {instance.chunks} chunks, {instance.micro_batches} micro-batches, "
        f"{instance.schedule}; without any waiting the work would take {outcome.work_bound:.6g}"
    )
    table = Table(box=None)
    for name in ("stage", "layers by chunk", "recompute", "peak memory", "of the cap"):
        table.add_column(name, justify="left" if name == "recompute" else "right")
    for stage in range(instance.stages):
        own = plan[:, instance.stage_of == stage]
        peak = outcome.peak[stage]
        table.add_row(
            str(stage),
            " ".join(str(count) for count in own.sum(axis=0)),
            _recompute(outcome, own),
            f"{peak:.0f}",
            f"{100 * peak / instance.cap:.1f} %",
        )
    console.print(table)


def _recompute(outcome: Outcome, own: np.ndarray) -> str:
    """Return options of a stage's layers, by chunk: `dense none 1 0, moe full 2 3`."""
    types, columns = outcome.instance.types, outcome.instance.columns
    return ", ".join(
        f"{types[t].name} {types[t].options[o].name} {' '.join(map(str, own[k]))}"
        for k, (t, o) in enumerate(columns)
        if own[k].any()
    )


def draw(instance: Instance, plan: np.ndarray, path: Path) -> Path:
    """Draw the time line and the memory of a plan [K, C] to the picture file `path`, and return `path`. The function
    raises the same errors as `save_figure`.
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
    """Write at the right of each row its layers and, below, those that recompute, by chunk."""
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
    parameters, activation = every.sum(axis=0) + instance.least_static, kept
    for stage in range(instance.stages):
        times, memory = memory_over_time(simulation, stage, parameters[stage], activation[:, stage])
        times, memory = np.append(times, simulation.makespan), np.append(memory, memory[-1])
        colour = colormaps["viridis"](stage / instance.stages)
        axes.step(times, memory, where="post", color=colour, linewidth=0.8, label=f"stage {stage}")
    axes.axhline(instance.cap, color="red", linestyle="--", linewidth=1)
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": "x-small"}
    axes.annotate("memory_cap", (1.005, instance.cap), color="red", **beside)
    axes.set_ylim(0, 1.05 * max(instance.cap, axes.get_ylim()[1]))
    axes.set_ylabel("memory of a stage,\nin the instance's unit")
    axes.set_xlabel("time of one step, in the instance's unit")
    axes.legend(ncols=min(8, instance.stages), fontsize="x-small", loc="lower center")
