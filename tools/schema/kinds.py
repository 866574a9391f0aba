"""Types as YAML sees them, taken from annotations and defaults."""

from __future__ import annotations

import types
import typing
from typing import Any

NAMES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", tuple: "list", dict: "dict"}
WORDS = {
    "bool": "True or False",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "null": "nothing",
}


def spec_of(annotation: Any = None, default: Any = None) -> dict[str, Any]:
    """``{"types": ["int", "null"]}`` for an argument; empty when anything may stand there.

    A default that contradicts its annotation widens it (MindFormers writes `x: int = None`).
    """
    kinds = _kinds(annotation)
    if kinds is None:
        kinds = {NAMES[type(default)]} if type(default) in NAMES else None
    if not kinds:
        return {}
    if default is None:
        kinds.add("null")
    elif type(default) in NAMES:
        kinds.add(NAMES[type(default)])
    return {"types": sorted(kinds)}


def _kinds(annotation: Any) -> set[str] | None:
    """Kinds of an annotation; None when it says nothing, or names a class that YAML cannot write."""
    if annotation in (None, Any) or isinstance(annotation, str) or annotation is type.__class__:
        return None
    if annotation is type(None):
        return {"null"}
    if annotation in NAMES:
        return {NAMES[annotation]}
    origin = typing.get_origin(annotation)
    if origin in NAMES:
        return {NAMES[origin]}
    if origin is typing.Union or origin is getattr(types, "UnionType", None):
        parts = [_kinds(part) for part in typing.get_args(annotation)]
        known = [part for part in parts if part]
        return set().union(*known) if known else None
    return None


def kind(value: Any) -> str:
    """The kind of a YAML value."""
    if isinstance(value, dict):
        return "dict"
    return "null" if value is None else NAMES.get(type(value), type(value).__name__)


def fits(value: Any, kinds: list[str]) -> bool:
    """Whether a value is of one of `kinds`; an integer is a number too."""
    found = kind(value)
    return found in kinds or (found == "int" and "float" in kinds)


def say(kinds: list[str]) -> str:
    """``["int", "null"]`` in words."""
    return " or ".join(WORDS.get(name, name) for name in kinds if name != "null") or "nothing"
