"""This module adds facts that MindFormers' annotations leave out: the values that a key may take, and the types of the
keys in sections that MindFormers' code reads from dictionaries. The file values.yaml holds most of the added facts.
This module itself holds the facts that follow from names in other modules.

`of_plugin` returns the keys and values of a plugin, from the class of its settings.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from plugins.hierarchical_ep.settings import DISPATCHERS
from plugins.settings import Section
from plugins.yarn import plan as yarn
from tools.hardware.units import BOTH, LONG

Spec = dict[str, Any]
FILE = Path(__file__).with_suffix(".yaml")


def _section(shared: dict[str, Spec]) -> dict[str, Spec]:
    """Return key -> its values, for a section of the file whose lines may name several keys."""
    return {key: spec for keys, spec in shared.items() for key in keys.split(", ")}


_FACTS = yaml.load(FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
TOP: dict[str, Spec] = _section(_FACTS["top"])
SECTIONS: dict[str, dict[str, Spec]] = {name: _section(keys) for name, keys in _FACTS["sections"].items()}
TYPED: dict[str, dict[str, Spec]] = {name: _section(keys) for name, keys in _FACTS["typed"].items()}
MODEL: dict[str, Spec] = _section(_FACTS["model"])

_ROPE: Spec = {
    "enum": ["rope", "yarn", "none", "relative", "learned_absolute", "partial_rope"],
    "rule": "position_embedding",
}
_NO_SUCH = (
    f'the training graph has no positions of this kind; it has "rope", and "yarn" (by {yarn.KEY} for grouped queries)'
)
_SCALED = _ROPE | {
    "instead": {
        **dict.fromkeys(("linear", "dynamic", "llama3", "longrope", "proportional"), _NO_SUCH),
        "default": "leave rope_scaling out, because this is plain RoPE",
        yarn.ROPE_TYPES[yarn.TELECHAT3]: f'write "yarn", and {yarn.KEY}: {{attention_factor: {yarn.TELECHAT3}}}',
    }
}
SECTIONS["rope_scaling"] = {"type": _SCALED, "rope_type": _SCALED, **SECTIONS["rope_scaling"]}
_DTYPES = ("compute_dtype", "layernorm_compute_dtype", "params_dtype", "router_dense_type", "softmax_compute_dtype")
MODEL |= {key: {"enum": [*BOTH], "rule": "dtype"} for key in _DTYPES}
MODEL |= {
    "rotary_dtype": {"enum": [name for name in BOTH if name not in ("fp16", LONG["fp16"])], "rule": "rotary_fp16"},
    "position_embedding_type": _ROPE,
    "moe_token_dispatcher_type": {"enum": [*DISPATCHERS, "alltoall_zero_redundancy"], "rule": "dispatcher"},
}

_NAMES = {tuple: "list", NoneType: "null"}
_LIMITS = {"least": "min", "below": "below"}


def of_plugin(section: type[Section]) -> dict[str, Spec]:
    """Return the schema of a plugin's recipe keys, derived from the class of the plugin's settings."""
    keys: dict[str, Spec] = {}
    for each in fields(section):
        limits, spec = each.metadata, dict[str, Any](description=each.metadata["meaning"])
        kinds = [*section.kinds(each.name), *([NoneType] if limits.get("null") else [])]
        if "choices" in limits:
            spec["enum"] = [*limits["choices"], *limits.get("bare", ())[:1]]
        else:
            names = {_NAMES.get(kind, kind.__name__) for kind in kinds}
            spec["types"] = sorted({*names, "int"} if "float" in names else names)
        spec.update({_LIMITS[name]: limits[name] for name in _LIMITS if name in limits})
        if each.default is not MISSING and each.default != ():
            spec["default"] = each.default
        keys[each.name] = spec
    return keys
