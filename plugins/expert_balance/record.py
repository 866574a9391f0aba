"""`RUN/metrics/expert_load.jsonl`, one line a step: both halves of its form, writing and reading. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError
from plugins.lines import append_line, read_steps


@dataclass(frozen=True)
class Moved:
    """What moved after a step.

    Args:
        slots: int64 [layers, E], the placement from now on.
        experts: that changed device. sent_bytes: by all ranks. plan_s, move_s: seconds.
    """

    slots: np.ndarray
    experts: int
    sent_bytes: int
    plan_s: float
    move_s: float


@dataclass(frozen=True)
class Record:
    """The expert loads of a step.

    Args:
        devices: ranks of the EP group. layers: [layers] numbers of the MoE layers in the model.
        tokens: int64 [layers, E] by logical expert: all ranks and micro-batches.
        slots: int64 [layers, E], the placement during the step.
        micro_batch: [layers] max/mean of the worst micro-batch; None where it is not known.
        moved: after the step, or None.
        nodes: that plans balance first, see `plan.node_limited`; 1: they do not.
    """

    step: int
    devices: int
    layers: tuple[int, ...]
    tokens: np.ndarray
    slots: np.ndarray
    micro_batch: tuple[float | None, ...]
    moved: Moved | None = None
    nodes: int = 1


def load_file(run_dir: str | Path) -> Path:
    """Where a run records its expert loads."""
    return Path(run_dir) / "metrics" / "expert_load.jsonl"


def append(path: Path, record: Record) -> None:
    """Add a line, on a line of its own also where a killed run left half of one."""
    append_line(path, line(record))


def line(record: Record) -> str:
    """The record as JSON."""
    moved = record.moved
    return json.dumps({
        "step": record.step,
        "devices": record.devices,
        "nodes": record.nodes,
        "layers": list(record.layers),
        "tokens": record.tokens.tolist(),
        "slots": record.slots.tolist(),
        "micro_batch": list(record.micro_batch),
        "moved": moved and {
            "slots": moved.slots.tolist(),
            "experts": moved.experts,
            "bytes": moved.sent_bytes,
            "plan_s": moved.plan_s,
            "move_s": moved.move_s,
        },
    })  # fmt: skip


def read(path: Path, until: int | None = None) -> list[Record]:
    """The records of a file, by step. A resumed run replaces what it repeats; half a line of a killed one is left out.

    Args:
        until: the last step wanted, such as the one a run is resumed from; None: all.

    Raises:
        DataError: no such file, nothing in it, or a line that is no record or another model's.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; plugins.expert_balance with record: True writes it, from the first step on"
        )
    records = read_steps(path, _record, _follow)
    if not records:
        raise DataError(f"{path}: no step in it")
    return [record for record in records if until is None or record.step <= until]


def _follow(before: Record, record: Record, place: str) -> None:
    if _kind(before) != _kind(record):
        raise DataError(f"{place}: other layers, experts or devices than before; one file is one run of one layout")


def _kind(record: Record) -> tuple[Any, ...]:
    return record.layers, record.tokens.shape, record.devices


def _record(content: Any, place: str) -> Record:
    try:
        moved = content["moved"]
        record = Record(
            step=int(content["step"]),
            devices=int(content["devices"]),
            nodes=int(content.get("nodes", 1)),
            layers=tuple(int(layer) for layer in content["layers"]),
            tokens=np.array(content["tokens"], np.int64),
            slots=np.array(content["slots"], np.int64),
            micro_batch=tuple(None if ratio is None else float(ratio) for ratio in content["micro_batch"]),
            moved=moved
            and Moved(
                np.array(moved["slots"], np.int64),
                int(moved["experts"]),
                int(moved["bytes"]),
                float(moved["plan_s"]),
                float(moved["move_s"]),
            ),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{place}: no record of expert loads ({type(error).__name__}: {error})") from None
    _check(record, place)
    return record


def _check(record: Record, place: str) -> None:
    """Refuse what no run writes: every later computation takes these for granted."""
    shape = record.tokens.shape
    placements = [record.slots] + ([record.moved.slots] if record.moved else [])
    wrong = ""
    if len(shape) != 2 or not all(shape) or shape[0] != len(record.layers) or len(record.micro_batch) != shape[0]:
        wrong = f"tokens of shape {list(shape)} for {len(record.layers)} layers"
    elif record.devices < 1 or shape[1] % record.devices:
        wrong = f"{record.devices} devices do not divide {shape[1]} experts"
    elif record.nodes < 1 or record.devices % record.nodes:
        wrong = f"{record.nodes} nodes do not divide {record.devices} devices"
    elif (record.tokens < 0).any():
        wrong = "a negative number of tokens"
    elif any(slots.shape != shape or (np.sort(slots, axis=1) != np.arange(shape[1])).any() for slots in placements):
        wrong = "slots that are no placement: each layer needs every slot once"
    if wrong:
        raise DataError(f"{place}: {wrong}")
