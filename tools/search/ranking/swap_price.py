"""What swapping a layer's activations to the host would cost beside recomputing them (`tools.pipeline.swap`).

Simulated only: MindFormers 1.9.0's `swap_config` reaches no model (docs/schedules.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.estimate.configuration import Configuration
from tools.estimate.memory.activations import saved
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.pipeline.swap import swapped
from tools.placement.budget import Budget
from tools.search.ranking.swapping import Swapping, place_swapping

if TYPE_CHECKING:
    from tools.search.ranking.run import Found

_LEAST = 2.0  # seconds, whatever the time limit says


def swap_words(config: Configuration, times: TimeModel) -> list[str]:
    """A line for each kind of layer; one that says so where the hardware file has no link to the host."""
    lines = []
    for kind in dict.fromkeys(config.model.pattern):
        layer, whole = times.layer(config, kind), saved(config, kind)
        moved = whole - saved(config, kind, "full")
        copied = times.to_host(moved)
        if copied is None:
            return [f"swapping instead of recomputing: not known, {times.hardware.name} has no host_link"]
        found = swapped(whole, moved, copied, layer.forward.total, layer.backward.total)
        again = layer.recomputed["full"].total
        lines.append(
            f"swapping what a {kind} layer keeps ({moved / GIB:.2f} GiB a micro-batch) would add "
            f"{1e3 * found.extra_backward:.1f} ms to its backward, recomputing all of it {1e3 * again:.1f} ms: host "
            f"link {times.hardware.host_link}, nothing else on it; swap_config cannot be run by "
            "MindFormers 1.9.0"
        )
    return lines


def add_swapping(found: Found, times: TimeModel, budget: Budget) -> None:
    """Place the first layout with swapping as a third choice, with twice a placement's effort."""
    if found.whole and found.entries:
        twice, seconds = 2 * budget.effort, max(_LEAST, budget.seconds_left)
        room = found.request.room
        found.swapping = place_swapping(found.entries[0].config, times, room, Budget(twice, seconds))


def swapping_words(found: Swapping) -> list[str]:
    """What swapping as a third choice would bring to the first layout, in lines."""
    if found.with_s == float("inf"):
        return ["keep, recompute or swap: no layout of the first one's stages fits, with swapping or without"]
    options = ", ".join(f"{name} {count}" for name, count in found.layers.items())
    words = f"{found.with_s:.2f} s a step instead of {found.without_s:.2f}"
    if found.with_s >= found.without_s:
        words = f"nothing gained over {found.without_s:.2f} s a step"
    return [
        f"keep, recompute or swap, in the stages of 1: {words}, {found.peak / GIB:.1f} GiB; layers: {options}; those "
        f"that swap by stage: {' '.join(map(str, found.by_stage))}",
        "simulated only: nothing of MindFormers' swapping runs without a device; nobody else is on the link",
    ]


def swapping_json(found: Swapping) -> dict[str, Any]:
    """For `--json`: seconds are None where nothing fits."""
    seconds = (found.without_s, found.with_s)
    without, swapping = (None if one == float("inf") else one for one in seconds)
    more = {"layers": dict(found.layers), "swapping_by_stage": list(found.by_stage), "peak_gib": found.peak / GIB}
    return {"step_s_without": without, "step_s": swapping, **more, "runnable": False}
