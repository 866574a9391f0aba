"""Which tokenizer a model's ids are of, and text from ids that come one by one."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from launch.run.preflight import data_prefixes
from plugins.errors import DataError
from tools.data.outputs import check_form, read_sidecar
from tools.data.tokenizer import Coder, Tokenizer, load
from tools.recipe.load import Recipe
from tools.recipe.view import LOADER, look

FILE = "tokenizer.json"
HALF = "\ufffd"  # what decoders write for bytes that are no whole character


def tokenizer_of(recipe: Recipe, weights: Path, given: Path | None) -> Tokenizer:
    """The tokenizer that is `given`, that lies beside `weights`, or that `recipe` or its corpus names.

    Raises:
        DataError: none of them is there, it cannot be loaded or does not give text back, or it is not the corpus' own.
    """
    prefixes = _corpora(recipe)
    if given:
        return _fast(given)
    if (weights / FILE).exists():
        return _fast(weights)
    if (instructions := _of_instructions(recipe)) and (instructions / FILE).exists():
        return _fast(instructions)
    for prefix in prefixes:
        if Path(f"{prefix}.json").exists():
            sidecar = read_sidecar(prefix)
            check_form(Path(f"{prefix}.json"), sidecar)
            written = sidecar["tokenizer"]
            found = _fast(Path(prefix).parent / written["path"], sidecar["eod_token"])
            if found.fingerprint != written["fingerprint"]:
                raise DataError(f"{found.spec.folder}: is not the tokenizer that wrote {prefix}; name it: --tokenizer")
            return found
    where = f"{prefixes[0]}.json, which names the tokenizer of the recipe's corpus, is not here" if prefixes else (
        "the recipe does not say which tokenizer wrote its data"
    )  # fmt: skip
    raise DataError(f"--tokenizer: {where}; name the tokenizer's folder")


def _corpora(recipe: Recipe) -> list[str]:
    paths = look(recipe, (*LOADER, "config", "data_path"))
    return data_prefixes(paths) if paths else []


def _of_instructions(recipe: Recipe) -> Path | None:
    """The folder that the first handler with a tokenizer reads it from."""
    for handler in look(recipe, (*LOADER, "handler")) or []:
        folder = look(handler, ("tokenizer", "pretrained_model_dir"))
        if isinstance(folder, str) and folder:
            return Path(folder)
    return None


def _fast(folder: Path, end: str | None = None) -> Tokenizer:
    found = load(folder, end)
    if found.spec.backend is None:
        raise DataError(f"--tokenizer {folder}: has no {FILE}; tc3 generate takes fast tokenizers only")
    return found


class Spoken:
    """Text from ids that come one by one: the bytes of a character wait until it is whole.

    Args:
        coder: of the ids. before: ids that the text goes on from, which are not repeated.
    """

    def __init__(self, coder: Coder, before: Sequence[int]):
        self._coder, self._ids = coder, list(before)
        self._said = len(coder.decode(self._ids))

    def push(self, token: int) -> str:
        """The text that is new with `token`; may be empty."""
        self._ids.append(token)
        text = self._coder.decode(self._ids)
        return "" if text.endswith(HALF) else self._new(text)

    def rest(self) -> str:
        """What no token has completed."""
        return self._new(self._coder.decode(self._ids))

    def _new(self, text: str) -> str:
        new, self._said = text[self._said :], len(text)
        return new


def harmless(text: str) -> str:
    """`text` without what a terminal would obey: control characters other than line feed and tabulator."""
    return "".join(HALF if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)
