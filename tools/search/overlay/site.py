"""What a search was told of the machine, as keys of a recipe: devices of a node, memory of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tools.estimate.configuration import Configuration
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB
from tools.recipe.load import KeyPath
from tools.recipe.unresolved import CHUNKS, DISPATCH, unresolved
from tools.recipe.view import MODEL, View, limit_of

NODE = (*MODEL, "npu_nums_per_device")
_LIMIT, _POOL = ("context", "max_device_memory"), ("context", "mempool_block_size")
_HUNDREDTH = GIB / 100


@dataclass(frozen=True)
class Site:
    """The machine of an answer.

    Args:
        node: devices of a node.
        hardware: its file or name, as `plugins.hierarchical_ep.hardware` takes it.
        memory: bytes that the job may use on a device, where the recipe's own limit is not what was asked for.
    """

    node: int
    hardware: str
    memory: float | None = None


def stays_plugged(view: View, config: Configuration, node: int) -> bool:
    """Whether `plugins.hierarchical_ep` of a recipe can dispatch: to others, in groups that do not straddle nodes."""
    aligned = config.ep % node == 0 or node % config.ep == 0
    return bool(view.get(DISPATCH)) and config.ep > 1 and aligned


def site_values(view: View, config: Configuration, site: Site) -> dict[KeyPath, Any]:
    """The keys to change for `config` to run on `site`.

    Node size matters to dispatchers that know nodes; a memory pool as large as the old limit goes with it.
    """
    values: dict[KeyPath, Any] = {}
    plugged = stays_plugged(view, config, site.node)
    if config.model.experts and config.ep > 1 and (plugged or config.ep_mode != "global"):
        if view.node != site.node:
            values[NODE] = site.node
        hardware = (*DISPATCH, "hardware")
        # the chunks that `auto` stands for depend on the cluster
        if plugged and CHUNKS in unresolved(view.recipe) and view.get(hardware, DEFAULT_HARDWARE) != site.hardware:
            values[hardware] = site.hardware
    if site.memory is not None and limit_of(view.recipe) != int(site.memory):
        limit = f"{math.ceil(site.memory / _HUNDREDTH) / 100:g}GB"  # MindSpore's GB are 2^30 bytes
        pool = view.get(_POOL)
        values[_LIMIT] = limit
        if pool is not None and pool == view.get(_LIMIT):
            values[_POOL] = limit
    return values
