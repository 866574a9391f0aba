"""This module writes and reads `RUN/metrics/probe_N.jsonl`, with one line for each probe of rank N. The module is pure
Python.

Each rank has a file of its own, so writing a line needs no collective, and a rank that hangs does not keep other ranks
from writing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from plugins.lines import append_line, read_steps

_START, _END = "probe_", ".jsonl"
_LARGEST = 1e15  # of any number in these files


@dataclass(frozen=True)
class Record:
    """A `Record` is one probe of one rank, with the rank's waiting times since the previous probe. All times in a
    `Record` are in seconds.

    Args:
        step: the step after which the probe ran.
        device: the type of device, as in `context.device_target`.
        work: the number of pieces of work, as in the settings.
        probe: the time of this work without communication, minus the time that other processes used its core.
        seconds: the time since the previous probe (or the end of the first step); all following values are within this
            time.
        steps: the number of steps.
        data: the time spent waiting for batches; None if the host cannot measure it (`runner_config.sink_mode: True`).
        cpu: the processor time of all threads of the worker.
        waited: the time in which threads were ready but had no core.
        stopped: the time in which a limit had stopped its control group.
    """

    step: int
    rank: int
    host: str
    device: str
    work: int
    probe: float
    seconds: float
    steps: int
    data: float | None
    cpu: float
    waited: float
    stopped: float


def probe_file(run_dir: str | Path, rank: int) -> Path:
    """Return the file in which rank `rank` of a run records its probes."""
    return Path(run_dir) / "metrics" / f"{_START}{rank}{_END}"


def append(path: Path, record: Record) -> None:
    """Append a record as one line to the file; if a killed run left an incomplete line, end that line first."""
    append_line(path, {name: _short(value) for name, value in asdict(record).items()})


def read_run(run_dir: str | Path) -> list[Record]:
    """Return the records of all ranks of a run, in the order of ranks and steps; the list is empty if the run was not
    probed.

    Raises:
        DataError: see `read`; the file of a rank holds another rank's probes.
    """
    files = (Path(run_dir) / "metrics").glob(f"{_START}*{_END}")
    ranks = sorted(int(name) for file in files if (name := file.name[len(_START) : -len(_END)]).isdecimal())
    records = {rank: read(probe_file(run_dir, rank)) for rank in ranks}
    for rank, own in records.items():
        if others := [record.rank for record in own if record.rank != rank]:
            raise DataError(
                f"{probe_file(run_dir, rank)}: the file holds probes of rank {others[0]}, but must hold those of "
                f"rank {rank}; copy the run's metrics/ folders of all hosts again"
            )
    return [record for own in records.values() for record in own]


def read(path: Path) -> list[Record]:
    """Return the records of one file by step; a resumed run replaces the steps that it repeats, and an incomplete line
    of a killed run is left out.

    Raises:
        DataError: a line is not a record.
    """
    return read_steps(path, record_of)


def _short(value: Any) -> Any:
    return round(value, 7) if isinstance(value, float) else value


def record_of(content: Any, place: str) -> Record:
    """Return the record that a line holds; `place` names the line in error messages.

    Raises:
        DataError: a value is one that no run writes; later computations do not check the values again.
    """
    try:
        record = Record(**{field.name: content[field.name] for field in fields(Record)})
        _check(record)
    except (KeyError, TypeError, ValueError) as error:
        why = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{place}: this is not a record of a probe: {why}") from None
    return record


def _check(record: Record) -> None:
    whole: Iterable[Any] = (record.step, record.rank, record.work, record.steps)
    if not all(type(value) is int and 0 <= value < _LARGEST for value in whole):
        raise ValueError("the value of step, rank, work or steps is not a whole number")
    if not (type(record.host) is str and type(record.device) is str):
        raise TypeError("the value of host or device is not a string")
    data = 0.0 if record.data is None else record.data
    times = (record.probe, record.seconds, data, record.cpu, record.waited, record.stopped)
    if not all(type(value) in (int, float) and 0 <= value < _LARGEST for value in times):  # nor is NaN
        raise ValueError("a time is negative or not a number")
    if not record.probe or not record.seconds:
        raise ValueError("the time of the probe or of the steps is 0")
