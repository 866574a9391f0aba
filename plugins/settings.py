"""This module describes a plugin's settings as a dataclass: type, default, range and meaning of each key are defined
once, at the field of the key. The module is pure Python.

The class defines four things: which values a recipe may write (`Section.read`, which `tc3 check` and the plugin itself
call), the schema for editors (`tools/schema`), the meaning of a change of a key (`tc3 recipe diff`), and the tables of
docs/, which tests/plugins/test_settings.py compares with the class.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from plugins.errors import RecipeError, did_you_mean, refuse_unknown

MOST = {int: 1_000_000_000, float: 1e30}  # numbers without a limit `below` are smaller
S = TypeVar("S", bound="Section")
WATCHES = ("nothing", "watches, does not train")  # what a change means for training: a group of `tc3 recipe diff`, why


def setting(default: Any, meaning: str, right: str = "", **limits: Any) -> Any:
    """Return the dataclass field that defines one key of a plugin's settings.

    Args:
        default: the value if the key is not written; `MISSING` for a required key.
        meaning: one phrase for docs and editors.
        right: the text for messages that says which values are right.
        limits: `least`, `above` and `below` of a number; `choices`; `null`: whether null means the default; `bare`:
            (value, what YAML made it of); `parse`: a function that returns the value, or raises RecipeError without a
            key; `change`: (group, phrase) for `tc3 recipe diff`, if it is not that of the section.
    """
    return field(default=default, metadata={"meaning": meaning, "right": right, **limits})


@dataclass(frozen=True)
class Section:
    """A `Section` is the base class of a plugin's settings: `KEY` is its key path, and `RIGHT` says what to write if
    the section is not a mapping.
    """

    KEY: ClassVar[str]
    RIGHT: ClassVar[str]
    CHANGE: ClassVar[tuple[str, str]]  # (group, phrase) of `tc3 recipe diff`

    @classmethod
    def read(cls: type[S], written: Any) -> S:
        """Return the settings in a plugin's section of a recipe, with defaults for keys that the section leaves out.

        Raises:
            RecipeError: the section is not a mapping, lacks a required key, or has an unknown key or a value with a
                wrong type or outside its range.
        """
        ours, refusals = cls.look(written)
        if ours is None:
            raise refusals[0]
        return ours

    @classmethod
    def look(cls: type[S], written: Any) -> tuple[S | None, list[RecipeError]]:
        """Return (settings, no errors) for a valid section, and otherwise (None, all errors for which `read` would
        refuse the section).
        """
        known = {each.name: each for each in fields(cls)}
        needed = [name for name, each in known.items() if each.default is MISSING]
        right = RecipeError(cls.RIGHT, cls.KEY)
        if not isinstance(written, Mapping):
            return None, [right]
        values, refusals = {}, [right] if any(name not in written for name in needed) else []
        for name, value in written.items():
            try:
                refuse_unknown(f"{cls.KEY}.", [name], known, what="setting")
                values[name] = cls._value(name, value)
            except RecipeError as error:
                refusals.append(error)
        if refusals:
            return None, refusals
        ours = cls(**values)
        try:
            ours.agree()
        except RecipeError as error:
            return None, [error]
        return ours, []

    def agree(self) -> None:
        """Raise RecipeError for settings that contradict each other; the class of a plugin's settings overrides this
        method.
        """

    @classmethod
    def kinds(cls, name: str) -> list[type]:
        """Return the Python types of a key's values, without None."""
        hint = get_type_hints(cls)[name]
        united = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        return [get_origin(each) or each for each in united if each is not NoneType]

    @classmethod
    def number_problem(cls, name: str, value: float) -> tuple[str, str] | None:
        """Return (what is wrong, what to write) for a number that a key does not allow. Return None if the key allows
        the number, if there is no such key, or if the key's values are not numbers.
        """
        if name not in {each.name for each in fields(cls)} or not set(cls.kinds(name)) & MOST.keys():
            return None
        try:
            cls._value(name, value)
        except RecipeError as error:
            wrong, _, right = error.wrong.partition("; ")
            return wrong, right
        return None

    @classmethod
    def _value(cls, name: str, value: Any) -> Any:
        limits = next(each.metadata for each in fields(cls) if each.name == name)
        if value is None and limits.get("null"):
            return next(each.default for each in fields(cls) if each.name == name)
        if "bare" in limits and value is limits["bare"][0]:
            value = limits["bare"][1]
        try:
            return limits["parse"](value) if "parse" in limits else _plain(value, cls.kinds(name), limits)
        except RecipeError as error:
            raise RecipeError(error.wrong, f"{cls.KEY}.{name}") from None


def _plain(value: Any, kinds: list[type], limits: Mapping[str, Any]) -> Any:
    """Return a valid value of a key whose type is a choice of words, or a number within limits; raise RecipeError
    otherwise.
    """
    if choices := limits.get("choices"):
        if value not in choices:
            near = f"is none of {', '.join(choices)}{did_you_mean(value, list(choices))}"
            raise RecipeError(
                f"{value!r} is not allowed; {limits['right']}" if limits["right"] else f"{value!r} {near}"
            )
        return value
    fits = type(value) in kinds or (float in kinds and type(value) is int)
    if fits and type(value) in MOST:
        most = MOST[float if float in kinds else int]
        if "below" not in limits and value >= most:
            raise RecipeError(f"{_short(value)} is too large; write less than {most:,}")
        fits = limits.get("least", -math.inf) <= value < limits.get("below", math.inf)
        fits = fits and value > limits.get("above", -math.inf)
    if not fits:
        raise RecipeError(f"{_short(value)} is not allowed; {limits['right']}")
    return float(value) if float in kinds else value


def _short(value: Any) -> str:
    """Return a value for a message, without most digits of a number that has many."""
    text = repr(value)
    return text if len(text) <= 30 or type(value) not in MOST else f"{text[:12]}... ({len(text)} digits)"


def settings_of(name: str) -> type[Section]:
    """Return the class of a plugin's settings, which the plugin's module `plan` defines."""
    importlib.import_module(f"plugins.{name}.plan")
    return next(each for each in Section.__subclasses__() if f"plugins.{name}" == each.KEY)


def value_at(recipe: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of a recipe."""
    for key in path.split("."):
        if not isinstance(recipe, Mapping) or key not in recipe:
            return default
        recipe = recipe[key]
    return recipe


def section_at(recipe: Any, path: str) -> Mapping[str, Any]:
    """Return the section at a dotted path of a recipe; return an empty section if the value is not a mapping, which
    `tc3 check` refuses.
    """
    value = value_at(recipe, path)
    return value if isinstance(value, Mapping) else {}


def count_at(recipe: Any, path: str) -> int:
    """Return the positive integer at a dotted path of a recipe; return 1, as MindFormers does, if the key is missing or
    its value is not a positive integer.
    """
    value = value_at(recipe, path)
    return value if type(value) is int and value > 0 else 1


def graph_mode_only(recipe: Mapping[str, Any], key: str) -> None:
    """Raise RecipeError if the recipe uses PyNative mode and the plugin at `key` is on: the plugin changes the samples
    of a data loader, which has no effect in PyNative mode.
    """
    if value_at(recipe, "context.mode") in (1, "PYNATIVE_MODE"):
        wrong = (
            f"{key} works only in graph mode, because MindFormers builds the data loader in another way in "
            "PyNative mode; write 0"
        )
        raise RecipeError(wrong, "context.mode")
