"""This module averages several checkpoints of one model, as was done at the end of the training of TeleChat2."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError
from plugins.lora.plan import is_adapter
from plugins.sealed_checkpoint.plan import write_seal
from tools.checkpoint.stored import METADATA, MODEL_FILE, Stored, read_metadata
from tools.checkpoint.tensor_files import save_arrays
from tools.files.atomic import atomic_folder, real_path
from tools.recipe.load import Recipe
from tools.weights.convert_plan import keep_recipe, recipe_of_run, settings_apart
from tools.weights.inventory import mark
from tools.weights.source import Source, is_of_the_model, refuse_target


def average(
    sources: Sequence[Source],
    target: Path,
    shares: Sequence[float] | None = None,
    progress: Callable[[str], None] = lambda name: None,
    damaged: Sequence[str] = (),
) -> int:
    """Write the weighted average of all checkpoints in `sources` to `target`, in the layout of these checkpoints.
    Return the number of averaged tensors.

    Sums are taken in float64 and rounded once to the type of the weights. The optimizer's state is left out, because an
    average of weights has no such state. Counters are those of the last source. Memory holds one tensor of each source
    at a time, and the file that is being written.

    Args:
        sources: two or more checkpoints in MindFormers' form that were saved in one layout.
        target: the path of a folder that does not exist yet.
        shares: the weight of each checkpoint in the sum; the shares add up to 1, and by default all are equal.
        progress: a function that is called with the name of each file.
        damaged: descriptions of the damage in `sources` that is accepted (`inventory.salvaged`); `target` records them.

    Raises:
        CheckpointError: the sources do not fit together, a number is not finite, or `target` exists.
        DataError: `target` cannot be written.
    """
    shares = check_average(sources, target, shares)
    last, averaged = sources[-1].stored, set()
    described, step, ranks = _described(last), sources[-1].step or 0, sources[-1].ranks
    recipe = next(filter(None, (recipe_of_run(source.path) for source in sources)), None)
    with atomic_folder(target) as part:
        for file in filter(MODEL_FILE.search, last.files):
            progress(file)
            arrays = {}
            for name in last.files[file]:
                if is_of_the_model(name):
                    arrays[name] = _mean(sources, shares, file, name)
                    averaged.add(name)
                else:
                    arrays[name] = last.read_from(file, name)
            save_arrays(arrays, part / file)
        for name, content in described.items():
            (part / name).write_bytes(content)
        if recipe:
            keep_recipe(part, recipe)
        mark(part, damaged)
        for rank in range(ranks):
            write_seal(part, rank, ranks, step)
    return len(averaged)


def check_average(sources: Sequence[Source], target: Path, shares: Sequence[float] | None) -> Sequence[float]:
    """Check that the checkpoints in `sources` can be averaged, and return the weight of each checkpoint in the average.
    The function reads only the headers of the files.

    Raises:
        CheckpointError: as for `average`, except for values that are not finite.
    """
    shares = _shares(sources, shares)
    _fit(sources, target)
    return shares


def _mean(sources: Sequence[Source], shares: Sequence[float], file: str, name: str) -> np.ndarray:
    """Return one tensor of one file; all as they lie, for the layouts are one."""
    total = None
    for source, share in zip(sources, shares, strict=True):
        array = source.stored.read_from(file, name)
        if not np.isfinite(array.astype(np.float32, copy=False)).all():
            raise CheckpointError(
                f"{source.path / file}: {name} has values that are not finite, so nothing was averaged; leave this "
                "checkpoint out"
            )
        wide = array.astype(np.float64) * share
        total = wide if total is None else total + wide
    assert total is not None, "there are sources"
    return rounded(total, array.dtype)


def rounded(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return float64 `numbers` in another type, each rounded once to the nearest number of the type (ties to even).

    The conversion to bfloat16 goes through float32, which would round twice. So a number that float32 does not hold is
    first replaced by that one of its two neighbours in float32 whose last bit is 1, which rounds as the number itself.
    """
    if dtype.name != "bfloat16":
        return numbers.astype(dtype)
    with np.errstate(over="ignore"):
        near = np.array(numbers, np.float32)
    bits, wide = near.view(np.uint32), near.astype(np.float64)
    even = (wide != numbers) & ~np.isnan(numbers) & (bits % 2 == 0)
    bits[even] += np.asarray(np.where(np.abs(wide) < np.abs(numbers), np.uint32(1), np.uint32(0xFFFFFFFF)))[even]
    return near.astype(dtype)


def _shares(sources: Sequence[Source], shares: Sequence[float] | None) -> Sequence[float]:
    if shares is None:
        return [1 / len(sources)] * len(sources)
    if len(shares) != len(sources):
        raise CheckpointError(
            f"--weights: {len(shares)} shares are given for {len(sources)} checkpoints; give each checkpoint one share"
        )
    given = ", ".join(f"{share:g}" for share in shares)
    if any(not 0 <= share <= 1 for share in shares):  # nor is NaN
        raise CheckpointError(f"--weights {given}: each share of an average must be from 0 to 1")
    if not math.isclose(sum(shares), 1, rel_tol=1e-6):
        raise CheckpointError(f"--weights {given}: the shares add up to {sum(shares):g}; they must add up to 1")
    return [share / math.fsum(shares) for share in shares]  # 0.3333333 thrice would make all weights smaller


def _fit(sources: Sequence[Source], target: Path) -> None:
    """Refuse what has no average, or would be averaged wrongly."""
    refuse_target(target)
    if len(sources) < 2:
        raise CheckpointError("an average needs at least two checkpoints; give more")
    first = sources[0]
    known: dict[str, Path] = {}
    model: Recipe | None = None  # of the first run whose recipe is known
    for source in sources:
        if (same := known.setdefault(str(real_path(source.path)), source.path)) is not source.path:
            raise CheckpointError(
                f"{source.path}: this checkpoint is named twice (as {same}); name each checkpoint once; to give "
                "one checkpoint a larger share than the others, use --weights"
            )
        if source.form != "MindFormers":
            raise CheckpointError(
                f"{source.path}: the form of these weights is {source.form!r}; only checkpoints of runs (folders "
                "iteration_*) can be averaged"
            )
        source.require_whole()
        source.require_types()
        if adapter := next(filter(is_adapter, source.headers), None):
            raise CheckpointError(
                f"{source.path}: the checkpoint holds LoRA adapters ({adapter}), and the product B A of averaged "
                "matrices is not the average of the products; first merge the adapters of each checkpoint into its "
                f"weights (tc3 weights merge {shlex.quote(str(source.path))} TO), and average the merged weights"
            )
        if wrong := _difference(_kinds(first), _kinds(source)):
            raise CheckpointError(
                f"{source.path}: {wrong}; {first.path} holds another model, or was saved in another layout; write all "
                "checkpoints in the layout of one recipe first (tc3 weights reshard)"
            )
        if _placed(source) != _placed(first):
            raise CheckpointError(
                f"{source.path}: the experts are in other slots than in {first.path}; write a copy of each checkpoint "
                "with its experts in logical order (tc3 experts restore-order), and average the copies"
            )
        own = recipe_of_run(source.path, say=True)
        if model and own and (apart := settings_apart(model, own)):
            settings = "; ".join(f"{name} is {new!r}, but {old!r} in {model.source}" for name, old, new in apart)
            raise CheckpointError(
                f"{source.path}: the model settings of this checkpoint's recipe {own.source} differ from those of "
                f"{model.source}, so an average of the weights of the two runs has no meaning: {settings}; average "
                "only checkpoints of one model"
            )
        model = model or own


def _kinds(source: Source) -> dict[tuple[str, str], tuple[str, tuple[int, ...], str]]:
    """Return (file, name) -> type and shape of the averaged tensors, and which slice of the whole tensor it is."""
    places = {
        (file, name): f"slice {place} of {' x '.join(map(str, tensor.cuts))}"
        for name, tensor in source.stored.tensors.items()
        if len(tensor.copies) > 1
        for place, copies in enumerate(tensor.copies)
        for _, file in copies
    }
    return {
        (file, name): (header.dtype, header.shape, places.get((file, name), "whole"))
        for file, headers in source.stored.files.items()
        if MODEL_FILE.search(file)
        for name, header in headers.items()
        if is_of_the_model(name)
    }


def _difference(first: dict, other: dict) -> str:
    for key in first.keys() | other.keys():
        if first.get(key) != other.get(key):
            file, name = key
            return f"{file}: {name} is {other.get(key, 'not there')}, and {first.get(key, 'not there')}"
    return ""


def _placed(source: Source) -> dict[str, list[int]]:
    return {module: slots.tolist() for module, slots in source.placements.items()}


def _described(stored: Stored) -> dict[str, bytes]:
    """Return name -> content of common.json as it is, and of metadata.json without the optimizer's state."""
    described = stored.others("common.json", METADATA)
    if METADATA not in described:
        return described
    listed, storage = read_metadata(stored.folder / METADATA)
    kept = {name for file, headers in stored.files.items() if MODEL_FILE.search(file) for name in headers}
    content = {
        "state_dict_metadata": {name: tensor for name, tensor in listed.items() if name in kept},
        "storage_data": {
            key: [entry for entry in entries if MODEL_FILE.search(entry["file_name"])]
            for key, entries in storage.items()
            if any(MODEL_FILE.search(entry["file_name"]) for entry in entries)
        },
    }
    return {**described, METADATA: json.dumps(content).encode()}
