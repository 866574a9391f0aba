"""What a search is asked: a recipe's run, a cluster, devices, batch, memory, the user's limits."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from plugins.errors import RecipeError
from tools.dryrun.memory import limit_of
from tools.recipe.load import Recipe
from tools.search.configuration import Configuration
from tools.search.efficiency import cluster
from tools.search.from_recipe import from_recipe
from tools.search.hardware import Hardware
from tools.search.memory_model import GIB
from tools.search.search_limits import Limit
from tools.search.settle_layout import even_layout, is_auto, settle_layout

# of HBM for a job where nobody says: the driver, HCCL's buffers and the allocator's fragments take the rest (assumed;
# MindFormers' public recipes for 64 GB devices write 54 to 59 GB, of 2^30)
USABLE = 0.9


@dataclass(frozen=True)
class Request:
    """One search.

    Args:
        base: the recipe's own run; degrees, layers, batch, recomputation and sharding of it are what is searched for.
        hardware: the cluster.
        devices: to use, all of them.
        global_batch: samples a step.
        cap: bytes that a job may use on a device.
        cap_source: where `cap` comes from.
        ulysses: context parallelism cuts heads (MindFormers' `ulysses_cp`).
        limits: the user's.
    """

    base: Configuration
    hardware: Hardware
    devices: int
    global_batch: int
    cap: float
    cap_source: str
    ulysses: bool = False
    limits: tuple[Limit, ...] = ()

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.hardware.devices_per_node

    @property
    def changed(self) -> bool:
        """Whether devices or batch are not the recipe's."""
        return (self.devices, self.global_batch) != (self.base.devices, self.base.global_batch)


def request_of(
    recipe: Recipe,
    cluster_name: str,
    devices: int | None = None,
    global_batch: int | None = None,
    memory_gib: float | None = None,
    limits: tuple[Limit, ...] = (),
) -> Request:
    """The request for a recipe; what is None is the recipe's own.

    Raises:
        RecipeError: the recipe describes no run, or there is no such cluster.
    """
    try:
        base, limit = from_recipe(_with_layout(recipe)), limit_of(recipe)
    except RecipeError as error:
        raise RecipeError(f"{recipe.source}: {error}") from None
    hardware = cluster(cluster_name)
    cap, source = USABLE * hardware.hbm_bytes, f"{USABLE:.0%} of the device's memory (assumed)"
    if memory_gib is not None:
        cap, source = memory_gib * GIB, "--memory"
    elif 0 < limit <= hardware.hbm_bytes:
        cap, source = float(limit), "context.max_device_memory of the recipe"
    return Request(
        base=base,
        hardware=hardware,
        devices=devices or base.devices,
        global_batch=global_batch or base.global_batch,
        cap=cap,
        cap_source=source,
        ulysses=recipe.get("parallel_config", {}).get("context_parallel_algo") == "ulysses_cp",
        limits=limits,
    )


def _with_layout(recipe: Recipe) -> Recipe:
    """The recipe with a layout that can be read: an even one for `offset: auto`, translated for a layout string."""
    if is_auto(recipe):
        return even_layout(recipe)
    settled = copy.deepcopy(recipe)
    settle_layout(settled)
    return settled
