"""This module compares two recipes by full key path, and describes the effect of each difference on training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from plugins import ADAPTERS
from plugins.settings import settings_of
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import LOADER, MODEL, View
from tools.schema.converter import model_number

# What a change of a recipe's key means for training: by the table `meaning.yaml`, and of plugins by their settings.

TABLE = Path(__file__).with_name("meaning.yaml")
GROUPS = ("numbers", "layout", "nothing")  # from the gravest to the lightest
UNCLASSIFIED = "unclassified"


class Meaning(NamedTuple):
    """A `Meaning` describes the effect of changing a key of a recipe: one of the groups in meaning.yaml, and a short
    phrase.
    """

    group: str
    phrase: str


def meaning_of(words: tuple[str, ...]) -> Meaning:
    """Return the effect of changing the value at a key path. To be safe, an unknown key counts as a key that changes
    the results.
    """
    same_as, patterns = _table()
    for copy, original in same_as.items():
        if words[: len(copy)] == copy and len(words) > len(copy):
            words = original + words[len(copy) :]
    matching = [pattern for pattern in patterns if _matches(pattern, words)]
    return patterns[max(matching, key=_specificity)] if matching else Meaning("numbers", UNCLASSIFIED)


@cache
def _table() -> tuple[dict[tuple[str, ...], tuple[str, ...]], dict[tuple[str, ...], Meaning]]:
    """Return the sections that are one, and pattern -> meaning, patterns split into words."""
    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    same_as = {tuple(copy.split(".")): tuple(original.split(".")) for copy, original in data["same_as"].items()}
    patterns: dict[tuple[str, ...], Meaning] = {}
    for entry in data["meanings"]:
        for path in entry["paths"]:
            pattern = tuple(path.split("."))
            assert pattern not in patterns, f"{TABLE.name}: {path} stands there twice"
            patterns[pattern] = Meaning(entry["group"], entry["means"])
    for name in ADAPTERS:
        section = settings_of(name)
        patterns["plugins", name] = Meaning(*section.CHANGE)
        for each in fields(section):
            patterns["plugins", name, each.name] = Meaning(*each.metadata.get("change", section.CHANGE))
    return same_as, patterns


def _matches(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Return whether a pattern covers a whole path; `**` stands at the end and takes one word or more."""
    if pattern[-1] == "**":
        pattern, words = pattern[:-1], words[: len(pattern) - 1] if len(words) >= len(pattern) else ()
    return len(pattern) == len(words) and all(map(fnmatchcase, words, pattern))


def _specificity(pattern: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the key that sorts patterns: by plain words, then all words, then letters without wildcards."""
    plain = [word for word in pattern if "*" not in word]
    return len(plain), len(pattern) - pattern.count("**"), len("".join(pattern).replace("*", ""))


_MANY = 2  # places of one plain list; with more of them the whole list is one difference


class _Absent:
    """An `_Absent` stands for a key that one of the two recipes does not have."""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return "absent"


ABSENT = _Absent()


class Batch(NamedTuple):
    """A `Batch` holds the number of devices of a run, and the numbers of samples (the global batch) and tokens of a
    step.
    """

    devices: int
    samples: int
    tokens: int


@dataclass(frozen=True)
class Change:
    """A `Change` is one difference between two recipes. The field `words` is the key path for people, in which an entry
    of a list is named by its `type`.
    """

    words: tuple[str, ...]
    before: Any
    after: Any
    meaning: Meaning
    also: tuple[str, ...] = ()  # other dotted paths of the same value, shared by an anchor on both sides

    @property
    def path(self) -> str:
        """Return the key path of the changed value as a text, such as ``callbacks.CheckpointMonitor.prefix``."""
        return ".".join(self.words)


@dataclass(frozen=True)
class Comparison:
    """A `Comparison` holds the batches of two recipes, and the differences between the recipes, the most important
    group first.
    """

    before: Batch
    after: Batch
    changes: list[Change] = field(default_factory=list)

    def group(self, name: str) -> list[Change]:
        """Return the differences whose effect belongs to the group `name` (one of `GROUPS`), in the order of the
        recipes.
        """
        return [change for change in self.changes if change.meaning.group == name]


class _Pair(NamedTuple):
    """A `_Pair` is a value of both recipes that differs, with its key path in each."""

    words: tuple[str, ...]
    paths: tuple[KeyPath, KeyPath]
    before: Any
    after: Any


def compare(before: Recipe, after: Recipe) -> Comparison:
    """Return every difference between two flat recipes; a value that several keys share through a YAML anchor is listed
    once.
    """
    batches = batch_of(before), batch_of(after)
    found: dict[Any, Change] = {}
    for pair in _differences((), ((), ()), before, after):
        change = Change(pair.words, pair.before, pair.after, _meaning(pair.words, batches))
        shared = _idents((before, after), pair) or pair.words
        found[shared] = _merge(found[shared], change) if shared in found else change
    changes = sorted(found.values(), key=lambda change: GROUPS.index(change.meaning.group))
    return Comparison(*batches, changes)


def batch_of(recipe: Recipe) -> Batch:
    """Return the numbers of devices, samples and tokens of a step, as MindFormers' trainer computes them."""
    view = View(recipe)
    default = model_number(view, "seq_length")
    length = view.number((*MODEL, "seq_length"), view.number((*LOADER, "config", "seq_length"), default))
    return Batch(view.devices, view.global_batch, view.global_batch * length)


def _meaning(words: tuple[str, ...], batches: tuple[Batch, Batch]) -> Meaning:
    """Return the meaning of a path; of those that the global batch depends on, in the light of both global batches."""
    meaning = meaning_of(tuple(word.split("#")[0] for word in words if not word.isdigit()))
    if meaning.group not in ("micro", "mesh"):
        return meaning
    changes = batches[0].samples != batches[1].samples
    group = "numbers" if changes or meaning.group == "micro" else "layout"
    return Meaning(group, f"{meaning.phrase}; the global batch {'changes' if changes else 'stays'}")


def _idents(recipes: tuple[Recipe, Recipe], pair: _Pair) -> tuple[Any, ...] | None:
    """Return the anchors behind a value in both recipes, as far as they are known; equal anchors mean the same shared
    value.
    """
    marks = [recipe.marks.get(path) for recipe, path in zip(recipes, pair.paths, strict=True)]
    return tuple(mark and mark.ident for mark in marks) if any(marks) else None


def _merge(first: Change, second: Change) -> Change:
    """Return two changes of one shared value as one change, at the key path whose group of meanings is the more
    important one.
    """
    if GROUPS.index(second.meaning.group) < GROUPS.index(first.meaning.group):
        first, second = second, first
    return replace(first, also=(*first.also, second.path, *second.also))


def _differences(words: tuple[str, ...], paths: tuple[KeyPath, KeyPath], before: Any, after: Any) -> Iterator[_Pair]:
    """Yield what differs below a key path. Mappings go by key, lists of mappings by type, plain lists by index."""
    kinds = {_kind(side) for side in (before, after) if side not in (ABSENT, None, {}, [])}
    if kinds == {"mapping"}:
        names = {key: key for key in before or {}}, {key: key for key in after or {}}
        yield from _members(words, paths, (before, after), names)
    elif kinds == {"entries"}:
        names = _names(before or []), _names(after or [])
        common = [[name for name in side if name in names[0] and name in names[1]] for side in names]
        if common[0] != common[1]:
            yield _Pair(words, paths, *common)
        yield from _members(words, paths, (before, after), names)
    elif not _same(before, after):
        places = list(_places(before, after)) if kinds == {"list"} and before and after else []
        if not 0 < len(places) <= _MANY:
            yield _Pair(words, paths, before, after)
        for place, old, new in places if len(places) <= _MANY else ():
            inner = (*paths[0], *place), (*paths[1], *place)
            yield _Pair((*words, *map(str, place)), inner, old, new)


def _members(
    words: tuple[str, ...],
    paths: tuple[KeyPath, KeyPath],
    sides: tuple[Any, Any],
    keys: tuple[dict[str, Any], dict[str, Any]],
) -> Iterator[_Pair]:
    """Compare member by member; `keys` maps a member's name to its key or index, for each side."""
    for name in [*keys[0], *(name for name in keys[1] if name not in keys[0])]:
        values = [side[key[name]] if name in key else ABSENT for side, key in zip(sides, keys, strict=True)]
        here = tuple((*path, key.get(name, ABSENT)) for path, key in zip(paths, keys, strict=True))
        yield from _differences((*words, str(name)), (here[0], here[1]), *values)


def _names(entries: list[Any]) -> dict[str, int]:
    """Name -> index of list entries: the `type`, numbered from its second use, or the index where there is none."""
    names: dict[str, int] = {}
    for index, entry in enumerate(entries):
        name = str(entry["type"]) if isinstance(entry, dict) and "type" in entry else str(index)
        seen = sum(known.split("#")[0] == name for known in names)
        names[f"{name}#{seen + 1}" if seen else name] = index
    return names


def _kind(value: Any) -> str:
    """Return how a value is compared; an empty or absent value is compared like the value of the other recipe."""
    if isinstance(value, list):
        return "entries" if any(isinstance(item, dict) for item in value) else "list"
    return "mapping" if isinstance(value, dict) else "value"


def _places(before: Any, after: Any) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield (indices, old, new) for each element of two lists of the same shape; for other lists, yield the whole
    lists.
    """
    if not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
        if not _same(before, after):
            yield (), before, after
        return
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        for place, *values in _places(old, new):
            yield (index, *place), values[0], values[1]


def _same(before: Any, after: Any) -> bool:
    """Return whether MindFormers reads two values alike: 1 and 1.0 are one number, 1 and true are two values."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return before == after and isinstance(before, bool) == isinstance(after, bool)
