"""This module lists how a document violates a structural schema of Kubernetes (OpenAPI 3.0), as far as jobs need it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}


def broken(schema: dict[str, Any], value: Any, place: str = "") -> Iterator[str]:
    """A sentence for each place of `value` that `schema` does not allow, unknown keys among them."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield f"{place}: {value!r} is no number and no string"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        yield f"{place}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    if kind == "object":
        yield from _object(schema, value, place)
    elif kind == "array":
        for number, item in enumerate(value):
            yield from broken(schema["items"], item, f"{place}[{number}]")
    elif kind == "string":
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{place}: {value!r} is not {schema['pattern']}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{place}: {len(value)} characters are too many"
    elif kind == "integer" and value < schema.get("minimum", value):
        yield f"{place}: {value} is too small"


def _object(schema: dict[str, Any], value: dict[str, Any], place: str) -> Iterator[str]:
    """The same of a mapping. One without any keys in the schema, such as metadata, may hold anything."""
    known, others = schema.get("properties"), schema.get("additionalProperties")
    yield from (f"{place}: no {name}" for name in schema.get("required", []) if name not in value)
    for name, item in value.items():
        if known and name in known:
            yield from broken(known[name], item, f"{place}.{name}")
        elif isinstance(others, dict):
            yield from broken(others, item, f"{place}.{name}")
        elif known and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{place}.{name}: no such key"
