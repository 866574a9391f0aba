"""This module builds the tree of all keys and values that a recipe may contain, from `schema.json` (MindFormers' keys)
and `tools.schema.values` (facts that `schema.json` leaves out).

`json_schema` converts this tree to a JSON schema (draft 2020-12), with which editors offer completion, types and
choices while a user types. An editor reads only one file at a time, so the JSON schema requires no key, and only `tc3
check` has rules that concern several values.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from plugins import ADAPTERS
from plugins.settings import Section, settings_of
from tools.schema import values
from tools.schema.values import Spec

NAMES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", tuple: "list", dict: "dict"}
WORDS = {
    "bool": "True or False",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "null": "nothing",
}


def spec_of(annotation: Any = None, default: Any = None) -> dict[str, Any]:
    """Return the allowed types of an argument, such as ``{"types": ["int", "null"]}``; return an empty mapping if any
    value is allowed. If the default value has another type than the annotation (as in MindFormers' `x: int = None`),
    both types are allowed.
    """
    kinds = _kinds(annotation)
    if kinds is None:
        kinds = {NAMES[type(default)]} if type(default) in NAMES else None
    if not kinds:
        return {}
    if default is None:
        kinds.add("null")
    elif type(default) in NAMES:
        kinds.add(NAMES[type(default)])
    return {"types": sorted(kinds)}


def _kinds(annotation: Any) -> set[str] | None:
    """Return kinds of an annotation; None when it says nothing, or names a class that YAML cannot write."""
    if annotation in (None, Any) or isinstance(annotation, str) or annotation is type.__class__:
        return None
    if annotation is type(None):
        return {"null"}
    if annotation in NAMES:
        return {NAMES[annotation]}
    origin = typing.get_origin(annotation)
    if origin in NAMES:
        return {NAMES[origin]}
    if origin in (typing.Union, types.UnionType):
        parts = [_kinds(part) for part in typing.get_args(annotation)]
        known = [part for part in parts if part]
        return set().union(*known) if known else None
    return None


def kind(value: Any) -> str:
    """Return the kind of a YAML value, such as "int" or "list"."""
    if isinstance(value, dict):
        return "dict"
    return "null" if value is None else NAMES.get(type(value), type(value).__name__)


def fits(value: Any, kinds: list[str]) -> bool:
    """Return whether a YAML value has one of the kinds (types) in `kinds`. An integer also has the kind of
    floating-point numbers.
    """
    found = kind(value)
    return found in kinds or (found == "int" and "float" in kinds)


def say(kinds: list[str]) -> str:
    """Return kinds of YAML values, such as ``["int", "null"]``, in words for messages."""
    return " or ".join(WORDS.get(name, name) for name in kinds if name != "null") or "nothing"


FILE = Path(__file__).with_name("schema.json")
DEFAULT_MODEL = "telechat3_moe"
_MAPPING: Spec = {"types": ["dict"]}
_INJECTED = ("parallel_config", "init_method", "output_layer_init_method", "activation_func", "MAX_PATTERN_LEN")

_HF_METHODS = ("rename_column", "remove_columns", "sort", "shuffle", "flatten", "take")  # of datasets.Dataset
_TOKENIZER = (
    *("type", "auto_register", "vocab_file", "tokenizer_file", "add_bos_token", "add_eos_token", "bos_token"),
    *("eos_token", "pad_token", "unk_token", "model_max_length"),
)


@dataclass(frozen=True)
class Shape:
    """A `Shape` describes what is allowed at one key of a recipe: a value, a mapping (whose keys may depend on its
    `type`), or a list.
    """

    spec: Spec = field(default_factory=dict)
    keys: dict[str, Shape] | None = None  # of a mapping; None when it is no mapping, or when anything goes
    types: dict[str, Shape] | None = None  # by the value of `type`
    item: Shape | None = None  # of each entry of a list
    opened: bool = False  # other keys are allowed too
    line: str = ""  # the MindFormers line that says so
    registry: str = ""  # what `type` names, in words
    section: type[Section] | None = None  # of a plugin: who reads it


class Schema:
    """A `Schema` gives access to the content of `schema.json`."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.versions: dict[str, str] = data["versions"]
        self.models: dict[str, Any] = data["models"]
        self.intended: dict[str, str] = data["intended"]
        self.not_reported = set(data["transformer"]["not_reported"])
        self._shapes: dict[str, Shape] = {}

    def line(self, rule: str) -> str:
        """Return the line of MindFormers' sources on which a rule of `tc3 check` is based, such as
        ``mindformers/...py:123``; return "" if no rule is given.
        """
        return self.data["lines"][rule] if rule else ""

    def model_type(self, recipe: dict[str, Any]) -> str:
        """Return the recipe's `model_type`; if MindFormers does not know this type, return the type of
        TeleChat3-MoE.
        """
        model = recipe.get("model")
        config = model.get("model_config") if isinstance(model, dict) else None
        name = config.get("model_type") if isinstance(config, dict) else None
        return name if isinstance(name, str) and name in self.models else DEFAULT_MODEL

    @property
    def trained(self) -> list[str]:
        """Return the model types that MindFormers can train."""
        return [name for name, model in sorted(self.models.items()) if model["trains"]]

    def class_of(self, model: str) -> str:
        """Return the name of the class that trains `model`, as recipes name it under `architectures`."""
        return str(self.models[model]["config_class"]).removesuffix("Config") + "ForCausalLM"

    def fields(self, model: str) -> dict[str, Spec]:
        """Return the fields of the TransformerConfig class that `model` builds."""
        transformer = self.data["transformer"]
        extra = transformer["mla_fields"] if self.models[model]["mla"] else {}
        return {**transformer["fields"], **extra}

    def targets(self, model: str, key: str) -> list[tuple[str, str | None]]:
        """Return the fields of the TransformerConfig that MindFormers sets from the recipe's `key`, as pairs (field,
        function that converts the value).
        """
        rules = self.models[model]["mapping"].get(key)
        if rules is not None:
            return [(target, function) for target, function in rules]
        return [(key, None)] if key in self.fields(model) else []

    def recipe(self, model: str) -> Shape:
        """Return the tree of all keys and values that a recipe of one model may contain."""
        if model not in self._shapes:
            self._shapes[model] = self._recipe(model)
        return self._shapes[model]

    def _recipe(self, model: str) -> Shape:
        keys = self._keys("", values.TOP)
        for name in (
            *("runner_config", "parallel_config", "recompute_config", "swap_config", "checkpoint", "model"),
            *("context", "parallel", "monitor_config", "tensorboard"),
        ):
            keys[name] = self._section(name)
        lr = self._typed("lr_schedule")
        grouped = replace(self._typed("lr_schedule", {"params": Shape({"types": ["list"]})}), registry="grouped_lr")
        callbacks = Shape({"types": ["list"]}, item=self._typed("callbacks"))
        keys["grouped_lr_schedule"] = Shape(
            _MAPPING, {"default": lr, "grouped": Shape({"types": ["list"]}, item=grouped)}
        )
        keys.update(callbacks=callbacks, eval_callbacks=callbacks, lr_schedule=lr, optimizer=self._typed("optimizer"))
        keys.update(trainer=self._typed("trainer"), runner_wrapper=self._wrapper())
        dataset = self._dataset()
        keys.update(train_dataset=dataset, eval_dataset=dataset)
        tasks = self._typed("dataset_task", {"dataset_config": dataset})
        only = {"dataset_config": dataset}
        # a task takes everything from `dataset_config`, which the trainer sets; its other arguments do nothing
        task = replace(tasks, types={name: replace(shape, keys=only) for name, shape in (tasks.types or {}).items()})
        keys.update(train_dataset_task=task, eval_dataset_task=task)
        assert keys["model"].keys is not None
        keys["model"].keys["model_config"] = self._model(model)
        plugins = {name: _plugin(name, module) for name, module in ADAPTERS.items()}
        keys["plugins"] = Shape({"types": ["dict", "null"]}, plugins)
        keys["base_config"] = Shape({"types": ["list", "str"]})
        return Shape(_MAPPING, keys, line=self.line("template_key"))

    def _keys(self, section: str, extra: dict[str, Spec]) -> dict[str, Shape]:
        """Return keys of one section, each with what MindFormers and `values` know of its values."""
        return {key: Shape(self._spec(spec, extra.get(key))) for key, spec in self.data["sections"][section].items()}

    def _spec(self, *parts: Spec | None) -> Spec:
        spec: Spec = {}
        for part in parts:
            if part and ("enum" in part or "choices" in part):
                spec = {key: value for key, value in spec.items() if key not in ("types", "enum")}
            spec.update(part or {})
        if "choices" in spec:
            spec.setdefault("enum", self.data["choices"][spec["choices"]])
        return {key: value for key, value in spec.items() if key != "choices"}

    def _section(self, name: str) -> Shape:
        keys = self._keys(name, values.SECTIONS.get(name, {}))
        for inner in self.data["sections"]:
            parent, dot, key = inner.rpartition(".")
            if dot and parent == name:
                keys[key] = self._section(inner)
        closed = name in ("runner_config", "parallel_config", "recompute_config", "swap_config", "monitor_config")
        rule = "template_key" if closed else "context_excluded" if name == "context" else ""
        may_be_null = ("tensorboard", "checkpoint", "monitor_config", "swap_config", "monitor_config.health_checkpoint")
        return Shape({"types": ["dict", "null"]} if name in may_be_null else _MAPPING, keys, line=self.line(rule))

    def _typed(self, section: str, children: dict[str, Shape] | None = None) -> Shape:
        """Return a mapping whose `type` names a class, whose arguments are its other keys."""
        extra = values.TYPED.get(section, {})
        types = {}
        for name, described in self.data["typed"][section].items():
            keys = {key: Shape(self._spec(spec, extra.get(key))) for key, spec in described["keys"].items()}
            if section == "lr_schedule":
                keys["warmup_epochs"] = Shape(extra["warmup_epochs"])  # read by the trainer
            types[name] = Shape(
                _MAPPING, {**keys, **(children or {})}, opened=described["open"], line=described["line"]
            )
        return Shape(_MAPPING, types=types, registry=section, line=self.line("registry"))

    def _wrapper(self) -> Shape:
        """Return runner_wrapper, whose loss scale may be a number or a class."""
        scales = self._typed("runner_wrapper")
        return self._typed(
            "runner_wrapper",
            {"scale_sense": Shape({"types": ["dict", "float"]}, types=scales.types, registry="scale_sense")},
        )

    def _dataset(self) -> Shape:
        """Return a dataset section; with MindFormers' Megatron loader its `config` is closed too."""
        gpt = Shape(_MAPPING, self._keys("gpt_dataset", values.SECTIONS["gpt_dataset"]))
        loaders = self._typed("data_loader")
        assert loaders.types is not None
        megatron, hugging = (loaders.types[name].keys for name in ("BlendedMegatronDatasetDataLoader", "HFDataLoader"))
        assert megatron is not None and hugging is not None
        megatron["config"] = gpt
        hugging.update(self._keys("hf_loader", values.SECTIONS["hf_loader"]))
        hugging["handler"] = Shape({"types": ["list", "null"]}, item=self._handler())
        loaders.types["HFDataLoader"] = replace(loaders.types["HFDataLoader"], opened=False)
        keys = self._keys("train_dataset", values.SECTIONS["train_dataset"])
        return Shape(_MAPPING, {**keys, "data_loader": loaders})

    def _handler(self) -> Shape:
        """Return one entry of HFDataLoader's `handler`; a method of `datasets.Dataset` has arguments of its own."""
        known, types = values.SECTIONS["handlers"], {}
        tokenizer = {**self._keys("tokenizer", values.SECTIONS["tokenizer"]), **dict.fromkeys(_TOKENIZER, Shape())}
        for name, described in self.data["handlers"].items():
            keys = {key: Shape(self._spec(spec, known.get(key))) for key, spec in described["keys"].items()}
            keys["tokenizer"] = Shape({"types": ["dict", "null"]}, tokenizer)
            types[name] = Shape(_MAPPING, keys, line=described["line"])
        types.update({name: Shape(_MAPPING, opened=True, keys={}) for name in _HF_METHODS})
        return Shape(_MAPPING, types=types, registry="handler", line=self.line("registry"))

    def _model(self, model: str) -> Shape:
        """Return keys of model.model_config: those that reach a field, and those of the model's config class."""
        described, fields = self.models[model], self.fields(model)
        elsewhere = {*self.data["sections"]["parallel_config"], *self.data["sections"]["recompute_config"]}
        elsewhere |= {*_INJECTED}
        names = {*fields, *described["mapping"], *described["defaults"], *self.not_reported, *described["ignored"]}
        keys = {}
        for key in sorted(names - elsewhere):
            plain = [fields[target] for target, function in self.targets(model, key) if function is None]
            spec = self._spec(
                plain[0] if plain else spec_of(default=described["defaults"].get(key)), values.MODEL.get(key)
            )
            if key in described["ignored"] and "types" in spec:  # a public config.json has null for what is off
                spec["types"] = sorted({*spec["types"], "null"})
            keys[key] = Shape(spec)
        registered, classes = self.data["transformer"]["architectures"], {self.class_of(name) for name in self.trained}
        known = [name for name in registered if name.removeprefix("Training") in classes]
        wrong = {name: f"MindFormers' training graph has no class {name}" for name in {*registered} - {*known}}
        architectures = {"types": ["list"], "items": ["str"], "enum_items": known, "wrong": wrong}
        scaling = {key: Shape(spec) for key, spec in values.SECTIONS["rope_scaling"].items()}
        keys["rope_scaling"] = Shape({"types": ["dict", "null"]}, scaling)
        keys["architectures"] = Shape(architectures)
        keys["model_type"] = Shape(self._model_types())
        return Shape(_MAPPING, keys, line=self.line("converter_unmapped"))

    def _model_types(self) -> Spec:
        """Return the model types that MindFormers trains; of those that it only runs, what is wrong with them."""
        wrong, instead = {}, {}
        for name in self.models.keys() - set(self.trained):
            has_experts = any(["num_moe_experts", None] in rules for rules in self.models[name]["mapping"].values())
            near = "telechat3_moe (with multi_latent_attention: False)" if has_experts else "telechat3"
            wrong[name] = f"MindFormers only runs inference with {name}, and refuses to train it"
            instead[name] = f"write a model_type that it trains, such as {near}, and the same model under architectures"
        return {"enum": self.trained, "wrong": wrong, "instead": instead}


def _plugin(name: str, module: str) -> Shape:
    """Return a plugin's settings; `False` leaves it off. Plugins that are not ours are not looked into."""
    section = settings_of(name) if module.startswith("plugins.") else None
    keys = {key: Shape(spec) for key, spec in values.of_plugin(section).items()} if section else {}
    return Shape({"types": ["bool", "dict", "null"]}, keys or None, opened=not keys, section=section)


@lru_cache(maxsize=1)
def load_schema() -> Schema:
    """Return the schema that the repository's schema.json holds."""
    return Schema(json.loads(FILE.read_text(encoding="utf-8")))


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
    """Return the schema of every recipe as JSON text. In the schema of every recipe, `model_config` may have the keys
    of any model.
    """
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
    """A `_Writer` turns shapes into JSON Schema; what stands in several places becomes `$defs`."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def of(self, shape: Shape, name: str = "") -> dict[str, Any]:
        """Return the JSON schema of the values that are allowed at the key `name` of a recipe."""
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
        """Return a mapping with `type`, whose class says the other keys; `auto_register` allows any."""
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
