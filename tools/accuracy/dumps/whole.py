"""This module checks whether a dump of tensors still has all steps and ranks with which it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugins.errors import DataError


def refuse_parts(
    folder: Path, folders: dict[int, dict[int, Path]], weights: dict[int, dict[int, Path]], stated: dict[str, Any]
) -> None:
    """Raise DataError if a dump has lost steps or ranks: two dumps that lack the same steps or ranks would look
    equal.
    """
    steps, workers, level = (stated.get(name) for name in ("steps", "workers", "level"))
    if not (isinstance(steps, int) and isinstance(workers, int)):
        return
    again = "copy the whole dump again, or make it again"
    if ranks := sorted(set(range(workers)) - next(iter(folders.values())).keys()):
        listed = ", ".join(map(str, ranks))
        raise DataError(f"{folder}: {workers} ranks made the dump, but rank {listed} is missing; {again}")
    # at level L2 MindSpore numbers the steps of each graph
    if level != "L2" and (missing := sorted(set(range(steps)) - folders.keys())):
        raise DataError(f"{folder}: the dump was made of {steps} steps, but step {missing[0]} is missing; {again}")
    if steps not in (weights if level in ("L1", "L2") else folders):  # those before the first may not exist
        raise DataError(f"{folder}: the weights after the last step (step {steps}) are missing; {again}")
