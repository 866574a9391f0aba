"""The recorded loads of the steps before a resume: the prediction starts from them, and the record goes on behind them.

Pure. A checkpoint holds no prediction: the same loads, fed again, give the same one, bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from plugins.errors import DataError
from plugins.expert_balance.record import Record, line, load_file, read


def file_of(checkpoint: str | Path | None, save_path: str | Path, run_dir: str | Path) -> Path:
    """Where the run that saved `checkpoint` (a folder of one iteration), this one or another, records its loads."""
    if checkpoint is None or Path(os.path.realpath(checkpoint)).parent == Path(os.path.realpath(save_path)):
        return load_file(run_dir)
    return load_file(Path(os.path.realpath(checkpoint)).parent.parent)


def carry_over(source: Path, own: Path, step: int, form: tuple[int, int, int]) -> tuple[list[Record], str]:
    """Leave in the file `own` what `source` holds of the steps up to `step`; of another layout, nothing.

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
    """int64 [steps, layers, E] of logical tokens."""
    return np.array([record.tokens for record in records], np.int64).reshape(-1, *form[1:])


def _write(path: Path, records: list[Record]) -> None:
    """The whole file, or the one before: never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(line(record) + "\n" for record in records), "utf-8")
    os.replace(new, path)
