"""What `tc3 search pipeline` says: the solution file, the summary for people, one JSON object for machines."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tools.placement.optimise import Outcome


def solution_json(outcome: Outcome) -> dict[str, Any]:
    """The solution file's content: name, solution n[type][v][s][option], time and peak_mem (stable)."""
    assert outcome.plan is not None
    return {
        "name": outcome.instance.name,
        "solution": outcome.instance.to_solution(outcome.plan),
        "time": outcome.time,
        "peak_mem": outcome.peak.tolist(),
    }


def report_json(outcome: Outcome) -> dict[str, Any]:
    """The solution with what is known about it; without a plan `solution` is null and `why` says what is missing."""
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


def solution_text(outcome: Outcome) -> str:
    """The solution file."""
    return json.dumps(solution_json(outcome)) + "\n"


def print_text(outcome: Outcome, console: Console) -> None:
    """Print step time, bound and a row for each stage."""
    instance, plan = outcome.instance, outcome.plan
    assert plan is not None
    proof = "proven best" if outcome.finished else f"at most {100 * outcome.gap:.2f} % from the best"
    console.print(
        f"{instance.name}: simulated step {outcome.time:.6g}, no plan under {outcome.bound:.6g}: {proof} "
        f"({outcome.seconds:.0f} s)"
    )
    console.print(
        f"{instance.stages} stages x {instance.chunks} chunks, {instance.micro_batches} micro-batches, "
        f"{instance.schedule}; work alone would take {outcome.work_bound:.6g}"
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
    """Options of a stage's layers, by chunk: `dense none 1 0, moe full 2 3`."""
    types, columns = outcome.instance.types, outcome.instance.columns
    return ", ".join(
        f"{types[t].name} {types[t].options[o].name} {' '.join(map(str, own[k]))}"
        for k, (t, o) in enumerate(columns)
        if own[k].any()
    )
