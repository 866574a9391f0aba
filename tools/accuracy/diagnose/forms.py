"""This module defines the form of each line in the records of a run: its keys and the types of their values. Unknown
keys are ignored, because a later version may write more keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from plugins.step_record.plan import IDS, PROJECTIONS

_MEND = "copy the file again, or train again into a new folder"
_LARGEST = 10**300  # of a whole number: larger ones are no float
_MOST = 2**62  # of a count or of the number of a step
_SHORT = 40  # characters of a wrong value that a message shows


Wrong = tuple[str, str] | None  # the path inside a value, and what is wrong with the value there
Form = Callable[[Any], Wrong]
Inner = Iterable[tuple[str | int, Any, Form]]  # (name, value, form) of the values inside a list or an object


def _form(words: str, holds: Callable[[Any], bool], inner: Callable[[Any], Inner] = lambda value: ()) -> Form:
    """Return a check of a value; `words` describe a valid value in error messages."""

    def check(value: Any) -> Wrong:
        if not holds(value):
            text = json.dumps(value)
            return "", f"is {text if len(text) <= _SHORT else f'{text[:_SHORT]}...'}, but must be {words}"
        for name, each, form in inner(value):  # a path is made only of what is wrong: a run writes many lines
            if found := form(each):
                return f".{name}{found[0]}", found[1]
        return None

    return check


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
    return whole or isinstance(value, float)


def _list(words: str, form: Form, length: int | None = None) -> Form:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value))

    return _form(words, holds, lambda value: ((place, each, form) for place, each in enumerate(value)))


def _row(words: str, *forms: Form) -> Form:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) == len(forms)

    return _form(words, holds, lambda value: zip(range(len(forms)), value, forms, strict=True))


def _named(words: str, form: Form) -> Form:
    return _form(words, _is_object, lambda value: ((name, each, form) for name, each in value.items()))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_TEXT = _form("text", lambda value: isinstance(value, str))
_FLAG = _form("true or false", lambda value: isinstance(value, bool))
_TRUE = _form("true", lambda value: value is True)
_NUMBER = _form("a number", _is_number)
_NUMBER_OR_NULL = _form("a number or null", lambda value: value is None or _is_number(value))
_SQUARE = _form("a number that is not below 0", lambda value: _is_number(value) and not value < 0)
_COUNT = _form("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < _MOST)
_STEP = _form("the number of a step, from 1 on", lambda value: type(value) is int and 1 <= value < _MOST)
_PLAIN = _form(
    "text, a number, true, false or null", lambda value: value is None or isinstance(value, (str, bool)) or
    _is_number(value)
)  # fmt: skip
_COUNTS, _NUMBERS = _list("a list of whole numbers", _COUNT), _list("a list of numbers", _NUMBER)
_DIGESTS = _list("a list of digests", _TEXT)
_ROWS = _form(
    "a digest, or a list of digests",
    lambda value: isinstance(value, (str, list)),
    lambda value: ((place, each, _TEXT) for place, each in enumerate(value if isinstance(value, list) else ())),
)
_SAMPLES = _form(
    "an object of digests by column, or null",
    lambda value: value is None or isinstance(value, dict),
    lambda value: (
        (name, each, _DIGESTS if name == IDS else _ROWS) for name, each in (value or {}).items()
    ),
)  # fmt: skip
_STATE = _named("an object of tensors by name", _row("[digest, sum of squares, shape]", _TEXT, _SQUARE, _COUNTS))
_PARTS = _named("an object of parts by name", _row("[shape of the whole, offset of the part]", _COUNTS, _COUNTS))
_PROJECTED = _list(f"a list of {PROJECTIONS} numbers", _NUMBER, PROJECTIONS)
_MODULES = _named(
    "an object of outputs by module", _row("[digest, sum of squares, projections]", _TEXT, _SQUARE, _PROJECTED)
)
_UPDATE = {"dimensions": _COUNT, "square": _SQUARE, "gradient": _SQUARE}
_UPDATE |= dict.fromkeys(("rate", "decay", "rest"), _NUMBER_OR_NULL)
_WEIGHTS = _named(
    "an object of updates by weight",
    _form("an object", _is_object, lambda value: ((key, value[key], _UPDATE[key]) for key in _UPDATE if key in value)),
)
_BY_ROUTER = _named("an object of lists of numbers by router", _NUMBERS)


# the keys of each kind of line
HEADER = dict.fromkeys(("total_steps", "start_step", "world_size"), _COUNT) | {
    "time": _NUMBER,
    "software": _named("an object of versions by package", _TEXT),
    "held_bytes": _named("an object of numbers by kind", _COUNT),
}
NUMBERS = ("loss", "lm_loss", "load_balancing_loss", "mtp_loss", "global_norm", "learning_rate")
STEP = {
    "step": _STEP,
    **dict.fromkeys(NUMBERS, _NUMBER_OR_NULL),
    **dict.fromkeys(("time", "tokens", "seconds", "cpu_seconds"), _NUMBER),
    "overflow": _FLAG,
    "samples": _SAMPLES,
}
START_OF_STATE = {
    "step": _COUNT,
    "start": _TRUE,
    "biases": _BY_ROUTER,
    "state": _STATE,
    "effective": _named("an object of settings by name", _PLAIN),
}
STATE = {
    "step": _STEP,
    "learning_rate": _NUMBER_OR_NULL,
    "updates": _COUNT,
    "parts": _PARTS,
    "weights": _WEIGHTS,
    "loads": _BY_ROUTER,
    "modules": _MODULES,
    "skipped": _TRUE,
    "biases": _BY_ROUTER,
    "state": _STATE,
}
END_OF_STATE = {"step": _STEP, "end": _TRUE, "state": _STATE, "modules": _MODULES}


def check_form(record: Mapping[str, Any], form: Mapping[str, Form], file: Path, number: int) -> None:
    """Raise DataError if a recorded line holds a value of a wrong type."""
    for name, each in form.items():
        if name in record and (wrong := each(record[name])):
            raise DataError(f"{file}: line {number}: {name}{wrong[0]} {wrong[1]}; {_MEND}")


def check_lengths(record: Mapping[str, Any], known: dict[str, int], file: Path, number: int) -> None:
    """Raise DataError if a router has another number of experts than in earlier lines of the file. `known` holds the
    numbers of the earlier lines.
    """
    for key in ("loads", "biases"):
        for router, numbers in record.get(key, {}).items():
            if len(numbers) != known.setdefault(router, len(numbers)):
                wrong = (
                    f"{key}.{router} has {len(numbers)} numbers, but must have {known[router]}, as in the lines before"
                )
                raise DataError(f"{file}: line {number}: {wrong}; {_MEND}")
