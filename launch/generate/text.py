"""This module turns logits into tokens and tokens into text; the code that chooses tokens is pure NumPy."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launch.run.preflight import data_prefixes
from plugins.errors import DataError
from tools.data.outputs import checked_sidecar
from tools.data.tokenizer import Coder, Tokenizer, load
from tools.recipe.load import Recipe
from tools.recipe.view import LOADER, look

FILE = "tokenizer.json"  # of a fast tokenizer, in its folder
HALF = "\ufffd"  # what decoders write for bytes that do not form a complete character


@dataclass(frozen=True)
class Sampling:
    """A `Sampling` holds the settings by which tokens are sampled.

    Args:
        temperature: logits are divided by this number, above 0; below 1 probable tokens become more probable.
        top_k: only this number of most probable tokens can be drawn; 0 means all.
        top_p: only the fewest most probable tokens with this share of the probability can be drawn, above 0; 1.0 means
            all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def likeliest(logits: np.ndarray) -> int:
    """Return the id of the largest of `logits` [V]; if several logits are the largest, return the first of their
    ids.
    """
    return int(np.argmax(logits))


def probabilities(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Return the probability with which each token is sampled: float64 [V], adding up to 1.

    Temperature is applied first, then top-k, then top-p to the remaining tokens, as in Hugging Face's `generate`. Of
    two equally probable tokens the token with the smaller id counts as more probable, so that exactly k tokens remain.
    """
    scaled = (logits.astype(np.float64) - logits.max()) / how.temperature  # the largest is 0: no overflow
    chances = np.exp(scaled)
    order = np.argsort(-logits, kind="stable")
    if how.top_k:
        chances[order[how.top_k :]] = 0
    if how.top_p < 1:
        sums = np.cumsum(chances[order])
        enough = int(np.searchsorted(sums, how.top_p * sums[-1])) + 1
        chances[order[enough:]] = 0
    return chances / chances.sum()


def draw(logits: np.ndarray, how: Sampling, random: np.random.Generator) -> int:
    """Return the id of one token, sampled with `probabilities`; the function draws one number from `random`."""
    sums = np.cumsum(probabilities(logits, how))
    return int(np.searchsorted(sums, random.random() * sums[-1], side="right"))


def tokenizer_of(recipe: Recipe, weights: Path, given: Path | None) -> Tokenizer:
    """Return a tokenizer: the tokenizer that is `given`, the tokenizer in the folder of `weights`, or the tokenizer
    that `recipe` or its corpus names.

    Raises:
        DataError: no tokenizer exists, it cannot be loaded, it does not reproduce text, or it is not the corpus's own.
    """
    paths = look(recipe, (*LOADER, "config", "data_path"))
    prefixes = data_prefixes(paths) if paths else []
    if given:
        return _fast_tokenizer(given)
    if (weights / FILE).exists():
        return _fast_tokenizer(weights)
    if (instructions := _instructions_tokenizer(recipe)) and (instructions / FILE).exists():
        return _fast_tokenizer(instructions)
    for prefix in prefixes:
        if Path(f"{prefix}.json").exists():
            sidecar = checked_sidecar(prefix)
            written = sidecar["tokenizer"]
            found = _fast_tokenizer(Path(prefix).parent / written["path"], sidecar["eod_token"])
            if found.fingerprint != written["fingerprint"]:
                raise DataError(
                    f"{found.spec.folder}: this is not the tokenizer with which the corpus {prefix} was tokenized; "
                    "give the folder of the corpus's tokenizer with --tokenizer"
                )
            return found
    where = f"{prefixes[0]}.json, which names the tokenizer of the recipe's corpus, does not exist" if prefixes else (
        "the recipe does not say which tokenizer wrote its data"
    )  # fmt: skip
    raise DataError(f"{where}; give the tokenizer's folder with --tokenizer")


def _instructions_tokenizer(recipe: Recipe) -> Path | None:
    """Return the folder that the first handler with a tokenizer reads it from."""
    for handler in look(recipe, (*LOADER, "handler")) or []:
        folder = look(handler, ("tokenizer", "pretrained_model_dir"))
        if isinstance(folder, str) and folder:
            return Path(folder)
    return None


def _fast_tokenizer(folder: Path, end: str | None = None) -> Tokenizer:
    found = load(folder, end)
    if found.spec.backend is None:
        raise DataError(
            f"--tokenizer {folder}: the folder has no {FILE}, so it does not hold a fast tokenizer, which "
            "tc3 generate needs"
        )
    return found


class Spoken:
    """A `Spoken` makes text from token ids that arrive one by one; it keeps the bytes of a character until the
    character is complete.

    Args:
        coder: the tokenizer of the ids.
        before: ids after which the text begins; they are not repeated.
    """

    def __init__(self, coder: Coder, before: Sequence[int]):
        self._coder, self._ids = coder, list(before)
        self._said = len(coder.decode(self._ids))

    def push(self, token: int) -> str:
        """Return the text that `token` adds to the output; the text may be empty."""
        self._ids.append(token)
        text = self._coder.decode(self._ids)
        return "" if text.endswith(HALF) else self._new(text)

    def rest(self) -> str:
        """Return as text the bytes that remain at the end and do not form a complete character."""
        return self._new(self._coder.decode(self._ids))

    def _new(self, text: str) -> str:
        new, self._said = text[self._said :], len(text)
        return new


def harmless(text: str) -> str:
    """Return `text` without the control characters that a terminal would interpret, except line feed and tabulator."""
    return "".join(HALF if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)
