"""Layers to stages and chunks for ranking: as even as can be, the head and MTP layers counted by their FLOPs.

A candidate is ranked with this layout; those that are best are placed by the pipeline optimiser afterwards.
"""

from __future__ import annotations

from functools import lru_cache

from tools.estimate.configuration import Configuration, Table
from tools.estimate.layer_model import work
from tools.model.architecture import Model


@lru_cache(maxsize=4096)
def balanced_layers(model: Model, sequence: int, stages: int, chunks: int, turned: bool = False) -> Table:
    """[chunks][stages] layers; needs `model.layers` >= stages x chunks. `turned`: odd chunks run back up (a V).

    1. Each chunk gets a layer, except the last one where the head alone weighs as much.
    2. Each other layer goes to the stage with the least load; of equals to the last, which holds the fewest
       micro-batches. There it goes to the chunk with the least load, of equals to the first.
    """
    extra = end_weight(model, sequence)
    counts = [[1] * stages for _ in range(chunks)]
    # an MTP layer would move to the place before an empty last chunk
    end = 0 if turned and chunks % 2 == 0 else stages - 1
    if extra >= 1 and not model.mtp and stages * chunks > 1:
        counts[-1][end] = 0

    def load(chunk: int, stage: int) -> float:
        return counts[chunk][stage] + (extra if (chunk, stage) == (chunks - 1, end) else 0.0)

    for _ in range(model.layers - sum(map(sum, counts))):
        loads = [round(sum(load(chunk, stage) for chunk in range(chunks)), 6) for stage in range(stages)]
        stage = max(index for index in range(stages) if loads[index] == min(loads))
        chunk = min(range(chunks), key=lambda index: (load(index, stage), index))
        counts[chunk][stage] += 1
    return tuple(tuple(row) for row in counts)


@lru_cache(maxsize=256)
def end_weight(model: Model, sequence: int) -> float:
    """FLOPs of the head and the MTP layers, in FLOPs of a layer of the last kind."""
    config = Configuration(model, layers=((model.layers,),), sequence=sequence)
    ends = work(config, "head").flops + model.mtp * work(config, "mtp").flops
    return ends / work(config, model.last_kind).flops
