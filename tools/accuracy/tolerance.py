"""Table 2 of the report: tolerance of an operator by data type and accumulation count. The data: tolerance.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tools.accuracy.promotion import ROUNDOFF

FILE = Path(__file__).with_name("tolerance.yaml")


@cache
def table() -> dict[str, Any]:
    """The file's content: columns, alias, systematic, lower_bound."""
    return yaml.safe_load(FILE.read_text("utf-8"))


def tolerance(dtype: str, count: int, roundings: int = 1) -> float:
    """The largest error allowed, as `judge.errors` measures it.

    Args:
        dtype: of the operator's inputs: float32, float16, bfloat16 or hfloat32.
        count: terms that one output element accumulates; 0 for an operator that only moves values.
        roundings: how often a value is stored in `dtype` on its way to the output.
    """
    if count == 0:
        return 0.0
    content = table()
    rows = content["columns"][content["alias"].get(dtype, dtype)]
    reached = [row["tolerance"] for row in rows if row["count"] <= count]
    return reached[-1] + (roundings - 1) * ROUNDOFF[dtype]


def systematic(dtype: str) -> tuple[float, float]:
    """(floor, sigmas) of the factor that all elements of a tensor share: see tools/accuracy/compare/scale.py."""
    content = table()
    found = content["systematic"]
    return found["floor"][content["alias"].get(dtype, dtype)], found["sigmas"]


def lower_bound() -> float:
    """The smallest magnitude of a test input."""
    return table()["lower_bound"]
