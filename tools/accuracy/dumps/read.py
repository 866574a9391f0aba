"""A dump folder: `stepN/rankM/{dump.json, dump_tensor_data/*.npy}` as msprobe writes it.

At L1 and L2, where msprobe shows no weights, `tc3 accuracy dump` adds `weights/stepN/rankM/` of the same layout: the
weights before step N.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import DataError, not_json
from tools.accuracy.dumps import kernels
from tools.accuracy.dumps.marker import read as stated_in
from tools.accuracy.dumps.names import Name, parse
from tools.accuracy.dumps.read_items import Entry, Item

TENSORS = ("mindspore.Tensor", "torch.Tensor", "numpy.ndarray")
ROLES = {
    "input_args": "input",
    "input_kwargs": "input",
    "input": "input",
    "parameters": "parameters",
    "output": "output",
}
WEIGHTS = "weights"
STATISTICS = ("Max", "Min", "Mean", "Norm")
HEAD = ("level", "task", "data")
LEVELS = ("L0", "L1", "mix", "L2")
TASKS = ("statistics", "tensor")
LARGEST = 2**62  # values
_STEP = re.compile(r"step(\d+)$")
_RANK = re.compile(r"rank(\d+)$")
_PROCESS = re.compile(r"proc\d+$")


@dataclass(frozen=True)
class Dump:
    """A dump as far as its folders and heads tell.

    Args:
        folders: step -> rank -> folder with dump.json.
        level, task: msprobe's.
        marker: what `tc3 accuracy dump` stated; None for msprobe's own dumps, whose completeness nobody knows.
        weights: step -> rank -> folder with the dump.json of weights that msprobe did not show.
    """

    folder: Path
    folders: dict[int, dict[int, Path]]
    level: str
    task: str
    marker: dict[str, Any] | None
    weights: dict[int, dict[int, Path]]

    @property
    def steps(self) -> list[int]:
        """All of which there is something."""
        return sorted({*self.folders, *self.weights})

    @property
    def ranks(self) -> list[int]:
        """The ranks of the first step."""
        return sorted(next(iter(self.folders.values())))

    def entries(self, step: int, rank: int) -> list[Entry]:
        """Weights that stand apart, which are those before the step; then its calls, in the order of their ends."""
        found = _entries(self.weights[step][rank]) if step in self.weights else []
        if step in self.folders:
            folder = self.folders[step][rank]
            found += kernels.entries(folder, step) if self.level == "L2" else _entries(folder)
        return found


def open_dump(folder: Path) -> Dump:
    """Look at a dump's folders.

    Raises:
        DataError: it is no dump, or not a whole one.
    """
    if not folder.is_dir():
        if folder.exists():
            raise DataError(
                f"{folder}: a file; a dump is a folder, as `tc3 accuracy dump RECIPE --out FOLDER` makes it"
            )
        raise DataError(f"{folder}: no such folder; `tc3 accuracy dump RECIPE --out {folder}` makes a dump")
    stated = stated_in(folder)
    if stated is not None and not stated["complete"]:
        raise DataError(f"{folder}: the dump was not finished (killed, or it failed): make it again in a new folder")
    weights = _steps(folder / WEIGHTS)
    if (folder / kernels.CONFIGURATION).exists():
        folders, level, task = kernels.folders(folder), "L2", "tensor"
        _same_ranks(folder, folders, weights)
    else:
        folders = _steps(folder)
        _same_ranks(folder, folders, weights)
        head = _content(next(iter(next(iter(folders.values())).values())))
        level, task = head["level"], head["task"]
    return Dump(folder, folders, level, task, stated, weights)


def _steps(folder: Path) -> dict[int, dict[int, Path]]:
    """step -> rank -> folder with a dump.json."""
    folders = {int(match[1]): _ranks(path) for path in folder.glob("step*") if (match := _STEP.match(path.name))}
    return {step: ranks for step, ranks in sorted(folders.items()) if ranks}


def _same_ranks(folder: Path, folders: dict[int, dict[int, Path]], weights: dict[int, dict[int, Path]]) -> None:
    """Raise DataError unless there are steps, and all have the same ranks."""
    if not folders:
        raise DataError(f"{folder}: not a dump: it holds no stepN/rankM/dump.json{_elsewhere(folder)}")
    first = sorted(next(iter(folders.values())))
    for step, ranks in (*folders.items(), *weights.items()):
        if sorted(ranks) != first:
            raise DataError(f"{folder}: step {step} has ranks {sorted(ranks)}, the first step {first}")


def _elsewhere(folder: Path) -> str:
    """Where the dump might be meant."""
    if (folder / "dump.json").exists():
        return f"; it is one rank of a dump: give {folder.parent.parent}"
    if any(folder.glob("*/dump.json")):
        return f"; it is one step of a dump: give {folder.parent}"
    steps = (path for path in sorted(folder.glob("*/step*")) if _STEP.match(path.name))
    inside = next((path.parent for path in steps if _ranks(path)), None)
    return f"; did you mean {inside}?" if inside else ""


def _ranks(step: Path) -> dict[int, Path]:
    """rank -> folder; a single process that knew no rank (`procPID`) is rank 0."""
    if not step.is_dir():
        return {}
    folders = [path for path in step.iterdir() if (path / "dump.json").exists()]
    ranks = {int(match[1]): path for path in folders if (match := _RANK.match(path.name))}
    processes = [path for path in folders if _PROCESS.match(path.name)]
    if len(processes) > 1 or (processes and ranks):
        raise DataError(
            f"{step}: {processes[0].name} says no rank: give start() a rank_id where several processes dump"
        )
    return ranks or dict(enumerate(processes))


def _content(folder: Path) -> dict[str, Any]:
    file = folder / "dump.json"
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not msprobe's dump.json, or not a whole one: it {not_json(error)}") from None
    missing = [key for key in HEAD if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{file}: not msprobe's dump.json: it has no {missing[0]!r}")
    if not isinstance(content["data"], dict) or not content["data"]:
        raise DataError(f"{file}: no tensor was dumped: the run ended before its first step, or nothing was hooked")
    for key, known in (("level", LEVELS), ("task", TASKS)):
        if content[key] not in known:
            raise DataError(f"{file}: {key} {content[key]!r} cannot be compared; {', '.join(known)} can")
    return {key: content[key] for key in HEAD}


def _entries(folder: Path) -> list[Entry]:
    data = _content(folder)["data"]
    found = []
    for key, value in data.items():
        if not isinstance(value, dict):
            raise DataError(f"{folder / 'dump.json'}: {key}: its tensors by role are wanted, not {str(value)[:40]!r}")
        found.append(Entry(_name(folder, key), tuple(_items(key, value, folder))))
    return found


def _name(folder: Path, key: str) -> Name:
    try:
        return parse(key)
    except ValueError:
        raise DataError(f"{folder / 'dump.json'}: {key!r} is no name of msprobe's") from None


def _items(key: str, value: dict[str, Any], folder: Path) -> Iterator[Item]:
    data = folder / "dump_tensor_data"
    for group in sorted(value, key=_rank_of):
        role = ROLES.get(group, "gradient")
        label = group if role == "gradient" else role
        yield from _leaves(value[group], label if role != "gradient" else group, role, data)


def _rank_of(group: str) -> int:
    """Inputs and parameters come before outputs."""
    order = list(ROLES)
    return order.index(group) if group in order else len(order)


def _leaves(node: Any, label: str, role: str, data: Path) -> Iterator[Item]:
    """Tensors and plain values of a nested list or dictionary."""
    if isinstance(node, list):
        for number, child in enumerate(node):
            yield from _leaves(child, f"{label}.{number}", role, data)
    elif isinstance(node, dict):
        kind = node.get("type")
        if kind in TENSORS:
            yield _tensor(node, label, role, data)
        elif isinstance(kind, str):
            yield Item(label, role, kind, value=node.get("value"))
        else:
            for name, child in node.items():
                yield from _leaves(child, f"{label}.{name}", role, data)


def _tensor(node: dict[str, Any], label: str, role: str, data: Path) -> Item:
    wrong = _wrong(node)
    if wrong:
        raise DataError(f"{data.parent / 'dump.json'}: {label}: {wrong}: the file is damaged, or no dump of msprobe's")
    dtype = node["dtype"].rpartition(".")[2].lower()
    file = data / node["data_name"] if node.get("data_name") else None
    statistics = tuple(node.get(name) for name in STATISTICS)
    return Item(label, role, dtype, tuple(node["shape"]), statistics, file, trained=node.get("requires_grad"))


def _wrong(node: dict[str, Any]) -> str | None:
    """What a tensor's node has that none can have; None if nothing."""
    dtype, shape, name = node.get("dtype"), node.get("shape"), node.get("data_name")
    if not isinstance(dtype, str):
        return f"dtype {dtype!r}"
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < LARGEST for size in shape):
        return f"shape {str(shape)[:60]}"
    if math.prod(shape) >= LARGEST:
        return f"shape {str(shape)[:60]}"
    if name is not None and (not isinstance(name, str) or "/" in name):
        return f"data_name {name!r}"
    odd = next((key for key in STATISTICS if not isinstance(node.get(key), int | float | None)), None)
    return f"{odd} {node[odd]!r}" if odd else None
