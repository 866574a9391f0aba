"""What a search is asked: a recipe's run, a cluster, devices, batch, memory, the user's limits."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

from plugins.errors import RecipeError
from tools.auto.layout import even_layout, is_auto, settle_layout
from tools.check.heads import DEGREE, not_compiled
from tools.ep_report.advise import DEFAULT_HARDWARE
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster, cluster_file
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory_error import known_errors
from tools.hardware import Hardware, known_hardware
from tools.hardware.names import name_of
from tools.hardware.units import GIB
from tools.recipe.load import Recipe
from tools.recipe.view import View, limit_of
from tools.schema.schema import load_schema
from tools.schema.stages import swaps
from tools.search.overlay.site import Site
from tools.search.space.limits import Limit

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
        global_batch: samples per step.
        cap: bytes that a job may use on a device.
        margin: share of `cap` that predictions must leave free, because they are off by as much.
        cap_source: where `cap` comes from.
        ulysses: how many parts of the heads context parallelism cuts (MindFormers' ulysses_degree_in_cp; graph mode
            reads no other key for it).
        limits: the user's.
        hardware_file: name or file of `hardware`, as a recipe names it.
        swaps: the recipe moves activations to the host, which is not modelled.
        own_cap: `cap` is the recipe's limit, or there is none: an overlay need not write it.
    """

    base: Configuration
    hardware: Hardware
    devices: int
    global_batch: int
    cap: float
    cap_source: str
    ulysses: int = 1
    limits: tuple[Limit, ...] = ()
    hardware_file: str = DEFAULT_HARDWARE
    own_cap: bool = True
    margin: float = 0.0
    swaps: bool = False

    @property
    def room(self) -> float:
        """Bytes that a prediction may reach on a device: the cap without its margin."""
        return self.cap * (1 - self.margin)

    @property
    def room_words(self) -> str:
        """``51.4 GiB (55.5 less a margin of 7.4 %)``."""
        margin = f" ({self.cap / GIB:.1f} less a margin of {100 * self.margin:.1f} %)" if self.margin else ""
        return f"{self.room / GIB:.1f} GiB{margin}"

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.hardware.devices_per_node

    @property
    def site(self) -> Site:
        """What overlays say of the machine."""
        return Site(self.node, self.hardware_file, None if self.own_cap else self.cap)

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
    margin: float | None = None,
) -> Request:
    """The request for a recipe; what is None is the recipe's own, and the margin the estimator's known error.

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
        ulysses=View(recipe).number(DEGREE, 1),
        limits=limits,
        hardware_file=file_of(cluster_name),
        own_cap=memory_gib is None and limit <= hardware.hbm_bytes,
        margin=known_errors().margin if margin is None else margin,
        swaps=swaps(View(recipe)),
    )


def require_ulysses(recipe: Recipe, request: Request) -> None:
    """Refuse Ulysses where MindFormers 1.9.0 does not compile it, as `tc3 dryrun` shows.

    Raises:
        RecipeError: heads are cut, and the attention has other widths for queries and values, or is not MLA.
    """
    refused = not_compiled(request.base.model) if request.ulysses > 1 else None
    if refused:
        why, rule = refused
        where = load_schema().line(rule)
        raise RecipeError(f"{recipe.source}: {'.'.join(DEGREE)}: {why}: write 1 [{where}]")


def file_of(cluster_name: str) -> str:
    """A cluster as recipes name it: the name of a hardware file, or the path of another."""
    name = name_of(cluster_name)
    return name if name in known_hardware() else os.path.abspath(cluster_file(cluster_name))


def _with_layout(recipe: Recipe) -> Recipe:
    """The recipe with a layout that can be read: an even one for `offset: auto`, translated for a layout string."""
    if is_auto(recipe):
        return even_layout(recipe)
    settled = copy.deepcopy(recipe)
    settle_layout(settled)
    return settled
