"""This module holds the rules about the `plugins:` section: settings that a plugin itself refuses, and settings of
plugins that exclude each other.

`check_dispatch` compares the collectives that the ranks of an EP group will call, before a launch, and finds out
whether all of these calls come to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from plugins.attention_balance import plan as attention_balance
from plugins.batch_ramp import plan as batch_ramp
from plugins.edited_classes import ALL, ARCHITECTURES, DENSE, edited
from plugins.ep_overlap import plan as ep_overlap
from plugins.ep_overlap.plan import FORWARD_STEPS, chunk_slices
from plugins.errors import RecipeError
from plugins.expert_balance import settings as expert_balance
from plugins.group_aux_loss import plan as group_aux_loss
from plugins.grouped_gradient import plan as grouped_gradient
from plugins.held_out_loss import plan as held_out_loss
from plugins.hierarchical_ep import settings as hierarchical_ep
from plugins.hierarchical_ep.plan import make_plan
from plugins.hierarchical_ep.programs import check_groups, check_programs, creation_orders, programs_of
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from plugins.hyper_connections import plan as hyper_connections
from plugins.lora import plan as lora
from plugins.mtp_documents import plan as mtp_documents
from plugins.operator_fusion import plan as operator_fusion
from plugins.output_biases import plan as output_biases
from plugins.packed_labels import plan as packed_labels
from plugins.spike_guard import plan as spike_guard
from plugins.yarn import plan as yarn
from tools.check.conflicts import KEYS as MINDFORMERS_OWN
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import LOADER, MODEL, PARALLEL, View
from tools.schema.converter import STREAMS, Built, convert
from tools.schema.schema import load_schema

_HIERARCHICAL, _OVERLAP = ("plugins", "hierarchical_ep"), ("plugins", "ep_overlap")
_EXPERTS, _GROUP_LOSS = ("plugins", "expert_balance"), ("plugins", "group_aux_loss")
_SPIKES, _PACKED = ("plugins", "spike_guard"), ("plugins", "packed_labels")
_BALANCE, _HELD_OUT = ("plugins", "attention_balance"), ("plugins", "held_out_loss")
_FUSION, _GRADIENT = ("plugins", "operator_fusion"), ("plugins", "grouped_gradient")
_MTP, _RAMP = ("plugins", "mtp_documents"), ("plugins", "batch_ramp")
_STREAMS = ("plugins", "hyper_connections")
_YARN, _LORA, _BIASES = ("plugins", "yarn"), ("plugins", "lora"), ("plugins", "output_biases")
_CLASSES = {  # of MindFormers' models that a plugin can change
    **dict.fromkeys((_HIERARCHICAL, _EXPERTS, _GROUP_LOSS, _MTP), ARCHITECTURES),
    **dict.fromkeys((_STREAMS, _LORA), ALL),
    **dict.fromkeys((_YARN, _BIASES), DENSE),
}


def check_plugins(view: View, built: Built, found: Findings) -> None:
    """Check every rule about the `plugins:` section, and add the violations to `found`."""

    def on(section: KeyPath) -> bool:
        return view.get(section) not in (None, False)

    _model_classes(view, built, on, found)
    if on(_HIERARCHICAL):
        _hierarchical_ep(view, built, found)
    if on(_OVERLAP):
        if not on(_HIERARCHICAL):
            wrong = "this plugin cuts the dispatch of plugins.hierarchical_ep, which is off"
            found.error(_OVERLAP, wrong, "switch plugins.hierarchical_ep on, or this plugin off")
        with _refusals(_OVERLAP, found):
            chunks, _ = ep_overlap.read(view.get(_OVERLAP))
            if chunks != "auto":
                tokens = built.number("seq_length") // (view.tp * view.cp if view.parallel else 1)
                chunk_slices(view.batch, max(tokens, 1), chunks)
    if on(_BALANCE):
        with _refusals(_BALANCE, found):
            attention_balance.check(view.recipe)
    _packed_labels(view, on(_PACKED), found)
    if on(_HELD_OUT):
        _held_out_loss(view, found)
    _of_the_model(view, built, on, found)
    if on(_RAMP):
        _batch_ramp(view, found)
    if on(_SPIKES):
        with _refusals(_SPIKES, found):
            spike_guard.check(view.recipe)
    if view.get(_FUSION, False) is not False:
        _operator_fusion(view, found)
    if view.get(_GRADIENT, False) is not False:
        _grouped_gradient(view, found)
    if on(_GROUP_LOSS) and _has_experts(_GROUP_LOSS, built, found):
        kind = built.fields.get("moe_router_load_balancing_type", group_aux_loss.DEFAULT_KIND)
        with _refusals((), found):
            group_aux_loss.Settings.read(view.get(_GROUP_LOSS))
            coefficient = built.fields.get("moe_aux_loss_coeff")
            group_aux_loss.check(kind, coefficient, view.ep, view.tp if view.parallel else 1)
    if on(_EXPERTS) and _has_experts(_EXPERTS, built, found):
        _expert_balance(view, built, found)


def _model_classes(view: View, built: Built, on: Callable[[KeyPath], bool], found: Findings) -> None:
    """Check that the plugins can change the class of the model; the CPU backend has classes of its own."""
    names = view.get((*MODEL, "architectures"))
    if view.cpu_classes or not names:
        return
    idle = [_STREAMS] * (built.number(STREAMS, 1) == 1)  # or refused, because the model has no experts
    idle += [_HIERARCHICAL, _EXPERTS, _GROUP_LOSS, _MTP] * (not built.number("num_moe_experts"))
    for section, classes in _CLASSES.items():
        if on(section) and section not in idle:
            with _refusals((), found):
                edited(names, ".".join(section), classes)


def _of_the_model(view: View, built: Built, on: Callable[[KeyPath], bool], found: Findings) -> None:
    """Check plugins that change what the model computes."""
    if on(_MTP):
        with _refusals(_MTP, found):
            mtp_documents.check(view.get(_MTP), view.recipe, built.number("mtp_num_layers"))
    if on(_YARN):
        _yarn(view, found)
    if on(_BIASES):
        with _refusals((), found):
            model = view.get(MODEL)
            output_biases.read(view.get(_BIASES), model if isinstance(model, dict) else {})
    if on(_STREAMS):
        with _refusals(_STREAMS, found):
            hyper_connections.check(view.get(_STREAMS), view.recipe)
    if on(_LORA):
        with _refusals(_LORA, found):
            lora.check(view.get(_LORA), view.recipe, built.fields)


def _batch_ramp(view: View, found: Findings) -> None:
    """Report the errors of the plugin's reader, and a run that ends before its batch has grown to its full size."""
    with _refusals((), found):
        batch_ramp.check(view.recipe)
        last, steps = view.ramp.stages[-1][0], view.ramp.steps_of(view.samples)
        if 0 < steps <= last:
            wrong = f"the ramp lasts until step {last:,}, but the run ends with step {steps:,}"
            right = f"write stages that end earlier, or train at least {view.ramp.samples_until(last + 1):,} samples"
            found.warning(
                (*_RAMP, "stages"), f"{wrong}, so that no step trains the full {view.global_batch:,} samples", right
            )


def _held_out_loss(view: View, found: Findings) -> None:
    for check in (held_out_loss.check_step, held_out_loss.check_files):
        with _refusals((), found):
            check(view.recipe)
    settings, _ = held_out_loss.Settings.look(view.get(_HELD_OUT))
    if settings:  # otherwise the schema's check names what is wrong with them
        with _refusals((), found):
            held_out_loss.check_samples(settings, view.global_batch)


def _has_experts(section: KeyPath, built: Built, found: Findings) -> bool:
    if not built.number("num_moe_experts"):
        found.error(section, "the model has no experts", "leave the plugin out")
    return bool(built.number("num_moe_experts"))


def _packed_labels(view: View, on: bool, found: Findings) -> None:
    """Check packed conversations: MindFormers shifts labels once too often, and packs streams in another way."""
    if on:
        loader = view.get(LOADER)
        with _refusals(_PACKED, found):
            packed_labels.read(view.get(_PACKED), loader=loader if isinstance(loader, dict) else {})
    elif view.packs and not view.flag((*LOADER, "streaming")):
        handlers = [item.get("type") for item in view.get((*LOADER, "handler")) if isinstance(item, dict)]
        path = (*LOADER, "handler", handlers.index(packed_labels.PACKING))
        wrong = (
            "packing shifts the labels twice, so that each token is trained to predict the token after the next, and "
            "the last token of a conversation to predict padding"
        )
        found.error(path, wrong, f"add {packed_labels.KEY}: {{}}", rule="packed_labels")


def _yarn(view: View, found: Findings) -> None:
    """Report the errors of the plugin's reader, and positions beyond the range to which YaRN stretches RoPE."""
    scaling = view.get((*MODEL, "rope_scaling"))
    if isinstance(scaling, dict) and scaling.get("type", scaling.get("rope_type")) not in ("rope", "yarn", None):
        return  # refused by name already
    with _refusals((), found):
        model = view.get(MODEL)
        reach = yarn.read(view.get(_YARN), model if isinstance(model, dict) else {})
        longest = reach.factor * reach.original
        if (length := view.number((*MODEL, "seq_length"), 0)) > longest:
            wrong = f"{reach.factor:g} x {reach.original} tokens are fewer than seq_length {length}"
            right = f"write at least {-(-length // reach.original)}, unless the weights were trained with this factor"
            found.warning((*MODEL, "rope_scaling", "factor"), wrong, right)


def _hierarchical_ep(view: View, built: Built, found: Findings) -> None:
    if not _has_experts(_HIERARCHICAL, built, found):
        return
    with _refusals(_HIERARCHICAL, found):
        node = built.number("npu_nums_per_device", DEVICES_PER_NODE)
        ranks = view.dp * view.tp
        hierarchical_ep.read(view.get(_HIERARCHICAL), view.ep, node, built.number("num_moe_experts"), 0, ranks)
    if view.ep == 1:
        wrong = "every device holds all experts, so that there is nothing to dispatch between devices"
        found.error(_HIERARCHICAL, wrong, "write parallel_config.expert_parallel above 1, or leave the plugin out")
    dispatcher = (*MODEL, "moe_token_dispatcher_type")
    usual = hierarchical_ep.DEFAULT_DISPATCHER
    if view.get(dispatcher, usual) != usual:
        found.error(dispatcher, "plugins.hierarchical_ep sets this key itself", f"write {usual!r}")
    for key in MINDFORMERS_OWN:
        if built.fields.get(key):
            found.error((*MODEL, key), "plugins.hierarchical_ep does not support expert relocation", "write False")
    if view.cpu_classes and view.ep != view.devices:
        wrong = f"only {view.ep} of the {view.devices} workers would share the experts"
        found.error(
            (*PARALLEL, "expert_parallel"), wrong, f"on CPU all workers must share them, so write {view.devices}"
        )


def _operator_fusion(view: View, found: Findings) -> None:
    where = "see docs/fusion.md"
    with _refusals((), found, "operator_fusion"):
        fusion = operator_fusion.check(view.recipe)
        if fusion and view.on_cpu and fusion.level != "off":
            found.note(_FUSION, "a CPU has no DVM kernels, so that nothing is fused here", where)
        elif fusion and fusion.level == "cube":
            found.warning((*_FUSION, "level"), "cube is experimental, and we have not run this level on an NPU", where)


def _grouped_gradient(view: View, found: Findings) -> None:
    where = "see docs/grouped-gradient.md"
    with _refusals((), found, "grouped_gradient"):
        if grouped_gradient.check(view.recipe):
            found.warning(_GRADIENT, "this plugin is experimental, and we have not run it on an NPU", where)
        else:
            found.note(_GRADIENT, "a CPU does not have this operator, so that nothing is replaced here", where)


def _expert_balance(view: View, built: Built, found: Findings) -> None:
    with _refusals(_EXPERTS, found):
        expert_balance.check(
            expert_balance.read(view.get(_EXPERTS)),
            counts=bool(built.fields.get("moe_router_enable_expert_bias")),
            expert_parallel=view.ep if view.devices > 1 else 1,
            optimizer=str(view.get(("optimizer", "type"))),
            experts=built.number("num_moe_experts"),
            sharded=not view.cpu_classes,
        )


@contextmanager
def _refusals(section: KeyPath, found: Findings, rule: str = "") -> Iterator[None]:
    """Yield each error of a plugin's reader, at the key that the error names."""
    try:
        yield
    except RecipeError as error:
        found.refusal(section, error, rule)


_BATCH, _SEQUENCE = 4, 8  # tokens of a rank in the trial, at least one for each chunk


def check_dispatch(recipe: Recipe) -> None:
    """Simulate the token dispatch of one MoE layer with `plugins.hierarchical_ep`, forward and backward, on all ranks
    of one EP group.

    All EP groups of a run are equal except for the numbers of their ranks, so one group is enough. The routing is
    random: groups, operations and their order do not depend on it, and split lists must agree for any routing.

    Raises:
        ClusterError: some ranks disagree or wait for each other; the message names the first of them.
    """
    plugins = recipe.get("plugins") or {}
    if not plugins.get("hierarchical_ep"):
        return
    view = View(recipe)
    fields = convert(view, load_schema()).fields
    settings = hierarchical_ep.read(
        plugins["hierarchical_ep"],
        view.ep,
        fields.get("npu_nums_per_device") or DEVICES_PER_NODE,
        fields["num_moe_experts"],
        rank=0,
    )
    topology, top_k = settings.topology, fields["moe_router_topk"]
    check_groups(creation_orders(topology))
    chunks, stride = ep_overlap.read(plugins["ep_overlap"]) if plugins.get("ep_overlap") else ((1, 1), 1)
    slices = chunk_slices(max(_BATCH, chunks[0]), max(_SEQUENCE, chunks[1]), chunks)
    rng = np.random.default_rng(0)
    plans = []
    for piece in slices:
        scores = rng.random((topology.ep, len(piece), topology.experts))
        plans.append(make_plan(settings.mode, topology, list(np.argsort(scores, axis=-1)[..., :top_k])))
    check_programs(programs_of(*plans, order=_order(plans[0], len(slices), stride)))


def _order(plan: Any, chunks: int, stride: int) -> list[tuple[int, int]]:
    """Return the order of issue, of the steps that communicate: (chunk, index among the plan's forward steps)."""
    names = [step.step for step in plan.forward]
    if len(names) == 2:  # one All-to-All each way
        names = ["dispatch.intra", "combine.intra"]
    issued = ep_overlap.issue_order(chunks, stride=stride) if chunks > 1 else [(0, step) for step in FORWARD_STEPS]
    return [(chunk, names.index(step)) for chunk, step in issued if step in names]
