"""This module writes, reads and continues `RUN/metrics/expert_load.jsonl`, which holds a run's expert loads, one line
for each step.

The prediction of loads starts from the recorded loads of the steps before a resume, and the record goes on behind them
(`carry_over`). A checkpoint holds no prediction: the same loads, fed again, give the same one, bit for bit. Pure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError, refuse_unknown
from plugins.lines import append_line, read_steps


@dataclass(frozen=True)
class Moved:
    """This says what moved after a step.

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
    """This holds the expert loads of a step.

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
    """Return where a run records its expert loads."""
    return Path(run_dir) / "metrics" / "expert_load.jsonl"


def append(path: Path, record: Record) -> None:
    """Append a line, which stands by itself even if a killed run left an incomplete line."""
    append_line(path, line(record))


def line(record: Record) -> str:
    """Return the record as JSON."""
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


def read(path: Path, until: int | None = None, say: Callable[[str], None] | None = None) -> list[Record]:
    """Return the records of a file by step. A resumed run replaces the steps that it repeats.

    Args:
        until: the last step wanted, such as the one a run is resumed from; None: all.
        say: hears that an unfinished last line was left out; None: all incomplete lines are (`plugins.lines`).

    Raises:
        DataError: no such file, nothing in it, or a line that is not a record or another model's.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; plugins.expert_balance with record: True writes it, from the first step on"
        )
    records = read_steps(path, _record, _follow, say)
    if not records:
        raise DataError(f"{path}: the file holds no step")
    return [record for record in records if until is None or record.step <= until]


def _follow(before: Record, record: Record, place: str) -> None:
    if _kind(before) != _kind(record):
        raise DataError(
            f"{place}: layers, experts or devices differ from the lines above, but a file must hold one layout"
        )


def _kind(record: Record) -> tuple[Any, ...]:
    return record.layers, record.tokens.shape, record.devices


_KEYS = ("step", "devices", "nodes", "layers", "tokens", "slots", "micro_batch", "moved")
_MOVED = ("slots", "experts", "bytes", "plan_s", "move_s")


def _record(content: Any, place: str) -> Record:
    if not isinstance(content, dict) or "tokens" not in content:
        raise DataError(f"{place}: this is not a record of expert loads, because the key tokens is missing")
    refuse_unknown(f"{place}: ", content, _KEYS, DataError)
    moved = content.get("moved")
    if isinstance(moved, dict):
        refuse_unknown(f"{place}: moved.", moved, _MOVED, DataError)
    try:
        record = Record(
            step=_whole(content["step"]),
            devices=_whole(content["devices"]),
            nodes=_whole(content.get("nodes", 1)),
            layers=tuple(_whole(layer) for layer in content["layers"]),
            tokens=_table(content["tokens"]),
            slots=_table(content["slots"]),
            micro_batch=tuple(None if ratio is None else float(ratio) for ratio in content["micro_batch"]),
            moved=moved
            and Moved(
                _table(moved["slots"]),
                _whole(moved["experts"]),
                _whole(moved["bytes"]),
                float(moved["plan_s"]),
                float(moved["move_s"]),
            ),
        )
    except KeyError as error:
        raise DataError(f"{place}: not a record of expert loads: {error.args[0]} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{place}: not a record of expert loads: {' '.join(str(error).split())[:120]}") from None
    _check(record, place)
    return record


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"{str(value)[:40]} is not an integer of 64 bits")
    return value


def _table(value: Any) -> np.ndarray:
    """int64 of lists of lists; NumPy alone would round 1.5 to 1."""
    found = np.array(value)
    if found.dtype != np.int64:
        raise ValueError("its rows must be equally long and hold integers of 64 bits")
    return found


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
    elif not record.tokens.sum(axis=1).all():
        wrong = f"layer {record.layers[int(record.tokens.sum(axis=1).argmin())]} has no token: no step leaves one out"
    elif record.step < 1:
        wrong = f"step {record.step}: the first one is 1"
    elif not all(ratio is None or 0.99 <= ratio <= 1.01 * record.devices for ratio in record.micro_batch):
        wrong = (
            f"micro_batch {list(record.micro_batch)}: the busiest device's load over the mean is 1 to {record.devices}"
        )
    elif record.moved and not (0 <= record.moved.plan_s < math.inf and 0 <= record.moved.move_s < math.inf):
        wrong = f"moved: plan_s {record.moved.plan_s}, move_s {record.moved.move_s}: these must be seconds"
    elif record.moved and min(record.moved.experts, record.moved.sent_bytes) < 0:
        wrong = f"moved: {record.moved.experts} experts and {record.moved.sent_bytes} bytes: there must be 0 or more"
    elif any(slots.shape != shape or (np.sort(slots, axis=1) != np.arange(shape[1])).any() for slots in placements):
        wrong = "the slots are not a placement: each layer needs every slot once"
    if wrong:
        raise DataError(f"{place}: {wrong}")


def file_of(checkpoint: str | Path | None, save_path: str | Path, run_dir: str | Path) -> Path:
    """Return the file in which the run that saved `checkpoint` (a folder of one iteration) records its loads; that may
    be this run or another.
    """
    if checkpoint is None or Path(os.path.realpath(checkpoint)).parent == Path(os.path.realpath(save_path)):
        return load_file(run_dir)
    return load_file(Path(os.path.realpath(checkpoint)).parent.parent)


def carry_over(source: Path, own: Path, step: int, form: tuple[int, int, int]) -> tuple[list[Record], str]:
    """Copy the records of the steps up to `step` from `source` into the file `own`; copy nothing if `source` is of
    another layout.

    Args:
        form: devices, layers and experts of this run.

    Returns:
        The records, and what of the steps before is not known; "" where all is.
    """
    try:
        records, missing = read(source, until=step) if step else [], ""
    except DataError as error:
        records, missing = [], str(error)
    if records and (records[0].devices, *records[0].tokens.shape) != form:
        records, missing = [], f"{source}: other devices, layers or experts than this run has"
        if source == own:
            own.rename(own.with_name(f"{own.stem}_until_step_{step}.jsonl"))
    absent = sorted({*range(1, step + 1)} - {record.step for record in records})
    if absent and not missing:
        missing = f"{source}: has no record of {len(absent)} of the steps up to {step}, such as {absent[0]}"
    if records or own.exists():
        _write(own, records)
    return records, missing


def loads(records: list[Record], form: tuple[int, int, int]) -> np.ndarray:
    """Return int64 [steps, layers, E], the tokens of logical experts."""
    return np.array([record.tokens for record in records], np.int64).reshape(-1, *form[1:])


def _write(path: Path, records: list[Record]) -> None:
    """The whole file, or the one before: never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(line(record) + "\n" for record in records), "utf-8")
    os.replace(new, path)
