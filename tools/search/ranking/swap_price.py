"""What swapping a layer's activations to the host would cost beside recomputing them (`tools.pipeline.swap`).

Simulated only: MindFormers 1.9.0's `swap_config` reaches no model (docs/schedules.md).
"""

from __future__ import annotations

from tools.estimate.configuration import Configuration
from tools.estimate.memory.activations import saved
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.pipeline.swap import swapped


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
