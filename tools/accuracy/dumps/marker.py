"""What `tc3 accuracy dump` was asked for, and the file that says whether it was finished (written first, and last)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import DataError

FILE = "tc3_dump.json"


@dataclass(frozen=True)
class Job:
    """One dump, in values fit for JSON."""

    recipe: str
    out: str
    mini: bool
    steps: int
    level: str
    task: str
    overrides: list[str]


def write(folder: Path, complete: bool, **facts: Any) -> None:
    """State that `folder` is (or is becoming) a dump; whole or not at all, also when we are killed."""
    part = folder / f".{FILE}.part"
    with part.open("w", encoding="utf-8") as out:
        json.dump({"complete": complete, **facts}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    part.rename(folder / FILE)


def read(folder: Path) -> dict[str, Any] | None:
    """What was stated; None for a dump that msprobe wrote on its own.

    Raises:
        DataError: the file is not as `write` left it.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        stated = json.loads(file.read_bytes())
    except (OSError, ValueError):
        stated = None
    if not isinstance(stated, dict) or not isinstance(stated.get("complete"), bool):
        raise DataError(f"{file}: damaged: it does not say whether the dump is whole; make the dump again")
    return stated
