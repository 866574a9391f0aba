"""What the experts of this rank are built with: topology, mode, chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology, of_mesh
from plugins.settings import section_of

# MindFormers' dispatchers (`moe_token_dispatcher_type`) -> the mode in which they send tokens
DISPATCHERS = {"alltoall": "global", "alltoall_deredundency": "hierarchical"}
DISPATCHER_OF = {mode: name for name, mode in DISPATCHERS.items()}
DEFAULT_DISPATCHER = "alltoall"  # which leaves its place to this plugin
SETTINGS = ("mode", "hardware")  # hardware: a name or file of tools/hardware, for `mode: auto` alone


def uncut(batch: int, config: Any) -> list[np.ndarray]:
    """A rank's token indices in one piece; arguments as in `plugins.ep_overlap.settings.slices`."""
    return [np.arange(batch * config.seq_length // (config.tensor_model_parallel_size * config.context_parallel_size))]


def _no_slices(config: Any):
    raise AssertionError("nobody said how many tokens a rank has")


def _no_order(chunks: int):
    raise AssertionError("one chunk needs no order")


@dataclass
class Settings:
    """One rank's part in expert parallelism.

    Attributes:
        mode: one of `plan.MODES`; topology: of its EP group; rank: its index there; ranks: the group's global ranks;
        slices: TransformerConfig -> token indices of each chunk; order: number of chunks -> (chunk, step) pairs.
            The adapter sets the first, and `ep_overlap` replaces both.
    """

    mode: str
    topology: Topology
    rank: int
    ranks: tuple[int, ...]
    slices: Any = field(default=_no_slices)
    order: Any = field(default=_no_order)


def read(settings: Any, expert_parallel: int, devices_per_node: int, experts: int, rank: int) -> Settings:
    """`plugins.hierarchical_ep` of a recipe for the global rank `rank`.

    Raises:
        RecipeError: an unknown key or mode, or EP groups that do not fit the nodes.
    """
    check(settings)
    topology = of_mesh(expert_parallel, devices_per_node, experts)
    if experts % expert_parallel:
        raise RecipeError(
            f"parallel_config.expert_parallel: {expert_parallel} does not divide the {experts} routed experts "
            "(model.model_config.n_routed_experts)"
        )
    first = rank // expert_parallel * expert_parallel
    return Settings(settings["mode"], topology, rank - first, tuple(range(first, first + expert_parallel)))


def check(settings: Any) -> None:
    """Refuse settings that are no `{mode: ..., hardware: ...}`."""
    key = "plugins.hierarchical_ep"
    right = f"write `mode:` under it, one of auto, {', '.join(MODES)}"
    mode = section_of(key, settings, SETTINGS, right, needs=["mode"])["mode"]
    if mode not in (*MODES, "auto"):
        raise RecipeError(
            f"{key}.mode: unknown mode {mode!r}, expected auto, {', '.join(MODES)}{did_you_mean(str(mode), [*MODES])}"
        )
