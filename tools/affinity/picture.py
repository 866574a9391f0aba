"""The host as text: a row for each NUMA node, a character for each core."""

from __future__ import annotations

from string import ascii_lowercase, digits

from tools.affinity.plan import Plan
from tools.process.host import compress

_LEGEND = "0-9a-z: the worker of that rank   I: interrupts   S: system   .: nobody's   x: not allowed"
_MARKS = digits + ascii_lowercase


def picture(plan: Plan) -> str:
    """``node 6  144-167  IS00000000000111...  <- NPU 0, 1``, and a legend."""
    marks = {core: _MARKS[worker.rank % len(_MARKS)] for worker in plan.workers for core in worker.cores}
    marks.update(dict.fromkeys(plan.system, "S"))
    marks.update({core: "I" for cores in plan.interrupts.values() for core in cores})
    host = plan.host
    width = max(len(compress(cores)) for cores in host.nodes.values())
    rows = []
    for node, cores in host.nodes.items():
        line = "".join(marks.get(core, ".") if core in host.allowed else "x" for core in cores)
        near = ", ".join(str(npu) for npu, home in host.npus.items() if home == node)
        rows.append(f"node {node:<3d}{compress(cores):{width}s}  {line}{f'  <- NPU {near}' if near else ''}")
    return "\n".join([*rows, _LEGEND])
