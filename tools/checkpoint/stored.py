"""This module reads a checkpoint that many ranks wrote. The module joins the slices of each tensor, and reads the
values of a tensor only when a caller asks for them.

`open_stored` reads only the headers of the files. MindFormers 1.9.0 (`checkpoint/metadata.py`, `sharded_tensor.py`)
writes for every rank a safetensors file of weights and one of the optimizer's state, and a metadata.json:
`state_dict_metadata` gives for each tensor its whole shape, into how many slices each axis is cut
(`axis_fragmentations`) and the slices that exist ("chunk"), `storage_data` the files and ranks that hold a slice. The
entry `global_offset` holds a single number, the position of the slice in row-major order. A checkpoint of one process
has no metadata.json. `read_whole` reads all tensors at once, reads every element once, and compares copies: it is for
small models. `kind_of` returns the kind of a tensor from its name.

`read_placements` and `refuse_moved` handle experts that have moved (plugins/expert_balance): they find the order in
which a checkpoint stores experts. If experts may have moved, each MoE layer has the tensor `<layer>.experts.placement`,
int [E]: logical expert -> slot. The rows of the experts' weights and of their moments are in the order of slots. A
program that reads the checkpoint without the placement would mix up the experts.

The module needs only NumPy.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeGuard

import ml_dtypes  # NumPy learns what bfloat16 is
import numpy as np
from safetensors import SafetensorError, safe_open

from plugins.errors import CheckpointError, not_json, read_text
from plugins.hyper_connections.plan import WEIGHTS as CONNECTIONS
from plugins.sealed_checkpoint.plan import files_in
from plugins.sealed_checkpoint.router_state import (
    ADAM,
    AVERAGES,
    FUSED,
    LARGEST,
    MOMENTS,
    MUON_MOMENT,
    orthogonal,
)
from tools.checkpoint.tensor_files import Header, read_headers

PLACEMENT = "placement"  # how names of placements end
TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of iterations: MindFormers takes the newest
METADATA = "metadata.json"
# names of a rank's files, behind a prefix that the user chooses: weights, and the state of the optimizer
MODEL_FILE, OPTIMIZER_FILE = (re.compile(rf"(?:^|-){kind}-\d+-\d+\.safetensors$") for kind in ("model", "opt"))
BUFFERS = "accu_grads."  # of a step with micro-batches: MindFormers lists them, and never saves them
Kind = Literal["weights", "optimizer", "other"]
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "other")
OPTIMIZERS = ("AdamW", "PmaAdamW", "Muon")  # those whose state is known by name
LAYER_NORM = ("gamma", "beta")  # the names of a LayerNorm's two weights; those of other norms are called weight
# how names of trained parameters end; others count, or balance
_TRAINED_ENDINGS = ("weight", "weight1", "weight2", "bias", *LAYER_NORM, *CONNECTIONS)
# types that the safetensors package does not read into NumPy: of DeepSeek-V3's published weights
_EIGHT_BITS: dict[str, Any] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_UNREAD = ("F8_E8M0",)  # neither the safetensors package nor the installed ml_dtypes has it
# of names that end with a parameter's name; "exp_avg" also begins the names of CAME's states
_OPTIMIZER_PREFIXES = ("adam_", "moment", "exp_avg", *MOMENTS, AVERAGES, BUFFERS)


@dataclass(frozen=True)
class Tensor:
    """A `Tensor` describes one tensor of a checkpoint and the files that hold the slices of this tensor.

    Args:
        dtype: the type of the tensor as safetensors writes it.
        shape: the shape of the whole tensor.
        cuts: the number of parts into which each axis is cut.
        copies: for each slice in row-major order, (rank, file) of all ranks that hold it, sorted by rank.
    """

    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    copies: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def part(self) -> tuple[int, ...]:
        """Return the shape of one slice of this tensor."""
        return tuple(length // count for length, count in zip(self.shape, self.cuts, strict=True))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks whose files hold a part of this tensor."""
        return tuple(sorted({rank for copies in self.copies for rank, _ in copies}))


@dataclass(frozen=True)
class Stored:
    """A `Stored` is a checkpoint on disk, which is the folder of one iteration. The headers of the checkpoint's files
    say which tensors each file holds.
    """

    folder: Path
    files: Mapping[str, Mapping[str, Header]]
    weights_only: bool = False

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor whose layout the checkpoint's metadata.json lists. All slices of each listed tensor must
        exist.

        Raises:
            CheckpointError: a slice or a tensor is missing, or has another shape than the metadata say.
        """
        metadata = self.folder / METADATA
        if not metadata.exists():
            if len({rank_of(name) for name in self.files}) > 1:
                raise CheckpointError(
                    f"{self.folder}: several ranks wrote here, but {METADATA}, which describes their layout, is "
                    "missing; copy the checkpoint again"
                )
            found: dict[str, Tensor] = {}
            for file, headers in self.files.items():
                for name, header in headers.items():
                    own = Tensor(header.dtype, header.shape, (1,) * len(header.shape), (((0, file),),))
                    if (first := found.setdefault(name, own)) is not own:
                        raise CheckpointError(
                            f"{self.folder / file}: this file and {first.copies[0][0][1]} both hold {name}; one of the "
                            "two is of another save, so move that one to another folder"
                        )
            return found
        listed, storage = read_metadata(metadata)
        held = {name for headers in self.files.values() for name in headers}
        return {
            name: self._tensor(name, tensor, storage)
            for name, tensor in listed.items()
            if name in held or (kind_of(name) == "weights" if self.weights_only else not name.startswith(BUFFERS))
        }

    @cached_property
    def unlisted(self) -> dict[str, dict[int, str]]:
        """Return a nested dictionary name -> rank -> file of the tensors whose layout the checkpoint does not list,
        such as counters.
        """
        found: dict[str, dict[int, str]] = {}
        for file, headers in self.files.items():
            for name in headers.keys() - self.tensors.keys():
                found.setdefault(name, {})[rank_of(file)] = file
        return found

    def read(self, name: str) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return one whole tensor, and the ranks whose copy of a slice differs from the copy of the first rank that
        holds this slice.
        """
        tensor = self.tensors[name]
        whole, differing = None, set()
        for place, copies in enumerate(tensor.copies):
            first = self.read_from(copies[0][1], name)
            if len(tensor.copies) == 1:
                whole = first
            else:
                whole = np.empty(tensor.shape, first.dtype) if whole is None else whole
                index = np.unravel_index(place, tensor.cuts)
                spans = (slice(i * size, (i + 1) * size) for i, size in zip(index, tensor.part, strict=True))
                whole[tuple(spans)] = first
            differing |= {rank for rank, file in copies[1:] if self.read_from(file, name).tobytes() != first.tobytes()}
        assert whole is not None, "every tensor has a slice"
        return whole, tuple(sorted(differing))

    def read_from(self, file: str, name: str) -> np.ndarray:
        """Return the part of a tensor that one file of the checkpoint holds."""
        header = self.files[file].get(name)
        if header and header.dtype in _UNREAD:
            raise CheckpointError(
                f"{self.folder / file}: {name}: values of the type {header.dtype} cannot be read here; leave --values "
                "and --diff out to see what the file holds"
            )
        with self.opened(file) as tensors:
            if header is None or header.dtype not in _EIGHT_BITS:
                array: np.ndarray = tensors.get_tensor(name)
                return array
            count = math.prod(header.shape)
            found = np.fromfile(self.folder / file, _EIGHT_BITS[header.dtype], count, offset=header.start)
            return found.reshape(header.shape)

    @contextmanager
    def opened(self, file: str) -> Iterator[Any]:
        """Yield an object that reads the tensors of one file of the checkpoint, as `safe_open` of safetensors does.

        Raises:
            CheckpointError: the file cannot be read any more. It could be when its headers were read.
        """
        path = self.folder / file
        try:
            with safe_open(path, "np") as tensors:
                yield tensors
        except (SafetensorError, OSError) as error:
            if isinstance(error, OSError) and path.exists():  # the caller could not write, for instance
                raise
            raise _gone(path, error) from None

    def others(self, *names: str) -> dict[str, bytes]:
        """Return the contents of the named files in the checkpoint's folder; files that do not exist are left out. A
        command that converts a checkpoint reads the files before it begins, because a training run may remove the
        checkpoint while the command runs.

        Raises:
            CheckpointError: a file, or the whole folder, cannot be read any more.
        """
        try:
            there = {path.name for path in self.folder.iterdir()}
            return {name: (self.folder / name).read_bytes() for name in names if name in there}
        except OSError as error:
            raise _gone(Path(error.filename or self.folder), error) from None

    def _tensor(self, name: str, tensor: Mapping[str, Any], storage: Mapping[str, Any]) -> Tensor:
        """Return one tensor of metadata.json: all its slices are there once, and have one shape."""
        shape, cuts = tuple(tensor["global_shape"]), tuple(tensor["axis_fragmentations"])
        slices = {int(chunk["global_offset"][0]): tuple(chunk["local_shape"]) for chunk in tensor["chunk"]}
        part = tuple(length // count for length, count in zip(shape, cuts, strict=True))
        even = tuple(length * count for length, count in zip(part, cuts, strict=True)) == shape
        if not even or slices.keys() != set(range(math.prod(cuts))) or set(slices.values()) != {part}:
            found = f"slices {sorted(slices)} of shapes {sorted(set(slices.values()))}"
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(shape)} and is cut into {list(cuts)} parts, but the {found} "
                "do not make up the whole tensor; copy the checkpoint again"
            )
        copies = tuple(self._copies(name, place, part, storage) for place in range(len(slices)))
        return Tensor(self.files[copies[0][0][1]][name].dtype, shape, cuts, copies)

    def _copies(
        self, name: str, number: int, shape: tuple[int, ...], storage: Mapping[str, Any]
    ) -> tuple[tuple[int, str], ...]:
        entries = storage.get(str((name, (number,))), [])
        if not entries:
            raise CheckpointError(
                f"{self.folder}: {name}: metadata.json names no file that holds slice {number}; copy the checkpoint "
                "again"
            )
        for entry in entries:
            file = entry["file_name"]
            if name not in self.files.get(file, {}):
                gone = "; the file is not there" * (file not in self.files)
                raise CheckpointError(
                    f"{self.folder / file}: the file does not hold {name}, although {METADATA} says that it "
                    f"does{gone}; copy the checkpoint again"
                )
            if (found := self.files[file][name].shape) != shape:
                raise CheckpointError(
                    f"{self.folder / file}: {name} has shape {list(found)}, but a slice of it must have "
                    f"{list(shape)}; copy the checkpoint again"
                )
        return tuple(sorted((int(entry["storage_rank"]), entry["file_name"]) for entry in entries))


def _gone(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or (error if path.exists() else "No such file or directory")
    return CheckpointError(
        f"{path}: the file cannot be read ({reason}); if a running training has removed this checkpoint "
        "(checkpoint.save_max), name a newer checkpoint, or a copy"
    )


def open_stored(folder: Path, weights_only: bool = False) -> Stored:
    """Return the checkpoint in a folder; only the headers of its files are read.

    Args:
        folder: a folder `iteration_*` that MindFormers wrote.
        weights_only: whether the files with the state of the optimizer are left out; they may be missing then.

    Raises:
        CheckpointError: it holds no safetensors, or one that is damaged.
    """
    paths = files_in(folder)
    files = {path.name: read_headers(path) for path in paths if not (weights_only and OPTIMIZER_FILE.search(path.name))}
    if not files:
        wanted = "give the folder of an iteration, such as checkpoint/iteration_*"
        if (folder / "config.json").exists():
            wanted = "it has a config.json, so download the model's *.safetensors into this folder, too"
        raise CheckpointError(f"{folder}: the folder holds no safetensors files; {wanted}")
    return Stored(folder, files, weights_only)


def rank_of(name: str) -> int:
    """Return the rank that wrote a checkpoint file, from the file's name, which ends in `-<rank>-<world
    size>.safetensors`.
    """
    words = name.removesuffix(".safetensors").split("-")
    return int(words[-2]) if len(words) > 2 and words[-2].isdecimal() else 0


def read_metadata(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two tables of a checkpoint's metadata.json: name -> tensor, and slice -> the files that hold this
    slice.

    Raises:
        CheckpointError: it is not what MindFormers writes.
    """
    text = read_text(file, CheckpointError)
    try:
        content = json.loads(text)
        listed, storage = content["state_dict_metadata"], content["storage_data"]
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{file}: this is not MindFormers' metadata of a checkpoint: it {not_json(error)}; copy the checkpoint "
            "again"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        wanted = "state_dict_metadata and storage_data"
        raise CheckpointError(
            f"{file}: this is not MindFormers' metadata of a checkpoint: it lacks {wanted}; copy the checkpoint again"
        ) from None
    for kind, section, holds in (("tensor", listed, _is_tensor), ("slice", storage, _is_slice)):
        wrong = [name for name in section if not holds(section[name])] if isinstance(section, dict) else ["all"]
        if wrong:
            raise CheckpointError(
                f"{file}: {wrong[0]}: this entry does not describe a {kind} in the form that MindFormers writes; the "
                "file may be damaged"
            )
    return listed, storage


def _is_tensor(found: Any) -> bool:
    """Return whether an entry has a shape, cuts of each axis, and a place and a shape for each slice."""
    if not isinstance(found, dict) or not isinstance(found.get("chunk"), list):
        return False
    shape, cuts = found.get("global_shape"), found.get("axis_fragmentations")
    if not _are_numbers(shape) or not _are_numbers(cuts) or len(shape) != len(cuts) or 0 in cuts:
        return False
    chunks = [chunk for chunk in found["chunk"] if isinstance(chunk, dict) and _are_numbers(chunk.get("local_shape"))]
    placed = [chunk for chunk in chunks if _are_numbers(place := chunk.get("global_offset")) and len(place) == 1]
    return len(placed) == len(found["chunk"])


def _is_slice(found: Any) -> bool:
    """Return whether an entry names the files that hold a slice, and their ranks."""
    return isinstance(found, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("file_name"), str)
        and _are_numbers([entry.get("storage_rank")])
        for entry in found
    )


def _are_numbers(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(number) is int and number >= 0 for number in found)


def kind_of(name: str) -> Kind:
    """Return the kind of a tensor: "weights" for a trained weight, "optimizer" for the optimizer's state, and "other"
    for anything else, such as a counter.
    """
    if name.startswith(_OPTIMIZER_PREFIXES):
        return "optimizer"
    return "weights" if name.rsplit(".", 1)[-1] in _TRAINED_ENDINGS else "other"


def moments_of(optimizer: Mapping[str, Any], name: str, axes: int) -> tuple[str, ...]:
    """Return the names of the tensors that an optimizer keeps for a weight with `axes` dimensions; each of these
    tensors has the weight's shape.

    Muon keeps one moment of a matrix of a layer, and of other weights what AdamW does. PmaAdamW keeps an average, too.
    Source: core/optim of MindFormers 1.9.0.

    Args:
        optimizer: the recipe's section `optimizer`, whose type is one of `OPTIMIZERS`.
    """
    kind = optimizer.get("type")
    if kind == "Muon":
        return tuple(prefix + name for prefix in ((MUON_MOMENT,) if orthogonal(name, axes) else ADAM))
    fused = bool(optimizer.get("use_fused"))
    prefixes = [*(FUSED if fused else ADAM), *[LARGEST] * bool(fused and optimizer.get("amsgrad"))]
    if kind == "PmaAdamW":
        prefixes.append(f"{AVERAGES}{optimizer.get('fused_algo') or 'ema'}.")
    return tuple(prefix + name for prefix in prefixes)


@dataclass(frozen=True)
class Whole:
    """A `Whole` holds all tensors of a checkpoint as one process would have written them.

    Args:
        arrays: the whole tensors, by name.
        differing: for each tensor the ranks whose copy of a slice differs in any bit from that of the first rank that
            holds the slice.
        ranks: for each tensor the ranks that hold a part of it.
        unlisted: name -> rank -> what this rank wrote of a tensor whose layout is not listed, such as counters and the
            routers' biases.
    """

    arrays: dict[str, np.ndarray]
    differing: dict[str, tuple[int, ...]]
    ranks: dict[str, tuple[int, ...]]
    unlisted: dict[str, dict[int, np.ndarray]]


def read_whole(folder: Path) -> Whole:
    """Return all tensors of one checkpoint with their slices joined.

    Args:
        folder: a folder `iteration_*` that MindFormers wrote.

    Raises:
        CheckpointError: a file, a slice or a tensor is missing, or has another shape than the metadata say.
    """
    stored = open_stored(folder)
    read = {name: stored.read(name) for name in stored.tensors}
    return Whole(
        arrays={name: array for name, (array, _) in read.items()},
        differing={name: ranks for name, (_, ranks) in read.items() if ranks},
        ranks={name: tensor.ranks for name, tensor in stored.tensors.items()},
        unlisted={
            name: {rank: stored.read_from(file, name) for rank, file in files.items()}
            for name, files in stored.unlisted.items()
        },
    )


class UnreadableError(CheckpointError):
    """This error means that a file is damaged, or is not a safetensors file."""


def read_placements(folder: Path) -> dict[str, np.ndarray]:
    """Return the slot of each expert, int [E], for each module of experts (such as `decoder.layers.0.mlp.experts`) for
    which the checkpoint stores slots, because plugins.expert_balance may have moved the experts.

    Args:
        folder: a folder `iteration_*` that MindFormers wrote; a folder of the legacy format, or without a checkpoint,
            has no slots.

    Raises:
        CheckpointError: a file cannot be read, a placement is not a permutation, or two ranks differ.
    """
    found: dict[str, np.ndarray] = {}
    for file in (path for path in files_in(folder) if "-model-" in path.name):
        for module, slots in _placements_in(file):
            if not np.array_equal(np.sort(slots), np.arange(len(slots))):
                raise CheckpointError(
                    f"{file}: {module}.{PLACEMENT} is not a permutation of the experts' slots; the file may be damaged"
                )
            if not np.array_equal(found.setdefault(module, slots), slots):
                raise CheckpointError(
                    f"{file}: {module}.{PLACEMENT} differs from the placement in the files of other ranks; the file "
                    "may be damaged"
                )
    return found


def _placements_in(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                module, _, last = name.rpartition(".")
                if last == PLACEMENT:
                    yield module, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UnreadableError(f"{file}: this is not a complete safetensors file ({error})") from None


def moved(placements: dict[str, np.ndarray]) -> list[str]:
    """Return the names of the modules whose experts are not stored in their logical order."""
    return [module for module, slots in placements.items() if (slots != np.arange(len(slots))).any()]


def loaded_from(folder: Path) -> Path:
    """Return the folder that MindFormers loads if a recipe names `folder`: the iteration that the tracker file in this
    folder names, or the folder itself if there is no tracker file.
    """
    tracker = folder / TRACKER
    if tracker.exists() and (number := tracker.read_text(encoding="ascii", errors="replace").strip()).isdecimal():
        return folder / f"iteration_{int(number):08d}"
    return folder


def refuse_moved(folder: Path, balanced: bool) -> None:
    """Raise CheckpointError if a run without plugins.expert_balance would start from a checkpoint in which experts are
    not stored in their logical order.

    Args:
        folder: the folder of an iteration, or a folder of several iterations.
        balanced: whether the run has the plugin.
    """
    if balanced:
        return
    folder = loaded_from(folder)
    try:
        wrong = moved(read_placements(folder))
    except UnreadableError:
        return  # whoever reads the weights says what is wrong with the file
    if wrong:
        raise CheckpointError(
            f"{folder}: the experts of {len(wrong)} layers have moved (plugins.expert_balance), and this recipe, which "
            f"does not have the plugin, would train them in a wrong order; switch the plugin on, or first run "
            f"`tc3 experts restore-order {shlex.quote(str(folder))}`"
        )
