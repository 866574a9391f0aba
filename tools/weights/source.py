"""This module reads weights from a checkpoint of a run, from a Hugging Face folder, or from one safetensors file.
Before weights are written, the module checks that the target folder does not exist and that the disk has enough room.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from plugins.errors import CheckpointError, DataError, not_json, read_text
from plugins.sealed_checkpoint.plan import fault
from tools.checkpoint.scan import is_sealed, iterations, saved_step
from tools.checkpoint.stored import Stored, kind_of, moved, open_stored, rank_of, read_placements
from tools.checkpoint.tensor_files import TYPES, Header, read_headers
from tools.files.atomic import what_is

INDEX = "model.safetensors.index.json"
CHECKSUMS = "checksums.json"  # of a Hugging Face folder: files by sha256, tensors by CRC-32
_PICKLES = ("bin", "pt", "pth")  # endings of torch's older files
_PART = re.compile(r"(.*-)(\d{1,6})-of-(\d{1,6})\.safetensors")
SINGLE = "model.safetensors"  # where one file holds all of it: transformers writes no index then
Form = Literal["MindFormers", "Hugging Face", "one file"]


@dataclass(frozen=True)
class Source:
    """A `Source` holds the headers of stored weights (a checkpoint of a run, a Hugging Face folder or one safetensors
    file), and reads their values tensor by tensor.

    Args:
        path: the path as the user gave it.
        form: how the weights are stored.
    """

    path: Path
    form: Form
    stored: Stored

    @cached_property
    def headers(self) -> dict[str, Header]:
        """Return the type, the whole shape (not cut over ranks), and the number of bytes (without copies) of each
        tensor, by name.
        """
        found = {}
        for name, tensor in self.stored.tensors.items():
            size = sum(self.stored.files[copies[0][1]][name].bytes for copies in tensor.copies)
            found[name] = Header(tensor.dtype, tensor.shape, size)
        for name, files in self.stored.unlisted.items():  # each rank has one of its own
            found[name] = self.stored.files[files[min(files)]][name]
        return found

    @cached_property
    def ranks(self) -> int:
        """Return the number of ranks that wrote these weights."""
        return len({rank_of(file) for file in self.stored.files})

    @cached_property
    def placements(self) -> Mapping[str, np.ndarray]:
        """Return the modules in which plugins.expert_balance has moved experts, with the slot of each logical expert
        (int [E]).
        """
        found = read_placements(self.stored.folder) if self.form == "MindFormers" else {}
        return {module: found[module] for module in moved(found)}

    @cached_property
    def step(self) -> int | None:
        """Return the training step after which the weights were saved; return None if the step is unknown."""
        return saved_step(self.stored.folder)

    def seal_fault(self, checksums: bool) -> str | None:
        """Return how the files of a checkpoint differ from its seals (files with recorded sizes and checksums). Return
        None if all files agree with their seals, or if there are no seals.
        """
        return fault(self.stored.folder, checksums=checksums) if self.sealed else None

    def require_whole(self) -> None:
        """Raise CheckpointError if the files of a checkpoint differ from the sizes in its seals (files with recorded
        sizes and checksums). The check compares only sizes, not checksums.
        """
        if reason := self.seal_fault(checksums=False):
            raise CheckpointError(f"{self.path}: this is not a complete checkpoint: {reason}")

    def require_types(self) -> None:
        """Raise CheckpointError if a tensor has a data type that tc3 cannot write, such as one with eight bits."""
        if wrong := [f"{name} ({header.dtype})" for name, header in self.headers.items() if header.dtype not in TYPES]:
            others = len(wrong) - 1
            more = f", nor those of {others} more tensor{'s' * (others > 1)}" * (others > 0)
            raise CheckpointError(
                f"{self.path}: tc3 cannot write the data type of {wrong[0]}{more}; it can write {', '.join(TYPES)}"
            )

    @cached_property
    def sealed(self) -> bool:
        """Return whether any rank has written a seal (a file that says that the rank's part is complete) into the
        checkpoint.
        """
        return self.form == "MindFormers" and is_sealed(self.stored.folder)

    def read(self, name: str) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return one whole tensor with its experts in logical order, and the ranks whose copy differs from the first
        rank's copy.
        """
        if name not in self.stored.tensors:
            by_rank = {rank: self.stored.read_from(file, name) for rank, file in self.stored.unlisted[name].items()}
            first = by_rank[min(by_rank)]
            return first, tuple(rank for rank, each in sorted(by_rank.items()) if each.tobytes() != first.tobytes())
        array, differing = self.stored.read(name)
        module = name.rpartition(".")[0]
        for each, slots in self.placements.items():
            if (module == each or module.endswith("." + each)) and array.shape[0] % len(slots) == 0 and array.ndim > 1:
                array = array.reshape(len(slots), -1, *array.shape[1:])[slots].reshape(array.shape)
        return array, differing

    def require_same(self, name: str, differing: tuple[int, ...]) -> None:
        """Raise CheckpointError if `differing` names ranks whose copies of a tensor differ from the copy of the first
        rank.
        """
        if differing:
            ranks = ", ".join(map(str, differing))
            raise CheckpointError(
                f"{self.path}: {name} differs between ranks: the values of ranks {ranks} are not those of rank 0; `tc3 "
                "weights inspect --values` lists the differences"
            )

    def bits(self, name: str) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the same tensor and ranks as `read`, but with the elements of the tensor as integers of the same
        width.
        """
        tensor = self.stored.tensors.get(name)
        if tensor is None or len(tensor.copies) > 1 or len(tensor.copies[0]) > 1 or self.placements:
            array, differing = self.read(name)
            return array.view(f"u{array.dtype.itemsize}"), differing
        file = tensor.copies[0][0][1]
        header = self.stored.files[file][name]
        width = header.bytes // max(1, math.prod(header.shape))
        if not header.bytes:
            return np.empty(header.shape, f"u{width or 1}"), ()
        return np.asarray(np.memmap(self.stored.folder / file, f"u{width}", "r", header.start, header.shape)), ()


def open_source(path: Path) -> Source:
    """Return the weights in the folder or file `path`.

    Raises:
        CheckpointError: the path does not exist or holds no weights of a known form, a file is damaged, or the files do
            not agree with their index.
    """
    if path.is_file():
        return Source(path, "one file", Stored(path.parent, {path.name: read_headers(path)}))
    if not path.is_dir():
        raise CheckpointError(f"{path}: {what_is(path)}")
    if (path / INDEX).exists() or (path / SINGLE).exists():
        return Source(path, "Hugging Face", _hugging_face(path))
    described = (path / "config.json").exists()  # no iteration of a run has one
    if parts := sorted(path.glob("*.safetensors" if described else "*-of-*.safetensors")):
        return Source(path, "Hugging Face", _without_index(path, parts))
    torchs = (file for kind in _PICKLES for file in path.glob(f"*.{kind}") if not file.with_suffix(".idx").exists())
    if pickles := sorted(torchs):  # beside an .idx lies a corpus
        raise CheckpointError(
            f"{path}: {pickles[0].name} is a pickle, which is not read because it can run code; write safetensors with "
            "transformers' save_pretrained(TO, safe_serialization=True)"
        )
    if inside := [*iterations(path), *iterations(path / "checkpoint")]:
        raise CheckpointError(f"{path}: the folder holds checkpoints; name one of them, such as {inside[0]}")
    return Source(path, "MindFormers", open_stored(path))


def is_of_the_model(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a weight of the model, or a router's bias (which is not trained by
    gradients).
    """
    return kind_of(name) == "weights" or name.endswith(".expert_bias")


def refuse_target(target: Path) -> None:
    """Raise CheckpointError if the folder to which weights are to be written exists already, lies in a checkpoint, or
    would be taken for a checkpoint of the run beside whose checkpoints it lies.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: the folder exists; remove it, or name another one")
    beside = target.absolute().parent
    if around := next((folder for folder in (beside, *beside.parents) if is_sealed(folder)), None):
        raise CheckpointError(f"{target}: the folder would lie in the checkpoint {around}; name a folder outside of it")
    of_run = (beside.parent / "recipe.yaml").exists()
    if target.name.startswith("iteration_") and of_run and any(map(is_sealed, iterations(beside))):
        raise CheckpointError(
            f"{target}: a resume of the run whose checkpoints lie in {beside} would take the folder for one of them; "
            "choose a name that does not begin with iteration_"
        )


_MARGIN = 1.02  # headers, indices, metadata, seals, checksums


def require_room(folder: Path, target: Path, size: int, written: int = 0) -> None:
    """Raise an error if the disk of `folder` has no room for the `size` bytes that are to be written to `target`.

    Args:
        written: the number of those of the `size` bytes that are already on the disk.

    Raises:
        DataError: the disk has too little room, or its free space cannot be determined.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(f"{target}: this path cannot be written ({error.strerror or error})") from None
    if (wanted := int(size * _MARGIN) - written) > free:
        raise DataError(
            f"{target}: {wanted / 1e9:,.3f} GB are to be written, but only {free / 1e9:,.3f} GB are free on its disk"
        )


def _without_index(folder: Path, parts: Sequence[Path]) -> Stored:
    """Return the files of a Hugging Face folder that lacks its index: each tensor where a file's header has it."""
    for part in parts:
        if found := _PART.fullmatch(part.name):
            before, number, count = found.groups()
            expected = [f"{before}{each:0{len(number)}d}-of-{count}.safetensors" for each in range(1, int(count) + 1)]
            if absent := [name for name in expected if not (folder / name).exists()]:
                raise CheckpointError(
                    f"{folder / absent[0]}: the file is missing beside {part.name}; copy the folder again"
                )
    files = {part.name: read_headers(part) for part in parts}
    where: dict[str, str] = {}
    for file, headers in files.items():
        for name in headers:
            if (first := where.setdefault(name, file)) != file:
                raise CheckpointError(
                    f"{folder / file}: this file and {first} both hold {name}, and {INDEX}, which says from which file "
                    "to read it, is missing; copy the index beside the files"
                )
    return Stored(folder, files)


def _hugging_face(folder: Path) -> Stored:
    """Return the files of a Hugging Face folder: those of its index, each tensor where that says."""
    if not (folder / INDEX).exists():
        return Stored(folder, {SINGLE: read_headers(folder / SINGLE)})
    text = read_text(folder / INDEX, CheckpointError)
    try:
        where = dict(json.loads(text)["weight_map"])
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder / INDEX}: this is not an index of safetensors: it {not_json(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{folder / INDEX}: this is not an index of safetensors: it has no weight_map") from None
    if not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(
            f"{folder / INDEX}: this is not an index of safetensors: its weight_map must hold names of files"
        )
    files = {file: read_headers(folder / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file]:
            raise CheckpointError(
                f"{folder / file}: the file lacks {name}, which {INDEX} assigns to this file; copy the folder again"
            )
    for file, headers in files.items():
        if unknown := [name for name in headers if where.get(name) != file]:
            raise CheckpointError(
                f"{folder / file}: the file holds {unknown[0]}, which {INDEX} does not assign to this file; copy the "
                "folder again"
            )
    return Stored(folder, files)
