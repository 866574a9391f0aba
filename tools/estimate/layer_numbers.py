"""Recompute keys under `model_config.swap`: MindFormers then reads numbers of layers (which), not counts (how many).

`LayerSetting` (parallel_core/training_graph/transformer/utils.py) takes a flag or a list of layers, by operator pattern
in a mapping; a list of patterns is refused. Elsewhere a table [chunks][stages] counts layers from a chunk's first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tools.estimate.configuration import Table
from tools.pipeline.schedules import is_v_shaped


def places(layers: Table, schedule: str) -> list[tuple[int, int, int]]:
    """(chunk, stage, number in the chunk) of each layer in the model's order."""
    found = []
    for chunk, row in enumerate(layers):
        order = range(len(row))
        for stage in reversed(order) if is_v_shaped(schedule) and chunk % 2 else order:
            found += [(chunk, stage, place) for place in range(row[stage])]
    return found


def numbers_of(table: Table | None, layers: Table, schedule: str) -> list[int]:
    """The layers that a table of counts names."""
    if table is None:
        return []
    where = places(layers, schedule)
    return [number for number, (chunk, stage, place) in enumerate(where) if place < table[chunk][stage]]


def table_of_numbers(numbers: Iterable[int], layers: Table, schedule: str) -> Table:
    """How many of a list's layers each chunk and stage holds.

    Raises:
        ValueError: one of them is no layer of the model.
    """
    where, counts = places(layers, schedule), Counter[tuple[int, int]]()
    for number in set(numbers):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(where):
            raise ValueError(f"{number!r} is not the number of one of the {len(where)} layers")
        counts[where[number][:2]] += 1
    return tuple(tuple(counts[chunk, stage] for stage in range(len(row))) for chunk, row in enumerate(layers))


def table_by_numbers(value: Any, layers: Table, schedule: str) -> Table | None:
    """A recompute key's value as a table; of a mapping of operator patterns the one that names most layers.

    Raises:
        ValueError, TypeError: it is neither a flag, nor such a list or mapping.
    """
    if isinstance(value, dict):
        tables = [table for table in (table_by_numbers(inner, layers, schedule) for inner in value.values()) if table]
        return max(tables, key=lambda table: sum(map(sum, table)), default=None)
    if not value:
        return None
    return layers if value is True else table_of_numbers(value, layers, schedule)
