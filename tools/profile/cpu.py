"""MindSpore's profile of a CPU: its cpu_op_execute_timestamp_N.txt and cpu_framework_N.txt (found by trying, 2.9.0).

The first has a line `scope/Type-opN;HostCpuOps;start ns,milliseconds,thread ...` for each operator, with all of its
executions; the second a line `Type;Type-opN;graph;input_1:[8, 128];...` for each execution, in order. Names without
scopes are shared, so the k-th execution of a short name has the shapes of its k-th line. The profiler writes no steps:
operators run equally often in each, so their usual number of executions is the number of steps.

A CPU has other work, too. An operator's time is the lower quartile of its executions, and so is the gap before it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from plugins.errors import DataError
from tools.profile.kernels import Kernel, Profile, Shapes, Step
from tools.profile.spread import spread_notes

TIMES = "cpu_op_execute_timestamp_*.txt"
SHAPES = "cpu_framework_*.txt"
QUIET = 25  # percentile of an operator's executions that is taken as its time
_SHAPE = re.compile(r"input_\d+:\[([\d, ]*)\]")


def read_cpu(folder: Path) -> Profile:
    """The profile under a FRAMEWORK folder.

    Raises:
        DataError: a file cannot be read as described above.
    """
    found = sorted(folder.glob(TIMES))
    runs = _executions(found[0])
    shapes = _shapes(next(iter(sorted(folder.glob(SHAPES))), None))
    counts = Counter(len(every) for every in runs.values())
    steps = counts.most_common(1)[0][0]
    notes = [f"a CPU's profile: of {steps} steps each operator's quiet quarter; communication does not appear in it"]
    if not shapes:
        notes.append("no cpu_framework_*.txt beside it: shapes are unknown")
    kernels = _quiet(runs, shapes, steps)
    once = min(every for every in runs.values() if len(every) == steps)  # its starts are a step apart
    seconds = max((kernel.start + kernel.seconds for kernel in kernels), default=0.0)
    notes += spread_notes([after - start for (start, _), (after, _) in pairwise(once)], seconds)
    rank = re.search(r"_(\d+)\.txt$", found[0].name)
    return Profile(
        str(folder), "CPU", Step(tuple(kernels), seconds), steps, rank=int(rank[1]) if rank else None,
        notes=tuple(notes),
    )  # fmt: skip


def _executions(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Operator -> (start, seconds) of each execution."""
    found: dict[str, list[tuple[float, float]]] = {}
    origin = 0  # nanoseconds since 1970 have more digits than a float
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            name, _, rest = line.split(";", 2)
            every = [part.split(",") for part in rest.split()]
            origin = origin or int(every[0][0])
            found[name] = [((int(part[0]) - origin) * 1e-9, float(part[1]) * 1e-3) for part in every]
        except (ValueError, IndexError):
            raise DataError(f"{path}:{number}: want `operator;kind;start,milliseconds,thread ...`") from None
    if not any(found.values()):
        raise DataError(f"{path}: holds no executions of operators")
    return {name: sorted(every) for name, every in found.items() if every}


def _shapes(path: Path | None) -> dict[str, list[Shapes]]:
    """Short name -> input shapes of each execution."""
    found: dict[str, list[Shapes]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path else ():
        parts = line.split(";", 3)
        if len(parts) == 4:
            sizes = (tuple(map(int, re.findall(r"\d+", shape))) for shape in _SHAPE.findall(parts[3]))
            found[parts[1]].append(tuple(sizes))
    return found


def _quiet(runs: dict[str, list[tuple[float, float]]], shapes: dict[str, list[Shapes]], steps: int) -> list[Kernel]:
    """One step in which every operator, and the gap before it, takes as long as in its quiet quarter."""
    every = sorted((start, seconds, name) for name, times in runs.items() for start, seconds in times)
    ends = np.maximum.accumulate(np.array([start + seconds for start, seconds, _ in every]))
    gaps: dict[str, list[float]] = defaultdict(list)
    seen: Counter[str] = Counter()
    sizes: dict[str, Counter[Shapes]] = defaultdict(Counter)
    place: dict[str, list[int]] = defaultdict(list)
    for index, (start, _, name) in enumerate(every):
        short = name.rsplit("/", 1)[-1]
        lines = shapes.get(short, [])
        if seen[short] < len(lines):
            sizes[name][lines[seen[short]]] += 1
        seen[short] += 1
        gaps[name].append(max(0.0, start - ends[index - 1]) if index else 0.0)
        place[name].append(index)
    order = sorted(runs, key=lambda name: place[name][len(place[name]) // 2] % max(1, len(every) // steps))
    kernels, now = [], 0.0
    for name in order:
        share = len(runs[name]) / steps
        now += share * float(np.percentile(gaps[name], QUIET))
        seconds = share * float(np.percentile([seconds for _, seconds in runs[name]], QUIET))
        kind = name.rsplit("/", 1)[-1].rsplit("-op", 1)[0]
        count = max(1, round(share))
        usual = sizes[name].most_common(1)[0][0] if sizes[name] else ()  # threads may swap two lines in some step
        kernels.append(Kernel(name, kind, "Host", now, seconds, usual, count=count))
        now += seconds
    return kernels
