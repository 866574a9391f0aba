"""What a run's corpora held when it began, so that a resume notices one that was prepared anew at the same path.

Corpora have terabytes, so `RUN/data.json` covers of each: the whole .idx, that is the length and place of every
document; the size of the .bin, and 256 blocks of it, evenly spread, first and last included (up to 16 MiB: all of it).
Other text practically always has other lengths; tokens changed in place, between those blocks, are not seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launch.run.preflight import data_prefixes
from plugins.errors import DataError
from tools.files.atomic import sampled_digest, whole_digest, write_atomically
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import LOADER, View

DATA_PATH = (*LOADER, "config", "data_path")
_SLOW = 2 << 30  # bytes of index that take seconds to read


def data_file(run_dir: Path) -> Path:
    """Where a run keeps the digests of its data."""
    return run_dir / "data.json"


def digests(recipe: Recipe) -> list[dict[str, Any]]:
    """Of each corpus of a recipe's `data_path` in turn: prefix, bytes of .idx and .bin, sha256 of what is covered.

    For HFDataLoader of each of its files, and of the tokenizers that make ids of them: file, bytes, sha256 of what is
    covered. Empty for loaders of other kinds.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    view = View(recipe)
    path = view.get(DATA_PATH)
    if not view.megatron:
        return [_digest_of_file(Path(name)) for name in (*view.instruction_files, *_tokenizers(recipe))]
    return [_digest(prefix) for prefix in data_prefixes(path)] if path is not None else []


def tokenizer_folders(recipe: Recipe) -> list[str]:
    """The folders of tokenizers that make ids of HFDataLoader's files, as its handlers name them."""
    view = View(recipe)
    handlers = view.get((*LOADER, "handler"))
    sections = [item.get("tokenizer") for item in handlers if isinstance(item, dict)] if view.instruction_files else []
    folders = [section.get("pretrained_model_dir") for section in sections if isinstance(section, dict)]
    return [folder for folder in folders if isinstance(folder, str)]


def _tokenizers(recipe: Recipe) -> list[str]:
    """What each tokenizer folder says about ids; hidden files and the model's are no part."""
    files = [file for folder in tokenizer_folders(recipe) for file in sorted(Path(folder).glob("tokenizer*"))]
    return [str(file) for file in files if file.is_file()]


def _digest_of_file(path: Path) -> dict[str, Any]:
    try:
        return {"prefix": str(path), "bytes": path.stat().st_size, "sample_sha256": sampled_digest(path)}
    except OSError as error:
        raise DataError(f"{dotted((*LOADER, 'data_files'))}: {path}: cannot be read ({error.strerror})") from None


def _digest(prefix: str) -> dict[str, Any]:
    try:
        index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        sizes = {"idx_bytes": index.stat().st_size, "bin_bytes": tokens.stat().st_size}
        if sizes["idx_bytes"] > _SLOW:
            click.echo(f"{index}: reading its {sizes['idx_bytes'] / 1e9:.0f} GB, to know this data again", err=True)
        return {
            "prefix": prefix,
            **sizes,
            "idx_sha256": whole_digest(index),
            "bin_sample_sha256": sampled_digest(tokens),
        }
    except OSError as error:
        raise DataError(f"{dotted(DATA_PATH)}: {error.filename}: cannot be read ({error.strerror})") from None


def keep(recipe: Recipe, run_dir: Path) -> None:
    """Write down what the recipe's data holds now. Data that cannot be read is left to the loader to complain of."""
    try:
        write_atomically(data_file(run_dir), json.dumps(digests(recipe), indent=1) + "\n")
    except DataError as error:
        click.echo(f"{error}; a resume will not know whether the data is still the same", err=True)


def replaced(run_dir: Path, recipe: Recipe) -> list[str]:
    """The corpora of `recipe` that do not hold what those of the run in `run_dir` held, each in words.

    A run that has written nothing down (of an earlier version, or of MindFormers alone) is said, and taken.
    """
    stored = data_file(run_dir)
    try:
        before = json.loads(stored.read_text(encoding="utf-8"))
        now = digests(recipe)
        pairs = list(zip(before, now, strict=True))
        return [_words(old, new) for old, new in pairs if _content(old) != _content(new)]
    except (OSError, DataError, ValueError, TypeError, KeyError) as error:
        reason = "is not there" if isinstance(error, FileNotFoundError) else f"does not tell ({error})"
        click.echo(f"{stored} {reason}: whether the data still holds what it did is unknown", err=True)
        return []


def _content(digest: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in digest.items() if key != "prefix"}


def _words(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Which file is another one."""
    if "bytes" in new:
        sizes = f" ({old['bytes']:,} bytes then, {new['bytes']:,} now)" if old.get("bytes") != new["bytes"] else ""
        return f"{new['prefix']} is not what it was{sizes}: the data was prepared anew or replaced"
    same_index = old["idx_sha256"] == new["idx_sha256"]
    file = f"{new['prefix']}.{'bin' if same_index else 'idx'}"
    size = "bin_bytes" if same_index else "idx_bytes"
    sizes = f" ({old[size]:,} bytes then, {new[size]:,} now)" if old[size] != new[size] else ""
    return f"{file} is not what it was{sizes}: the corpus was prepared anew or replaced"
