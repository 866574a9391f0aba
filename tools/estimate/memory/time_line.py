"""This module computes and draws the live bytes of one device over a training step.

For each moment a time line has the bytes that exist for the whole step, the bytes that are kept for a backward pass,
and the bytes that the running pass needs. The same function composes the time lines of the analytical model and of the
dry run's compiled graph.

**The tensors that are live between passes.**

A pass is an operation of `tools.pipeline.schedules`. The tensors that a forward pass keeps exist from its start to the
end of its backward pass (or of its weight-gradient pass, if that is separate). Between passes only these tensors exist.
The update (clipping and the optimizer) follows after the last pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plugins.errors import DataError
from tools.estimate.configuration import Configuration
from tools.estimate.memory.model import (
    IN_WORDS,
    STATIC,
    UPDATED,
    chunk_modules,
    stage_memory,
    static_modules,
    working_of,
)
from tools.files.atomic import check_writable, write_atomically
from tools.files.figure import ENDINGS, new_figure, save_figure
from tools.hardware.units import GIB
from tools.pipeline.schedules import Op
from tools.pipeline.simulate import Durations, Simulation, enough, simulate

KEPT, WORKING, BUFFERS, UPDATE = "kept", "working", "buffers", "update"
PARTS = (*STATIC, KEPT, WORKING, UPDATE, BUFFERS)


class Owner(NamedTuple):
    """An `Owner` says what a number of bytes is used for: a part of the memory (such as weights), and the module or
    pass that needs the bytes.
    """

    part: str
    module: str


Bytes = Mapping[Owner, float]


class Timed(NamedTuple):
    """A `Timed` is a forward or backward pass of a pipeline schedule with its start and end times."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class TimeLine:
    """A `TimeLine` holds the live bytes of one device of a stage."""

    edges: np.ndarray  # [moments + 1] times: moment i lasts from edges[i] to edges[i + 1]
    unit: str  # of the times, "seconds" or "passes"
    # [moments] the pass that runs, such as "F 3.0" (micro-batch 3, chunk 0), "update", or "" if nothing runs
    labels: tuple[str, ...]
    owners: tuple[Owner, ...]  # of the columns of `live`
    live: np.ndarray  # [moments, owners] bytes

    @property
    def total(self) -> np.ndarray:
        """Return the total number of bytes at each moment, [moments]."""
        return self.live.sum(axis=1)

    @property
    def peak(self) -> float:
        """Return the peak memory in bytes over the whole time line."""
        return float(self.total.max())

    @property
    def fullest(self) -> int:
        """Return the index of the moment with the most bytes. If several moments have the most bytes, return the first
        moment in a backward pass.
        """
        full = self.total >= self.peak * (1 - 1e-12)
        behind = full & np.array([label.startswith("B") for label in self.labels])
        return int((behind if behind.any() else full).argmax())

    def at_peak(self) -> list[tuple[Owner, float]]:
        """Return the memory at its peak as pairs (owner, bytes), the largest first. Owners (users of memory) without
        bytes are left out.
        """
        found = zip(self.owners, map(float, self.live[self.fullest]), strict=True)
        return sorted(((owner, size) for owner, size in found if size), key=lambda pair: -pair[1])

    def peak_as_json(self) -> dict[str, Any]:
        """Return the peak memory in bytes, the pass that runs at the peak, and the bytes of each part and module, the
        largest first.
        """
        owners = [owner._asdict() | {"bytes": size} for owner, size in self.at_peak()]
        return {"bytes": self.peak, "pass": self.labels[self.fullest], "owners": owners}

    def as_json(self) -> dict[str, Any]:
        """Return the time line as values for `--json` and for files, with bytes as whole numbers."""
        at = self.fullest
        return {
            "unit": self.unit,
            "edges": [round(float(edge), 9) for edge in self.edges],
            "labels": list(self.labels),
            "owners": [{"part": owner.part, "module": owner.module} for owner in self.owners],
            "live": [[round(float(size)) for size in row] for row in self.live],
            "peak": {"bytes": round(self.peak), "moment": at, "pass": self.labels[at]},
        }


def stitch(
    passes: Sequence[Timed],
    constant: Bytes,
    kept: Sequence[Bytes],
    inside: Callable[[Op], Sequence[Bytes]],
    end: float,
    unit: str = "seconds",
    update: Bytes | None = None,
) -> TimeLine:
    """Return the time line of the memory in a step, composed from the forward and backward passes of the step.

    Args:
        passes: the passes of a stage, in their order and without overlap.
        constant: the bytes of each owner that exist for the whole step.
        kept: [chunks] the bytes that one micro-batch keeps for its backward pass.
        inside: the additional bytes that a pass needs, in moments of equal length.
        end: the time at which the last pass ends.
        update: the bytes that clipping and the optimizer need in addition to weights, state and accumulated gradients.
            The duration of clipping and the optimizer is unknown, and is drawn as the mean duration of a pass.
    """
    split = {(item.op.micro_batch, item.op.chunk) for item in passes if item.op.kind == "W"}
    edges, labels, rows = [0.0], [], []
    waiting = np.zeros(len(kept), int)

    def add(until: float, label: str, more: Bytes) -> None:
        row = dict(constant)
        for count, each in zip(waiting, kept, strict=True):
            for owner, size in each.items():
                row[owner] = row.get(owner, 0.0) + int(count) * size
        for owner, size in more.items():
            row[owner] = row.get(owner, 0.0) + size
        edges.append(until)
        labels.append(label)
        rows.append(row)

    for op, start, stop in passes:
        if start > edges[-1] or not rows:
            add(max(start, edges[-1]), "", {})
        waiting[op.chunk] += op.kind == "F"
        moments = inside(op)
        for number, more in enumerate(moments, 1):
            add(start + (stop - start) * number / len(moments), f"{op.kind} {op.micro_batch}.{op.chunk}", more)
        waiting[op.chunk] -= op.kind == "W" or (op.kind == "B" and (op.micro_batch, op.chunk) not in split)
    add(max(end, edges[-1]), "", {})
    if update:
        edges.append(edges[-1] + sum(stop - start for _, start, stop in passes) / max(len(passes), 1))
        labels.append(UPDATE)
        rows.append({owner: size for owner, size in constant.items() if owner.part in UPDATED} | dict(update))
    owners = sorted({owner for row in rows for owner in row}, key=lambda owner: (PARTS.index(owner.part), owner.module))
    live = np.array([[row.get(owner, 0.0) for owner in owners] for row in rows])
    return TimeLine(np.array(edges), unit, tuple(labels), tuple(owners), live)


def time_line(config: Configuration, stage: int, simulation: Simulation) -> TimeLine:
    """Return the predicted memory of a stage over a simulated pipeline schedule as a time line. The peak of the time
    line equals `stage_memory(config, stage).peak`. The memory model computes only the largest number of bytes that any
    pass needs in addition to kept activations, so the time line shows this number for every pass.
    """
    memory = stage_memory(config, stage)
    name, _ = working_of(config, stage)
    inside = {Owner(WORKING, name): memory.working, Owner(BUFFERS, "communication"): memory.buffers}
    constant = {Owner(part, module): size for (part, module), size in static_modules(config, stage).items()}
    kept = [{Owner(KEPT, module): size for module, size in chunk.items()} for chunk in chunk_modules(config, stage)]
    timed = zip(simulation.orders[stage], simulation.starts[stage], simulation.ends[stage], strict=True)
    passes = [Timed(op, float(start), float(end)) for op, start, end in timed]
    after = updating_owners(memory.update)
    after |= {Owner(BUFFERS, "communication"): memory.buffers} if after else {}
    return stitch(passes, constant, kept, lambda op: [inside], simulation.makespan, update=after)


def updating_owners(size: float) -> dict[Owner, float]:
    """Return the bytes that the optimizer's update needs, as a dictionary owner -> bytes for a time line."""
    return {Owner(UPDATE, "divided gradients"): size} if size else {}


def simulated(config: Configuration, forward: np.ndarray, backward: np.ndarray, transfer: float = 0.0) -> Simulation:
    """Simulate the pipeline schedule with the fewest micro-batches that need as much memory as all micro-batches of a
    step. The arguments are the seconds of a micro-batch's passes [chunks, stages] and of a transfer. The function
    raises RecipeError if the schedule cannot run.
    """
    few, schedule = enough(config.schedule, config.pp, config.micro_batches), config.schedule
    if config.pp == 1:  # accumulation finishes one micro-batch before the next, whatever the scheduler is called
        few, schedule = (min(config.micro_batches, 2), "1f1b") if config.chunks == 1 else (1, schedule)
    return simulate(schedule, int(few), Durations(forward, backward, backward / 2, transfer))


FORMS = (*ENDINGS, ".json")
_NAMES = {**IN_WORDS, BUFFERS: "communication buffers"}
_COLOURS = ("#30506f", "#44739e", "#6f9bc4", "#a9c5df")
_MOST = 6  # bands of kept activations; the smallest share one
_KEPT = ("#8c4a1f", "#b8652b", "#d98847", "#eba96f", "#f3c79c", "#f8dfc6")
_LAST = {WORKING: "#5b8c5a", UPDATE: "#7d6b91", BUFFERS: "#a9c8a4"}


def check_form(path: Path) -> None:
    """Raise an error if a time line cannot be written to the given file. Commands call this function before a long
    computation begins.

    Raises:
        DataError: the ending of the file's name is not in `FORMS`, or its folder cannot be written to.
    """
    if path.suffix not in FORMS:
        raise DataError(f"--time-line {path}: the file must end in {', '.join(FORMS[:-1])} or {FORMS[-1]}")
    check_writable(path)


def write_line(line: TimeLine, title: str, limit: float, path: Path) -> None:
    """Write a time line of memory as numbers (.json) or as a picture (see `draw`); an error leaves no partly written
    file.
    """
    if path.suffix == ".json":
        write_atomically(path, json.dumps(line.as_json()) + "\n")
    else:
        draw(line, title, limit, path)


def draw(line: TimeLine, title: str, limit: float, path: Path) -> Path:
    """Draw the memory of a stage over one step to an .svg or .png file, and return `path`; a limit of 0 means that
    there is no limit. The function raises the same errors as `tools.files.figure.save_figure`.
    """
    figure = new_figure(11, 4.6)
    axes = figure.subplots()
    bottom = np.zeros(len(line.labels))
    unit = 1000 if line.unit == "seconds" else 1
    for label, colour, sizes in bands(line):
        top = bottom + sizes / GIB
        axes.stairs(top, line.edges * unit, baseline=bottom, fill=True, color=colour, label=label)
        bottom = top
    axes.stairs(line.total / GIB, line.edges * unit, color="black", linewidth=0.6)
    at = line.fullest
    middle = unit * (line.edges[at] + line.edges[at + 1]) / 2
    axes.plot([middle], [line.peak / GIB], marker="v", color="black")
    place = middle / (unit * float(line.edges[-1]))
    name = "the update" if line.labels[at] == UPDATE else line.labels[at]
    axes.annotate(
        f"{line.peak / GIB:.1f} GiB in {name}",
        (middle, line.peak / GIB),
        textcoords="offset points",
        xytext=(0, 7),
        ha="left" if place < 0.1 else "right" if place > 0.9 else "center",  # inside of the axes
        fontsize="small",
    )
    if limit:
        axes.axhline(limit / GIB, color="black", linestyle="--", label=f"limit, {limit / GIB:.1f} GiB")
    axes.set_ylim(0, 1.12 * max(line.peak, limit) / GIB)
    axes.set_xlim(float(line.edges[0]) * unit, float(line.edges[-1]) * unit)
    axes.set_ylabel("GiB on a device")
    axes.set_xlabel("ms (modelled)" if line.unit == "seconds" else "passes of the stage in their order")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(title, fontsize="medium", wrap=True)
    return save_figure(figure, path)


def bands(line: TimeLine) -> list[tuple[str, str, np.ndarray]]:
    """Return (label, colour, bytes [moments]) for each band of the picture of memory over time, from bottom to top. The
    bands show the memory that exists for the whole step, kept activations by module, and the memory of the running
    pass. The modules with the most kept activations have a band each, and the other modules share one band, so that the
    bands add up to the time line.
    """
    found = []
    for part, colour in zip([part for part in PARTS if part not in (KEPT, *_LAST)], _COLOURS, strict=True):
        found.append((_NAMES[part], colour, _sum(line, [o for o in line.owners if o.part == part])))
    kept = sorted((o for o in line.owners if o.part == KEPT), key=lambda owner: -_sum(line, [owner]).max())
    groups = [(f"kept: {owner.module}", [owner]) for owner in kept[: _MOST - 1]]
    groups += [("kept: other modules", kept[_MOST - 1 :])] if len(kept) >= _MOST else []
    found += [(name, _KEPT[place], _sum(line, own)) for place, (name, own) in enumerate(groups)]
    for part, colour in _LAST.items():
        own = [owner for owner in line.owners if owner.part == part]
        label = _NAMES.get(part) or "in the pass" + "".join(f": {o.module}" for o in own[:1] if len(own) == 1)
        found.append((label, colour, _sum(line, own)))
    return [band for band in found if band[2].max() > 0]


def _sum(line: TimeLine, owners: Sequence[Owner]) -> np.ndarray:
    columns = [line.owners.index(owner) for owner in owners]
    return line.live[:, columns].sum(axis=1)
