"""This module reads a dump of tensors: steps, ranks, the calls of each step, and the inputs and outputs of each call.

msprobe writes `stepN/rankM/{dump.json, dump_tensor_data/*.npy}`. L1 and L2 do not show weights, so `tc3 accuracy dump`
adds `weights/stepN/rankM/` in the same layout: the weights before step N. At L2 MindSpore itself writes the kernels of
compiled graphs, `rank_R/Net/GRAPH/STEP/*.npy`, with names
TYPE.SCOPE.TASK.STREAM.MICROSECONDS.input|output.N.FORMAT.DTYPE.npy; names that are too long for the file system are in
mapping.csv. Operators below `Gradients` are the backward pass; those below `optimizer` count as weights, because they
compute the update.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from plugins.errors import DataError, not_json
from tools.accuracy.dumps.write import refuse_parts
from tools.accuracy.dumps.write import stated as stated_in

FORWARD, BACKWARD, WEIGHTS, STATE = "forward", "backward", "weights", "state"
PHASES = (FORWARD, BACKWARD, WEIGHTS, STATE)
GRADIENT = "parameters_grad"
CELLS = ("Cell", "Module")  # MindSpore's and PyTorch's word
CHUNK = 1 << 16  # values in a piece; pieces of both sides and their errors fit a core's cache
BUFFER = CHUNK * 16  # bytes: no value has more than 16
_HEAD = 128  # NumPy pads a header to a multiple of 64; nearly every one is this long
_own = threading.local()
CONFIGURATION = "kernel_kbyk_dump.json"
KIND = "Kernel"
_KERNEL_RANK = re.compile(r"rank_(\d+)$")
_UNKNOWN = (None, None, None, None)  # no statistics; values only
TENSORS = ("mindspore.Tensor", "torch.Tensor", "numpy.ndarray")
INPUTS = ("input_args", "input_kwargs", "input")
ROLES = {**dict.fromkeys(INPUTS, "input"), "parameters": "parameters", "output": "output"}
WEIGHTS_FOLDER = "weights"
STATISTICS = ("Max", "Min", "Mean", "Norm")
HEAD = ("level", "task", "data")
LEVELS = ("L0", "L1", "mix", "L2")
TASKS = ("statistics", "tensor")
LARGEST = 2**62  # values
_STEP = re.compile(r"step(\d+)$")
_RANK = re.compile(r"rank(\d+)$")
_PROCESS = re.compile(r"proc\d+$")


@dataclass(frozen=True)
class Name:
    """A `Name` is one key of msprobe's dump.json, split into its parts."""

    text: str  # the key itself
    kind: str  # the kind of the hooked object: Cell (Module is read as Cell), Functional, Mint, Tensor, ...
    path: str  # the cell's path in the model, or the function's name
    type: str  # the cell's class, or the function's last name
    phase: str  # forward, backward or parameters_grad
    call: int  # the number of earlier calls of the module in this step

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the key by which calls of two dumps are paired; frameworks name their classes differently."""
        return self.kind, self.path, self.phase, self.call

    @property
    def place(self) -> str:
        """Return the path of the cell, or the name of the function, for messages."""
        return f"{self.path} ({self.type})" if self.kind == "Cell" else f"{self.kind}.{self.path}"


def parse(text: str) -> Name:
    """Split a key of dump.json, such as `Cell.PATH.CLASS.forward.N` or `Functional.NAME.N.backward`, into its parts;
    raise ValueError for a key of another form.
    """
    parts = text.split(".")
    marks = (FORWARD, BACKWARD, GRADIENT)
    if len(parts) < 4:
        raise ValueError(text)
    if parts[-2] in marks:
        phase, call = parts[-2:]
    elif parts[-1] in marks:
        call, phase = parts[-2:]
    else:
        raise ValueError(text)
    kind, body = parts[0], parts[1:-2]
    if kind in CELLS:
        return Name(text, "Cell", ".".join(body[:-1]), body[-1], phase, int(call))
    return Name(text, kind, ".".join(body), body[-1], phase, int(call))


class NpyFile:
    """An `NpyFile` is an open .npy file whose values `chunks` yields; as a context manager it closes the file. The
    constructor raises DataError if the file is missing or is not a .npy file; the method `chunks` raises DataError if
    the file is shorter than its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(
                f"{path}: the file cannot be read ({error.strerror}), but dump.json names it, so the dump is not "
                f"complete"
            ) from None
        try:
            head = self._file.read(_HEAD)
            self._start = 10 + int.from_bytes(head[8:10], "little")
            head += self._file.read(max(self._start - _HEAD, 0))  # many axes
            self.dtype, self.shape = _parsed(head[: self._start])
        except (ValueError, SyntaxError, TypeError, TokenError, OSError) as error:
            self._file.close()
            raise DataError(f"{path}: this is not a .npy file that can be read ({error})") from None
        self.size = int(np.prod(self.shape, dtype=np.int64))

    def __enter__(self) -> NpyFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def chunks(self, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the array's values in C order, in flat pieces of up to `CHUNK` values that are views of `buffer`."""
        self._file.seek(self._start)
        for start in range(0, self.size, CHUNK):
            piece = buffer[: min(self.size - start, CHUNK) * self.dtype.itemsize]
            view, done = memoryview(piece), 0  # type: ignore[arg-type]
            while done < len(view):
                read = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                if not read:
                    raise DataError(f"{self.path}: the file ends too early, so the dump is not complete")
                done += read
            yield piece.view(self.dtype)


@lru_cache(maxsize=4096)
def _parsed(head: bytes) -> tuple[np.dtype, tuple[int, ...]]:
    """Return NumPy's reading of a header; most arrays of a dump share theirs with others."""
    stream = io.BytesIO(head)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("the version of the .npy format must be 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran:
        raise ValueError("the array is in Fortran order, which msprobe never writes")
    if dtype.kind not in "biufc":
        raise ValueError(f"the data type must be a number or bool, but is {dtype}")
    return dtype, shape


def pieces(*files: NpyFile) -> Iterator[tuple[np.ndarray, ...]]:
    """Read up to four .npy files of equal size together: yield one tuple after another with the next piece of each
    file. A tuple is valid only until the next tuple is read, because all tuples use the same memory.
    """
    if not hasattr(_own, "buffers"):
        _own.buffers = [np.empty(BUFFER, np.uint8) for _ in range(4)]
    return zip(*(file.chunks(buffer) for file, buffer in zip(files, _own.buffers, strict=False)), strict=True)


@dataclass(frozen=True)
class Item:
    """An `Item` is one tensor or plain Python value that a dumped call reads or returns."""

    label: str  # role and position: `input.0`, `output.1`, `parameters.weight`, or the parameter of a gradient
    role: str  # input, output, parameters or gradient
    dtype: str  # the framework's name of the type in lower case; of a plain value, the name of its Python type
    shape: tuple[int, ...] = ()  # the shape of the tensor
    statistics: tuple[float | None, ...] = ()  # max, min, mean, L2 norm; None for what msprobe has not written
    file: Path | None = None  # the file of the values, if they were dumped
    value: Any = None  # the plain value
    trained: bool | None = None  # whether a gradient trains it, if the dump states it

    @property
    def parameter(self) -> str:
        """Return the name of a parameter within its cell, also for its gradient (such as `weight.0`)."""
        if self.role == "parameters":
            return self.label.removeprefix("parameters.")  # may have dots, as an optimizer's `moment1.fc.weight`
        return self.label.removesuffix(".0")

    @property
    def is_tensor(self) -> bool:
        """Return whether the value is a tensor, and not a plain Python value."""
        return bool(self.statistics)


@dataclass(frozen=True)
class Entry:
    """An `Entry` is one call of a cell or function in a dump, with its inputs and outputs."""

    name: Name
    items: tuple[Item, ...]


def kernel_folders(folder: Path) -> dict[int, dict[int, Path]]:
    """Return, for each step, a dict from each rank to the folder in which the rank dumped its kernels."""
    found: dict[int, dict[int, Path]] = {}
    for rank in folder.glob("rank_[0-9]*"):
        match = _KERNEL_RANK.match(rank.name)
        for step in {int(path.name) for path in rank.glob("Net/*/*") if path.name.isdigit()} if match else ():
            found.setdefault(step, {})[int(match[1])] = rank  # type: ignore[index]
    return dict(sorted(found.items()))


def kernel_entries(rank: Path, step: int) -> list[Entry]:
    """Return the kernels of a step in the order in which they ran; raise DataError if a file or its name is wrong."""
    found = [file for folder in sorted(rank.glob(f"Net/*/{step}")) for file in _kernel_files(folder)]
    found.sort(key=lambda file: file[0])
    calls: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str, int], list[Item]] = {}
    for _, kind, scope, item in found:
        call = calls.get((kind, scope), 0)
        if any(item.label == other.label for other in items.get((kind, scope, call), ())):
            call = calls[kind, scope] = call + 1  # it ran again
        items.setdefault((kind, scope, call), []).append(item)
    entries = []
    for (kind, scope, call), group in items.items():
        where = scope.partition(".")[2]
        phase = BACKWARD if where.startswith("Gradients") else WEIGHTS if "optimizer-" in where else FORWARD
        name = Name(f"{KIND}.{scope}.{call}.{phase}", KIND, scope, kind, phase, call)
        entries.append(Entry(name, tuple(group)))
    return entries


def _kernel_files(folder: Path) -> Iterator[tuple[int, str, str, Item]]:
    """Yield (microseconds, operator, `graphG.scope`, tensor) of each file."""
    mapping = folder / "mapping.csv"
    names = {}
    if mapping.exists():
        with mapping.open(newline="", encoding="utf-8") as file:
            try:
                names = dict(csv.reader(file))
            except (ValueError, csv.Error):
                raise DataError(f"{mapping}: each line must hold two names, with a comma between them") from None
    for path in folder.glob("*.npy"):
        parts = names.get(path.name, path.name).split(".")
        if len(parts) != 10 or parts[5] not in ("input", "output") or not parts[4].isdigit():
            raise DataError(
                f"{path}: the name of this file is not one that msprobe gives to a kernel's tensor; make the dump again"
            )
        kind, scope, _, _, when, role, place, _, dtype, _ = parts
        with NpyFile(path) as file:
            item = Item(f"{role}.{place}", role, dtype.lower(), file.shape, _UNKNOWN, path)
        yield int(when), kind, f"graph{folder.parent.name}.{scope}", item


@dataclass(frozen=True)
class Dump:
    """A `Dump` describes a dump of tensors by its folders and file headers; the values stay in the files."""

    folder: Path
    folders: dict[int, dict[int, Path]]  # step -> rank -> folder with dump.json
    level: str  # of msprobe, as `task`
    task: str
    marker: dict[str, Any] | None  # the record of `tc3 accuracy dump`; msprobe's own dumps do not say if they are whole
    weights: dict[int, dict[int, Path]]  # step -> rank -> folder with the dump.json of weights that msprobe left out

    @property
    def steps(self) -> list[int]:
        """Return all steps of which the dump has calls or weights."""
        return sorted({*self.folders, *self.weights})

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have dumped the first step."""
        return sorted(next(iter(self.folders.values())))

    def entries(self, step: int, rank: int) -> list[Entry]:
        """Return the weights before a step, and then its calls in the order in which they ended."""
        found = _entries(self.weights[step][rank]) if step in self.weights else []
        if step in self.folders:
            folder = self.folders[step][rank]
            found += kernel_entries(folder, step) if self.level == "L2" else _entries(folder)
        return found


def open_dump(folder: Path) -> Dump:
    """Return the dump in `folder`; raise DataError if it is not a complete dump."""
    if not folder.is_dir():
        if folder.exists():
            raise DataError(
                f"{folder}: this is a file, but a dump is a folder, as `tc3 accuracy dump RECIPE --out FOLDER` makes it"
            )
        raise DataError(f"{folder}: there is no such folder; `tc3 accuracy dump RECIPE --out {folder}` makes a dump")
    stated = stated_in(folder)
    if stated is not None and not stated["complete"]:
        raise DataError(
            f"{folder}: the dump is not complete, because its run was killed or failed; dump again into a new folder"
        )
    weights = _steps(folder / WEIGHTS_FOLDER)
    if (folder / CONFIGURATION).exists():
        folders, level, task = kernel_folders(folder), "L2", "tensor"
        _same_ranks(folder, folders, weights)
    else:
        folders = _steps(folder)
        _same_ranks(folder, folders, weights)
        head = _content(next(iter(next(iter(folders.values())).values())))
        level, task = head["level"], head["task"]
    if stated is not None:
        refuse_parts(folder, folders, weights, stated)
    return Dump(folder, folders, level, task, stated, weights)


def _steps(folder: Path) -> dict[int, dict[int, Path]]:
    folders = {int(match[1]): _ranks(path) for path in folder.glob("step*") if (match := _STEP.match(path.name))}
    return {step: ranks for step, ranks in sorted(folders.items()) if ranks}


def _same_ranks(folder: Path, folders: dict[int, dict[int, Path]], weights: dict[int, dict[int, Path]]) -> None:
    if not folders:
        raise DataError(f"{folder}: this is not a dump, because it holds no stepN/rankM/dump.json{_elsewhere(folder)}")
    first = sorted(next(iter(folders.values())))
    for step, ranks in (*folders.items(), *weights.items()):
        if sorted(ranks) != first:
            raise DataError(
                f"{folder}: step {step} has ranks {sorted(ranks)}, but the first step has ranks {first}; copy the "
                "missing folders, or make the dump again"
            )


def _elsewhere(folder: Path) -> str:
    if (folder / "dump.json").exists():
        return f"; it is one rank of a dump: give {folder.parent.parent}"
    if any(folder.glob("*/dump.json")):
        return f"; it is one step of a dump: give {folder.parent}"
    steps = (path for path in sorted(folder.glob("*/step*")) if _STEP.match(path.name))
    inside = next((path.parent for path in steps if _ranks(path)), None)
    return f"; did you mean {inside}?" if inside else ""


def _ranks(step: Path) -> dict[int, Path]:
    """Return rank -> folder; a single process that knew no rank (`procPID`) is rank 0."""
    if not step.is_dir():
        return {}
    folders = [path for path in step.iterdir() if (path / "dump.json").exists()]
    ranks = {int(match[1]): path for path in folders if (match := _RANK.match(path.name))}
    processes = [path for path in folders if _PROCESS.match(path.name)]
    if len(processes) > 1 or (processes and ranks):
        raise DataError(
            f"{step}: the name of the folder {processes[0].name} does not contain a rank; if several processes dump, "
            "each process must pass its rank_id to msprobe's start()"
        )
    return ranks or dict(enumerate(processes))


def _content(folder: Path) -> dict[str, Any]:
    file = folder / "dump.json"
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: this is not msprobe's dump.json, or it is incomplete: the file {not_json(error)}"
        ) from None
    missing = [key for key in HEAD if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{file}: this is not msprobe's dump.json, because it has no {missing[0]!r}")
    if not isinstance(content["data"], dict) or not content["data"]:
        raise DataError(
            f"{file}: no tensor was dumped, because the run ended before its first step or msprobe hooked no call"
        )
    for key, known in (("level", LEVELS), ("task", TASKS)):
        if content[key] not in known:
            raise DataError(
                f"{file}: dumps of {key} {content[key]!r} cannot be compared; dump with one of {', '.join(known)}"
            )
    return {key: content[key] for key in HEAD}


def _entries(folder: Path) -> list[Entry]:
    file, found = folder / "dump.json", []
    for key, value in _content(folder)["data"].items():
        if not isinstance(value, dict):
            raise DataError(
                f"{file}: {key}: must be an object that lists the tensors of the call by their role (input, "
                f"parameters, output), not {str(value)[:40]!r}"
            )
        try:
            name = parse(key)
        except ValueError:
            raise DataError(f"{file}: {key!r} is not a name that msprobe writes; make the dump again") from None
        found.append(Entry(name, tuple(_items(value, folder))))
    return found


def _items(value: dict[str, Any], folder: Path) -> Iterator[Item]:
    data = folder / "dump_tensor_data"
    order = [*ROLES]  # inputs and parameters come before outputs
    for group in sorted(value, key=lambda group: order.index(group) if group in order else len(order)):
        role = ROLES.get(group, "gradient")
        yield from _leaves(value[group], group if role == "gradient" else role, role, data)


def _leaves(node: Any, label: str, role: str, data: Path) -> Iterator[Item]:
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
        raise DataError(
            f"{data.parent / 'dump.json'}: {label}: {wrong}; the file is damaged, or msprobe did not write it"
        )
    dtype = node["dtype"].rpartition(".")[2].lower()
    file = data / node["data_name"] if node.get("data_name") else None
    statistics = tuple(node.get(name) for name in STATISTICS)
    return Item(label, role, dtype, tuple(node["shape"]), statistics, file, trained=node.get("requires_grad"))


def _wrong(node: dict[str, Any]) -> str | None:
    """Return the fault of a tensor's entry that no dump can have; None if it is right."""
    dtype, shape, name = node.get("dtype"), node.get("shape"), node.get("data_name")
    if not isinstance(dtype, str):
        return f"dtype {dtype!r}"
    sizes = isinstance(shape, list) and all(type(size) is int and 0 <= size < LARGEST for size in shape)
    if not sizes or math.prod(shape) >= LARGEST:  # type: ignore[arg-type]
        return f"shape {str(shape)[:60]}"
    if name is not None and (not isinstance(name, str) or "/" in name):
        return f"data_name {name!r}"
    told = {key: node.get(key) for key in STATISTICS}
    huge = [key for key, value in told.items() if type(value) is int and abs(value) >= 10**300]  # no float can hold it
    odd = next((key for key in STATISTICS if key in huge or not isinstance(told[key], int | float | None)), None)
    return f"{odd} {str(told[odd])[:60]!r}" if odd else None
