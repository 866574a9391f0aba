"""This module lists changes to a run that reduce its memory on a device: single changes, and pairs of changes.

A change keeps the devices and the global batch. The memory of the changed run is predicted anew, which shows how much
memory the change frees. `tools.memory` finds the recipe's keys for a change, and its cost in step time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration, Table, even_layers, tensor_cuts
from tools.estimate.from_recipe import not_empty
from tools.estimate.memory.model import all_stages, peak_memory, stage_memory
from tools.pipeline.schedules import is_v_shaped

Apply = Callable[[Configuration, float], Configuration | None]  # of a run and its limit; None: not for this run


@dataclass(frozen=True)
class Change:
    """A `Change` is a change to a run (or two changes together) that reduces the memory of the run. A `Change` holds a
    description, the changed run, and the peak memory of each stage in bytes.
    """

    name: str
    config: Configuration
    peaks: tuple[float, ...]

    @property
    def peak(self) -> float:
        """Return the peak memory in bytes of the stage that needs the most memory."""
        return max(self.peaks)


def single_changes(config: Configuration, limit: float) -> list[Change]:
    """Return each single change of a run that reduces the memory of the fullest stage. A change that adds recomputation
    recomputes only as many layers as are needed to stay below `limit` bytes.
    """
    now, found = peak_memory(config), []
    for name, apply in _moves(config):
        try:
            changed = apply(config, limit)
            if changed is not None and changed != config:
                found.append(Change(name, changed, _peaks(changed)))
        except RecipeError:
            continue  # degrees that do not fit together
    return [change for change in found if change.peak < now * (1 - _LEAST)]


def pairs_of_changes(config: Configuration, limit: float) -> list[Change]:
    """Return the pairs of changes to a run that save more memory on the fullest stage than each of the two changes by
    itself.
    """
    found = []
    for (name, apply), (other, second) in combinations(_moves(config), 2):
        if name.split(" ")[0] == other.split(" ")[0]:
            continue  # of one kind
        try:
            first = apply(config, limit)
            both = None if first is None else second(first, limit)
            alone = second(config, limit)
            if first is None or both is None:
                continue
            peaks = _peaks(both)
            least = min(max(_peaks(one)) for one in (first, alone) if one is not None)
        except RecipeError:
            continue
        if max(peaks) < least * (1 - _LEAST):
            found.append(Change(f"{name}; {other}", both, peaks))
    return found


_LEAST = 5e-3  # share of the peak below which a change is none
_MOST_EP = 4  # doublings of a degree


@lru_cache(maxsize=4096)
def _peaks(config: Configuration) -> tuple[float, ...]:
    return tuple(memory.peak for memory in all_stages(config))


def _moves(config: Configuration) -> list[tuple[str, Apply]]:
    moves: list[tuple[str, Apply]] = [
        ("shard the optimizer", lambda run, _: replace(run, shard_optimizer=True)),
        (
            "shard accumulated gradients",
            lambda run, _: replace(run, shard_gradients=True) if run.shard_optimizer else None,
        ),
        ("recompute the fewest layers that fit", fewest_recomputed),
        ("recompute every layer", lambda run, _: _recomputed(run, run.layers)),
        ("recompute norms", _recompute_norms),
        ("move a layer from the fullest stage", _move_layer),
        ("halve the micro-batch", _halve_batch),
        ("model_parallel doubled, data_parallel halved", lambda run, _: _for_data(run, 2 * run.tp, run.cp)),
        ("context_parallel doubled, data_parallel halved", lambda run, _: _for_data(run, run.tp, 2 * run.cp)),
        ("pipeline_stage doubled, data_parallel halved", lambda run, _: _deeper(run)),
    ]
    if config.model.experts:
        for times in (2**power for power in range(1, _MOST_EP + 1)):
            moves.append((f"expert_parallel times {times}", _expert_parallel(times * config.ep)))
    return [(name, _sharing_experts(apply)) for name, apply in moves]


def _sharing_experts(apply: Apply) -> Apply:
    """Return a change without runs whose experts ranks of dp x tp cannot share, as MindFormers shares them."""

    def applied(run: Configuration, limit: float) -> Configuration | None:
        changed = apply(run, limit)
        return None if changed is None or changed.dp * changed.tp % changed.ep else changed

    return applied


def _expert_parallel(ep: int) -> Apply:
    def apply(run: Configuration, _: float) -> Configuration | None:
        return None if run.model.experts % ep else replace(run, ep=ep)

    return apply


def _halve_batch(run: Configuration, _: float) -> Configuration | None:
    return None if run.batch % 2 else replace(run, batch=run.batch // 2, micro_batches=2 * run.micro_batches)


def _for_data(run: Configuration, tp: int, cp: int) -> Configuration | None:
    """Return the run with these degrees at the cost of data parallelism; the global batch stays. Return None if the
    degrees do not divide the model's sizes or the sequence. Tensor parallelism where the run had none brings sequence
    parallelism along, without which MindFormers trains no experts.
    """
    sizes = [size for sizes in tensor_cuts(run.model).values() for size in sizes]
    if run.dp % 2 or any(size % tp for size in sizes) or run.sequence % (tp * cp):
        return None
    cut = run.sequence_parallel or run.tp == 1 < tp
    half, twice = run.dp // 2, 2 * run.micro_batches
    return replace(run, tp=tp, cp=cp, dp=half, micro_batches=twice, sequence_parallel=cut)


def _deeper(run: Configuration) -> Configuration | None:
    """Return the run with twice the stages and layers spread evenly; None unless all or no layers are recomputed."""
    tables = (run.recompute.full, run.recompute.select, run.recompute.communication)
    whole = all(table is None or table == run.layers for table in tables) and not run.recompute.operators
    if run.dp % 2 or run.pp == 1 or not whole or run.model.layers < 2 * run.pp * run.chunks:
        return None
    layers = even_layers(run.model.layers, 2 * run.pp, run.chunks, run.model.mtp)
    if is_v_shaped(run.schedule):
        return None
    full, select, communication = (None if table is None else layers for table in tables)
    recompute = replace(run.recompute, full=full, select=select, communication=communication)
    half, twice = run.dp // 2, 2 * run.micro_batches
    return replace(run, pp=2 * run.pp, layers=layers, recompute=recompute, dp=half, micro_batches=twice)


def _recompute_norms(run: Configuration, _: float) -> Configuration | None:
    if run.recompute.select == run.layers or run.recompute.full == run.layers or run.recompute.selective != "norms":
        return None
    return replace(run, recompute=replace(run.recompute, select=run.layers))


def fewest_recomputed(run: Configuration, limit: float) -> Configuration | None:
    """Return the run with as few fully recomputed layers on each stage as the memory limit allows. Return None if no
    layer or every layer would be recomputed. Layers are added to the chunks in turn, beginning with the chunk that has
    the most micro-batches in flight.
    """
    now = run.recompute.full or tuple((0,) * run.pp for _ in run.layers)
    found: Table = now
    for stage in range(run.pp):
        order = [chunk for turn in range(max(row[stage] for row in run.layers)) for chunk in range(run.chunks)]
        for chunk in order:
            if stage_memory(_recomputed(run, found), stage).peak <= limit:
                break
            if found[chunk][stage] < run.layers[chunk][stage]:
                found = _one_more(found, chunk, stage)
    return None if found in (now, run.layers) else _recomputed(run, found)


def _recomputed(run: Configuration, full: Table) -> Configuration:
    return replace(run, recompute=replace(run.recompute, full=not_empty(full)))


def _move_layer(run: Configuration, _: float) -> Configuration | None:
    """Move one layer of the fullest stage to the emptiest, in the chunk where the fullest has most."""
    if run.pp == 1 or is_v_shaped(run.schedule):
        return None
    peaks = _peaks(run)
    high, low = peaks.index(max(peaks)), peaks.index(min(peaks))
    chunk = max(range(run.chunks), key=lambda place: run.layers[place][high])
    if run.layers[chunk][high] < 2:
        return None
    layers = _one_more(_one_more(run.layers, chunk, low), chunk, high, -1)

    def fitted(table: Table | None) -> Table | None:
        """Adapt a table of recomputed layers [chunks][stages] to new numbers of layers. If all layers of a chunk and
        stage were recomputed before, all layers are recomputed again; otherwise the number is limited to the layers
        that exist.
        """
        if table is None or table == run.layers:
            return table and layers
        return tuple(tuple(map(min, row, own)) for row, own in zip(table, layers, strict=True))

    old = run.recompute
    full, select, communication = fitted(old.full), fitted(old.select), fitted(old.communication)
    operators = tuple((name, fitted(table) or table) for name, table in old.operators)
    recompute = replace(old, full=full, select=select, communication=communication, operators=operators)
    return replace(run, layers=layers, recompute=recompute)


def _one_more(table: Table, chunk: int, stage: int, more: int = 1) -> Table:
    rows = [list(row) for row in table]
    rows[chunk][stage] += more
    return tuple(map(tuple, rows))
