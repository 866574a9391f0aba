"""This module computes what a policy would have done with recorded loads, step by step; the policy may be this plugin's
or another planner's.

The decision of a replay is the live run's own. `eplb` (DeepSeek; MindFormers packs alike) plans from scratch at every
plan; it is here for reports and benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from plugins.expert_balance.plan import Prediction, due, greedy, imbalance, moved, next_placements
from plugins.expert_balance.record import Record
from plugins.expert_balance.settings import Settings

# predicted [layers, E], the placements there are [layers, E], step -> placements from now on [layers, E]
Policy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Replay:
    """This is the result of a policy over the recorded steps.

    Args:
        ratios: [steps, layers] max/mean of each step under its placement.
        slots: int64 [steps, layers, E], the placement after each step.
        moves: int64 [steps, layers], experts that changed device after a step.
        plans: of a whole model that were made; plan_s: seconds of one, the mean.
    """

    ratios: np.ndarray
    slots: np.ndarray
    moves: np.ndarray
    plans: int
    plan_s: float


def replay(records: Sequence[Record], settings: Settings) -> Replay:
    """Return what the plugin would have done from the first record's placement on.

    With the settings of the run that recorded them, from its first step on, `slots` are the run's own.
    """
    devices, nodes = records[0].devices, {record.step: record.nodes for record in records}

    def decide(predicted: np.ndarray, old: np.ndarray, step: int) -> np.ndarray:
        return next_placements(settings, predicted, old, devices, step=step, nodes=nodes[step])

    return replay_policy(records, decide, settings.every, settings.memory)


def replay_policy(records: Sequence[Record], policy: Policy, every: int, decay: float) -> Replay:
    """Ask `policy` for a placement after every step at which a plan is due."""
    devices, layers = records[0].devices, len(records[0].layers)
    slots, prediction = records[0].slots, Prediction(decay)
    ratios, after, moves = [], [], np.zeros((len(records), layers), np.int64)
    plans, seconds = 0, 0.0
    for at, record in enumerate(records):
        ratios.append(imbalance(record.tokens, slots, devices))
        prediction.see(record.tokens)
        if due(record.step, every):
            began, predicted = time.perf_counter(), prediction.loads
            assert predicted is not None
            new = policy(predicted, slots, record.step)
            seconds, plans = seconds + time.perf_counter() - began, plans + 1
            moves[at] = [moved(new[i], slots[i], devices) for i in range(layers)]
            slots = new
        after.append(slots)
    return Replay(np.stack(ratios), np.stack(after), moves, plans, seconds / max(plans, 1))


def differences(records: Sequence[Record], found: Replay) -> list[int]:
    """Return the steps after which a replay's placement differs from the recorded one."""
    ends = [record.moved.slots if record.moved else record.slots for record in records]
    return [record.step for record, end, slots in zip(records, ends, found.slots, strict=True) if (end != slots).any()]


def eplb(loads: np.ndarray, devices: int, nodes: int = 1, groups: int = 1) -> np.ndarray:
    """Return EPLB's placement int64 [E] without replicas, by the description in its README.

    Hierarchical where `nodes` divides `groups`: groups of experts are packed to nodes, then the experts of each node to
    its devices. Otherwise global: experts are packed to devices. Its middle step, copies of hot experts, is left out:
    training has one copy of an expert in an EP group.
    """
    if groups % nodes or nodes == 1:
        return _slots(_packed(loads, devices))
    node = np.repeat(_packed(loads.reshape(groups, -1).sum(1), nodes), len(loads) // groups)
    device = np.empty(len(loads), np.int64)
    for one in range(nodes):
        here = np.flatnonzero(node == one)
        device[here] = one * (devices // nodes) + _packed(loads[here], devices // nodes)
    return _slots(device)


def _packed(loads: np.ndarray, packs: int) -> np.ndarray:
    """[items] the pack of each item, equally many in each: the heaviest first, to the lightest pack that has room."""
    return greedy(loads, packs) // (len(loads) // packs)


def _slots(device: np.ndarray) -> np.ndarray:
    """The placement of a device for each expert."""
    slots = np.empty(len(device), np.int64)
    slots[np.argsort(device, kind="stable")] = np.arange(len(device))
    return slots
