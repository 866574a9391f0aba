"""What a change of a recipe's key means for training. The table is `meaning.yaml`; this reads it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

TABLE = Path(__file__).with_suffix(".yaml")
GROUPS = ("numbers", "layout", "nothing")  # from the gravest to the lightest
UNCLASSIFIED = "unclassified"


class Meaning(NamedTuple):
    """What changes: a group of `meaning.yaml` and a short phrase."""

    group: str
    phrase: str


def meaning_of(words: tuple[str, ...]) -> Meaning:
    """The meaning of a key path without its list indices; an unknown one counts as numbers, the safe side."""
    same_as, patterns = _table()
    for copy, original in same_as.items():
        if words[: len(copy)] == copy and len(words) > len(copy):
            words = original + words[len(copy) :]
    matching = [pattern for pattern in patterns if _matches(pattern, words)]
    return patterns[max(matching, key=_specificity)] if matching else Meaning("numbers", UNCLASSIFIED)


@cache
def _table() -> tuple[dict[tuple[str, ...], tuple[str, ...]], dict[tuple[str, ...], Meaning]]:
    """The sections that are one, and pattern -> meaning, patterns split into words."""
    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    same_as = {tuple(copy.split(".")): tuple(original.split(".")) for copy, original in data["same_as"].items()}
    patterns: dict[tuple[str, ...], Meaning] = {}
    for entry in data["meanings"]:
        for path in entry["paths"]:
            pattern = tuple(path.split("."))
            assert pattern not in patterns, f"{TABLE.name}: {path} stands there twice"
            patterns[pattern] = Meaning(entry["group"], entry["means"])
    return same_as, patterns


def _matches(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Whether a pattern covers a whole path; `**` stands at the end and takes one word or more."""
    if pattern[-1] == "**":
        pattern, words = pattern[:-1], words[: len(pattern) - 1] if len(words) >= len(pattern) else ()
    return len(pattern) == len(words) and all(map(fnmatchcase, words, pattern))


def _specificity(pattern: tuple[str, ...]) -> tuple[int, int, int]:
    """More plain words, then more words, then more letters that are no wildcard."""
    plain = [word for word in pattern if "*" not in word]
    return len(plain), len(pattern) - pattern.count("**"), len("".join(pattern).replace("*", ""))
