"""This module reads `plugins.hierarchical_ep` of a recipe. The module computes the settings from which a rank's
experts are built, and checks that the device can sort as many rows of tokens as a rank may receive. The module is pure
Python.

A `Part` holds topology, mode and chunks of one rank. `largest_sorts` says how many rows one rank may have to sort at
once, and `check_room` refuses more rows than the rank's device can sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import Settings
from plugins.hierarchical_ep.topology import Topology, of_mesh

# MindFormers' dispatchers (`moe_token_dispatcher_type`) -> the mode in which they send tokens
DISPATCHERS = {"alltoall": "global", "alltoall_deredundency": "hierarchical"}
DISPATCHER_OF = {mode: name for name, mode in DISPATCHERS.items()}
DEFAULT_DISPATCHER = "alltoall"  # which leaves its place to this plugin


def uncut(batch: int, config: Any) -> list[np.ndarray]:
    """Return the indices of all tokens of a rank as one chunk; the function takes the same arguments as
    `plugins.ep_overlap.plan.slices`.
    """
    return [np.arange(batch * config.seq_length // (config.tensor_model_parallel_size * config.context_parallel_size))]


@dataclass
class Part:
    """A `Part` holds the values with which one rank's routed experts are built.

    Attributes:
        mode: one of `plan.MODES`.
        topology: the topology of the EP group.
        rank: the rank's index in the group.
        ranks: the group's global ranks.
        slices: a function from the TransformerConfig to the token indices of each chunk.
        order: a function from the number of chunks to (chunk, step) pairs, None for one chunk. The adapter sets
            `slices`, and `ep_overlap` replaces both functions.
    """

    mode: str
    topology: Topology
    rank: int
    ranks: tuple[int, ...]
    slices: Any = None
    order: Any = None


def read(settings: Any, expert_parallel: int, devices_per_node: int, experts: int, rank: int, ranks: int = 0) -> Part:
    """Return the settings of `plugins.hierarchical_ep` in a recipe, as a `Part` for the global rank `rank`. `ranks` is
    the number of ranks that share experts; if this number is known, error messages propose degrees that divide it.

    Raises:
        RecipeError: a key or mode is unknown, or the EP groups do not fit the nodes.
    """
    mode = Settings.read(settings).mode
    topology = of_mesh(expert_parallel, devices_per_node, experts, ranks)
    if experts % expert_parallel:
        raise RecipeError(
            f"{expert_parallel} does not divide the {experts} routed experts (model.model_config.n_routed_experts); "
            f"write a divisor of {experts}",
            "parallel_config.expert_parallel",
        )
    first = rank // expert_parallel * expert_parallel
    return Part(mode, topology, rank - first, tuple(range(first, first + expert_parallel)))


def largest_sorts(mode: str, topology: Topology, tokens: int, top_k: int, spare: int = 0) -> list[tuple[int, int]]:
    """Return (kinds, count) for the largest case of each sort in `dispatcher.py`, which sorts `count` keys of `kinds`
    different values.

    Args:
        mode: one of `plan.MODES`.
        tokens: the number of tokens of a rank that are dispatched at once.
        top_k: the number of experts of each token.
        spare: the number of additional pairs that each rank sends to itself.
    """
    local = topology.experts // topology.ep
    crosses = mode != "global" and topology.nodes > 1
    group = topology.devices_per_node if crosses else topology.ep
    held = topology.nodes * tokens if crosses else tokens
    # one kind more for what is not wanted, and for local experts, counted from 1, another
    pairs = (group * local + 1, held * top_k + spare)
    room = (local + 2, group * held * min(top_k, local) + local + spare)
    first = [(topology.nodes + 1, held)] if crosses and mode == "deduplicated" else []
    return [*first, pairs, room]


def check_room(mode: str, topology: Topology, tokens: int, top_k: int, rows: Any) -> None:
    """Refuse settings with which a rank would have to sort more rows than its device sorts correctly, if all tokens of
    the EP group were routed to it.

    Args:
        mode, topology, tokens, top_k: as in `largest_sorts`.
        rows: the row operations of the device; `rows.numbers(kinds, count)` is the number of different keys that a sort
            needs, `rows.limit` the number that the device supports, and `rows.spare` is as in `largest_sorts`.

    Raises:
        RecipeError: there are too many rows; the message names the keys that cause it.
    """
    for kinds, count in largest_sorts(mode, topology, tokens, top_k, rows.spare):
        if rows.numbers(kinds, count) > rows.limit:
            raise RecipeError(
                f"runner_config.batch_size, model.model_config.seq_length: with {tokens:,} tokens on each rank and "
                f"{top_k} experts per token (model.model_config.num_experts_per_tok), one of the {topology.ep} ranks "
                f"of an EP group (parallel_config.expert_parallel) may receive {count:,} rows; sorting these by "
                f"{kinds} destinations needs {rows.numbers(kinds, count):,} different keys, but this device can "
                f"use at most {rows.limit:,} keys. Take a smaller batch, more model_parallel or context_parallel, or "
                "plugins.ep_overlap with more chunks"
            )
