"""This module converts weights between MindFormers' and Hugging Face's form, file by file. A conversion that was
interrupted continues where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import CheckpointError, DataError
from plugins.lines import flush
from plugins.sealed_checkpoint.plan import write_seal
from tools.checkpoint.stored import METADATA
from tools.checkpoint.tensor_files import TYPES, Made, save_file
from tools.data.instructions import read_tokenizer
from tools.files.atomic import flush_all, not_written
from tools.process.children import ordered_map
from tools.recipe.load import Recipe
from tools.weights.convert_plan import Plan, Shard, keep_recipe
from tools.weights.hugging_face_config import FILE as CONFIG
from tools.weights.hugging_face_config import config_of
from tools.weights.hugging_face_names import Entry, part_shape
from tools.weights.hugging_face_sizes import Sizes
from tools.weights.inventory import mark
from tools.weights.source import CHECKSUMS, INDEX, Source, open_source, refuse_target, require_room

# One file of a conversion: what it needs is read tensor by tensor; it is written whole, with checksums of tensors.

DONE = ".done.json"  # behind the name of a file that is whole


def writer(source: Path, folder: Path, plan: Plan, known: dict[str, int]) -> Callable[[Shard], str]:
    """Return a function that writes one file (shard) of a conversion into `folder`. Each worker process calls `writer`
    once.

    Args:
        known: the CRC-32 of the bits of each Hugging Face tensor by name, if the source lists it.
    """
    return partial(write_shard, open_source(source), folder, plan, known)


def write_shard(source: Source, folder: Path, plan: Plan, known: dict[str, int], shard: Shard) -> str:
    """Write one file (shard) of a conversion, and next to it a file that lists its content; return the name of the
    shard's file.

    Raises:
        CheckpointError: a tensor of the source differs from its checksum or from the tensor that it must repeat, or
            ranks hold different copies of it.
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
        raise DataError(f"{target}: this path cannot be written ({error.strerror or error})") from None
    return shard.file


class _Parts:
    """A `_Parts` holds Hugging Face's parts of MindFormers' tensors, each made when it is written; those of a layer
    come mixed.

    Args:
        sums: takes the CRC-32 of each part.
    """

    def __init__(self, source: Source, plan: Plan, sums: dict[str, int]) -> None:
        self.source, self.plan, self.sums = source, plan, sums
        self.arrays: dict[str, np.ndarray] = {}  # those of which some parts are written
        self.left: dict[str, int] = {}

    def of(self, entry: Entry) -> dict[str, Made]:
        """Return the Hugging Face tensors that are made from one MindFormers tensor, as a dictionary by name."""
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
            self.source.require_same(name, differing)
        part = _as_type(entry.part(self.arrays[name], index), self.source.headers[name].dtype, self.plan, entry)
        self.sums[entry.parts[index]] = crc32(part)
        self.left[name] -= 1
        if not self.left[name]:
            del self.arrays[name]
        yield part


def _pieces(source: Source, plan: Plan, known: dict[str, int], entry: Entry) -> Iterator[np.ndarray]:
    """Yield MindFormers' tensor of an entry, as whole numbers, one expert after another."""

    def part(index: int) -> np.ndarray:
        name = entry.parts[index]
        stands_for = plan.stands_for.get(name, name)
        bits, _ = source.bits(stands_for)
        if name in known and crc32(bits) != known[name]:
            raise CheckpointError(f"{source.path}: {name} does not match its checksum, so the file is damaged")
        for copy, original in plan.copies.items():
            if original == name and source.bits(copy)[0].tobytes() != bits.tobytes():
                raise CheckpointError(
                    f"{source.path}: {copy} differs from {name}, but the model has only one weight for these two names"
                )
        return _as_type(bits, source.headers[stands_for].dtype, plan, entry)

    return entry.pieces(part)


def _written(source: Source, plan: Plan, entry: Entry, name: str) -> str:
    """Return safetensors' type of what is written for an entry; `name`: a tensor of the source that it is made of."""
    return plan.dtype if plan.dtype and entry.trained else source.headers[plan.stands_for.get(name, name)].dtype


def _as_type(bits: np.ndarray, dtype: str, plan: Plan, entry: Entry) -> np.ndarray:
    """Return bits of numbers of `dtype` as those of the type that is written. NumPy copies bfloat16, which it does not
    know, number by number: whole numbers stand for them wherever nothing is computed.
    """
    if not plan.dtype or not entry.trained or plan.dtype == dtype:
        return bits
    converted = np.ascontiguousarray(bits).view(TYPES[dtype]).astype(TYPES[plan.dtype])
    return converted.view(f"u{converted.dtype.itemsize}")


def crc32(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes, in row-major order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


TOKENIZER = ("tokenizer", "special_tokens_map", "vocab", "merges", "added_tokens", "chat_template", "generation_config")
_VOCABULARY = ("tokenizer.", "vocab")  # one of these holds the tokens of a tokenizer
_PLAN = "plan.json"


def check_tokenizer(folder: Path, known: int) -> None:
    """Raise DataError if `folder` holds no tokenizer, or one with more ids than the `known` ids of the model; only the
    ids of a tokenizer.json are counted.
    """
    if not any(path.name.startswith(_VOCABULARY) for path in folder.iterdir() if path.is_file()):
        raise DataError(
            f"--tokenizer {folder}: the folder holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json); "
            "name the folder of the training data's tokenizer, such as PREFIX_tokenizer of tc3 data prepare"
        )
    loaded = read_tokenizer("--tokenizer", folder)
    ids = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1 if loaded else 0
    if ids > known:
        raise DataError(
            f"--tokenizer {folder}: this tokenizer has {ids:,} ids, but the model has only {known:,}; name the "
            "tokenizer of the data that the model was trained on"
        )


def convert(
    source: Source,
    target: Path,
    plan: Plan,
    sizes: Sizes,
    workers: int = 1,
    tokenizer: Path | None = None,
    ends: int | None = None,
    progress: Callable[[int, str], None] = lambda done, file: None,
    damaged: Sequence[str] = (),
    recipe: Recipe | None = None,
) -> None:
    """Write the converted weights to `target`, a folder that does not exist yet. After each written file, the function
    `progress` is called with the number of bytes written so far and the name of the file. In a Hugging Face folder,
    `ends` is written as the id of the end-of-document token. The damaged tensors of `source` that `damaged` lists are
    copied unchanged, and are listed in `target`.

    If the weights are written in MindFormers' form, `recipe` is stored beside them; later commands compare their recipe
    with the stored one (`keep_recipe`).

    The files are written into a hidden folder beside `target` until all of them are complete. If a conversion of the
    same source is run again after an interruption or a full disk, it keeps the files that are complete.

    Raises:
        CheckpointError: `target` exists, another process is writing `target`, or the source is damaged.
        DataError: `target` cannot be written, or the disk has no room for it.
    """
    refuse_target(target)
    part = target.with_name(f".{target.name}.part")
    _make_room(part, target, plan)
    with _alone(part, target):
        _take_up(part, source, plan)
        left = [shard for shard in plan.shards if not _is_whole(part, shard.file)]
        done = plan.bytes - sum(shard.bytes for shard in left)
        known = {} if plan.to == "Hugging Face" or damaged else _known(source)
        make = partial(writer, source.path.absolute(), part, plan, known)
        for shard, file in zip(left, ordered_map(make, left, min(workers, max(1, len(left)))), strict=True):
            done += shard.bytes
            progress(done, file)
        records = {shard.file: json.loads((part / f"{shard.file}{DONE}").read_text("utf-8")) for shard in plan.shards}
        try:
            if plan.to == "Hugging Face":
                _finish_hugging_face(part, records, sizes, plan, ends)
            else:
                finish_mindformers(part, records)
                if recipe:
                    keep_recipe(part, recipe)
            for path in sorted(tokenizer.iterdir()) if tokenizer else ():
                if path.is_file() and path.name.startswith(TOKENIZER):
                    shutil.copyfile(path, part / path.name)
            mark(part, damaged)
            for name in [_PLAN, *(f"{file}{DONE}" for file in records)]:
                (part / name).unlink()
            flush_all(part)
            part.rename(target)
            flush(target.parent)
        except OSError as error:
            raise not_written(target, error) from None


def _make_room(part: Path, target: Path, plan: Plan) -> None:
    """Make the folder to write in, on a disk that has room for what is not there yet."""
    try:
        part.mkdir(parents=True, exist_ok=True)
        there = sum(path.stat().st_size for path in part.glob("*.safetensors"))
    except OSError as error:
        raise DataError(f"{target}: this path cannot be written ({error.strerror or error})") from None
    try:
        require_room(part, target, plan.bytes, there)
    except DataError:
        with contextlib.suppress(OSError):
            part.rmdir()  # where nothing is in it
        raise


@contextmanager
def _alone(part: Path, target: Path) -> Iterator[None]:
    """Hold the folder, which becomes `target`, against a second conversion into it."""
    folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_finished(part, target)
        yield
    except BlockingIOError:
        raise CheckpointError(f"{part}: another process is writing into this folder") from None
    finally:
        os.close(folder)


def _refuse_finished(part: Path, target: Path) -> None:
    """Raise CheckpointError if another process has finished this conversion before we held the lock. It has renamed the
    folder that we hold, or the folder that we hold is a new and empty one.
    """
    try:
        refuse_target(target)
    except CheckpointError:
        with contextlib.suppress(OSError):
            part.rmdir()  # where nothing is in it
        raise


def _take_up(part: Path, source: Source, plan: Plan) -> None:
    """Keep the files of weights that an earlier conversion of the same files by the same plan has written, and nothing
    else.
    """
    files = {name: (source.stored.folder / name).stat() for name in source.stored.files}
    identity = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(files.items())]
    read = [sorted(plan.stands_for.items()), sorted(plan.copies.items())]  # by config.json, which may be edited
    words = json.dumps([str(source.path.absolute()), identity, plan.to, plan.dtype, repr(plan.shards), read])
    mark = hashlib.sha256(words.encode()).hexdigest()
    try:
        if (part / _PLAN).read_text("utf-8") == mark:
            kept = {_PLAN, *(shard.file + end for shard in plan.shards for end in ("", DONE))}
            for path in part.iterdir():  # what a process was writing when it was killed, and another tokenizer's files
                if path.name not in kept:
                    path.unlink()
            return
    except (OSError, ValueError):
        pass
    for path in part.iterdir():
        path.unlink()
    try:
        (part / _PLAN).write_text(mark, "utf-8")
    except OSError as error:
        raise not_written(part / _PLAN, error) from None


def _is_whole(part: Path, file: str) -> bool:
    try:
        return bool(json.loads((part / f"{file}{DONE}").read_text("utf-8"))["bytes"] == (part / file).stat().st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _known(source: Source) -> dict[str, int]:
    """Return checksums of a Hugging Face source's tensors, where this tool wrote it."""
    try:
        return dict(json.loads((source.stored.folder / CHECKSUMS).read_text("utf-8"))["tensors"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _finish_hugging_face(part: Path, records: dict[str, Any], sizes: Sizes, plan: Plan, ends: int | None) -> None:
    """Write index, configuration and checksums."""
    where = {name: file for file, record in records.items() for name in record["tensors"]}
    if len(records) > 1:
        _write(part / INDEX, {"metadata": {"total_size": plan.bytes}, "weight_map": where})
    types = [kind for record in records.values() for kind, shape in record["tensors"].values() if len(shape) > 1]
    config = config_of(sizes, max(dict.fromkeys(types), key=types.count))
    _write(part / CONFIG, config if ends is None else {**config, "eos_token_id": ends})
    files = {file: record["sha256"] for file, record in records.items()}
    sums = {name: value for record in records.values() for name, value in record["crc32"].items()}
    _write(part / CHECKSUMS, {"files": files, "tensors": sums})


def finish_mindformers(part: Path, records: dict[str, Any]) -> None:
    """Write metadata.json for converted weights in MindFormers' form, and a seal (a file with its checksum) for each
    file. Thanks to metadata.json, a rank that loads the weights need not read every file to learn the shapes of the
    tensors.

    Args:
        records: for each file its "sha256" and its "tensors", which maps a tensor's name to (NumPy's name of its type,
            shape).
    """
    described, storage = {}, {}
    for file, record in records.items():
        for name, (kind, shape) in record["tensors"].items():
            described[name] = _described(kind, shape)
            # one rank, in several files: MindFormers looks for a whole tensor at rank 0
            storage[str((name, (0,)))] = [{"file_name": file, "storage_rank": 0, "rank_group": [0]}]
    _write(part / METADATA, {"state_dict_metadata": described, "storage_data": storage})
    known = {file: record["sha256"] for file, record in records.items()}
    for rank in range(len(records)):
        write_seal(part, rank, len(records), 0, known=known)


def _described(kind: str, shape: list[int]) -> dict[str, Any]:
    """Return a whole tensor as MindFormers 1.9.0 describes one (`checkpoint/metadata.py`, save_metadata)."""
    layout = {
        "device_matrix": [1],
        "tensor_map": [-1] * len(shape),
        "interleaved_parallel": False,
        "alias_name": ["a"],
        "rank_list": [0],
    }
    return {
        "properties": {"dtype": kind, "replica_id": [0], "allow_shape_mismatch": False, "allow_to_save": True},
        "global_shape": shape,
        "axis_fragmentations": [1] * len(shape),
        "layout": layout,
        "chunk": [{"global_offset": [0], "local_shape": shape}],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
