"""This module checks every key and value of a recipe against the schema of MindFormers' recipes. The module finds
unknown keys, values of a wrong type, and values that are not among the allowed choices.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from math import isfinite
from typing import Any

from plugins.settings import Section
from tools.recipe.findings import ERROR, Findings, refused
from tools.recipe.load import EXPONENT, KeyPath, Recipe, as_yaml, dotted, look
from tools.recipe.view import MODEL
from tools.schema.schema import Schema, Shape, fits, kind, load_schema, say

_SHOWN = 8  # choices listed in a message
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rotary_scaling_factor")


def check_keys(recipe: Recipe, schema: Schema, found: Findings) -> None:
    """Add a finding for each key and value of the recipe that the schema does not allow."""
    walk = _Walk(recipe, schema, found)
    walk.visit(recipe, walk.root, ())


def check_model(recipe: Recipe, schema: Schema, found: Findings) -> None:
    """Add an error for a recipe that names no model, or two different models: `model_type` decides which keys
    MindFormers reads, and `architectures` decides which class it builds.
    """
    kind, classes = (look(recipe, (*MODEL, key)) for key in ("model_type", "architectures"))
    folder = look(recipe, ("pretrained_model_dir",)) or look(recipe, ("model", "pretrained_model_dir"))
    known = sorted({schema.class_of(name) for name in schema.trained})
    for key, value, choices in (("model_type", kind, schema.trained), ("architectures", classes, known)):
        if value is None and not folder:  # of which MindFormers reads a config.json
            wrong = f"{key} is missing, by which MindFormers finds the class of the model"
            right = f"write one of {', '.join(choices)}{', in a list' if key != 'model_type' else ''}"
            found.error((*MODEL, key), wrong, right)
    if kind not in schema.trained or not isinstance(classes, list) or not classes:
        return
    name, right = str(classes[0]).removeprefix("Training"), schema.class_of(kind)
    if name != right and name in known:
        wrong = f"{name} is not the class of model_type {kind}, but MindFormers builds it all the same"
        found.error((*MODEL, "architectures"), wrong, f"write [{right}], or the model_type of {name}")


def refuse_keys(recipe: Recipe) -> None:
    """Raise an error for a recipe with a key or value that MindFormers does not know, or with a model that MindFormers
    cannot train. Commands call this function because they would compute wrong results for other recipes.

    Raises:
        RecipeError: the message describes the first such key or value, with file, line, key path and a right value, and
            gives the number of further ones.
    """
    schema = load_schema()
    found = Findings(recipe, schema.line)
    check_model(recipe, schema, found)
    if look(recipe, (*MODEL, "model_type")) is None and not found.found:
        wrong = "model_type is missing, which tc3 does not read in the config.json of pretrained_model_dir"
        found.error((*MODEL, "model_type"), wrong, "write it here, with the sizes of the model")
    check_keys(recipe, schema, found)
    if errors := [finding for finding in found.found if finding.severity == ERROR]:
        raise refused(errors)


class _Walk:
    """A `_Walk` is one walk over one recipe."""

    def __init__(self, recipe: Recipe, schema: Schema, found: Findings):
        self.recipe, self.schema, self.found = recipe, schema, found
        self.root = schema.recipe(schema.model_type(recipe))
        self.mla = schema.models[schema.model_type(recipe)]["mla"]

    def visit(self, value: Any, shape: Shape, path: KeyPath) -> None:
        """Check one value of a recipe and the values below it."""
        if shape.section is not None:
            return self._plugin(value, shape, shape.section, path)
        if not self._value(value, shape.spec, path):
            return
        if isinstance(value, dict) and shape.types is not None:
            self._typed(value, shape, path)
        elif isinstance(value, dict) and shape.keys is not None:
            self._mapping(value, shape, path)
        elif isinstance(value, list) and shape.item is not None:
            for index, item in enumerate(value):
                self.visit(item, shape.item, (*path, index))

    def _plugin(self, value: Any, shape: Shape, section: type[Section], path: KeyPath) -> None:
        """Report what the plugin's own reader refuses; `False` leaves it off."""
        for error in section.look(value)[1] if value is not False else ():
            name = error.key.rpartition(".")[2]
            kinds = (shape.keys or {}).get(name, Shape()).spec.get("types")
            right = _mended(value[name], kinds) if kinds and name in value else ""
            self.found.refusal(path, error, rule="operator_fusion" * (path[-1] == "operator_fusion"), right=right)

    def _mapping(self, value: dict[Any, Any], shape: Shape, path: KeyPath) -> None:
        assert shape.keys is not None
        for key, item in value.items():
            if key in shape.keys:
                self.visit(item, shape.keys[key], (*path, key))
            elif not shape.opened:
                self._unknown(key, shape, path)

    def _typed(self, value: dict[Any, Any], shape: Shape, path: KeyPath) -> None:
        """Check a mapping with `type`; a class of the user's own (`auto_register`) is not looked into."""
        assert shape.types is not None
        if "auto_register" in value:
            return
        name = value.get("type")
        if "type" not in value:
            self.found.error(
                path,
                "`type` is missing in this section",
                f"write one of {_listed(sorted(shape.types))}",
                source=shape.line,
            )
        elif not isinstance(name, str) or name not in shape.types:
            self.found.error(
                (*path, "type"),
                f"MindFormers does not know {name!r} in this section",
                _instead(name, shape.types),
                source=shape.line,
            )
        else:
            chosen = shape.types[name]
            self._mapping({key: item for key, item in value.items() if key != "type"}, chosen, path)

    def _unknown(self, key: Any, shape: Shape, path: KeyPath) -> None:
        """Report an unknown key: misspelt, misplaced, or invented."""
        here = f"in {dotted(path)}" if path else "at the top level"
        close = get_close_matches(str(key), list(shape.keys or {}), n=1, cutoff=0.75)
        places = _places(self.root, str(key))
        if path == MODEL and key in _YARN and not self.mla:  # this model's TransformerConfig has no such field
            right = "write the key inside rope_scaling"
        elif places:
            right = f"the key belongs in {' or '.join(places[:2])}"
        elif close:
            right = f"did you mean {close[0]!r}?"
        else:
            right = _instead(key, shape.keys or {}) or "remove the key, because no code reads it"
        self.found.error((*path, key), f"there is no key of this name {here}", right, source=shape.line)

    def _value(self, value: Any, spec: dict[str, Any], path: KeyPath) -> bool:
        """Return whether a value may stand here; notes why not."""
        problem = _problem(value, spec)
        if problem is None:
            return True
        note = self.found.warning if spec.get("severity") == "warning" else self.found.error
        note(path, problem[0], problem[1], rule=spec.get("rule", ""))
        return False


def _problem(value: Any, spec: dict[str, Any]) -> tuple[str, str] | None:
    """Return what is wrong with a value and what would be right; None when it is fine."""
    if "enum" in spec:
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in spec["enum"]):
            return None
        word = value if isinstance(value, str) else ""
        wrong = spec.get("wrong", {}).get(word, f"{value!r} is not one of the possible values")
        return wrong, spec.get("instead", {}).get(word) or _instead(value, spec["enum"])
    if "types" in spec and not fits(value, spec["types"]):
        return f"must be {say(spec['types'])}, not {say([kind(value)])} ({_short(value)})", _mended(
            value, spec["types"]
        )
    if isinstance(value, list):
        return _list_problem(value, spec)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _range_problem(value, spec)
    if isinstance(value, str) and "pattern" in spec and not re.fullmatch(spec["pattern"], value):
        return f"MindFormers cannot read {value!r}", f"write {spec['form']}"
    return None


def _list_problem(value: list[Any], spec: dict[str, Any]) -> tuple[str, str] | None:
    if "length" in spec and len(value) != spec["length"]:
        return f"must have {spec['length']} entries, not {len(value)}", ""
    for item in value:
        if "items" in spec and not fits(item, spec["items"]):
            return f"holds {_short(item)}, but each entry must be {say(spec['items'])}", ""
        if "enum_items" in spec and item not in spec["enum_items"]:
            wrong = spec.get("wrong", {}).get(item, f"MindFormers does not know {item!r}")
            return wrong, _instead(item, spec["enum_items"])
        if isinstance(item, (int, float)) and (problem := _range_problem(item, spec)):
            return problem
    return None


def _range_problem(value: float, spec: dict[str, Any]) -> tuple[str, str] | None:
    if "min" in spec and value < spec["min"]:
        return f"{value} is too small", f"write at least {spec['min']}"
    if "most" in spec and value > spec["most"]:
        return f"{value} is too large", f"write at most {spec['most']}"
    if "below" in spec and value >= spec["below"]:
        return f"{value} is too large", f"write a number below {spec['below']}"
    return None


def _mended(value: Any, kinds: list[str]) -> str:
    """Return the value that the author probably meant."""
    if isinstance(value, str) and "float" in kinds and EXPONENT.fullmatch(value):
        return f"write {as_yaml(value)}" if isfinite(float(value)) else "write a finite number"
    if isinstance(value, str) and kinds[0] in ("int", "float") and value.strip().lstrip("-").isdigit():
        return f"write {value.strip()} without quotes"
    if isinstance(value, str) and "bool" in kinds and value.lower() in ("true", "false"):
        return f"write {value.capitalize()} without quotes"
    return ""


def _instead(word: Any, known: Any) -> str:
    """Return a close choice, or the list of choices when it is short."""
    names = [str(name) for name in known]
    close = get_close_matches(str(word), names, n=1, cutoff=0.6)
    close = close or [name for name in names if name.endswith(f"_{word}")]
    if len(close) == 1:
        return f"did you mean {close[0]!r}?"
    return f"the possible values are {_listed(list(known))}" if len(names) <= _SHOWN else ""


def _listed(names: list[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:_SHOWN])
    return shown + (", ..." if len(names) > _SHOWN else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _places(shape: Shape, key: str, path: KeyPath = (), depth: int = 0) -> list[str]:
    """Return sections where `key` would be known, shallowest first."""
    if depth > 3:
        return []
    here = [dotted(path) or "the top level"] if key in (shape.keys or {}) else []
    for name, inner in (shape.keys or {}).items():
        if name in ("eval_dataset", "eval_dataset_task", "train_dataset_task", "plugins"):
            continue
        here += _places(inner, key, (*path, name), depth + 1)
    return here
