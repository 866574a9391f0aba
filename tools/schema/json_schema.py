"""The JSON Schema of recipes for editors (draft 2020-12): completion, types and choices while typing.

It knows one file at a time, so nothing is required, and rules about several values are `tc3 check`'s alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.schema.schema import DEFAULT_MODEL, Schema, Shape

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "recipe.schema.json"
_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "list": "array",
    "dict": "object",
    "null": "null",
}


def json_schema(schema: Schema) -> str:
    """The schema of every recipe as JSON text: the models' keys of `model_config` together."""
    writer = _Writer()
    body = writer.of(schema.recipe(DEFAULT_MODEL))
    config = body["properties"]["model"]["properties"]["model_config"]["properties"]
    for name in sorted(schema.models):
        model = schema.recipe(name).keys["model"].keys["model_config"]  # type: ignore[index]
        for key, shape in (model.keys or {}).items():
            config.setdefault(key, writer.of(shape))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(schema.versions.items()))
    top = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "TeleChat3-MoE training recipe",
        "description": f"Made by `tc3 check --schema` from {versions}.",
    }
    return json.dumps({**top, **body, "$defs": writer.definitions}, indent=1) + "\n"


class _Writer:
    """Turns shapes into JSON Schema; typed sections and datasets, which stand in several places, become `$defs`."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def of(self, shape: Shape, name: str = "") -> dict[str, Any]:
        """The schema of one place; `name` is its key."""
        if shape.types is None and "data_loader" not in (shape.keys or {}):
            return self._inline(shape)
        name = shape.registry or name
        if name not in self.definitions:
            self.definitions[name] = self._inline(shape)
        return {"$ref": f"#/$defs/{name}"}

    def _inline(self, shape: Shape) -> dict[str, Any]:
        found = _value(shape.spec)
        if shape.keys is not None:
            found["properties"] = {key: self.of(inner, key) for key, inner in sorted(shape.keys.items())}
            found["additionalProperties"] = shape.opened
        if shape.types is not None:
            found.update(self._typed(shape))
        if shape.item is not None:
            found["items"] = self.of(shape.item)
        return found

    def _typed(self, shape: Shape) -> dict[str, Any]:
        """A mapping with `type`: the class named there says which keys go with it; `auto_register` allows any."""
        assert shape.types is not None
        cases = []
        for name, inner in sorted(shape.types.items()):
            keys = {"type": {}, **self._inline(inner).get("properties", {})}
            then = {"properties": keys, "additionalProperties": inner.opened}
            cases.append({"if": {"properties": {"type": {"const": name}}, "required": ["type"]}, "then": then})
        known = {"properties": {"type": {"enum": sorted(shape.types)}}, "allOf": cases}
        return {"if": {"required": ["auto_register"]}, "then": True, "else": known}


def _value(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "enum" in spec:
        found["enum"] = spec["enum"]
    elif "types" in spec:
        kinds = [_TYPES[name] for name in spec["types"] if not (name == "int" and "float" in spec["types"])]
        found["type"] = kinds[0] if len(kinds) == 1 else kinds
    names = {"min": "minimum", "most": "maximum", "below": "exclusiveMaximum"}
    if not {"items", "enum"} & spec.keys():
        found.update({names[key]: spec[key] for key in names if key in spec})
    if "pattern" in spec:
        found["pattern"] = f"^{spec['pattern']}$"
    if "items" in spec:
        found["items"] = {"type": _TYPES[spec["items"][0]], **{names[key]: spec[key] for key in names if key in spec}}
    if "enum_items" in spec:
        found["items"] = {"enum": spec["enum_items"]}
    if "length" in spec:
        found.update(minItems=spec["length"], maxItems=spec["length"])
    if "description" in spec:
        found["description"] = spec["description"]
    if spec.get("default") is not None:
        found["default"] = spec["default"]
    return found
