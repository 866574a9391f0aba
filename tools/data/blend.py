"""The corpora of a recipe's `data_path`, told apart as MindFormers does: prefixes, or weights and prefixes by turns.

MindFormers 1.9.0, `get_blend_from_list` (dataset/blended_datasets/utils.py): an odd number of entries are prefixes; of
an even number every other one is a weight if all of these are numbers. Where some are and some are not, it stops or
takes a weight for a prefix, by the order of the entries; that is refused here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from plugins.errors import DataError


class Blend(NamedTuple):
    """Corpora by their prefixes; weights: one each, None where corpora are taken by their sizes."""

    prefixes: list[str]
    weights: list[float] | None


def read_blend(data_path: Any) -> Blend:
    """Take a `data_path` apart.

    Raises:
        DataError: it is no list of texts and numbers, or MindFormers could not read it. The message does not say
            where it stands.
    """
    if not isinstance(data_path, list) or not data_path or not all(_is_word(entry) for entry in data_path):
        raise DataError(f"wants a list such as ['1', PREFIX], got {data_path!r}, which is no list of paths")
    words = [str(entry).strip() for entry in data_path]
    weights = [_weight(word) for word in words[::2]]
    known = [weight for weight in weights if weight is not None]
    if len(words) % 2 or not known:
        return Blend(words, None)
    if len(known) < len(weights):
        raise DataError(f"mixes weighted and unweighted prefixes: {data_path!r}; a weight before each prefix, or none")
    if not all(math.isfinite(weight) and weight >= 0 for weight in known) or not sum(known):
        raise DataError(f"{', '.join(words[::2])}: no shares of a whole; finite numbers of zero or more")
    return Blend(words[1::2], known)


def _is_word(entry: Any) -> bool:
    return isinstance(entry, str | int | float) and not isinstance(entry, bool)


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
