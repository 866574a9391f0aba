"""What a run's corpora held when it began, so that a resume notices one that was prepared anew at the same path.

Corpora have terabytes, so `RUN/data.json` covers of each: the whole .idx, that is the length and place of every
document; the size of the .bin, and 256 blocks of it, evenly spread, first and last included (up to 16 MiB: all of it).
Other text practically always has other lengths; tokens changed in place, between those blocks, are not seen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click

from launch.run.preflight import data_prefixes
from plugins.errors import DataError
from tools.files.atomic import write_atomically
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import LOADER, View

DATA_PATH = (*LOADER, "config", "data_path")
BLOCK, BLOCKS = 1 << 16, 256
_CHUNK = 1 << 22
_SLOW = 2 << 30  # bytes of index that take seconds to read


def data_file(run_dir: Path) -> Path:
    """Where a run keeps the digests of its data."""
    return run_dir / "data.json"


def digests(recipe: Recipe) -> list[dict[str, Any]]:
    """Of each corpus of a recipe's `data_path` in turn: prefix, bytes of .idx and .bin, sha256 of what is covered.

    Empty for loaders of other kinds.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    view = View(recipe)
    path = view.get(DATA_PATH)
    return [_digest(prefix) for prefix in data_prefixes(path)] if view.megatron and path is not None else []


def _digest(prefix: str) -> dict[str, Any]:
    try:
        index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        sizes = {"idx_bytes": index.stat().st_size, "bin_bytes": tokens.stat().st_size}
        if sizes["idx_bytes"] > _SLOW:
            click.echo(f"{index}: reading its {sizes['idx_bytes'] / 1e9:.0f} GB, to know this data again", err=True)
        return {"prefix": prefix, **sizes, "idx_sha256": _whole(index), "bin_sample_sha256": _sample(tokens)}
    except OSError as error:
        raise DataError(f"{dotted(DATA_PATH)}: {error.filename}: cannot be read ({error.strerror})") from None


def _whole(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sample(path: Path) -> str:
    """sha256 of `BLOCKS` blocks spread over a file, the first and the last among them; of all where it has no more."""
    size = path.stat().st_size
    if size <= BLOCK * BLOCKS:
        return _whole(path)
    digest = hashlib.sha256()
    with path.open("rb") as data:
        for block in range(BLOCKS):
            data.seek((size - BLOCK) * block // (BLOCKS - 1))
            digest.update(data.read(BLOCK))
    return digest.hexdigest()


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
    same_index = old["idx_sha256"] == new["idx_sha256"]
    file = f"{new['prefix']}.{'bin' if same_index else 'idx'}"
    size = "bin_bytes" if same_index else "idx_bytes"
    sizes = f" ({old[size]:,} bytes then, {new[size]:,} now)" if old[size] != new[size] else ""
    return f"{file} is not what it was{sizes}: the corpus was prepared anew or replaced"
