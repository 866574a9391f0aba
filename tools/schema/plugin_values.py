"""Which values the keys of each plugin's section may take; the plugin's own reader says the rest."""

from __future__ import annotations

from plugins.attention_balance.samples.cost import UNITS
from plugins.expert_balance.settings import METHODS
from plugins.hierarchical_ep.plan import MODES
from plugins.operator_fusion.plan import LEVELS
from tools.schema.values import Spec

_FROM_0: Spec = {"types": ["int"], "min": 0}
_FROM_1: Spec = {"types": ["int"], "min": 1}
_NUMBER: Spec = {"types": ["float", "int"], "min": 0}
_TEXT: Spec = {"types": ["str"]}

PLUGINS: dict[str, dict[str, Spec]] = {
    "finite_loss": {"stop_after": _FROM_1},
    "packed_labels": {},
    "held_out_loss": {"data_path": _TEXT, "samples": _FROM_1, "every": _FROM_1},
    "hierarchical_ep": {"mode": {**_TEXT, "enum": ["auto", *MODES]}, "hardware": _TEXT},
    "attention_balance": {
        "window": _FROM_1,
        "per_pair": _NUMBER,
        "per_token": _NUMBER,
        "unit": {"enum": list(UNITS)},
    },
    "spike_guard": {
        "window": {"types": ["int"], "min": 4},
        "threshold": _NUMBER,
        "skip": _FROM_1,
        "rollbacks": _FROM_1,
        "skipped": {"types": ["list", "null"]},
    },
    "ep_overlap": {"chunks": {"types": ["list", "str"]}, "stride": _FROM_0},
    "expert_balance": {
        "every": _FROM_0,
        "method": {"enum": list(METHODS)},
        "moves": {"types": ["int", "null"], "min": 2},
        "gate": _NUMBER,
        "memory": _NUMBER,
        "record": {"types": ["bool"]},
    },
    "grouped_gradient": {},
    "operator_fusion": {
        "level": {"enum": [*LEVELS, False], "rule": "operator_fusion"},  # YAML reads a bare off as False
        "disable": {"types": ["list"], "items": ["str"]},
    },
    "straggler_probe": {"every": _FROM_1, "work": _FROM_1},
}
