"""What a sidecar must hold before anything relies on it: an edited or cut one is named, by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugins.errors import DataError, did_you_mean

# key -> its kind; a mapping stands for one, a list for a list of what it holds
_FORM: dict[str, Any] = {
    "split": str,
    "documents": int,
    "tokens": int,
    "dtype": str,
    "bin_sha256": str,
    "vocab_size": int,
    "eod_id": int,
    "eod_token": str,
    "tokenizer": {"path": str, "fingerprint": str, "trust_remote_code": bool},
    "sources": [{"input": str}],
    "jsonl_key": str,
    "globs": [str],
    "held_out": {"fraction": float, "seed": int},
}
_WORDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
}


def check_form(path: Path, sidecar: dict[str, Any]) -> None:
    """Hold the sidecar in `path` against what `tc3 data prepare` writes.

    Raises:
        DataError: a key is missing or of another kind.
    """
    _check(path, "", sidecar, _FORM)


def _check(path: Path, place: str, value: Any, form: Any) -> None:
    kind: type = form if isinstance(form, type) else type(form)
    if not _fits(value, kind):
        raise DataError(f"{path}: {place}: want {_WORDS[kind]}, got {value!r:.60}; make the pair again")
    if isinstance(form, list):
        for number, item in enumerate(value):
            _check(path, f"{place}[{number}]", item, form[0])
    elif isinstance(form, dict):
        for key, inner in form.items():
            name = f"{place}.{key}" if place else key
            if key not in value:
                raise DataError(f"{path}: {name}: missing{did_you_mean(key, list(value))}; make the pair again")
            _check(path, name, value[key], inner)


def _fits(value: object, kind: type) -> bool:
    """An integer is a number, but true and false are not."""
    return type(value) is kind or (kind is float and type(value) is int)
