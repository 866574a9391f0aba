"""Whether every key of the recipe reaches the model that MindFormers builds, with the value that was written."""

from __future__ import annotations

from typing import Any

from tools.hardware.units import same_dtype
from tools.recipe.findings import Findings
from tools.recipe.override import dotted
from tools.recipe.view import MODEL, RUNNER, View
from tools.schema.converter import Built, _apply
from tools.schema.schema import Schema

_FUNCTIONS = {"moe_router_score_function": "is_use_gated_sigmoid", "moe_token_drop_policy": "get_drop_policy"}


def check_arrival(view: View, schema: Schema, built: Built, found: Findings) -> None:
    """Report keys that MindFormers drops or overwrites."""
    model = schema.model_type(view.recipe)
    known = schema.recipe(model).keys["model"].keys["model_config"].keys  # type: ignore[index]
    for path, target in built.conflicts:
        if path[:-1] == MODEL and path[-1] not in (known or {}):
            continue  # an unknown key: reported as such
        other = built.origin.get(target)
        wrong = f"sets TransformerConfig.{target}, which {dotted(other) if other else 'a default'} sets too"
        if not view.has(path):
            path = other or path
        found.error(path, f"{wrong}; MindFormers refuses both", "keep one of them", rule="converter_conflict")
    for key in built.unread:
        _unread(key, view, schema, built, found)
    _inert(view, schema, built, found)
    batch = view.get((*MODEL, "batch_size"))
    if type(batch) is int and batch != view.batch and view.has((*RUNNER, "batch_size")):
        right = f"write {view.batch}, or an anchor of that key"
        found.error((*MODEL, "batch_size"), f"{batch} is replaced by runner_config.batch_size {view.batch}", right)
    if model.startswith("telechat3") and view.get(("model", "model_config", "vocab_size")) is None:
        found.warning(MODEL, "has no vocab_size: MindFormers takes 131072", "write it")


def _unread(key: str, view: View, schema: Schema, built: Built, found: Findings) -> None:
    """One key that no rule maps: harmless only where what was meant by it is there anyway."""
    model, path = schema.model_type(view.recipe), (*MODEL, key)
    ignored = key in schema.models[model]["ignored"]
    value, target = view.get(path), schema.intended.get(key)
    rule = "config_ignored" if ignored else "converter_unmapped"
    if target is None or target not in built.fields:
        if not ignored and key in schema.models[model]["defaults"]:
            found.warning(path, "reaches no field of TransformerConfig: MindFormers does not use it", rule=rule)
        return
    arrived = built.fields[target]
    if same(_apply(_FUNCTIONS.get(target), value), arrived):
        if value and not ignored and not view.has((*MODEL, target)):  # what is off needs no second spelling
            wrong = f"does not reach the model ({model} has no rule for it); {target} is {arrived} only by default"
            found.warning(path, wrong, f"write {target}: {arrived} as well", rule=rule)
        return
    wrong = f"{value!r} does not reach the model: MindFormers builds it with {target} = {arrived!r}"
    found.error(path, wrong, f"write {target}: {value}", rule=rule)


def _inert(view: View, schema: Schema, built: Built, found: Findings) -> None:
    """Keys that ask for something, and arrive in a field of which nothing becomes: no code that trains reads it."""
    transformer = schema.data["transformer"]
    defaults = {**transformer["fields"], **transformer["mla_fields"]}
    for name in transformer["unread"]:
        path, value = built.origin.get(name), built.fields.get(name)
        if path is not None and view.has(path) and value and value != defaults[name]["default"]:
            wrong = f"has no effect: nothing that trains reads TransformerConfig.{name}"
            found.warning(path, wrong, "leave it out", rule="inert")


def same(written: Any, arrived: Any) -> bool:
    """Equality as a recipe's author sees it: 1 is 1.0, bf16 is bfloat16, a tuple is a list."""
    if isinstance(written, (list, tuple)) and isinstance(arrived, (list, tuple)):
        return len(written) == len(arrived) and all(same(*pair) for pair in zip(written, arrived, strict=True))
    if isinstance(written, str) and isinstance(arrived, str):
        return same_dtype(written, arrived)
    return bool(written == arrived)
