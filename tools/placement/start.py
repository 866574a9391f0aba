"""A first plan in milliseconds: layers spread evenly, then as little recomputation as memory allows."""

from __future__ import annotations

import numpy as np

from tools.placement.instance import Instance


def recompute_less(instance: Instance, plan: np.ndarray) -> np.ndarray:
    """Return `plan` [K, C], which keeps the cap, with layers recomputing less while it does; layers stay in place."""
    # chunks near the model's end hold the fewest micro-batches: there memory buys most
    for chunk in reversed(range(plan.shape[1])):
        for index in range(len(instance.types)):
            plan = _ease(instance, plan, chunk, index)
    return plan


def even_plan(instance: Instance) -> np.ndarray:
    """Return layers in model order, as many in each chunk, each with its type's smallest activation; it may not fit."""
    plan = np.zeros((len(instance.columns), instance.chunks * instance.stages), int)
    size = plan.shape[1]
    layers = sum(kind.count for kind in instance.types)
    # the first and the last chunk may be empty: they have head and tail
    first, last = (0, size) if layers >= size or not instance.least_layers else (1, size - 1)
    chunk_of = first + np.arange(layers) * (last - first) // layers
    begin = 0
    for index, kind in enumerate(instance.types):
        columns = instance.type_columns(index)
        least = columns.start + int(instance.costs[3, columns].argmin())
        np.add.at(plan[least], chunk_of[begin : begin + kind.count], 1)
        begin += kind.count
    return plan


def _ease(instance: Instance, plan: np.ndarray, chunk: int, index: int) -> np.ndarray:
    """Give a chunk's layers of a type, one by one, the fastest option that keeps the cap."""
    columns = instance.type_columns(index)
    fastest = columns.start + instance.costs[1, columns].argsort(kind="stable")
    for slow in reversed(fastest):
        for fast in fastest:
            if fast == slow:
                break
            while plan[slow, chunk]:
                tried = plan.copy()
                tried[slow, chunk] -= 1
                tried[fast, chunk] += 1
                if not instance.fits(tried[None])[0]:
                    break
                plan = tried
    return plan
