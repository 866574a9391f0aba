"""This module describes the request for a search: a recipe's run, a cluster, devices, batch, memory, and the user's
limits on the space.

A limit is written as `tp<=8`, `pp=8,16`, `ep%8=0`, `mode!=global` or `recompute=full,none`:

limit  = name operator value
name   = dp | tp | pp | vpp | cp | ep | mbs | m | mode | shard | recompute
"="    one of the values after it, "!=" none of them; "<", "<=", ">", ">=" a number; "%N=" the remainder by N
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.plan import MODES
from tools.estimate.configuration import Configuration, Cut, offered
from tools.estimate.efficiency import cluster, cluster_file
from tools.estimate.from_recipe import DEGREE, from_recipe
from tools.estimate.memory.room import Room, room_of
from tools.estimate.time_model import require_step_time
from tools.hardware import DEFAULT_HARDWARE, Hardware, known_hardware
from tools.hardware.load import name_of
from tools.hardware.units import GIB
from tools.layout.advise import pluggable
from tools.layout.resolve import resolve
from tools.recipe.findings import in_file
from tools.recipe.load import Recipe
from tools.recipe.view import CHUNKS, OVERLAP, View, limit_of, look, unresolved
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import swaps
from tools.search.overlay import Site

SHARDS = ("none", "optimizer", "gradients")  # of the data-parallel copies: nothing, ZeRO-1, accumulated gradients, too
POLICIES = ("none", "select", "communication", "full")  # the same for all layers
PLANNED = "planned"  # by layer, chosen by the pipeline optimiser
NUMBERS = ("dp", "tp", "pp", "vpp", "cp", "ep", "mbs", "m")
WORDS = {"mode": MODES, "shard": SHARDS, "recompute": (*POLICIES, PLANNED)}

_GROUP_LOSS, _BALANCE = ("plugins", "group_aux_loss"), ("plugins", "attention_balance")
_LARGEST = 1_000_000_000
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_FORM = re.compile(r"\s*([a-z]+)\s*(<=|>=|!=|<|>|=|%\s*(\d+)\s*=)\s*([\w,\s]+?)\s*")


@dataclass(frozen=True)
class Limit:
    """A `Limit` is one limit on the strategies of a search, such as `tp<=8`: the user's text and its parts."""

    text: str
    name: str  # what it limits
    sign: str  # "=", "!=", "<", "<=", ">", ">=" or "%"
    values: tuple[int, ...]  # numbers, or for words their indices in `WORDS`
    modulus: int = 1  # of "%"

    def keeps(self, numbers: Any) -> np.ndarray:
        """Return for each of the given values whether it satisfies the limit; values that are words are given by their
        indices.
        """
        numbers = np.asarray(numbers)
        if self.sign == "%":
            return numbers % self.modulus == self.values[0]
        if self.sign in _ORDER:
            return np.asarray(_ORDER[self.sign](numbers, self.values[0]))
        among = np.isin(numbers, self.values)
        return among if self.sign == "=" else ~among


def read_limit(text: str) -> Limit:
    """Parse the text of one `--limit`.

    Raises:
        RecipeError: the text is not a limit; the message shows the form of a limit.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise RecipeError(
            f"--limit {text!r}: a limit must have a name, a sign and a value, such as tp<=8, pp=8,16 or ep%8=0"
        )
    name, sign, modulus, written = match.groups()
    if name not in (*NUMBERS, *WORDS):
        names = [*NUMBERS, *WORDS]
        raise RecipeError(
            f"--limit {text!r}: the name {name!r} is unknown{did_you_mean(name, names)}; the known names are "
            f"{', '.join(names)}"
        )
    words = [word.strip() for word in written.split(",")]
    if modulus is not None:
        sign = "%"
    if name in WORDS:
        known = WORDS[name]
        if sign not in ("=", "!="):
            raise RecipeError(f"--limit {text!r}: {name} can be compared only with = or !=")
        for word in words:
            if word not in known:
                hint = did_you_mean(word, list(known))
                raise RecipeError(
                    f"--limit {text!r}: the value of {name} must be one of {', '.join(known)}, not {word!r}{hint}"
                )
        values = tuple(known.index(word) for word in words)
    elif modulus is not None and not 0 < int(modulus) <= _LARGEST:
        raise RecipeError(
            f"--limit {text!r}: {modulus[:20]} is not a valid divisor; write a divisor from 1 to {_LARGEST:,}"
        )
    elif all(word.isdecimal() and int(word[:20]) <= _LARGEST for word in words):
        values = tuple(int(word) for word in words)
    else:
        raise RecipeError(f"--limit {text!r}: the value of {name} must be a number of at most {_LARGEST:,}")
    if sign not in ("=", "!=") and len(values) > 1:
        raise RecipeError(f"--limit {text!r}: write one number, because only = and != take a list")
    if modulus is not None and not 0 <= values[0] < int(modulus):
        raise RecipeError(
            f"--limit {text!r}: the remainder of a division by {modulus} must be from 0 to {int(modulus) - 1}"
        )
    return Limit(text, name, sign, values, int(modulus or 1))


@dataclass(frozen=True)
class Request:
    """A `Request` holds what one run of `tc3 search` searches for: the recipe's run, the cluster, the devices, the
    batch, and the limits on strategies.
    """

    base: Configuration  # the recipe's own run; its degrees, layers, batch, recomputation, sharding are searched for
    hardware: Hardware
    devices: int  # to use, all of them
    global_batch: int  # samples per step
    cap: float  # bytes that a job may use on a device
    cap_source: str  # where `cap` comes from
    flash: bool = True  # use_flash_attention, without which MindFormers refuses context parallelism
    # how many parts of the heads context parallelism cuts: MindFormers' ulysses_degree_in_cp, the only key for it that
    # graph mode reads
    ulysses: int = 1
    limits: tuple[Limit, ...] = ()  # the user's
    hardware_file: str = DEFAULT_HARDWARE  # name or file of `hardware`, as a recipe names it
    reserve: float = 0.0  # bytes that were measured beside the model, which `cap` is without
    own_cap: bool = True  # `cap` is the recipe's limit, or there is none: an overlay need not write it
    margin: float = 0.0  # share of `cap` that predictions must leave free, because they are off by as much
    swaps: bool = False  # the recipe moves activations to the host, which is not modelled
    splits: bool = True  # the recipe splits its model over devices; MindFormers accumulates no gradients elsewhere
    pluggable: bool = True  # plugins.hierarchical_ep can change the class of the recipe's model
    ramp: tuple[int, ...] = ()  # samples of a step in each stage of plugins.batch_ramp
    whole_sequences: bool = False  # plugins.group_aux_loss: an EP group must hold all tokens of its sequences
    whole_ranks: bool = False  # plugins.attention_balance: an EP group is whole data-parallel ranks, or a part of one
    schedule: str = ""  # of every pipeline (`tools.pipeline.schedules`); "": 1F1B, interleaved with several chunks
    groups: bool = False  # layers may recompute groups of operators as well (`tools.estimate.configuration`)
    # expert_parallel -> load of the fullest device over the mean, in every layer; what is not there has the recipe's
    skews: tuple[tuple[int, float], ...] = ()

    @property
    def room(self) -> float:
        """Return the bytes that a memory prediction may reach on a device: the memory cap minus the margin."""
        return Room(self.cap, self.cap_source, self.margin).bytes

    @property
    def room_words(self) -> str:
        """Return the memory limit as text, such as ``51.4 GiB (55.5 less a margin of 7.4 %)``."""
        return Room(self.cap, self.cap_source, self.margin).words

    @property
    def node(self) -> int:
        """Return the number of devices of a node of the cluster."""
        return self.hardware.devices_per_node

    @property
    def site(self) -> Site:
        """Return the cluster as a `Site`, which is the form that the functions for writing child recipes need."""
        return Site(self.node, self.hardware_file, None if self.own_cap else self.cap + self.reserve)

    def skew(self, ep: int) -> float:
        """Return the assumed ratio of the fullest device's load to the mean load in an expert-parallel group of `ep`
        devices.
        """
        return dict(self.skews).get(ep, self.base.skew)

    @property
    def changed(self) -> bool:
        """Return whether the request has another number of devices or another global batch than the recipe."""
        return (self.devices, self.global_batch) != (self.base.devices, self.base.global_batch)


def request_of(
    recipe: Recipe,
    cluster_name: str,
    devices: int | None = None,
    global_batch: int | None = None,
    memory_gib: float | None = None,
    limits: tuple[Limit, ...] = (),
    margin: float | None = None,
    reserve: float = 0.0,
) -> Request:
    """Return the search request for a recipe. For an argument that is None, use the recipe's own value; for `margin`,
    use the estimator's known error. `reserve` is the number of bytes of a device that framework and driver used in a
    measurement.

    Raises:
        RecipeError: the recipe does not describe a run, or the cluster is unknown.
    """
    hardware = cluster(cluster_name)
    try:  # an open layout for which there is no file yet is even, for the search places layers itself
        base = from_recipe(resolve(recipe, layout="found"))
        room = room_of(recipe, hardware, memory_gib, margin)
        require_step_time(base)
    except RecipeError as error:
        raise in_file(recipe, error) from None
    if room.cap <= reserve:
        raise RecipeError(
            f"{room.source}: this limit of {room.cap / GIB:.1f} GiB is not more than the {reserve / GIB:.2f} GiB that "
            "framework and driver used in the measurement; give a larger --memory, or a larger "
            "context.max_device_memory"
        )
    room = room.less(reserve)
    if base.ep_cut and CHUNKS in unresolved(recipe):  # strategies have each their own best chunks
        base = replace(base, ep_cut=Cut(stride=look(recipe, (*OVERLAP, "stride"))))
    view = View(recipe)
    return Request(
        base=base,
        hardware=hardware,
        devices=devices or base.devices,
        global_batch=global_batch or base.global_batch,
        cap=room.cap,
        cap_source=room.source,
        margin=room.margin,
        reserve=reserve,
        flash=convert(view, load_schema()).fields.get("use_flash_attention") is True,
        ulysses=view.number(DEGREE, 1),
        limits=limits,
        hardware_file=file_of(cluster_name),
        own_cap=memory_gib is None and limit_of(recipe) <= hardware.hbm_bytes,
        swaps=swaps(view),
        splits=view.parallel,
        pluggable=pluggable(recipe),
        ramp=tuple(samples for _, samples in view.ramp.stages) if view.parallel else (),
        whole_sequences=bool(base.model.experts) and view.get(_GROUP_LOSS) not in (None, False),
        whole_ranks=bool(base.model.experts) and view.get(_BALANCE) not in (None, False),
    )


def with_choices(request: Request, groups: bool, swapping: bool) -> Request:
    """Return the request with additional choices. If `groups` is True, layers may also recompute groups of operators
    (such as attention). An error is raised if swapping or the recomputation of groups is requested but impossible.

    Raises:
        RecipeError: the activation bytes of groups are unknown, the recipe lists layers by number, or the link to the
            host is unknown.
    """
    if swapping and request.hardware.host_link is None:
        raise RecipeError(
            f"--swap: the time of swapping is unknown, because the cluster file of {request.hardware.name} has no "
            "host_link (bandwidth between device and host); add this key"
        )
    if not groups:
        return request
    if not offered(request.base):
        raise RecipeError(
            "--recompute-operators: this model has no group of operators whose recomputation is known to free memory"
        )
    if request.swaps:
        raise RecipeError(
            "--recompute-operators does not work with a recipe that swaps activations, because its recompute keys hold "
            "lists of layers instead of counts of layers; write model_config.swap: False, or leave the option out"
        )
    return replace(request, groups=True)


def file_of(cluster_name: str) -> str:
    """Return the name by which recipes refer to a cluster: the name of a hardware file of this repository, or the
    absolute path of another file.
    """
    name = name_of(cluster_name)
    return name if name in known_hardware() else os.path.abspath(cluster_file(cluster_name))
