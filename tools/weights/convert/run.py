"""A conversion from its first file to the folder that reads as whole; one that was cut short goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import write_seal
from tools.checkpoint.stored import METADATA
from tools.data.workers import ordered_map
from tools.weights.convert.plan import Plan
from tools.weights.convert.write import DONE, writer
from tools.weights.hugging_face.config import FILE as CONFIG
from tools.weights.hugging_face.config import config_of
from tools.weights.hugging_face.sizes import Sizes
from tools.weights.inventory import mark
from tools.weights.source import CHECKSUMS, INDEX, Source

TOKENIZER = ("tokenizer", "special_tokens_map", "vocab", "merges", "added_tokens", "chat_template", "generation_config")
_MARGIN = 1.02  # headers, indices, checksums
_PLAN = "plan.json"


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
) -> None:
    """Write `target`, a folder that is not there yet. `progress` is told the bytes written and the file. A folder
    for Hugging Face says that the token `ends` ends a document. What is `damaged` in `source` and taken all the same
    (`inventory.salvaged`) is said in `target`.

    What is written stands in a hidden folder beside `target` until all of it is there; run again after an interrupt or
    a full disk, a conversion of the same source keeps the files that are whole.

    Raises:
        CheckpointError: `target` exists, another process writes it, or the source is damaged.
        DataError: it cannot be written, or the disk has no room for it.
    """
    refuse_target(target)
    part = target.with_name(f".{target.name}.part")
    _make_room(part, target, plan)
    with _alone(part):
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
                _finish_mindformers(part, records)
            if tokenizer:
                _copy_tokenizer(tokenizer, part)
            mark(part, damaged)
            for name in [_PLAN, *(f"{file}{DONE}" for file in records)]:
                (part / name).unlink()
            part.rename(target)
        except OSError as error:
            raise DataError(f"{target}: cannot be written ({error.strerror or error})") from None


def refuse_target(target: Path) -> None:
    """Raise CheckpointError where `target` exists."""
    if target.exists():
        raise CheckpointError(f"{target}: is there already; remove it, or name another folder")


def _make_room(part: Path, target: Path, plan: Plan) -> None:
    """The folder to write in, on a disk that has room for what is not there yet."""
    try:
        part.mkdir(parents=True, exist_ok=True)
        there = sum(path.stat().st_size for path in part.glob("*.safetensors"))
        free = shutil.disk_usage(part).free
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from None
    if (wanted := int(plan.bytes * _MARGIN) - there) > free:
        with contextlib.suppress(OSError):
            part.rmdir()  # where nothing is in it
        raise DataError(f"{target}: {wanted / 1e9:,.3f} GB are to be written, {free / 1e9:,.3f} GB are free there")


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Hold the folder against a second conversion into it."""
    folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(f"{part}: another process is writing there") from None
    finally:
        os.close(folder)


def _take_up(part: Path, source: Source, plan: Plan) -> None:
    """Keep what an earlier conversion of the same files by the same plan has written, and nothing else."""
    files = {name: (source.stored.folder / name).stat() for name in source.stored.files}
    identity = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(files.items())]
    words = json.dumps([str(source.path.absolute()), identity, plan.to, plan.dtype, repr(plan.shards)])
    mark = hashlib.sha256(words.encode()).hexdigest()
    try:
        if (part / _PLAN).read_text("utf-8") == mark:
            return
    except (OSError, ValueError):
        pass
    for path in part.iterdir():
        path.unlink()
    (part / _PLAN).write_text(mark, "utf-8")


def _is_whole(part: Path, file: str) -> bool:
    try:
        return bool(json.loads((part / f"{file}{DONE}").read_text("utf-8"))["bytes"] == (part / file).stat().st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _known(source: Source) -> dict[str, int]:
    """Checksums of a Hugging Face source's tensors, where this tool wrote it."""
    try:
        return dict(json.loads((source.stored.folder / CHECKSUMS).read_text("utf-8"))["tensors"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _finish_hugging_face(part: Path, records: dict[str, Any], sizes: Sizes, plan: Plan, ends: int | None) -> None:
    """Index, configuration and checksums."""
    where = {name: file for file, record in records.items() for name in record["tensors"]}
    if len(records) > 1:
        _write(part / INDEX, {"metadata": {"total_size": plan.bytes}, "weight_map": where})
    types = [kind for record in records.values() for kind, shape in record["tensors"].values() if len(shape) > 1]
    config = config_of(sizes, max(set(types), key=types.count))
    _write(part / CONFIG, config if ends is None else {**config, "eos_token_id": ends})
    files = {file: record["sha256"] for file, record in records.items()}
    sums = {name: value for record in records.values() for name, value in record["crc32"].items()}
    _write(part / CHECKSUMS, {"files": files, "tensors": sums})


def _finish_mindformers(part: Path, records: dict[str, Any]) -> None:
    """metadata.json (without it every rank would read every file to learn its shapes), and a seal for each file."""
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
    """A whole tensor as MindFormers 1.9.0 describes one (`checkpoint/metadata.py`, save_metadata)."""
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


def _copy_tokenizer(folder: Path, part: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name.startswith(TOKENIZER):
            shutil.copyfile(path, part / path.name)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
