"""Live bytes of a compiled stage over a step, pass by pass, stitched by the function of the analytical line.

Which tensors there are, their bytes and what a forward hands to its backward are the graph's. Inside a pass operators
run in the order of the graph's text and a tensor lives from its operator to its last reader: a device's own order, its
reuse and its fragments are unknown here. Times are unknown, too: each pass is one long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.dryrun.graph.passes import Pass
from tools.dryrun.layout import ACCUMULATED, STATE, WEIGHT, Held
from tools.estimate.memory.time_line import KEPT, WORKING, Bytes, Owner, Timed, TimeLine, stitch
from tools.estimate.memory.training_graph import OTHER, module_of_path
from tools.pipeline.schedules import Op

_PARTS = {WEIGHT: "weights", STATE: "state", ACCUMULATED: "accumulated"}


def line_of(held: Sequence[Held], graph: Mapping[str, Any], passes: Sequence[Pass]) -> TimeLine:
    """The line of a stage, whose peak is the total of `memory_of`.

    Args:
        held, graph, passes: as `tools.dryrun.memory.memory_of`; without known passes every chunk's backward counts
            once, with nothing waiting.
    """
    constant: dict[Owner, float] = {}
    for item in held:
        owner = Owner(_PARTS[item.kind], module_of_path(item.name))
        constant[owner] = constant.get(owner, 0.0) + item.bytes
    for name, size in graph["kept"].items():
        owner = Owner("gathered", module_of_path(name))
        constant[owner] = constant.get(owner, 0.0) + size
    chunks = graph["activations"]
    order = [Op(*item) for item in passes] or [Op("B", 0, chunk) for chunk in range(len(chunks))]
    kept = [_kept(chunk) if passes else {} for chunk in chunks]
    timed = [Timed(op, float(place), float(place + 1)) for place, op in enumerate(order)]
    return stitch(timed, constant, kept, lambda op: _inside(op, chunks[op.chunk]), float(len(order)), "passes")


def _kept(chunk: Mapping[str, Any]) -> Bytes:
    """What a micro-batch leaves, by module; of a chunk whose modules are not known all of it is "other"."""
    modules = chunk.get("modules") or {OTHER: chunk["saved"]}
    return {Owner(KEPT, module): float(size) for module, size in modules.items()}


def _inside(op: Op, chunk: Mapping[str, Any]) -> list[Bytes]:
    """What is alive in a pass beside what is kept, of which a forward's own part is among what is alive in it."""
    own = chunk["saved"] if op.kind == "F" else 0
    most = chunk["forward" if op.kind == "F" else "backward"]
    curve = chunk.get("curves", {}).get("F" if op.kind == "F" else "B") or [most]
    words = "alive in a forward" if op.kind == "F" else "alive in a backward"
    return [{Owner(WORKING, words): float(max(0, size - own))} for size in curve]
