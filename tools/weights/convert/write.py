"""One file of a conversion: what it needs is read tensor by tensor; it is written whole, with checksums of tensors."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import CheckpointError, DataError
from tools.checkpoint.stream import Made, save_file
from tools.checkpoint.types import TYPES
from tools.weights.convert.plan import Plan, Shard
from tools.weights.hugging_face.names import Entry, part_shape
from tools.weights.source import Source, open_source

DONE = ".done.json"  # behind the name of a file that is whole


def writer(source: Path, folder: Path, plan: Plan, known: dict[str, int]) -> Callable[[Shard], str]:
    """A function that writes one shard into `folder`; built once in each worker process.

    Args:
        known: Hugging Face name -> CRC-32 of its bits, where the source says.
    """
    return partial(write_shard, open_source(source), folder, plan, known)


def write_shard(source: Source, folder: Path, plan: Plan, known: dict[str, int], shard: Shard) -> str:
    """Write `shard`, and beside it what it holds; returns its name.

    Raises:
        CheckpointError: a tensor of the source is not what its checksum or its twin says, or has several values.
        DataError: the file cannot be written.
    """
    sums: dict[str, int] = {}
    parts = _Parts(source, plan, sums) if plan.to == "Hugging Face" else None
    tensors: dict[str, Made] = {}
    for entry in shard.entries:
        if parts is not None:
            tensors |= parts.of(entry)
        else:
            dtype = _written(source, plan, entry, entry.parts[0])
            tensors[entry.mindformers] = Made(dtype, entry.shape, partial(_pieces, source, plan, known, entry))
    target, part = folder / shard.file, folder / f".{shard.file}.part"
    try:
        digest = save_file(tensors, part, {"format": "pt" if plan.to == "Hugging Face" else "ms"})
        record: dict[str, Any] = {
            "bytes": part.stat().st_size,
            "sha256": digest,
            "tensors": {name: [str(TYPES[made.dtype]), list(made.shape)] for name, made in tensors.items()},
            "crc32": {name: sums[name] for name in tensors if name in sums},
        }
        said = folder / f".{shard.file}{DONE}.part"
        said.write_text(json.dumps(record), "utf-8")
        os.replace(part, target)
        os.replace(said, folder / f"{shard.file}{DONE}")
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from None
    return shard.file


class _Parts:
    """Hugging Face's parts of MindFormers' tensors, each made when it is written; those of a layer come mixed.

    Args:
        sums: takes the CRC-32 of each part.
    """

    def __init__(self, source: Source, plan: Plan, sums: dict[str, int]) -> None:
        self.source, self.plan, self.sums = source, plan, sums
        self.arrays: dict[str, np.ndarray] = {}  # those of which some parts are written
        self.left: dict[str, int] = {}

    def of(self, entry: Entry) -> dict[str, Made]:
        """What is to be written for an entry."""
        dtype = _written(self.source, self.plan, entry, entry.mindformers)
        self.left[entry.mindformers] = len(entry.parts)
        return {
            name: Made(dtype, part_shape(entry, index), partial(self._make, entry, index))
            for index, name in enumerate(entry.parts)
        }

    def _make(self, entry: Entry, index: int) -> Iterator[np.ndarray]:
        name = entry.mindformers
        if name not in self.arrays:
            self.arrays[name], differing = self.source.bits(name)
            if differing:
                ranks = ", ".join(map(str, differing))
                raise CheckpointError(
                    f"{self.source.path}: {name} has several values, those of ranks {ranks} are not rank 0's: "
                    "`tc3 weights inspect --values` lists them"
                )
        part = _as_type(entry.part(self.arrays[name], index), self.source.headers[name].dtype, self.plan, entry)
        self.sums[entry.parts[index]] = crc32(part)
        self.left[name] -= 1
        if not self.left[name]:
            del self.arrays[name]
        yield part


def _pieces(source: Source, plan: Plan, known: dict[str, int], entry: Entry) -> Iterator[np.ndarray]:
    """MindFormers' tensor of an entry, as whole numbers, one expert after another."""

    def part(index: int) -> np.ndarray:
        name = entry.parts[index]
        stands_for = plan.stands_for.get(name, name)
        bits, _ = source.bits(stands_for)
        if name in known and crc32(bits) != known[name]:
            raise CheckpointError(f"{source.path}: {name} does not match its checksum: corrupted")
        for copy, original in plan.copies.items():
            if original == name and source.bits(copy)[0].tobytes() != bits.tobytes():
                raise CheckpointError(f"{source.path}: {copy} is another one than {name}; MindFormers has one for both")
        return _as_type(bits, source.headers[stands_for].dtype, plan, entry)

    return entry.pieces(part)


def _written(source: Source, plan: Plan, entry: Entry, name: str) -> str:
    """safetensors' type of what is written for an entry; `name`: a tensor of the source that it is made of."""
    return plan.dtype if plan.dtype and entry.trained else source.headers[plan.stands_for.get(name, name)].dtype


def _as_type(bits: np.ndarray, dtype: str, plan: Plan, entry: Entry) -> np.ndarray:
    """Bits of numbers of `dtype` as those of the type that is written. NumPy copies bfloat16, which it does not know,
    number by number: whole numbers stand for them wherever nothing is computed."""
    if not plan.dtype or not entry.trained or plan.dtype == dtype:
        return bits
    converted = np.ascontiguousarray(bits).view(TYPES[dtype]).astype(TYPES[plan.dtype])
    return converted.view(f"u{converted.dtype.itemsize}")


def crc32(array: np.ndarray) -> int:
    """Of an array's bits in row-major order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
