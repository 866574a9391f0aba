"""What others plan: EPLB (DeepSeek) and MindFormers, from scratch at every plan: for reports and benchmarks."""

from __future__ import annotations

import numpy as np


def pack(loads: np.ndarray, packs: int) -> np.ndarray:
    """[items] the pack of each item, equally many in each: the heaviest first, to the lightest pack that has room."""
    room = np.full(packs, len(loads) // packs)
    weight = np.zeros(packs)
    of = np.empty(len(loads), np.int64)
    for item in np.argsort(-loads, kind="stable"):
        of[item] = min(np.flatnonzero(room).tolist(), key=lambda pack: weight[pack])
        room[of[item]] -= 1
        weight[of[item]] += loads[item]
    return of


def eplb(loads: np.ndarray, devices: int, nodes: int = 1, groups: int = 1) -> np.ndarray:
    """EPLB's placement int64 [E] without replicas, after the description in its README.

    Hierarchical where `nodes` divides `groups`: groups of experts are packed to nodes, then the experts of each node to
    its devices. Otherwise global: experts are packed to devices. Its middle step, copies of hot experts, is left out:
    training has one copy of an expert in an EP group.
    """
    if groups % nodes or nodes == 1:
        return _slots(pack(loads, devices), devices)
    node = np.repeat(pack(loads.reshape(groups, -1).sum(1), nodes), len(loads) // groups)
    device = np.empty(len(loads), np.int64)
    for one in range(nodes):
        here = np.flatnonzero(node == one)
        device[here] = one * (devices // nodes) + pack(loads[here], devices // nodes)
    return _slots(device, devices)


def mindformers(loads: np.ndarray, devices: int) -> np.ndarray:
    """The placement of MindFormers' `expert_relocation_greedy`: the same packing; within a device by expert."""
    return _slots(pack(loads, devices), devices)


def _slots(device: np.ndarray, devices: int) -> np.ndarray:
    """The placement of a device for each expert."""
    slots = np.empty(len(device), np.int64)
    slots[np.argsort(device, kind="stable")] = np.arange(len(device))
    return slots
