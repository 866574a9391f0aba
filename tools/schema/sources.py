"""This module reads facts from MindFormers' sources for `tools.schema.extract`: the recipe keys that MindFormers reads,
its registered classes, its models, and the fields of TransformerConfig.

MindFormers passes most YAML sections around as dictionaries, so the code that reads them (`config.a.b`, `config["a"]`,
`config.get("a")`, `getattr(config, "a")`) is the only place that shows which keys exist.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.schema.schema import spec_of

Chain = tuple[str, ...]
_GETTERS = ("get", "pop", "get_value", "setdefault")
_METHODS = {*_GETTERS, "items", "keys", "values", "append", "update", "set_value", "to_dict", "to_diff_dict", "copy"}


def reads(files: Iterable[Path], roots: Iterable[str], of_self: bool = False) -> dict[str, set[str]]:
    """Return the configuration keys that the Python files `files` read from the variables `roots`, such as ``{"":
    {"seed", ...}, "checkpoint": {"prefix", ...}}``. If `of_self` is True, only variables that are attributes of `self`
    count.
    """
    found: dict[str, set[str]] = defaultdict(set)
    names = set(roots)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            chain = _chain(node)
            if chain and chain[0] == "self":
                chain = chain[1:]
            elif of_self:
                continue
            if chain and chain[0] in names:
                for depth, key in enumerate(chain[1:]):
                    if key in _METHODS:
                        break
                    found[".".join(chain[1 : depth + 1])].add(key)
    return dict(found)


def unread(names: Iterable[str], files: Iterable[Path]) -> list[str]:
    """Return, sorted, the names in `names` that no Python file in `files` reads as an attribute or contains as a
    string.
    """
    left = set(names)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                left.discard(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                left.discard(node.value)
    return sorted(left)


def _chain(node: ast.AST) -> Chain | None:
    """Return ``config.a.get("b")`` as ``("config", "a", "b")``; None for anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return _extend(node.value, node.attr)
    if isinstance(node, ast.Subscript):
        return _extend(node.value, _text(node.slice))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return _extend(node.comparators[0], _text(node.left))
    if isinstance(node, ast.Call) and node.args:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _GETTERS:
            return _extend(node.func.value, _text(node.args[0]))
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            return _extend(node.args[0], _text(node.args[1]))
    return None


def _extend(parent: ast.AST, key: str | None) -> Chain | None:
    chain = _chain(parent)
    return (*chain, *key.split(".")) if chain and key else None


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


_MEANT_OTHERWISE = {"untie_embeddings_and_output_weights"}  # read by its opposite, which `tools.check.arithmetic` knows
_LOSS_SCALES = ("AdaptiveLossScaleUpdateCell", "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell")


def registered(registry: str, site: Path) -> dict[str, Any]:
    """Return the arguments of each class that MindFormers has registered in `registry`, including MindSpore's classes
    for loss scaling.
    """
    from mindformers.tools.register import MindFormerRegister

    found = {}
    for name, cls in MindFormerRegister.registry.get(registry, {}).items():
        own = getattr(cls, "__module__", "").startswith("mindformers.")
        if inspect.isclass(cls) and (own or name in _LOSS_SCALES):
            found[name] = _arguments(cls, site)
    return dict(sorted(found.items()))


def _arguments(cls: type, site: Path) -> dict[str, Any]:
    """Return keys, types and defaults of a constructor; `open` when it passes unknown ones on."""
    keys: dict[str, Any] = {}
    opened = False
    for constructor in _constructors(cls):
        try:
            parameters = inspect.signature(constructor).parameters.values()
            source = inspect.getsource(constructor)
        except (TypeError, ValueError, OSError):
            continue
        for item in parameters:
            if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD):
                opened = opened or (item.kind == item.VAR_KEYWORD and _forwards(source, item.name, cls))
            elif item.name not in ("self", "cls"):
                default = None if item.default is item.empty else item.default
                keys[item.name] = spec_of(annotation=item.annotation, default=default)
    return {"keys": dict(sorted(keys.items())), "open": opened, "line": _where(cls, site)}


def _constructors(cls: type) -> list[Any]:
    """Return what takes a class's arguments: `__init__`, `__new__`, or those of the classes it chooses from."""
    from mindformers.core import optim

    chosen = {"AdamW": ("BasicAdamW", "FusedAdamW"), "PmaAdamW": ("BasicPmaAdamW", "FusedPmaAdamW")}.get(cls.__name__)
    if chosen and cls.__module__ == "mindformers.core.optim":
        return [getattr(optim, name).__init__ for name in chosen] + [cls.__new__]
    return [cls.__new__ if "__new__" in cls.__dict__ else cls.__init__]  # type: ignore[misc]


def _forwards(source: str, name: str, cls: type) -> bool:
    """Return whether `**kwargs` go on to somebody who may know more keys (dataset loaders do; others drop them)."""
    return f"**{name}" in source.split(":", 1)[1] and "dataloader" in cls.__module__ and "Megatron" not in cls.__name__


def _where(cls: type, site: Path) -> str:
    file = Path(inspect.getsourcefile(cls) or "")
    try:
        return f"{file.relative_to(site)}:{inspect.getsourcelines(cls)[1]}"
    except ValueError:
        return file.name


def handlers(site: Path) -> dict[str, Any]:
    """Return MindFormers' handlers that the key `handler` of HFDataLoader may name, with their arguments."""
    from mindformers.dataset import handler

    shared = reads([Path(handler.__file__).with_name("base_handler.py")], ["kwargs"])[""]
    found = {}
    for name, cls in vars(handler).items():
        if inspect.isclass(cls) and name.endswith("Handler") and not inspect.isabstract(cls):
            described = _arguments(cls, site)
            described["keys"].update({key: {} for key in sorted(shared) if key not in described["keys"]})
            found[name] = {**described, "open": False}
    return found


def models(site: Path) -> dict[str, Any]:
    """Return the keys of each graph-mode model, and how its converter maps them to fields of TransformerConfig."""
    from mindformers.parallel_core.config_converter import ConfigConverter
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    found = {}
    classes = MindFormerRegister.registry[MindFormerModuleType.CONFIG]
    for (kind, name), target in sorted(MindFormerRegister.search_names_map.items()):
        cls = classes.get(target)
        if kind != MindFormerModuleType.CONFIG or not target.startswith("mcore_") or name == target:
            continue
        if name.endswith("Config"):
            continue
        module = sys.modules[cls.__module__]
        defined = [item for item in vars(module).values() if inspect.isclass(item)]
        converters = [item for item in defined if issubclass(item, ConfigConverter) and item is not ConfigConverter]
        if converters:
            found[name.removeprefix("mcore_")] = _model(cls, converters[0], site)
    return found


def _model(cls: Any, converter: Any, site: Path) -> dict[str, Any]:
    from mindformers.models.model_config_utils import IGNORE_COMMON_HF_PARAMETER
    from mindformers.parallel_core.transformer_config_utils import ConfigLogHandler

    mla = inspect.signature(cls.convert_to_transformer_config).parameters["is_mla_model"].default
    rules = converter._get_final_mapping(ConfigLogHandler(), mla)
    mapping = {
        source: [[rule, None] if isinstance(rule, str) else [rule[0], rule[1].__name__] for rule in targets]
        for source, targets in rules.items()
        if targets != [source]
    }
    cells = _closure(cls.__init__)
    extra = cells.get("extra_ignore_param") or []
    signature = inspect.signature(cls.__init__).parameters
    defaults = {
        **(cells.get("mf_model_kwargs") or {}),
        **{name: item.default for name, item in signature.items() if item.default is not item.empty},
    }
    return {
        "line": _where(cls, site),
        "config_class": cls.__name__,
        "mla": mla,
        "ties": _ties(cls),
        "trains": bool(_training_texts(cls)),
        "fixed": fixed_fields(_training_texts(cls)),
        "defaults": {name: _plain(value) for name, value in sorted(defaults.items())},
        "ignored": sorted({name for name, _ in [*IGNORE_COMMON_HF_PARAMETER, *extra]}),
        "mapping": mapping,
    }


def _training_texts(config_class: Any) -> list[str]:
    """Return the sources of a model's training graph; none if MindFormers can only run inference with the model."""
    folder = Path(inspect.getsourcefile(config_class) or "").parent
    return [file.read_text(encoding="utf-8") for file in folder.glob("modeling_*_train.py")]


def _ties(config_class: Any) -> bool:
    """Return whether the training model shares embedding and output layer if `tie_word_embeddings` asks for it."""
    words = "share_embeddings_and_output_weights=self.config.tie_word_embeddings"
    return any(words in text for text in _training_texts(config_class))


def fixed_fields(texts: list[str]) -> dict[str, Any]:
    """Return the fields of TransformerConfig that the code of a model ignores, each with the value that the model uses
    instead. For example, a model that builds all layers by one call of `get_gpt_layer_local_spec` cannot mix dense and
    MoE layers.
    """
    calls = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    given: dict[str, dict[str, ast.expr]] = {}
    for call in calls:
        if isinstance(call.func, ast.Name):
            given[call.func.id] = {word.arg: word.value for word in call.keywords if word.arg}
    layer = given.get("get_gpt_layer_local_spec")
    if layer is None or "get_gpt_decoder_block_spec" in given:
        return {}
    found = {name: value.value for name, value in layer.items() if isinstance(value, ast.Constant)}
    found |= {"first_k_dense_replace": 0, "moe_layer_freq": 1}
    found |= {} if "num_experts" in layer else {"num_moe_experts": None}
    found |= {} if "multi_latent_attention" in layer else {"multi_latent_attention": False}
    return found | ({} if "mtp_block_spec" in given.get("GPTModel", {}) else {"mtp_num_layers": 0})


def _closure(function: Any) -> dict[str, Any]:
    """Return what the decorators of `__init__` hold: their lists of registered and ignored parameters."""
    found: dict[str, Any] = {}
    while function is not None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found.update({name: cell.cell_contents for name, cell in cells})
        if "ignore_info" in found:
            found["extra_ignore_param"] = found["ignore_info"]
        if "ignore_param_names" in found:
            found["extra_ignore_param"] = [(name, "") for name in found["ignore_param_names"]]
        function = getattr(function, "__wrapped__", None)
    return found


def transformer(site: Path) -> dict[str, Any]:
    """Return facts about MindFormers' TransformerConfig: its fields, the fields that no code reads, the keys that may
    be missing without a report by MindFormers, and the registered models.
    """
    from mindformers.parallel_core.transformer_config import MLATransformerConfig, TransformerConfig
    from mindformers.parallel_core.transformer_config_utils import DEFAULT_WHITE_KEY
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    plain, mla = _fields(TransformerConfig), _fields(MLATransformerConfig)
    known = [name.removeprefix("mcore_") for name in MindFormerRegister.registry[MindFormerModuleType.MODELS]]
    return {
        "fields": plain,
        "mla_fields": {name: spec for name, spec in mla.items() if plain.get(name) != spec},
        "unread": unread({*plain, *mla} - _MEANT_OTHERWISE, _training(site / "mindformers")),
        "not_reported": sorted(DEFAULT_WHITE_KEY),
        "architectures": sorted(known),
    }


def _training(package: Path) -> list[Path]:
    """Return MindFormers' sources without what no training runs, and without the list of all fields."""
    never = [package / name for name in ("modules", "pynative", "parallel_core/inference")]
    listing = package / "parallel_core" / "transformer_config_utils.py"
    files = (file for file in package.rglob("*.py") if file != listing)
    return [file for file in files if not any(file.is_relative_to(folder) for folder in never)]


def _fields(cls: Any) -> dict[str, Any]:
    """Return fields of a TransformerConfig class: type, default, description."""
    described = {}
    for item in dataclasses.fields(cls):
        default = None if item.default is dataclasses.MISSING else item.default
        spec = spec_of(annotation=item.type, default=default)
        spec["default"] = _plain(default)
        if item.metadata.get("description"):
            spec["description"] = item.metadata["description"]
        described[item.name] = spec
    return described


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)
