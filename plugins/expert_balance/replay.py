"""This module computes step by step which placements a policy would have made under recorded loads; the policy may be
that of this plugin or of another planner.

A replay decides by the same function as a live run. `eplb` (DeepSeek; MindFormers' planner works in the same way) and
`eplb_with_copies` plan from scratch each time; reports and benchmarks use them for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from plugins.expert_balance.copies import NOTHING, imbalance_with, next_state, none
from plugins.expert_balance.plan import Prediction, due, greedy, moved
from plugins.expert_balance.record import Record
from plugins.expert_balance.settings import Settings

# predicted [layers, E], the placements there are [layers, E], step -> placements from now on [layers, E]
Policy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
State = tuple[np.ndarray, np.ndarray]  # placements [layers, E], and copies [layers, D x spare]


@dataclass(frozen=True)
class Replay:
    """A `Replay` holds the placements that a policy would have made over the recorded steps, and the balance of the
    devices under these placements.

    Args:
        ratios: [steps, layers] max/mean of each step under its placement.
        slots: int64 [steps, layers, E], the placement after each step.
        moves: int64 [steps, layers], the number of experts that changed device after a step.
        plans: the number of plans of a whole model.
        plan_s: the mean seconds of a plan.
        copies: int64 [steps, layers, D x spare] after each step.
    """

    ratios: np.ndarray
    slots: np.ndarray
    moves: np.ndarray
    plans: int
    plan_s: float
    copies: np.ndarray

    @property
    def made(self) -> np.ndarray:
        """Return the number of copies of experts after each step, int64 [steps, layers]."""
        return (self.copies != NOTHING).sum(axis=2)


def replay(records: Sequence[Record], settings: Settings) -> Replay:
    """Return the placements and copies that the plugin with these settings would have made, starting from the placement
    and copies of the first record.

    With the settings of the run that made the records, and from its first step on, `slots` and `copies` are equal to
    those of the run.
    """
    devices, nodes = records[0].devices, {record.step: record.nodes for record in records}
    slots, copies = records[0].slots, records[0].held
    if copies.shape[1] != devices * settings.spare:
        copies = none(len(slots), devices, settings.spare)

    def decide(predicted: np.ndarray, old: State, step: int) -> State:
        return next_state(settings, predicted, *old, devices, step=step, nodes=nodes[step])

    return _replayed(records, decide, (slots, copies), settings.every, settings.memory)


def replay_policy(records: Sequence[Record], policy: Policy, every: int, decay: float) -> Replay:
    """Return the placements that `policy`, which makes no copies of experts, gives for recorded loads; the policy is
    called after every step at which a plan is due.
    """

    def decide(predicted: np.ndarray, old: State, step: int) -> State:
        return policy(predicted, old[0], step), old[1]

    start = records[0].slots, none(len(records[0].layers), records[0].devices, 0)
    return _replayed(records, decide, start, every, decay)


def _replayed(
    records: Sequence[Record], decide: Callable[[np.ndarray, State, int], State], state: State, every: int, decay: float
) -> Replay:
    devices, layers, prediction = records[0].devices, len(records[0].layers), Prediction(decay)
    ratios, after, moves = [], [], np.zeros((len(records), layers), np.int64)
    plans, seconds = 0, 0.0
    for at, record in enumerate(records):
        ratios.append(imbalance_with(record.tokens, *state, devices))
        prediction.see(record.tokens)
        if due(record.step, every):
            began, predicted = time.perf_counter(), prediction.loads
            assert predicted is not None
            new = decide(predicted, state, record.step)
            seconds, plans = seconds + time.perf_counter() - began, plans + 1
            moves[at] = [moved(new[0][i], state[0][i], devices) for i in range(layers)]
            state = new
        after.append(state)
    slots, copies = (np.stack(each) for each in zip(*after, strict=True))
    return Replay(np.stack(ratios), slots, moves, plans, seconds / max(plans, 1), copies)


def differences(records: Sequence[Record], found: Replay) -> list[int]:
    """Return the steps after which a replay's placement or copies differ from those that the run recorded."""
    rows = zip(records, found.slots, found.copies, strict=True)
    return [
        record.step
        for record, slots, copies in rows
        if (record.after[0] != slots).any() or not np.array_equal(record.after[1], copies)
    ]


def eplb(loads: np.ndarray, devices: int) -> np.ndarray:
    """Return the placement int64 [E] of EPLB without replicas, by the description of the global policy in EPLB's
    README: experts are packed onto devices. The policy's earlier step, which makes copies of hot experts, is left out;
    `eplb_with_copies` includes it.
    """
    return _slots(_packed(loads, devices))


def eplb_with_copies(loads: np.ndarray, devices: int, spare: int) -> np.ndarray:
    """Return which expert each slot holds, int64 [D, E / D + spare], if EPLB's global policy for inference fills the
    slots.

    1. The D x spare copies are made one by one; each is a copy of the expert that has the most tokens per slot at that
       moment.
    2. All slots' contents are packed onto devices, the heaviest first, each onto the lightest device that has a free
       slot.

    No slot stays empty and no expert has a home, so a new plan moves whole experts; a device may hold an expert twice.
    """
    count = np.ones(len(loads), np.int64)
    for _ in range(devices * spare):
        count[int((loads / count).argmax())] += 1
    experts = np.repeat(np.arange(len(loads)), count)
    return experts[np.argsort(_packed((loads / count)[experts], devices), kind="stable")].reshape(devices, -1)


def eplb_ratios(records: Sequence[Record], every: int, decay: float, spare: int) -> np.ndarray:
    """Return for each step and layer the tokens of the fullest device divided by the mean, for a run in which
    `eplb_with_copies` plans whenever a plan is due.
    """
    devices, prediction, ratios = records[0].devices, Prediction(decay), []
    held: np.ndarray | None = None  # [layers, D, slots], after the first plan
    for record in records:
        before = record.on_devices.max(1) / record.on_devices.mean(1)
        ratios.append(before if held is None else of_slots(record.tokens, held))
        prediction.see(record.tokens)
        if due(record.step, every):
            assert prediction.loads is not None
            held = np.stack([eplb_with_copies(layer, devices, spare) for layer in prediction.loads])
    return np.stack(ratios)


def of_slots(loads: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return for each layer the tokens of the fullest device divided by the mean, if the tokens of an expert are
    distributed equally over all slots that hold the expert.

    Args:
        loads: [layers, E].
        held: int [layers, D, slots], the expert of each slot.
    """
    rows = zip(loads, held, strict=True)
    on = np.stack([(one / np.bincount(here.reshape(-1), minlength=len(one)))[here].sum(1) for one, here in rows])
    return on.max(1) / on.mean(1)


def _packed(loads: np.ndarray, packs: int) -> np.ndarray:
    """Return the pack of each item, [items], with the same number of items in each pack: the heaviest item is packed
    first, and each item goes to the lightest pack that has room.
    """
    return greedy(loads, packs) // (len(loads) // packs)


def _slots(device: np.ndarray) -> np.ndarray:
    slots = np.empty(len(device), np.int64)
    slots[np.argsort(device, kind="stable")] = np.arange(len(device))
    return slots
