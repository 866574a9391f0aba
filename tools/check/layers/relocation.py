"""MindFormers' own balancing of experts: where it refuses to start, and where it moves experts to a wrong place."""

from __future__ import annotations

from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath
from tools.recipe.view import MODEL, View
from tools.schema.converter import Built

KEYS = ("print_expert_load", "enable_expert_relocation")
_OPTIMIZER, _SHARDED = ("optimizer", "type"), ("parallel", "enable_parallel_optimizer")
_OURS = "leave it out; plugins.expert_balance does this"
# mindformers 1.9.0, moe_layer.py: the rows that a rank sends are sorted by np.argsort, which keeps no order among the
# experts that go to one device, and the slots that the router's map gives them are popped from a set
_MISPLACED = (
    "weights do not land where the router's map says: experts that go to one device are sent in the order of an "
    "unstable sort (192 experts on 8 devices: 100 of them misplaced, in 20 of 20 trials; 16 on 4: in 5 of 20, with "
    "AVX-512)"
)


def check_relocation(view: View, built: Built, found: Findings) -> None:
    """Rules of `print_expert_load` and `enable_expert_relocation`."""
    on = [(*MODEL, key) for key in KEYS if built.fields.get(key)]
    if not on or not built.number("num_moe_experts"):
        return
    dispatcher = built.fields.get("moe_token_dispatcher_type")
    if dispatcher != DEFAULT_DISPATCHER:
        for key in on:
            only = f"works with the {DEFAULT_DISPATCHER} dispatcher only, not {dispatcher}"
            found.error(key, only, rule="relocation")
    _refused_by_trainer(on[0], view, built, found)
    relocation = (*MODEL, "enable_expert_relocation")
    if relocation in on and built.number("num_moe_experts") > max(view.ep, 1):
        found.error(relocation, _MISPLACED, _OURS, rule="relocation_order")


def _refused_by_trainer(key: KeyPath, view: View, built: Built, found: Findings) -> None:
    """What MindFormers' trainer stops at; without checkpoints it starts, and what it trains is lost."""
    optimizer = view.get(_OPTIMIZER)
    if optimizer != "AdamW":
        found.error(key, f"works with AdamW only, not {optimizer}", _OURS, rule="relocation_adamw")
    if view.flag(_SHARDED):
        found.error(key, f"does not work with {'.'.join(_SHARDED)}", _OURS, rule="relocation_sharded")
    if built.number("moe_router_num_groups") > 1:
        found.error(key, "does not work with n_group above 1", _OURS, rule="relocation_groups")
    callbacks = view.get(("callbacks",)) or []
    if any(isinstance(each, dict) and each.get("type") == "CheckpointMonitor" for each in callbacks):
        found.error(key, "does not work with CheckpointMonitor", _OURS, rule="relocation_saves")
    else:
        found.warning(key, "without a CheckpointMonitor, which it refuses, this run saves nothing", _OURS)
