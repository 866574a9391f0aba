"""What the recipe itself needs of a host: room for its checkpoints, memory for its workers."""

from __future__ import annotations

import re

from tools.check.check import table_of
from tools.doctor.checks import Answer, Patient, check
from tools.doctor.system import free_space
from tools.hardware.units import GIB
from tools.schema.converter import convert
from tools.schema.schema import load_schema

BYTES = 12  # of a checkpoint for each parameter: weights and both moments of AdamW in float32
WORKER = GIB  # of one worker of a toy on CPU


@check(
    why="a checkpoint that does not fit ends the run; all nodes together write it, here if the folder is shared",
    source="12 bytes a parameter: weights and AdamW's moments in float32",
    mend="an output_dir with more room (--set output_dir=...), or fewer kept checkpoints",
)
def checkpoint_room(patient: Patient) -> Answer:
    """A whole checkpoint fits."""
    if patient.recipe is None:
        return Answer("unknown", "no recipe was named")
    table = table_of(patient.recipe, convert(patient.recipe, load_schema()))
    found = free_space(patient, str(patient.folder))
    if table is None or found is None:
        return Answer("unknown", "the size of the model or of the disk cannot be told")
    need, free = table["parameters_total"] * BYTES, found[2]
    return Answer(
        "ok" if free >= need else "fail", f"{need / GIB:,.1f} GiB each, {free / GIB:,.0f} GiB free at {found[0]}"
    )


@check(
    why="the kernel kills a worker when memory ends",
    source="launch/run/preflight.py: about 1 GiB for a worker of a toy on CPU",
    mend="fewer workers, or end what else uses memory",
)
def memory(patient: Patient) -> Answer:
    """There is memory for the workers; of those that drive an NPU it is not known how much they need."""
    row = re.search(r"^MemAvailable:\s+(\d+) kB", patient.root.read("/proc/meminfo") or "", re.MULTILINE)
    if row is None:
        return Answer("unknown", "/proc/meminfo does not tell")
    free, need = int(row[1]) * 1024, patient.workers * WORKER
    seen = f"{free / GIB:.0f} GiB available for {patient.workers} worker{'s' * (patient.workers > 1)}"
    return Answer("fail" if free < need else "ok" if patient.on_cpu else "unknown", seen)
