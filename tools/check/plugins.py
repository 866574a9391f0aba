"""Rules about the `plugins:` section: what each plugin's own reader refuses, and what does not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plugins.attention_balance import settings as attention_balance
from plugins.ep_overlap import settings as ep_overlap
from plugins.errors import RecipeError
from plugins.finite_loss import plan as finite_loss
from plugins.hierarchical_ep import settings as hierarchical_ep
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath
from tools.recipe.view import MODEL, PARALLEL, View
from tools.schema.converter import Built

_HIERARCHICAL, _OVERLAP = ("plugins", "hierarchical_ep"), ("plugins", "ep_overlap")
_FINITE = ("plugins", "finite_loss")
_BALANCE, _HELD_OUT = ("plugins", "attention_balance"), ("plugins", "held_out_loss")


def check_plugins(view: View, built: Built, found: Findings) -> None:
    """Every rule about plugins."""
    dispatch, overlap = view.get(_HIERARCHICAL), view.get(_OVERLAP)
    if dispatch not in (None, False):
        _hierarchical_ep(view, built, found)
    if overlap not in (None, False):
        if dispatch in (None, False):
            wrong = "it cuts what plugins.hierarchical_ep does, which is off"
            found.error(_OVERLAP, wrong, "switch plugins.hierarchical_ep on, or this off")
        _ep_overlap(view, built, found)
    if view.get(_BALANCE) not in (None, False):
        _attention_balance(view, found)
    if view.get(_HELD_OUT) not in (None, False) and (view.tp * view.pp * view.cp > 1 or view.accumulation > 1):
        wrong = "it evaluates data-parallel ranks alone, and the step as a whole"
        found.error(_HELD_OUT, wrong, "False with tensor, pipeline or context parallelism or accumulated gradients")
    if view.get(_FINITE, False) is not False:
        _settings(_FINITE, finite_loss.read, view, found)


def _hierarchical_ep(view: View, built: Built, found: Findings) -> None:
    experts = built.number("num_moe_experts")
    node = built.number("npu_nums_per_device", DEVICES_PER_NODE)
    if not experts:
        found.error(_HIERARCHICAL, "the model has no experts", "leave the plugin out")
        return
    try:
        hierarchical_ep.read(view.get(_HIERARCHICAL), view.ep, node, experts, rank=0)
    except RecipeError as error:
        _refused(_HIERARCHICAL, error, found)
    if view.ep == 1:
        wrong = "every device holds all experts: nothing to dispatch between devices"
        found.error(_HIERARCHICAL, wrong, "parallel_config.expert_parallel above 1, or leave the plugin out")
    dispatcher = (*MODEL, "moe_token_dispatcher_type")
    usual = hierarchical_ep.DEFAULT_DISPATCHER
    if view.get(dispatcher, usual) != usual:
        found.error(dispatcher, "plugins.hierarchical_ep takes this place", repr(usual))
    for key in ("print_expert_load", "enable_expert_relocation"):
        if built.fields.get(key):
            found.error((*MODEL, key), "plugins.hierarchical_ep has no expert relocation", "False")
    if view.cpu_classes and view.ep != view.devices:
        wrong = f"{view.ep} of {view.devices} workers share the experts"
        found.error((*PARALLEL, "expert_parallel"), wrong, f"device_target CPU needs {view.devices}: all workers")


def _ep_overlap(view: View, built: Built, found: Findings) -> None:
    try:
        chunks, _ = ep_overlap.read(view.get(_OVERLAP))
        if chunks != "auto":
            tokens = built.number("seq_length") // (view.tp * view.cp if view.parallel else 1)
            ep_overlap.chunk_slices(view.batch, max(tokens, 1), chunks)
    except RecipeError as error:
        _refused(_OVERLAP, error, found)


def _attention_balance(view: View, found: Findings) -> None:
    try:
        attention_balance.check(view.recipe)
    except RecipeError as error:
        _refused(_BALANCE, error, found)


def _settings(section: KeyPath, read: Callable[[Any], Any], view: View, found: Findings) -> None:
    """What the plugin's own reader refuses."""
    try:
        read(view.get(section))
    except RecipeError as error:
        _refused(section, error, found)


def _refused(section: KeyPath, error: RecipeError, found: Findings) -> None:
    """What a plugin's reader says, at the key that it names."""
    key, _, wrong = str(error).partition(": ")
    path = tuple(key.partition("[")[0].split("."))
    if path[:2] == section:
        found.error(path, wrong)
    else:
        found.error(section, str(error))
