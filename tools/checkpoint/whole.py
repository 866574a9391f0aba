"""Read a checkpoint that many ranks wrote as whole arrays: every element once, and copies compared.

MindFormers 1.9.0 (`checkpoint/metadata.py`, `sharded_tensor.py`) writes for every rank a safetensors file of weights
and one of the optimizer's state, and a metadata.json: `state_dict_metadata` gives for each tensor its whole shape, into
how many slices each axis is cut (`axis_fragmentations`) and the slices that exist ("chunk"), `storage_data` the files
and ranks that hold a slice. What is called `global_offset` is one number, the slice's place in row-major order. A
checkpoint of one process has no metadata.json. Pure NumPy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from plugins.errors import CheckpointError

METADATA = "metadata.json"
BUFFERS = "accu_grads."  # of a step with micro-batches: MindFormers lists them, and never saves them


@dataclass(frozen=True)
class Whole:
    """A checkpoint as if one process had written it.

    Args:
        arrays: name -> the whole tensor.
        differing: name -> ranks whose copy of a slice is not, bit by bit, that of the first rank that holds it.
        ranks: name -> those that hold a part of it.
        unlisted: name -> rank -> what the rank wrote without saying how it lies: counters, the biases of routers.
    """

    arrays: dict[str, np.ndarray]
    differing: dict[str, tuple[int, ...]]
    ranks: dict[str, tuple[int, ...]]
    unlisted: dict[str, dict[int, np.ndarray]]


def read_whole(folder: Path) -> Whole:
    """All tensors of one iteration, in whole.

    Args:
        folder: MindFormers' `iteration_*`.

    Raises:
        CheckpointError: a file, a slice or a tensor is missing, or has another shape than the metadata say.
    """
    files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise CheckpointError(f"{folder}: no safetensors; give an iteration's folder, such as checkpoint/iteration_*")
    held = {name: _load(path) for name, path in files.items()}
    if not (folder / METADATA).exists():
        if len({_rank_of(name) for name in files}) > 1:
            raise CheckpointError(f"{folder}: several ranks wrote here, and {METADATA}, which says how, is missing")
        arrays = {key: value for part in held.values() for key, value in part.items()}
        return Whole(arrays, {}, dict.fromkeys(arrays, (0,)), {})
    tensors, storage = _metadata(folder / METADATA)
    arrays, differing, ranks = {}, {}, {}
    for name, tensor in tensors.items():
        if name.startswith(BUFFERS) and not any(name in part for part in held.values()):
            continue
        arrays[name], wrong = _join(folder, name, tensor, storage, held)
        ranks[name] = tuple(sorted({_rank_of(file) for file, part in held.items() if name in part}))
        if wrong:
            differing[name] = tuple(sorted(wrong))
    unlisted: dict[str, dict[int, np.ndarray]] = {}
    for file, part in held.items():
        for name in part.keys() - tensors.keys():
            unlisted.setdefault(name, {})[_rank_of(file)] = part[name]
    return Whole(arrays, differing, ranks, unlisted)


def _metadata(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        content = json.loads(file.read_text())
        return content["state_dict_metadata"], content["storage_data"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not MindFormers' metadata of a checkpoint ({error!r})") from None


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors has an exception class of its own
        raise CheckpointError(f"{path}: no whole safetensors file ({error})") from None


def _rank_of(name: str) -> int:
    """The rank in a file's name, which ends in `-<rank>-<world size>.safetensors`."""
    words = name.removesuffix(".safetensors").split("-")
    return int(words[-2]) if len(words) > 2 and words[-2].isdecimal() else 0


def _join(
    folder: Path,
    name: str,
    tensor: Mapping[str, Any],
    storage: Mapping[str, Any],
    held: Mapping[str, Mapping[str, np.ndarray]],
) -> tuple[np.ndarray, set[int]]:
    """The whole of one tensor, and the ranks whose copies differ.

    Every slice has to be there once: slices are then a partition of the tensor, since all have the same shape.
    """
    shape, cuts = tuple(tensor["global_shape"]), tuple(tensor["axis_fragmentations"])
    slices = {_place(chunk): tuple(chunk["local_shape"]) for chunk in tensor["chunk"]}
    missing = sorted(set(range(math.prod(cuts))) - slices.keys())
    part = tuple(length // count for length, count in zip(shape, cuts, strict=True))
    whole_cuts = tuple(length * count for length, count in zip(part, cuts, strict=True)) == shape
    if missing or not whole_cuts or set(slices.values()) != {part} or len(slices) != math.prod(cuts):
        found = f"slices {sorted(slices)} of shapes {sorted(set(slices.values()))}"
        raise CheckpointError(f"{folder}: {name} {list(shape)}, cut {list(cuts)}: {found} do not make up the whole")
    whole, differing = None, set()
    for place in slices:
        copies = _copies(folder, name, place, part, storage, held)
        (_, first), *others = copies
        if whole is None:
            whole = np.empty(shape, first.dtype)
        index = np.unravel_index(place, cuts) if cuts else ()
        whole[tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, part, strict=True))] = first
        differing |= {rank for rank, copy in others if copy.tobytes() != first.tobytes()}
    assert whole is not None, "every tensor has a slice"
    return whole, differing


def _place(chunk: Mapping[str, Any]) -> int:
    """Which slice it is, counted in row-major order."""
    (place,) = chunk["global_offset"]
    return int(place)


def _copies(
    folder: Path,
    name: str,
    place: int,
    shape: tuple[int, ...],
    storage: Mapping[str, Any],
    held: Mapping[str, Mapping[str, np.ndarray]],
) -> list[tuple[int, np.ndarray]]:
    """(rank, array) of every rank that holds a slice, in order of the ranks."""
    entries = storage.get(str((name, (place,))), [])
    if not entries:
        raise CheckpointError(f"{folder}: {name}: no file is named that holds slice {place}")
    copies = []
    for entry in sorted(entries, key=lambda entry: entry["storage_rank"]):
        file = entry["file_name"]
        if name not in held.get(file, {}):
            raise CheckpointError(f"{folder / file}: holds no {name}, though {METADATA} says so; was it all copied?")
        if (found := held[file][name].shape) != shape:
            raise CheckpointError(f"{folder / file}: {name} is {list(found)}; a slice of it is {list(shape)}")
        copies.append((int(entry["storage_rank"]), held[file][name]))
    return copies
