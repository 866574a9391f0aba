"""This module handles the output files of `tc3 data prepare` that belong to one prefix. Either all files of a prefix
are published, or none of them.

PREFIX.bin  PREFIX.idx  PREFIX.json          the training split
PREFIX_heldout.bin  .idx  .json              the held-out split, if asked for
PREFIX_tokenizer/                            the tokenizer, if trained here

MindFormers adds the cache PREFIX/cache/GPTDataset_indices/, which says which tokens make up which sample. MindFormers
finds a cache by path, seed, sample length and sample count, not by content, so a run would silently use the cache of an
earlier .bin of the same name; therefore `publish` deletes this cache.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plugins.errors import DataError, did_you_mean, not_json
from plugins.lines import flush, locked
from tools.process.children import uninterrupted

# What a sidecar must hold before anything relies on it: an edited or cut one is named, by key.

# key -> its kind; a mapping stands for one, a list for a list of what it holds
_FORM: dict[str, Any] = {
    "split": str,
    "documents": int,
    "tokens": int,
    "dtype": str,
    "bin_sha256": str,
    "vocab_size": int,
    "eod_id": int,
    "eod_token": str,
    "tokenizer": {"path": str, "fingerprint": str, "trust_remote_code": bool},
    "sources": [{"input": str}],
    "jsonl_key": str,
    "globs": [str],
    "held_out": {"fraction": float, "seed": int},
}
_WORDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
}


def checked_sidecar(prefix: str | Path) -> dict[str, Any]:
    """Return the sidecar `PREFIX.json` if it has the form that `tc3 data prepare` writes.

    Raises:
        DataError: as for `read_sidecar`, or a key of the sidecar is missing or has a value of another type.
    """
    sidecar = read_sidecar(prefix)
    _check(Path(f"{prefix}.json"), "", sidecar, _FORM)
    return sidecar


def _check(path: Path, place: str, value: Any, form: Any) -> None:
    kind: type = form if isinstance(form, type) else type(form)
    if not _fits(value, kind):
        raise DataError(
            f"{path}: {place}: the value must be {_WORDS[kind]}, not {value!r:.60}; prepare the corpus again"
        )
    if isinstance(form, list):
        for number, item in enumerate(value):
            _check(path, f"{place}[{number}]", item, form[0])
    elif isinstance(form, dict):
        for key, inner in form.items():
            name = f"{place}.{key}" if place else key
            if key not in value:
                raise DataError(
                    f"{path}: {name}: the key is missing{did_you_mean(key, list(value))}; prepare the corpus again"
                )
            _check(path, name, value[key], inner)


def _fits(value: object, kind: type) -> bool:
    """Return whether a value has the wanted kind; an integer is a number, but true and false are not."""
    return type(value) is kind or (kind is float and type(value) is int)


SUFFIXES = (".bin", ".json", ".idx")  # the order of publishing: readers open a pair by its .idx, so it comes last
HELD_OUT = "heldout"


def split_name(name: str, split: str) -> str:
    """Return the file name, without suffix, of one split ("train" or "heldout") of the corpus called `name`."""
    return name if split == "train" else f"{name}_{split}"


def tokenizer_name(name: str) -> str:
    """Return the name of the folder for the tokenizer that is trained on the corpus called `name`."""
    return f"{name}_tokenizer"


def read_sidecar(prefix: str | Path) -> dict[str, Any]:
    """Return the content of the sidecar `PREFIX.json`: documents, tokens, vocab_size, eod_id, dtype and more (see
    `prepare`).

    Raises `DataError` if the sidecar is missing, cannot be read, or does not have the form that `tc3 data prepare`
    writes.
    """
    path = Path(f"{prefix}.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        ending = Path(prefix).suffix
        hint = f"; give the prefix without {ending}" if ending in SUFFIXES else ""
        raise DataError(
            f"{path}: this file does not exist; `tc3 data prepare` writes it beside .bin and .idx{hint}"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the file {not_json(error)}") from None
    if not isinstance(content, dict) or content.get("format") != "tc3-data-1":
        raise DataError(f"{path}: `tc3 data prepare` did not write this file; prepare the corpus again")
    return content


def check_prefix(prefix: Path, splits: tuple[str, ...], trains_tokenizer: bool, force: bool) -> None:
    """Raise `DataError` if a prefix is invalid, or if its files exist and `force` is not given.

    Raises `DataError`.
    """
    if prefix.suffix in SUFFIXES:
        raise DataError(f"--output {prefix}: give the prefix without {prefix.suffix}")
    if os.path.isdir(prefix) and not _is_cache(prefix):
        raise DataError(
            f"--output {prefix}: this is a folder; give the first part of the files' names, such as {prefix}/corpus"
        )
    files = files_of(prefix, splits)
    for path in files:
        if os.path.isdir(path):
            raise DataError(
                f"{path}: this is a folder, but --output {prefix} writes a file with this name; choose another --output"
            )
    folders = [prefix.parent / tokenizer_name(prefix.name)] if trains_tokenizer else []
    found = [path for path in (*files, *folders) if os.path.lexists(path)] + _stale_split(prefix)
    if found and not force:
        raise DataError(f"{found[0]}: the file exists; choose another --output, or replace it with --force")


def files_of(prefix: Path, splits: tuple[str, ...]) -> list[Path]:
    """Return the paths of all files that `tc3 data prepare` writes for the splits of `prefix`."""
    return [prefix.parent / (split_name(prefix.name, split) + suffix) for split in splits for suffix in SUFFIXES]


def _is_cache(prefix: Path) -> bool:
    """Return whether the folder of the prefix's name is where MindFormers caches its samples."""
    try:
        return "cache" in os.listdir(prefix)
    except OSError:
        return False


@contextmanager
def staged(prefix: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside `prefix`, on the same file system. The hidden folder is removed when the `with`
    block ends.

    The function creates the output folder if the folder is missing. Raises `DataError` if the folder cannot be written
    to.
    """
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.unfinished-", dir=prefix.parent))
    except OSError as error:
        raise DataError(f"--output {prefix}: its folder cannot be written ({error.strerror})") from error
    try:
        yield folder
    finally:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)


def publish(stage: Path, prefix: Path, splits: tuple[str, ...], force: bool) -> None:
    """Move the files of the staging folder `stage` into the folder of `prefix`. Existing files are replaced if `force`
    is given.

    At no moment does an .idx file stand beside a .bin file to which it does not belong: old .idx files are removed
    first, and each new .idx file is put in place last, after its .bin and .json. A power cut leaves the old pair of
    .bin and .idx, the new pair, or no readable pair.
    Raises `DataError`, as `check_prefix` does, if another run has published files under this prefix in the meantime.
    """
    with locked(prefix.parent), uninterrupted():
        check_prefix(prefix, splits, (stage / tokenizer_name(prefix.name)).exists(), force)
        for split in ("train", HELD_OUT):
            if split in splits or _stale_split(prefix):
                _remove_split(prefix.parent / split_name(prefix.name, split))
        flush(prefix.parent)
        _publish_tokenizer(stage / tokenizer_name(prefix.name), prefix.parent / tokenizer_name(prefix.name))
        for split in reversed(splits):
            for suffix in SUFFIXES:
                name = split_name(prefix.name, split) + suffix
                flush(prefix.parent)
                os.replace(stage / name, prefix.parent / name)
        flush(prefix.parent)


def leftovers(prefix: Path) -> list[Path]:
    """Return the staging folders of earlier runs for `prefix` that were killed before they could remove them."""
    return sorted(prefix.parent.glob(f".{prefix.name}.unfinished-*"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, and flush the file to disk."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    flush(path)


def _stale_split(prefix: Path) -> list[Path]:
    """Return a held-out split written with this prefix before: kept beside a new training split, it would leak into
    it.
    """
    held_out = prefix.parent / split_name(prefix.name, HELD_OUT)
    try:
        ours = read_sidecar(held_out).get("split") == HELD_OUT
    except (DataError, OSError):
        return []
    return [Path(f"{held_out}.json")] if ours else []


def _remove_split(path: Path) -> None:
    """Delete the pair of `path`, its .idx first, and the samples that MindFormers has cached for it."""
    for suffix in reversed(SUFFIXES):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    for cache in path.glob("cache/*Dataset_indices"):
        shutil.rmtree(cache)


def _publish_tokenizer(staged_folder: Path, folder: Path) -> None:
    if staged_folder.exists():
        folder.mkdir(exist_ok=True)
        for path in sorted(staged_folder.iterdir()):
            os.replace(path, folder / path.name)
        flush(folder)
