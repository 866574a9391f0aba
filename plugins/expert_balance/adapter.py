"""This module enables `plugins.expert_balance` of a recipe: it records the experts' loads, and moves experts between
ranks of an EP group.
"""

from __future__ import annotations

import importlib

from mindformers.parallel_core.transformer_config import TransformerConfig
from mindformers.parallel_core.utils.spec_utils import ModuleSpec

from plugins import telechat3_moe
from plugins.batch_ramp.plan import Ramp, division_of, ramp_of
from plugins.expert_balance.settings import KEY, Settings, check, read
from plugins.semi_auto_cpu.chosen import chosen


def enable(config, settings) -> None:
    """Make the model's experts movable between ranks and add the callback that moves them; call this after
    `plugins.hierarchical_ep` is enabled, because that plugin provides the experts.

    Raises:
        RecipeError: the settings are impossible, or the recipe has nothing to move or count.
    """
    ours = read(settings)
    sharded = config.context.device_target != "CPU" or chosen(config)
    check(
        ours,
        counts=config.model.model_config.get("moe_router_enable_expert_bias", True),
        expert_parallel=config.parallel_config.expert_parallel if config.use_parallel else 1,
        optimizer=config.optimizer.type,
        experts=config.model.model_config.n_routed_experts,
        sharded=sharded,
    )
    telechat3_moe.spare(KEY, (".placement",))
    if sharded:
        _in_graph(config, ours)
    else:
        _on_cpu(config, ours)


def _on_cpu(config, ours: Settings) -> None:
    from plugins.cpu_backend import transport
    from plugins.expert_balance.placed import PlacedGroupedExperts, PlacedRoutedExperts
    from plugins.hierarchical_ep import adapter as hierarchical_ep

    importlib.import_module("plugins.expert_balance.callback")
    devices = config.parallel_config.expert_parallel if config.use_parallel else 1
    if config.use_parallel:
        transport.connect()
    if devices > 1 and ours.spare:
        from plugins.expert_balance.copied import CopiedRoutedExperts

        params = {"settings": hierarchical_ep.current(), "spare": ours.spare}
        telechat3_moe.use_experts(ModuleSpec(CopiedRoutedExperts, params=params))
    elif devices > 1:
        telechat3_moe.use_experts(ModuleSpec(PlacedRoutedExperts, params={"settings": hierarchical_ep.current()}))
    else:
        telechat3_moe.use_experts(PlacedGroupedExperts)
    _add_callback(config, ours, "ExpertBalance", devices, _rows(config))


def _in_graph(config, ours: Settings) -> None:
    from plugins.expert_balance import graph

    graph.use_placed_experts(config)
    devices = config.parallel_config.expert_parallel if config.use_parallel else 1
    _add_callback(config, ours, graph.CALLBACK, devices, _counted(config))


def _counted(config) -> Ramp:
    """Return as a `Ramp` the number of samples in a micro-batch of all data-parallel ranks. In a model that is not
    split a step is one batch, which grows with `plugins.batch_ramp`.
    """
    division = division_of(config)
    full = division.ranks * division.micro
    return ramp_of(config, full) if division.whole else Ramp((), full)


def _rows(config) -> Ramp:
    """Return as a `Ramp` the number of samples in a rank's step, in every stage of `plugins.batch_ramp`, for a step
    that is one batch.
    """
    division = division_of(config)
    stages = ramp_of(config, division.full).stages
    return Ramp(tuple((end, batch // division.ranks) for end, batch in stages), config.runner_config.batch_size)


def _add_callback(config, ours: Settings, kind: str, devices: int, samples: Ramp) -> None:
    """Add the callback of this `kind`, for EP groups of `devices` ranks; `samples` says how many samples of a
    micro-batch a rank counts.
    """
    model, checkpoint = config.model.model_config, config.get("checkpoint") or {}
    config.callbacks.append({
        "type": kind,
        "settings": ours,
        "devices": devices,
        "nodes": _nodes(config),
        "rate": _rate(model),
        "samples": samples,
        "batches": ramp_of(config, division_of(config).full),
        "pairs": model.seq_length * model.num_experts_per_tok,
        "layers": model.num_hidden_layers,
        "run_dir": config.output_dir,
        "checkpoint": checkpoint.get("load_path") or None,
        "save_path": checkpoint.get("save_path"),
    })  # fmt: skip


def _rate(model) -> float:
    """Return the amount by which the routers' biases move in a step, under either of MindFormers' two keys."""
    written = (model.get(name) for name in ("moe_router_bias_update_rate", "topk_bias_update_rate"))
    return next((rate for rate in written if rate is not None), TransformerConfig.moe_router_bias_update_rate)


def _nodes(config) -> int:
    """Return the number of nodes of an EP group that a plan balances first, because a token goes to each node only
    once.
    """
    from plugins.hierarchical_ep import adapter as hierarchical_ep

    if not (config.get("plugins") or {}).get("hierarchical_ep"):
        return 1
    dispatch = hierarchical_ep.current()
    return dispatch.topology.nodes if dispatch.mode == "deduplicated" else 1
