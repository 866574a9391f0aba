"""A row of a measurements file, held against what a run can be, before anything is calculated with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.errors import DataError
from tools.ranges import RANGES, Range

# sizes by the name that rows give them; others may be any number that fits a model
_SIZES = {
    **dict.fromkeys(("layers", "num_layers"), RANGES["layers"]),
    **dict.fromkeys(("devices", "tp", "pp", "cp", "dp", "ep"), RANGES["devices"]),
    **dict.fromkeys(("gbs", "global_batch", "batch_size", "local_batch"), RANGES["global_batch_size"]),
    **dict.fromkeys(("micro_batch", "micro_batches", "micro_batch_num"), RANGES["micro_batches"]),
    **dict.fromkeys(("vpp", "pp_interleave_num"), RANGES["layers"]),
}
_ANY = Range(0, 1e15, whole=False)
_NEGATIVE = Range(-10_000, 10_000, whole=False)


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Refuse what no row can hold.

    Raises:
        DataError: no id, a block of the wrong kind, a number that is none; names the key.
    """
    if "id" not in row:
        raise DataError(f"{place}.id: missing")
    if isinstance(row["id"], bool) or not isinstance(row["id"], str | int):
        raise DataError(f"{place}.id: want a text")
    for key in ("group", "use", "hardware"):
        if not isinstance(row.get(key, ""), str):
            raise DataError(f"{place}.{key}: want a text")
    for key in ("config", "measured"):
        if row.get(key) is not None and not isinstance(row[key], Mapping):
            raise DataError(f"{place}.{key}: want a mapping")
    _numbers(row.get("config"), f"{place}.config", _SIZES)
    _numbers(row.get("measured"), f"{place}.measured", {})


def _numbers(value: Any, place: str, sizes: Mapping[str, Range], span: Range = _ANY) -> None:
    """Every number at or below a place; zero passes, as a way to say that there is none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _numbers(inner, f"{place}.{key}", sizes, _NEGATIVE if key == "offset" else sizes.get(key, _ANY))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _numbers(inner, f"{place}[{index}]", sizes, span)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
        if refusal := span.refusal(value):
            raise DataError(f"{place}: {_short(value)} {refusal}")
    elif isinstance(value, str) and _is_number(value):
        raise DataError(f"{place}: {value!r} is text, not a number: write it with a dot and a sign, such as 1.0e+3")


def _is_number(text: str) -> bool:
    try:
        float(text)
        return True
    except ValueError:
        return False


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"{text[:12]}... ({len(text)} digits)"
