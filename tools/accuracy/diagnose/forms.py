"""This module defines the form of each line in the records of a run: its keys and the types of their values. Unknown
keys are ignored, because a later version may write more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from plugins.step_record.plan import IDS, PROJECTIONS

_MEND = "copy the file again, or train again into a new folder"
_LARGEST = 10**300  # of a whole number: larger ones are no float
_MOST = 2**62  # of a count or of the number of a step
_SHORT = 40  # characters of a wrong value that a message shows


@dataclass(frozen=True)
class Form:
    """A `Form` describes the valid values of a key in `words`; `inner` yields (name, value, form) of values inside."""

    words: str
    holds: Callable[[Any], bool]
    inner: Callable[[Any], Iterator[tuple[str | int, Any, Form]]] | None = None


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
    return whole or isinstance(value, float)


def _or_null(form: Form) -> Form:
    return Form(f"{form.words} or null", lambda value: value is None or form.holds(value), form.inner)


def _list(words: str, form: Form, length: int | None = None) -> Form:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value))

    return Form(words, holds, lambda value: ((place, each, form) for place, each in enumerate(value)))


def _row(words: str, *forms: Form) -> Form:
    def inner(value: list[Any]) -> Iterator[tuple[str | int, Any, Form]]:
        return ((place, each, form) for place, (each, form) in enumerate(zip(value, forms, strict=True)))

    return Form(words, lambda value: isinstance(value, list) and len(value) == len(forms), inner)


def _named(words: str, form: Form) -> Form:
    return Form(
        words, lambda value: isinstance(value, dict), lambda value: ((name, each, form) for name, each in value.items())
    )


def _object(words: str, keys: Mapping[str, Form]) -> Form:
    def inner(value: dict[str, Any]) -> Iterator[tuple[str | int, Any, Form]]:
        return ((name, value[name], form) for name, form in keys.items() if name in value)

    return Form(words, lambda value: isinstance(value, dict), inner)


_TEXT = Form("text", lambda value: isinstance(value, str))
_FLAG = Form("true or false", lambda value: isinstance(value, bool))
_TRUE = Form("true", lambda value: value is True)
_NUMBER = Form("a number", _is_number)
_SQUARE = Form("a number that is not below 0", lambda value: _is_number(value) and not value < 0)
_COUNT = Form("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < _MOST)
_STEP = Form("the number of a step, from 1 on", lambda value: type(value) is int and 1 <= value < _MOST)
_PLAIN = Form(
    "text, a number, true, false or null", lambda value: value is None or isinstance(value, (str, bool)) or
    _is_number(value)
)  # fmt: skip
_COUNTS, _NUMBERS = _list("a list of whole numbers", _COUNT), _list("a list of numbers", _NUMBER)
_DIGESTS = _list("a list of digests", _TEXT)
_ROWS = Form(
    "a digest, or a list of digests",
    lambda value: isinstance(value, (str, list)),
    lambda value: ((place, each, _TEXT) for place, each in enumerate(value if isinstance(value, list) else ())),
)
_SAMPLES = Form(
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
_WEIGHTS = _named(
    "an object of updates by weight",
    _object(
        "an object",
        {"dimensions": _COUNT, "square": _SQUARE, "gradient": _SQUARE}
        | dict.fromkeys(("rate", "decay", "rest"), _or_null(_NUMBER)),
    ),
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
    **dict.fromkeys(NUMBERS, _or_null(_NUMBER)),
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
    "learning_rate": _or_null(_NUMBER),
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
        if name in record and (wrong := _wrong(record[name], each)):
            raise DataError(f"{file}: line {number}: {name}{wrong[0]} {wrong[1]}; {_MEND}")


def check_lengths(record: Mapping[str, Any], known: dict[str, int], file: Path, number: int) -> None:
    """Raise DataError if the experts of a router are not as many as `known` from earlier lines."""
    for key in ("loads", "biases"):
        for router, numbers in record.get(key, {}).items():
            if len(numbers) != known.setdefault(router, len(numbers)):
                wrong = (
                    f"{key}.{router} has {len(numbers)} numbers, but must have {known[router]}, as in the lines before"
                )
                raise DataError(f"{file}: line {number}: {wrong}; {_MEND}")


def _wrong(value: Any, form: Form) -> tuple[str, str] | None:
    """Return the path inside a value to a wrong value, and what is wrong with it; None if nothing is."""
    if not form.holds(value):
        text = json.dumps(value)
        return "", f"is {text if len(text) <= _SHORT else f'{text[:_SHORT]}...'}, but must be {form.words}"
    if form.inner is not None:
        for name, each, inner in form.inner(value):
            if found := _wrong(each, inner):
                return f".{name}{found[0]}", found[1]
    return None
