"""This module finds and reads a profile in a folder, in any of the formats of MindSpore's profiler. The module also
checks whether all steps of the profile have similar lengths.

The profile of an Ascend device consists of the CSV files of ASCEND_PROFILER_OUTPUT (tests/tools/profile/SOURCES.md):

    kernel_details.csv    Step ID (with a schedule), Name, Type, Accelerator Core, Start Time(us), Duration(us), and
                          from level 1 on Input Shapes and Output Shapes ("4096,2560;2560,7680"); op_summary's own
                          names of these columns are taken, too
    op_statistic.csv      OP Type, Core Type, Count, Total Time(us): where there are no kernels, their sums by type
    step_trace_time.csv   Step, Computing, Communication(Not Overlapped), Overlapped, Free; the first, second and last
                          make the step
    communication.json    whose keys name a collective's group, and profiler_metadata.json beside the folder, which
                          lists that group's ranks

Versions of the profiler differ in further columns, which are ignored, and in tabs around numbers.

The profile of a CPU consists of cpu_op_execute_timestamp_N.txt and cpu_framework_N.txt (as experiments with MindSpore
2.9.0 show).

cpu_op_execute_timestamp_N.txt has a line `scope/Type-opN;HostCpuOps;start ns,milliseconds,thread ...` for each
operator, with all of its executions; cpu_framework_N.txt has a line `Type;Type-opN;graph;input_1:[8, 128];...` for each
execution, in order. Several operators can have the same name without scope, so the k-th execution of such a name has
the shapes of the name's k-th line. The profiler does not record steps: the operators run equally often in each step, so
the most common number of executions of an operator is the number of steps.

A CPU also runs other programs. Therefore the time of an operator, and of the gap before it, is the lower quartile over
its executions.

Other programs on the machine can make the steps of a profile unequal, or longer than undisturbed steps; in this case a
note says so.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from plugins.errors import DataError, not_json, read_text
from tools.files.atomic import real_path
from tools.profile.kernels import Kernel, Profile, Shapes, Step

_WIDE = 0.1  # of the median, between the quartiles
_LONGER = 1.25  # usual steps over one of quiet operators


def spread_notes(lengths: Sequence[float], quiet: float | None = None) -> tuple[str, ...]:
    """Return notes about steps of unequal lengths; return () if all steps have similar lengths, or if the profile has
    fewer than two steps.

    Args:
        lengths: the seconds of each step.
        quiet: the seconds of a step that is composed of undisturbed executions of each operator.
    """
    if len(lengths) < 2:
        return ()
    low, middle, high = np.percentile(np.array(lengths, float), (25, 50, 75))
    found = []
    if high - low > _WIDE * middle:
        found.append(
            f"steps differ widely: half of them take {low:.4g} to {high:.4g} s; other work, or a shared link, was "
            "beside the run, and what is fitted holds for that: profile again on a quiet machine"
        )
    if quiet and middle > _LONGER * quiet:
        found.append(
            f"a usual step takes {middle:.4g} s, {middle / quiet:.2f} times one of quiet operators, which is fitted: "
            "the machine was not quiet"
        )
    return tuple(found)


FOLDER = "ASCEND_PROFILER_OUTPUT"
KERNELS, STATISTIC, TRACE = "kernel_details.csv", "op_statistic.csv", "step_trace_time.csv"
_US = 1e-6
_NAMES = {  # our name -> the profiler's, of kernel_details.csv or op_summary
    "name": ("Name", "Op Name"),
    "kind": ("Type", "OP Type"),
    "core": ("Accelerator Core", "Task Type", "Core Type"),
    "start": ("Start Time(us)", "Task Start Time(us)"),
    "seconds": ("Duration(us)", "Task Duration(us)"),
}
_TRACE = ("Computing", "Communication(Not Overlapped)", "Free")
Row = dict[str, str]


def read_ascend(folder: Path, steps: int | None = None) -> Profile:
    """Return the profile of one Ascend device from a folder that MindSpore's profiler wrote.

    Args:
        folder: a folder ASCEND_PROFILER_OUTPUT.
        steps: the number of steps in the files, if the files do not tell it.

    Raises:
        DataError: the folder holds neither kernels nor sums over kernels, or a required column is missing.
    """
    lengths = _lengths(folder / TRACE)
    rank = _rank(folder)
    if (folder / KERNELS).is_file():
        rows = _rows(folder / KERNELS)
        ranks = _groups(folder)
        by_step: dict[str, list[Kernel]] = defaultdict(list)
        origin = _time(rows[0], f"{folder / KERNELS}:2")
        for number, row in enumerate(rows, 2):
            step = next((row[key].strip() for key in ("Step ID", "Step Id") if row.get(key)), "")
            by_step[step].append(_kernel(row, f"{folder / KERNELS}:{number}", ranks, origin))
        found = [_step(kernels, lengths.get(name)) for name, kernels in by_step.items()]
        notes = (
            []
            if any(kernel.inputs for kernel in found[0].kernels)
            else ["the profile has no shapes: profile at level 1 to get them"]
        )
        if len(found) == 1:
            alone = _divided(found[0], steps or max(1, len(lengths)), sum(lengths.values()))
            notes += spread_notes(list(lengths.values()))
            return Profile(str(folder), "Ascend", alone, steps or max(1, len(lengths)), rank=rank, notes=tuple(notes))
        notes += spread_notes([step.seconds for step in found])
        middle = sorted(found, key=lambda step: step.seconds)[len(found) // 2]
        if (own := len(middle.kernels)) < (most := max(len(step.kernels) for step in found)):
            notes.append(
                f"the examined step has {own:,} kernels, and another step has {most:,}: if {KERNELS} was cut, terms of "
                "this step lack time, so copy the profile again"
            )
        return Profile(str(folder), "Ascend", middle, len(found), rank=rank, notes=tuple(notes))
    if (folder / STATISTIC).is_file():
        return _from_sums(folder, steps or max(1, len(lengths)), lengths, rank)
    raise DataError(
        f"{folder}: the folder holds neither {KERNELS} nor {STATISTIC}; profile again with profiler level 0 or higher"
    )


def _rows(path: Path) -> list[Row]:
    """Return the rows of a table, with the blanks in its header removed.

    Raises:
        DataError: it is not text, or has no rows.
    """
    text = read_text(path, DataError)
    try:
        rows = [{(key or "").strip(): value or "" for key, value in row.items() if isinstance(value, str | None)}
                for row in csv.DictReader(io.StringIO(text))]  # fmt: skip
    except csv.Error as error:
        raise DataError(f"{path}: this is not a table of comma-separated values: {error}") from None
    if not rows:
        raise DataError(f"{path}: the table has no rows")
    return rows


def _column(row: Row, name: str, place: str) -> str:
    for column in _NAMES[name]:
        if column in row:
            return row[column].strip()
    raise DataError(f"{place.rsplit(':', 1)[0]}: the table has no column {_NAMES[name][0]!r}; it has {', '.join(row)}")


def _number(text: str, place: str, column: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number < 1e18:
        raise DataError(f"{place}: {column}: {text!r} is not a number of microseconds")
    return number


def _time(row: Row, place: str) -> Decimal:
    """Return a start time as an exact number, because microseconds since 1970 have more digits than a float."""
    text = _column(row, "start", place)
    _number(text, place, _NAMES["start"][0])
    return Decimal(text)


def _kernel(row: Row, place: str, ranks: dict[str, tuple[int, ...]], origin: Decimal) -> Kernel:
    name, kind, core = (_column(row, key, place) for key in ("name", "kind", "core"))
    seconds = _number(_column(row, "seconds", place), place, _NAMES["seconds"][0]) * _US
    start = float(_time(row, place) - origin) * _US
    short = name.rsplit("/", 1)[-1]
    inputs, outputs = (shapes_of(row.get(key, "")) for key in ("Input Shapes", "Output Shapes"))
    return Kernel(name, kind, core, start, seconds, inputs, outputs, ranks.get(short, ()))


def shapes_of(text: str) -> Shapes:
    """Return the shapes of tensors in a text such as "4096,2560;2560,7680"; return () for N/A."""
    found = []
    for part in text.replace('"', "").split(";"):
        sizes = part.strip().strip("[]()")
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", sizes):
            found.append(tuple(int(size) for size in sizes.split(",")))
        elif sizes in ("", "N/A"):
            found.append(())
    return tuple(found) if any(found) else ()


def _step(kernels: Iterable[Kernel], seconds: float | None) -> Step:
    """Return the kernels from the begin of the step on; without a summary the step lasts until its last kernel ends."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    first = ordered[0].start
    moved = tuple(replace(kernel, start=kernel.start - first) for kernel in ordered)
    return Step(moved, seconds or max(kernel.start + kernel.seconds for kernel in moved))


def _divided(step: Step, steps: int, seconds: float) -> Step:
    """Return one of several steps that the files do not separate: it has the kernels of all steps, with their seconds
    divided by the number of steps.
    """
    shrunk = tuple(
        replace(kernel, start=kernel.start / steps, seconds=kernel.seconds / steps) for kernel in step.kernels
    )
    return Step(shrunk, (seconds or step.seconds) / steps, steps)


def _lengths(path: Path) -> dict[str, float]:
    """Return a dictionary step -> seconds from the summary; {} without a summary."""
    if not path.is_file():
        return {}
    rows = _rows(path)
    for column in _TRACE:
        if column not in rows[0]:
            raise DataError(f"{path}: the table has no column {column!r}; it has {', '.join(rows[0])}")
    return {
        row.get("Step", "").strip(): _US * sum(_number(row[column], f"{path}:{number}", column) for column in _TRACE)
        for number, row in enumerate(rows, 2)
    }


def _from_sums(folder: Path, steps: int, lengths: dict[str, float], rank: int | None) -> Profile:
    path, kernels = folder / STATISTIC, []
    for number, row in enumerate(_rows(path), 2):
        place = f"{path}:{number}"
        kind, core = (_column(row, key, place) for key in ("kind", "core"))
        if "Total Time(us)" not in row:
            raise DataError(f"{path}: the table has no column 'Total Time(us)'; it has {', '.join(row)}")
        seconds = _number(row["Total Time(us)"], place, "Total Time(us)") * _US / steps
        count = row.get("Count", "1").strip()
        kernels.append(Kernel(kind, kind, core, 0.0, seconds, count=max(1, int(count) if count.isdigit() else 1)))
    rows = _rows(folder / TRACE) if lengths else []
    shown, hidden = (
        sum(_number(row.get(column, "0"), str(folder / TRACE), column) for row in rows) * _US / steps
        for column in ("Communication(Not Overlapped)", "Overlapped")
    )
    step = Step(tuple(kernels), sum(lengths.values()) / steps, steps)
    note = f"{KERNELS} is missing: times are sums by type ({STATISTIC}); communication by group is unknown"
    return Profile(
        str(folder), "Ascend", step, steps, timed=False, rank=rank, exposed=(shown, hidden),
        notes=(note, *spread_notes(list(lengths.values()))),
    )  # fmt: skip


def _rank(folder: Path) -> int | None:
    """Return the rank in profiler_info_N.json beside the folder, or in the name of a folder rank_N above it."""
    names = [path.name for path in folder.parent.glob("profiler_info_*.json")]
    names += [part.name + ".json" for part in real_path(folder).parents if re.fullmatch(r"rank_\d+", part.name)]
    return next((int(found[1]) for found in (re.search(r"_(\d+)\.json$", name) for name in names) if found), None)


def _are_ranks(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(rank) is int and rank >= 0 for rank in found)


def _groups(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return a dictionary collective -> global ranks of its group, as far as the two JSON files state them."""
    groups = _json(folder.parent / "profiler_metadata.json").get("parallel_group_info", {})
    every_group = groups.items() if isinstance(groups, dict) else ()
    listed = {name: value.get("global_ranks") for name, value in every_group if isinstance(value, dict)}
    members = {name: tuple(ranks) for name, ranks in listed.items() if _are_ranks(ranks)}
    found: dict[str, tuple[int, ...]] = {}
    for step in _json(folder / "communication.json").values():
        for every in step.values() if isinstance(step, dict) else ():
            for key in every if isinstance(every, dict) else ():
                name, _, group = str(key).partition("@")
                if group in members:
                    found[name] = members[group]
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: the file {not_json(error)}") from None
    return content if isinstance(content, dict) else {}


TIMES = "cpu_op_execute_timestamp_*.txt"
_BESIDE = "op_execute_timestamp", "framework"  # in the name of that file, and of the file with the shapes of its rank
QUIET = 25  # percentile of an operator's executions that is taken as its time
_BEGUN = re.compile(r"_(\d{17})_ascend_ms")  # in the name of a profile's folder: the time of its start
_SHAPE = re.compile(r"input_\d+:\[([\d, ]*)\]")


def read_cpu(folder: Path) -> Profile:
    """Return the profile of a run on CPU, which MindSpore's profiler writes into a folder called FRAMEWORK.

    Raises:
        DataError: a file does not have the form that the docstring of this module describes.
    """
    times = _lowest(folder)
    runs = _executions(times)
    shapes = _shapes(times.with_name(times.name.replace(*_BESIDE)))
    counts = Counter(len(every) for every in runs.values())
    steps = counts.most_common(1)[0][0]
    notes = [f"a CPU's profile: of {steps} steps each operator's quiet quarter; communication does not appear in it"]
    if not shapes:
        notes.append("the rank's cpu_framework_*.txt is missing beside it, so shapes are unknown")
    kernels = _quiet(runs, shapes, steps)
    once = min(every for every in runs.values() if len(every) == steps)  # its starts are a step apart
    seconds = max((kernel.start + kernel.seconds for kernel in kernels), default=0.0)
    notes += spread_notes([after - start for (start, _), (after, _) in pairwise(once)], seconds)
    rank = re.search(r"_(\d+)\.txt$", times.name)
    return Profile(
        str(folder), "CPU", Step(tuple(kernels), seconds), steps, rank=int(rank[1]) if rank else None,
        notes=tuple(notes),
    )  # fmt: skip


def _lowest(folder: Path) -> Path:
    """Return the file of the lowest rank that has recorded times of operators in a folder."""
    return min(folder.glob(TIMES), key=lambda path: (len(path.name), path.name))


def _executions(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return operator -> (start, seconds) of each execution."""
    found: dict[str, list[tuple[float, float]]] = {}
    origin = 0  # nanoseconds since 1970 have more digits than a float
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            name, _, rest = line.split(";", 2)
            every = [part.split(",") for part in rest.split()]
            origin = origin or int(every[0][0])
            found[name] = [((int(part[0]) - origin) * 1e-9, float(part[1]) * 1e-3) for part in every]
            if not all(0 <= seconds < 1e12 for _, seconds in found[name]):  # nor is NaN
                raise ValueError
        except (ValueError, IndexError):
            raise DataError(
                f"{path}:{number}: the line must have the form `operator;kind;start,milliseconds,thread ...`"
            ) from None
    if not any(found.values()):
        raise DataError(f"{path}: the file holds no executions of operators")
    return {name: sorted(every) for name, every in found.items() if every}


def _shapes(path: Path) -> dict[str, list[Shapes]]:
    """Return short name -> input shapes of each execution."""
    found: dict[str, list[Shapes]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        parts = line.split(";", 3)
        if len(parts) == 4:
            sizes = (tuple(map(int, re.findall(r"\d+", shape))) for shape in _SHAPE.findall(parts[3]))
            found[parts[1]].append(tuple(sizes))
    return found


def _quiet(runs: dict[str, list[tuple[float, float]]], shapes: dict[str, list[Shapes]], steps: int) -> list[Kernel]:
    """Return one step in which every operator, and the gap before it, takes its lower quartile."""
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


def read_profile(folder: Path, steps: int | None = None) -> Profile:
    """Return the profile in a folder or below it. If the folder has profiles of several ranks, return the profile of
    the lowest rank; if this rank was profiled several times, return the newest profile, with a note.

    Args:
        steps: the number of steps in the profile, if its files do not tell steps apart.

    Raises:
        DataError: the folder holds no profile, or the profile cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; give the output folder of MindSpore's profiler")
    places = [folder] if _holds_csv(folder) else []
    places += sorted(path for path in folder.rglob(FOLDER) if path.is_dir() and _holds_csv(path))
    if places:
        newest, notes = _newest(places)
        profile = read_ascend(newest, steps)
        return replace(profile, notes=(*profile.notes, *notes))
    frameworks = sorted({path.parent for path in folder.rglob(TIMES)})
    if frameworks:
        newest, notes = _newest(frameworks)
        profile = read_cpu(newest)
        return replace(profile, notes=(*profile.notes, *notes))
    raise DataError(
        f"{folder}: the folder holds no profile: neither {FOLDER}/{KERNELS} or {STATISTIC} (Ascend) "
        f"nor FRAMEWORK/{TIMES} (CPU, with data_simplification off)"
    )


def _holds_csv(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (KERNELS, STATISTIC))


def _newest(places: Sequence[Path]) -> tuple[Path, list[str]]:
    """Return the newest profile of the lowest known rank, and a note if there are others of this rank; if no rank is
    known, return the newest of all profiles.
    """
    ranks = {place: _rank_of(place) for place in places}
    lowest = min((rank for rank in ranks.values() if rank is not None), default=None)
    mine = [place for place in places if ranks[place] == lowest]
    newest = max(mine, key=lambda place: ((_BEGUN.findall(str(place)) or [""])[-1], place.stat().st_mtime_ns))
    if len(mine) == 1:
        return newest, []
    of = "whose rank is not known" if lowest is None else f"of rank {lowest}"
    words = f"{len(mine)} profiles {of} are in this folder, of which the newest is read"
    return newest, [f"{words}: {newest}"]


def _rank_of(folder: Path) -> int | None:
    if (known := _rank(folder)) is not None:
        return known
    found = re.search(r"_(\d+)$", _lowest(folder).stem) if any(folder.glob(TIMES)) else None
    return int(found[1]) if found else None
