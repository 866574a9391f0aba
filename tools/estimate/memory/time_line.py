"""Live bytes of one device over a training step: what is there for the whole step, what waits for its backward, and
what the pass that runs needs. The analytical model and the dry run's compiled graph are stitched by the same function.

A pass is an operation of `tools.pipeline.schedules`. What a forward keeps is there from its start until its backward
(or its gradients of weights, where they are a pass of their own) ends. Between passes nothing but that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.memory.model import (
    chunk_modules,
    stage_memory,
    static_modules,
    working_of,
)
from tools.pipeline.in_flight import enough
from tools.pipeline.schedules import Op
from tools.pipeline.simulate import Durations, Simulation, simulate

KEPT, WORKING, BUFFERS = "kept", "working", "buffers"
PARTS = ("weights", "state", "accumulated", "gathered", KEPT, WORKING, BUFFERS)


class Owner(NamedTuple):
    """Whose bytes: a part of `PARTS`, and a module of `tools.estimate.memory.modules` or words for a pass."""

    part: str
    module: str


Bytes = Mapping[Owner, float]


class Timed(NamedTuple):
    """A pass with its start and end."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class TimeLine:
    """Live bytes of one device of a stage.

    Args:
        edges: [moments + 1] times: moment i lasts from edges[i] to edges[i + 1].
        unit: of them, "seconds" or "passes".
        labels: [moments] the pass that runs, such as "F 3.0" (micro-batch 3, chunk 0); "" where none does.
        owners: whose bytes the columns are.
        live: [moments, owners] bytes.
    """

    edges: np.ndarray
    unit: str
    labels: tuple[str, ...]
    owners: tuple[Owner, ...]
    live: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """[moments] bytes of all owners."""
        return self.live.sum(axis=1)

    @property
    def peak(self) -> float:
        """Most bytes at one moment."""
        return float(self.total.max())

    @property
    def fullest(self) -> int:
        """The moment at which the most bytes live, but for rounding: the first one in a backward, else the first."""
        full = self.total >= self.peak * (1 - 1e-12)
        behind = full & np.array([label.startswith("B") for label in self.labels])
        return int((behind if behind.any() else full).argmax())

    def at_peak(self) -> list[tuple[Owner, float]]:
        """Who holds how much at the fullest moment, most first; nobody who holds nothing."""
        found = zip(self.owners, map(float, self.live[self.fullest]), strict=True)
        return sorted(((owner, size) for owner, size in found if size), key=lambda pair: -pair[1])

    def peak_as_json(self) -> dict[str, Any]:
        """The peak's bytes, its pass and its owners, most first."""
        owners = [owner._asdict() | {"bytes": size} for owner, size in self.at_peak()]
        return {"bytes": self.peak, "pass": self.labels[self.fullest], "owners": owners}

    def as_json(self) -> dict[str, Any]:
        """For `--json` and files: bytes are whole numbers."""
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
) -> TimeLine:
    """A step's line from its passes.

    Args:
        passes: of a stage in their order, which do not overlap.
        constant: what is there for the whole step.
        kept: [chunks] what one micro-batch leaves for its backward.
        inside: what a pass needs beside them, in moments of equal length.
        end: of the step.
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
    owners = sorted({owner for row in rows for owner in row}, key=lambda owner: (PARTS.index(owner.part), owner.module))
    live = np.array([[row.get(owner, 0.0) for owner in owners] for row in rows])
    return TimeLine(np.array(edges), unit, tuple(labels), tuple(owners), live)


def time_line(config: Configuration, stage: int, simulation: Simulation) -> TimeLine:
    """The analytical line of a stage; its peak is `stage_memory(config, stage).peak`.

    The model does not say which pass of a stage takes the most beside what is kept: each is given that much.

    Args:
        simulation: of the schedule, by `simulated`.
    """
    memory = stage_memory(config, stage)
    name, _ = working_of(config, stage)
    inside = {Owner(WORKING, name): memory.working, Owner(BUFFERS, "communication"): memory.buffers}
    constant = {Owner(part, module): size for (part, module), size in static_modules(config, stage).items()}
    kept = [{Owner(KEPT, module): size for module, size in chunk.items()} for chunk in chunk_modules(config, stage)]
    timed = zip(simulation.orders[stage], simulation.starts[stage], simulation.ends[stage], strict=True)
    passes = [Timed(op, float(start), float(end)) for op, start, end in timed]
    return stitch(passes, constant, kept, lambda op: [inside], simulation.makespan)


def simulated(config: Configuration, forward: np.ndarray, backward: np.ndarray, transfer: float = 0.0) -> Simulation:
    """The schedule with as few micro-batches as are as full as all of them.

    Args:
        forward, backward: [chunks, stages] seconds of a micro-batch.
        transfer: seconds between stages.

    Raises:
        RecipeError: the schedule cannot run.
    """
    few = min(config.micro_batches, 2) if config.pp == 1 else enough(config.schedule, config.pp, config.micro_batches)
    return simulate(config.schedule, int(few), Durations(forward, backward, backward / 2, transfer))
