"""Groups of operators that a placement recomputes although they would fit.

The optimiser gives layers the cheapest groups first (`tools.placement.problem.chain`), and a layer that needs one more
group of it has all those before. A table of MindFormers counts each group for itself: where the last one frees more
than is missing, an earlier one can be left out.
"""

from __future__ import annotations

from dataclasses import replace

from tools.estimate.configuration import Configuration, Table
from tools.estimate.memory.model import stage_memory
from tools.estimate.operators import NORMS
from tools.estimate.time_model import TimeModel


def eased(config: Configuration, model: TimeModel, cap_bytes: float) -> Configuration:
    """`config` with fewer layers of each group, the dearest group first, as long as every stage keeps `cap_bytes`."""
    kind = config.model.last_kind
    names = [name for name, _ in config.recompute.operators] + [NORMS] * bool(config.recompute.select)
    for name in sorted(names, key=lambda name: -model.layer(config, kind).again(name).total):
        for stage in range(config.pp):
            if stage_memory(config, stage).peak > cap_bytes:
                continue
            for chunk in reversed(range(config.chunks)):
                config = _fewest(config, name, chunk, stage, cap_bytes)
    return config


def _fewest(config: Configuration, name: str, chunk: int, stage: int, cap_bytes: float) -> Configuration:
    """With as few layers of a chunk and stage in a group as fit; none where only whole layers recompute it."""
    table = table_of(config, name)
    most, least = table[chunk][stage], config.recompute.layers("full", chunk, stage)
    for count in [0, *range(least + 1, most)] if most else []:
        tried = with_table(config, name, _set(table, chunk, stage, count))
        if stage_memory(tried, stage).peak <= cap_bytes:
            return tried
    return config


def table_of(config: Configuration, name: str) -> Table:
    """The layers of a group, or of norms."""
    none: Table = tuple((0,) * config.pp for _ in config.layers)
    return (config.recompute.select if name == NORMS else dict(config.recompute.operators).get(name)) or none


def with_table(config: Configuration, name: str, table: Table) -> Configuration:
    """With other layers of a group, or of norms; a group without any is none."""
    some = table if any(map(any, table)) else None
    if name == NORMS:
        return replace(config, recompute=replace(config.recompute, select=some))
    rest = dict(config.recompute.operators) | {name: some}
    operators = tuple((group, rows) for group, rows in rest.items() if rows)
    return replace(config, recompute=replace(config.recompute, operators=operators))


def _set(table: Table, chunk: int, stage: int, count: int) -> Table:
    rows = [list(row) for row in table]
    rows[chunk][stage] = count
    return tuple(map(tuple, rows))
