"""A dump of level L2: kernels of compiled graphs, as MindSpore itself writes them, `rank_R/Net/GRAPH/STEP/*.npy`.

A file's name is TYPE.SCOPE.TASK.STREAM.MICROSECONDS.input|output.N.FORMAT.DTYPE.npy. Names that are too long for a
file system stand in the folder's mapping.csv. The operators of the backward pass are below `Gradients`, the optimizer's
below `optimizer`: they count as weights, for they make the update.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from plugins.errors import DataError
from tools.accuracy.dumps.names import BACKWARD, FORWARD, WEIGHTS, Name
from tools.accuracy.dumps.npy import NpyFile
from tools.accuracy.dumps.read_items import Entry, Item

CONFIGURATION = "kernel_kbyk_dump.json"
KIND = "Kernel"
_RANK = re.compile(r"rank_(\d+)$")
_UNKNOWN = (None, None, None, None)  # no statistics; values only


def folders(folder: Path) -> dict[int, dict[int, Path]]:
    """step -> rank -> the rank's folder."""
    found: dict[int, dict[int, Path]] = {}
    for rank in folder.glob("rank_[0-9]*"):
        match = _RANK.match(rank.name)
        for step in {int(path.name) for path in rank.glob("Net/*/*") if path.name.isdigit()} if match else ():
            found.setdefault(step, {})[int(match[1])] = rank  # type: ignore[index]
    return dict(sorted(found.items()))


def entries(rank: Path, step: int) -> list[Entry]:
    """The kernels of one step, in the order in which they ran.

    Raises:
        DataError: a file is broken, or has no name of MindSpore's.
    """
    found = [file for folder in sorted(rank.glob(f"Net/*/{step}")) for file in _files(folder)]
    found.sort(key=lambda file: file[0])
    calls: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str, int], list[Item]] = {}
    for _, kind, scope, item in found:
        call = calls.get((kind, scope), 0)
        if any(item.label == other.label for other in items.get((kind, scope, call), ())):
            call = calls[kind, scope] = call + 1  # it ran again
        items.setdefault((kind, scope, call), []).append(item)
    return [Entry(_name(*key), tuple(group)) for key, group in items.items()]


def _name(kind: str, scope: str, call: int) -> Name:
    where = scope.partition(".")[2]
    phase = BACKWARD if where.startswith("Gradients") else WEIGHTS if "optimizer-" in where else FORWARD
    return Name(f"{KIND}.{scope}.{call}.{phase}", KIND, scope, kind, phase, call)


def _files(folder: Path) -> Iterator[tuple[int, str, str, Item]]:
    """(microseconds, operator, `graphG.scope`, tensor) of each file."""
    mapping = folder / "mapping.csv"
    names = {}
    if mapping.exists():
        with mapping.open(newline="", encoding="utf-8") as file:
            try:
                names = dict(csv.reader(file))
            except ValueError as error:
                raise DataError(f"{mapping}: not two names a line ({error})") from None
    for path in folder.glob("*.npy"):
        parts = names.get(path.name, path.name).split(".")
        if len(parts) != 10 or parts[5] not in ("input", "output") or not parts[4].isdigit():
            raise DataError(f"{path}: not the name of a kernel's tensor")
        kind, scope, _, _, when, role, place, _, dtype, _ = parts
        with NpyFile(path) as file:
            item = Item(f"{role}.{place}", role, dtype.lower(), file.shape, _UNKNOWN, path)
        yield int(when), kind, f"graph{folder.parent.name}.{scope}", item
