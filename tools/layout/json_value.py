"""This module checks the values of a JSON file, and names the file and the key path of each value that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from plugins.errors import DataError, refuse_unknown

_LARGEST = 1e15


class JsonValue:
    """A `JsonValue` is a value of the file, with the key path at which the value stands."""

    def __init__(self, path: Path, where: str, value: Any):
        self.path, self.where, self.value = path, where, value

    def refuse(self, want: str) -> None:
        """Raise `DataError` with the file, the key path, the wrong value, and the condition that the value must
        meet.
        """
        shown = json.dumps(self.value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}..."
        raise DataError(f"{self.path}: {self.where or 'the whole file'}: {shown}: {want}")

    def key(self, name: str) -> JsonValue:
        """Return the value of a key of this mapping; raise `DataError` if the key is missing."""
        if not isinstance(self.value, dict):
            self.refuse("the value must be a mapping")
        where = f"{self.where}.{name}" if self.where else name
        if name not in self.value:
            near = "".join(f" (the file has {each!r})" for each in get_close_matches(name, self.value, 1))
            raise DataError(f"{self.path}: {where}: the key is missing{near}")
        return JsonValue(self.path, where, self.value[name])

    def only(self, *known: str) -> None:
        """Raise `DataError` for keys of this mapping that are not in `known`, except for notes (keys that begin with
        "about").
        """
        keys = [key for key in self.value if not key.startswith("about")] if isinstance(self.value, dict) else []
        refuse_unknown(f"{self.path}: {self.where}{'.' * bool(self.where)}", keys, known, DataError)

    def items(self) -> list[JsonValue]:
        """Return the values of this list; raise `DataError` if it is empty."""
        if not isinstance(self.value, list) or not self.value:
            self.refuse("the value must be a list that is not empty")
        return [JsonValue(self.path, f"{self.where}[{index}]", value) for index, value in enumerate(self.value)]

    def text(self) -> str:
        """Return this value, which must be a text that is not empty."""
        return self._checked(lambda value: isinstance(value, str) and bool(value), "the value must be a text")

    def whole(self, most: int) -> int:
        """Return this value, which must be a whole number from 1 to `most`."""
        want = f"the value must be 1, 2, 3, ... up to {most:,}"
        return self._checked(lambda v: isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= most, want)

    def number(self, least: float = 0.0) -> float:
        """Return this value, which must be a number of at least `least`."""

        def good(value: Any) -> bool:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return number and least <= value <= _LARGEST and value >= -_LARGEST

        return float(self._checked(good, f"the value must be a number{', 0 or more' * (least == 0)}"))

    def _checked(self, good: Callable[[Any], bool], want: str) -> Any:
        if not good(self.value):
            self.refuse(want)
        return self.value
