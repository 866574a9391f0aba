"""How many rows can meet at one rank, and whether its device can sort so many. Pure."""

from __future__ import annotations

from typing import Any

from plugins.errors import RecipeError
from plugins.hierarchical_ep.topology import Topology


def largest_sorts(mode: str, topology: Topology, tokens: int, top_k: int, spare: int = 0) -> list[tuple[int, int]]:
    """(kinds, count) of each sort of `dispatcher.py` at its largest: `count` keys of `kinds` values.

    Args:
        mode: one of `plan.MODES`.
        tokens: of a rank, sent through the experts at once; top_k: experts of each.
        spare: pairs that each rank sends itself besides.
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
    """Refuse more rows than the device sorts without mistakes, were all tokens of the EP group to meet at one rank.

    Args:
        mode, topology, tokens, top_k: as in `largest_sorts`.
        rows: row operations of the device; `rows.numbers(kinds, count)` is how many numbers a sort tells apart,
            `rows.limit` how many it can, and `rows.spare` as in `largest_sorts`.

    Raises:
        RecipeError: naming the keys that make it so many.
    """
    for kinds, count in largest_sorts(mode, topology, tokens, top_k, rows.spare):
        if rows.numbers(kinds, count) > rows.limit:
            raise RecipeError(
                f"runner_config.batch_size, model.model_config.seq_length: {tokens:,} tokens of each rank, "
                f"{top_k} experts each (model.model_config.num_experts_per_tok), can meet as {count:,} rows at one "
                f"of the {topology.ep} ranks (parallel_config.expert_parallel); sorted for {kinds} destinations that "
                f"takes {rows.numbers(kinds, count):,} different numbers, and this device sorts {rows.limit:,}. "
                "Take a smaller batch, more model_parallel or context_parallel, or plugins.ep_overlap with more chunks"
            )
