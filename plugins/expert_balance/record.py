"""This module writes, reads and continues `RUN/metrics/expert_load.jsonl`, which holds a run's expert loads, one line
for each step.

After a resume, the prediction of loads starts from the recorded loads of the earlier steps, and new lines are appended
to this record (`carry_over`). A checkpoint holds no prediction, because the same recorded loads give the same
prediction again, bit for bit. The module is pure Python and NumPy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError, refuse_unknown
from plugins.expert_balance.copies import NOTHING, loads_with
from plugins.lines import append_line, read_steps

_ROUNDED = 1e-5  # relative: loads are counted as shares, in float32


@dataclass(frozen=True)
class Moved:
    """A `Moved` holds the experts that moved to other devices after a step, and the cost of the move.

    Args:
        slots: int64 [layers, E], the new placement.
        experts: the number of experts that changed device.
        sent_bytes: the bytes that all ranks sent.
        plan_s, move_s: the seconds for planning and for moving.
        copies: int64 [layers, D x spare], the new copies, as in `plugins.expert_balance.copies`; None: no spare slots.
    """

    slots: np.ndarray
    experts: int
    sent_bytes: int
    plan_s: float
    move_s: float
    copies: np.ndarray | None = None


@dataclass(frozen=True)
class Record:
    """A `Record` is the recorded line of one step: the experts' loads, their placement, and the experts that moved
    after the step.

    Args:
        devices: ranks of the EP group.
        layers: [layers] numbers of the MoE layers in the model.
        tokens: int64 [layers, E] by logical expert: all ranks and micro-batches.
        slots: int64 [layers, E], the placement during the step.
        micro_batch: [layers] max/mean of the worst micro-batch; None if it is unknown.
        moved: the move after the step, or None.
        nodes: the number of nodes that plans balance first (see `plan.node_limited`); 1 if plans balance only devices.
        copies: int64 [layers, D x spare] during the step, as in `plugins.expert_balance.copies`; None: no spare slots.
    """

    step: int
    devices: int
    layers: tuple[int, ...]
    tokens: np.ndarray
    slots: np.ndarray
    micro_batch: tuple[float | None, ...]
    moved: Moved | None = None
    nodes: int = 1
    copies: np.ndarray | None = None

    @property
    def held(self) -> np.ndarray:
        """Return the copies of experts during the step, as [layers, D x spare]; without spare slots this is an array of
        shape [layers, 0].
        """
        return np.empty((len(self.layers), 0), np.int64) if self.copies is None else self.copies

    @property
    def on_devices(self) -> np.ndarray:
        """Return the tokens of each device, [layers, D]; the tokens of an expert are distributed equally over its own
        slot and its copies.
        """
        return loads_with(self.tokens, self.slots, self.held, self.devices)

    @property
    def after(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the placement [layers, E] and the copies [layers, D x spare] that are in use after the step; the
        copies are [layers, 0] if there are no spare slots.
        """
        copies = self.copies if self.moved is None else self.moved.copies
        slots = self.slots if self.moved is None else self.moved.slots
        return slots, self.held[:, :0] if copies is None else copies


def load_file(run_dir: str | Path) -> Path:
    """Return the path of the file in which a run records its expert loads."""
    return Path(run_dir) / "metrics" / "expert_load.jsonl"


def append(path: Path, record: Record) -> None:
    """Append a record as one line to the file; if a killed run left an incomplete line, end that line first."""
    append_line(path, as_json(record))


def as_json(record: Record) -> dict[str, Any]:
    """Return the record as a dictionary that can be written as JSON."""
    moved = record.moved
    copies = {} if record.copies is None else {"copies": record.copies.tolist()}
    new = {} if moved is None or moved.copies is None else {"copies": moved.copies.tolist()}
    return {
        "step": record.step,
        "devices": record.devices,
        "nodes": record.nodes,
        "layers": list(record.layers),
        "tokens": record.tokens.tolist(),
        "slots": record.slots.tolist(),
        **copies,
        "micro_batch": list(record.micro_batch),
        "moved": moved and {
            "slots": moved.slots.tolist(),
            **new,
            "experts": moved.experts,
            "bytes": moved.sent_bytes,
            "plan_s": moved.plan_s,
            "move_s": moved.move_s,
        },
    }  # fmt: skip


def read(path: Path, until: int | None = None, say: Callable[[str], None] | None = None) -> list[Record]:
    """Return the recorded expert loads in a file, as a dictionary step -> record. If a resumed run repeated some steps,
    the new records of these steps replace the old ones.

    Args:
        until: the last step to read, such as the one from which a run is resumed; None: all.
        say: a function that is called if an unfinished last line was left out; None: all incomplete lines are left out
            (`plugins.lines`).

    Raises:
        DataError: the file does not exist or is empty, or a line is not a record or belongs to another model.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file; a run with plugins.expert_balance.record: True writes it from its first "
            "step on"
        )
    records = read_steps(path, _record, _follow, say)
    if not records:
        raise DataError(
            f"{path}: the file holds no loads yet, because the run that writes it has not finished its first step"
        )
    return [record for record in records if until is None or record.step <= until]


def _follow(before: Record, record: Record, place: str) -> None:
    layouts = {(each.layers, each.tokens.shape, each.devices) for each in (before, record)}
    if len(layouts) > 1:
        raise DataError(
            f"{place}: the number of layers, experts or devices differs from the lines above; write one file for each "
            "parallel layout"
        )


_KEYS = ("step", "devices", "nodes", "layers", "tokens", "slots", "copies", "micro_batch", "moved")
_MOVED = ("slots", "copies", "experts", "bytes", "plan_s", "move_s")


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
            moved=None
            if moved is None
            else Moved(
                _table(moved["slots"]),
                _whole(moved["experts"]),
                _whole(moved["bytes"]),
                float(moved["plan_s"]),
                float(moved["move_s"]),
                _copies(moved),
            ),
            copies=_copies(content),
        )
    except KeyError as error:
        raise DataError(
            f"{place}: this line is not a record of expert loads, because the key {error.args[0]} is missing"
        ) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{place}: this line is not a record of expert loads: {' '.join(str(error).split())[:120]}"
        ) from None
    _check(record, place)
    return record


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"{str(value)[:40]} is not an integer of 64 bits")
    return value


def _table(value: Any) -> np.ndarray:
    """Return lists of lists as an int64 array; a conversion by NumPy would round 1.5 to 1."""
    found = np.array(value)
    if found.dtype != np.int64:
        raise ValueError("tokens, slots and copies must be lists of equally long lists of 64-bit integers")
    return found


def _copies(content: dict[str, Any]) -> np.ndarray | None:
    return None if content.get("copies") is None else _table(content["copies"])


def _check(record: Record, place: str) -> None:
    """Refuse values that no run writes, because every later computation relies on their form."""
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
        wrong = f"step {record.step}: the first step is 1"
    elif not all(ratio is None or 0.99 <= ratio <= 1.01 * record.devices for ratio in record.micro_batch):
        wrong = (
            f"micro_batch {list(record.micro_batch)}: the busiest device's load over the mean is 1 to {record.devices}"
        )
    elif record.moved and not (0 <= record.moved.plan_s < math.inf and 0 <= record.moved.move_s < math.inf):
        wrong = f"moved: plan_s {record.moved.plan_s}, move_s {record.moved.move_s}: these must be seconds"
    elif record.moved and min(record.moved.experts, record.moved.sent_bytes) < 0:
        wrong = f"moved: {record.moved.experts} experts and {record.moved.sent_bytes} bytes: there must be 0 or more"
    elif any(slots.shape != shape or (np.sort(slots, axis=1) != np.arange(shape[1])).any() for slots in placements):
        wrong = "slots is not a placement of experts, because each slot number must occur exactly once in a layer"
    else:
        held = [(record.slots, record.copies)]
        held += [(record.moved.slots, record.moved.copies)] if record.moved else []
        wrong = next(filter(None, (_strange(*each, record.devices) for each in held)), "")
    if wrong:
        raise DataError(f"{place}: {wrong}")


def _strange(slots: np.ndarray, copies: np.ndarray | None, devices: int) -> str:
    """Return in words what is wrong with the copies of a step; "" if they are right."""
    if copies is None:
        return ""
    layers, experts = slots.shape
    if copies.ndim != 2 or len(copies) != layers or not copies.shape[1] or copies.shape[1] % devices:
        return f"copies of shape {list(copies.shape)}: they need equally many slots on {devices} devices for each layer"
    if copies.min() < NOTHING or copies.max() >= experts:
        return f"copies: an expert's number is 0 to {experts - 1}, and {NOTHING} stands for an empty slot"
    for row, here in zip(slots, copies.reshape(layers, devices, -1), strict=True):
        for device, some in enumerate(here):
            some = some[some != NOTHING]
            if len(set(some.tolist())) < len(some) or (row[some] // (experts // devices) == device).any():
                return f"copies: device {device} has an expert twice"
    return ""


def file_of(checkpoint: str | Path | None, save_path: str | Path, run_dir: str | Path) -> Path:
    """Return the load file of the run that saved `checkpoint` (the folder of one iteration); this may be the current
    run or another one.
    """
    if checkpoint is None or Path(os.path.realpath(checkpoint)).parent == Path(os.path.realpath(save_path)):
        return load_file(run_dir)
    return load_file(Path(os.path.realpath(checkpoint)).parent.parent)


def carry_over(
    source: Path, own: Path, step: int, form: tuple[int, int, int], pairs: Callable[[int], int]
) -> tuple[list[Record], str]:
    """Copy the records of the steps up to `step` from `source` into the file `own`; copy nothing if `source` is of
    another layout or global batch, or cannot be read. If `source` is the file `own` itself and its records cannot be
    used, the file is renamed, and a new file begins. (With another global batch, the same step number stands for other
    samples.)

    Args:
        form: devices, layers and experts of this run.
        pairs: how many (token, expert) pairs each step of this run routes in a layer, by the number of the step.

    Returns:
        The records, and a text about the earlier steps that are missing; "" if none is. A record that begins later than
        the run lacks nothing: the run did not know those loads before the resume either.
    """
    try:
        records, missing = read(source, until=step) if step else [], ""
    except DataError as error:
        records, missing = [], str(error)
    if records and (records[0].devices, *records[0].tokens.shape) != form:
        records, missing = [], f"{source}: other devices, layers or experts than this run has"
    if any(not math.isclose(int(each.tokens[0].sum()), pairs(each.step), rel_tol=_ROUNDED) for each in records):
        records, missing = [], f"{source}: the steps have another global batch than those of this run"
    if missing and source == own and own.exists() and own.stat().st_size:  # nobody can make these records again
        names = (f"{own.stem}_until_step_{step}{again}.jsonl" for again in chain([""], (f"_{n}" for n in count(2))))
        own.rename(next(path for path in map(own.with_name, names) if not path.exists()))
    first = records[0].step if records else 1
    absent = sorted({*range(first, step + 1)} - {record.step for record in records})
    if absent and not missing:
        missing = f"{source}: the file has no record of {len(absent)} of the steps up to {step}, such as {absent[0]}"
    if records or own.exists():
        _write(own, records)
    return records, missing


def loads(records: list[Record], form: tuple[int, int, int]) -> np.ndarray:
    """Return the tokens of each logical expert in each step and layer, int64 [steps, layers, E]."""
    return np.array([record.tokens for record in records], np.int64).reshape(-1, *form[1:])


def _write(path: Path, records: list[Record]) -> None:
    """Write the file completely, or leave the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(as_json(record)) + "\n" for record in records), "utf-8")
    os.replace(new, path)
