"""This module enables `plugins.hierarchical_ep` of a recipe: it builds MindFormers' routed experts with this plugin's
token dispatch.
"""

from __future__ import annotations

from functools import partial

from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore.communication import get_rank

from plugins import telechat3_moe
from plugins.errors import UNRESOLVED, RecipeError
from plugins.hierarchical_ep import settings as reader
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from plugins.semi_auto_cpu.chosen import chosen

_current: list[reader.Part] = []


def enable(config, settings) -> None:
    """Make the model's routed experts dispatch tokens as `settings` say; call this function before the model is built.

    This function creates the communication groups of this rank, early and in the same order on every rank.

    Raises:
        RecipeError: the settings are impossible, or the plugin does not support the model.
    """
    model_config = config.model.model_config
    if model_config.get("moe_token_dispatcher_type", reader.DEFAULT_DISPATCHER) != reader.DEFAULT_DISPATCHER:
        raise RecipeError(
            "model.model_config.moe_token_dispatcher_type: plugins.hierarchical_ep sets this key itself; write "
            f"{reader.DEFAULT_DISPATCHER!r} or leave the key out, and choose the dispatch with "
            "plugins.hierarchical_ep.mode"
        )
    ours = reader.read(
        settings,
        config.parallel_config.expert_parallel if config.use_parallel else 1,
        model_config.get("npu_nums_per_device") or DEVICES_PER_NODE,
        model_config.n_routed_experts,
        get_rank() if config.use_parallel else 0,
    )
    if ours.mode == "auto":
        raise RecipeError(UNRESOLVED, "plugins.hierarchical_ep.mode")
    ours.slices = partial(reader.uncut, config.runner_config.batch_size)
    _current[:] = [ours]
    if config.context.device_target == "CPU" and not chosen(config):
        _on_cpu(ours)
    else:
        _on_ascend(ours, config)


def current() -> reader.Part:
    """Return the settings with which models are built from now on; call `enable` first."""
    return _current[0]


def _on_cpu(settings) -> None:
    from plugins.cpu_backend import transport
    from plugins.cpu_backend.expert_parallel import CpuRoutedExperts

    if len(settings.ranks) > 1:
        transport.connect()
    telechat3_moe.use_experts(ModuleSpec(module=CpuRoutedExperts, params={"settings": settings}))


def _on_ascend(settings, config) -> None:
    from plugins.hierarchical_ep.ascend import Net, Rows
    from plugins.hierarchical_ep.experts import RoutedExperts

    telechat3_moe.use_edited_model(config, "plugins.hierarchical_ep")
    net = Net(settings.ranks)
    net.create_groups(settings.topology, settings.rank)
    params = {"settings": settings, "net": net, "rows": Rows(), "streams": 2}
    telechat3_moe.use_experts(ModuleSpec(module=RoutedExperts, params=params))
