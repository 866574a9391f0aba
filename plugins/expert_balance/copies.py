"""This module plans copies of hot experts, says which token goes to which copy, and exchanges their weights and
gradients between ranks. The module needs only NumPy.

A placement (`plan.py`) assigns each expert to a home: the slot with its weights and its optimizer state. A device may
have `spare` slots in addition to its E / D homes; a spare slot holds a copy of another device's expert, or is empty. An
expert with n copies has n + 1 slots, and its tokens are dealt to these n + 1 slots in turn.

EPLB (DeepSeek, for inference) places experts and copies anew, without a difference between them. In this module homes
and copies differ: a home has the optimizer's state and is seldom moved, a copy has no state. The weights of a copy come
from its home in every forward pass, and its gradient is sent back and added there (`copied.py`), so that copies can
change at any step without moving any state. `planned` is greedy, as EPLB is, for given homes: the hottest expert of the
fullest device is copied first. A copy is made only if it helps, so no device ever gets more tokens than the fullest
device had without copies. `next_state` chooses the homes as well as the copies.

Copies are an array int [D x spare], which holds the logical expert in each spare slot, or `NOTHING`; the spare slots of
one device are adjacent. Every rank computes the plan for itself: as in `plan.py` loads are whole numbers, and among
equal loads the lowest index is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plugins.expert_balance.executor import Ranks
from plugins.expert_balance.plan import PARTS, device_loads, fullest_over_mean, next_placements
from plugins.expert_balance.settings import Settings

NOTHING = -1  # in a spare slot


def none(layers: int, devices: int, spare: int) -> np.ndarray:
    """Return a plan without copies: the spare slots of each layer, int64 [layers, D x spare], all empty (`NOTHING`)."""
    return np.full((layers, devices * spare), NOTHING, np.int64)


def share(loads: np.ndarray, parts: int | np.ndarray) -> np.ndarray:
    """Return the number of tokens in the largest part if `loads` tokens are divided into `parts` parts that differ by
    at most one token.
    """
    return -(-loads // parts)


def planned(loads: np.ndarray, slots: np.ndarray, devices: int, spare: int, least: float = 0.0) -> np.ndarray:
    """Return the expert of one layer that each spare slot copies, int64 [D x spare], or `NOTHING` for an empty slot.

    1. Take the device with the most tokens.
    2. Of all pairs of an expert of this device and another device with an empty spare slot, take the pair after which
       the fuller of the two devices has the fewest tokens. A device takes no second copy of an expert that it holds.
    3. Put a copy of the expert on the other device: all devices that already hold the expert get fewer tokens, and the
       device with the new copy gets more.
    4. Repeat until no pair lowers the load of the fullest device by the share `least`, or no empty slot is left.

    Args:
        loads: integers [E].
        slots: int [E], the placement.
        spare: the number of slots of a device for copies.
    """
    each = len(loads) // devices
    copies = np.full((devices, spare), NOTHING, np.int64)
    used, count = np.zeros(devices, np.int64), np.ones(len(loads), np.int64)
    holds = slots // each == np.arange(devices)[:, None]  # [D, E]
    part, on = loads.copy(), device_loads(loads, slots, devices)
    while True:
        fullest = int(on.argmax())
        experts, open_ = np.flatnonzero(holds[fullest]), np.flatnonzero(used < spare)
        if not open_.size:
            break
        smaller = share(loads[experts], count[experts] + 1)
        left = on[fullest] - part[experts] + smaller
        after = np.maximum(left[:, None], on[open_] + smaller[:, None])
        after[holds[open_][:, experts].T] = np.iinfo(np.int64).max
        best = int(after.argmin())
        if after.flat[best] >= on[fullest] or on[fullest] - after.flat[best] < least * on[fullest]:
            break
        expert, device = int(experts[best // len(open_)]), int(open_[best % len(open_)])
        copies[device, used[device]] = expert
        used[device], count[expert] = used[device] + 1, count[expert] + 1
        fewer, part[expert] = part[expert], smaller[best // len(open_)]
        on[holds[:, expert]] -= fewer - part[expert]
        on[device] += part[expert]
        holds[device, expert] = True
    return copies.reshape(-1)


def fullest(loads: np.ndarray, slots: np.ndarray, copies: np.ndarray, devices: int) -> int:
    """Return the number of tokens on the fullest device if each expert's tokens are distributed equally, in whole
    tokens, over its own slot and its copies.
    """
    filled = np.flatnonzero(copies != NOTHING)
    parts = share(loads, 1 + np.bincount(copies[filled], minlength=len(loads)))
    on = device_loads(parts, slots, devices)
    np.add.at(on, filled * devices // len(copies), parts[copies[filled]])
    return int(on.max())


def loads_with(loads: np.ndarray, slots: np.ndarray, copies: np.ndarray, devices: int) -> np.ndarray:
    """Return the tokens of each device, float [layers, D], if each expert's tokens are distributed equally over its own
    slot and its copies.

    Args:
        loads: [layers, E].
        slots: int [layers, E].
        copies: int [layers, D x spare].
    """
    filled = copies != NOTHING
    at = np.where(filled, copies, 0)
    count = np.ones(loads.shape)
    np.add.at(count, (np.arange(len(loads))[:, None], at), filled)
    parts = loads / count
    here = np.where(filled, np.take_along_axis(parts, at, 1), 0.0).reshape(len(loads), devices, -1).sum(2)
    return device_loads(parts, slots, devices) + here


def imbalance_with(loads: np.ndarray, slots: np.ndarray, copies: np.ndarray, devices: int) -> np.ndarray:
    """Return the imbalance of each layer with copies: the largest number of tokens of a device divided by the mean over
    the devices; the arguments are those of `loads_with`.
    """
    return fullest_over_mean(loads_with(loads, slots, copies, devices))


def next_copies(
    settings: Settings,
    predicted: np.ndarray,
    slots: np.ndarray,
    old: np.ndarray,
    devices: int,
    *,
    stayed: np.ndarray,
    step: int,
) -> np.ndarray:
    """Return the copies int64 [layers, D x spare] to use after a step; a live run and a replay both call this function.

    A layer has copies only if they lower its predicted imbalance (max/mean over the devices) by at least the gate's
    share. A layer keeps its present copies if none of its experts moves and no other copies would lower the imbalance
    by this share again; fewer copies take their place unless the imbalance would rise by this share. With `method:
    random` the spare slots are filled at random.

    Args:
        predicted: [layers, E], `Prediction.loads`.
        slots: int [layers, E], the placement from now on.
        old: the present copies.
        stayed: bool [layers], whether no expert of the layer moves.
        step: the seed of `method: random`.
    """
    loads = np.rint(np.asarray(predicted, np.float64) * PARTS).astype(np.int64)
    new = np.empty_like(old)
    for layer in range(len(old)):
        if settings.method == "random":
            new[layer] = _shuffled(slots[layer], devices, settings.spare, [step, layer])
            continue
        wanted = planned(loads[layer], slots[layer], devices, settings.spare, settings.gate)
        without, best, now = (
            fullest(loads[layer], slots[layer], each, devices)
            for each in (np.full_like(wanted, NOTHING), wanted, old[layer])
        )
        if without - best < settings.gate * without or best >= without:
            wanted, best = np.full_like(wanted, NOTHING), without
        fewer = (wanted != NOTHING).sum() < (old[layer] != NOTHING).sum()
        differ = best != now and abs(best - now) >= settings.gate * max(best, now)
        keep = (differ and best > now) if fewer else (not differ or best > now)
        new[layer] = old[layer] if stayed[layer] and keep else wanted
    return new


def next_state(
    settings: Settings,
    predicted: np.ndarray | None,
    slots: np.ndarray,
    copies: np.ndarray,
    devices: int,
    *,
    step: int,
    nodes: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the placements [layers, E] and the copies [layers, D x spare] to use after a step; a live run and a replay
    both call this function.

    With spare slots, three plans are made for each layer, which differ in the homes of the experts: the homes stay;
    they balance the loads (`next_placements`); or they balance the loads that remain after copies were made
    (`divided`). Each plan has its own copies. The homes of a layer stay as they are unless the fullest device of
    another plan has fewer tokens by at least the gate's share.

    Args: as in `plan.next_placements` and `next_copies`.
    """
    assert predicted is not None
    new = next_placements(settings, predicted, slots, devices, step=step, nodes=nodes)
    if not settings.spare:
        return new, copies
    loads = np.rint(np.asarray(predicted, np.float64) * PARTS).astype(np.int64)
    parts = np.stack([divided(layer, devices, settings.spare) for layer in loads]) / PARTS
    other = next_placements(settings, parts, slots, devices, step=step, nodes=nodes)
    homes = (new,) if settings.method == "random" else (slots, new, other)
    plans = [
        (each, next_copies(settings, predicted, each, copies, devices, stayed=(each == slots).all(axis=1), step=step))
        for each in homes
    ]
    after = np.array([[fullest(*row, devices) for row in zip(loads, *plan, strict=True)] for plan in plans])
    best, least = after.argmin(axis=0), after.min(axis=0)
    best[after[0] - least < settings.gate * after[0]] = 0
    rows = np.arange(len(slots))
    return (
        np.stack([plan[0] for plan in plans])[best, rows],
        np.stack([plan[1] for plan in plans])[best, rows],
    )


def divided(loads: np.ndarray, devices: int, spare: int) -> np.ndarray:
    """Return integers [E], the tokens that stay in each expert's own slot, after D x spare copies of experts were made
    one by one. Each copy is made of the expert whose own slot has the most tokens at that moment (the rule of EPLB),
    but no expert gets more than one slot on a device.
    """
    count = np.ones(len(loads), np.int64)
    for _ in range(devices * spare):
        left = np.where(count < devices, share(loads, count), -1)
        count[int(left.argmax())] += 1
    return share(loads, count)


def _shuffled(slots: np.ndarray, devices: int, spare: int, seed: list[int]) -> np.ndarray:
    """Return other devices' experts in every spare slot, none of them twice on a device."""
    random, each = np.random.default_rng(seed), len(slots) // devices
    found = np.full((devices, spare), NOTHING, np.int64)
    for device in range(devices):
        others = random.permutation(np.flatnonzero(slots // each != device))[:spare]
        found[device, : len(others)] = others
    return found.reshape(-1)


class Table:
    """A `Table` says which slots of the devices hold each expert; an expert is numbered by its own slot, not by that of
    a copy.

    Slots are numbered consecutively through the devices, as the dispatch numbers them: the slots of a device are its E
    / D homes, followed by its spare slots.

    Args:
        slots: int [E], the placement.
        copies: int [D x spare].

    Attributes:
        instances: int64 [E, most], the slots of each expert (rows are homes): its home first, then its copies.
        count: int64 [E], the number of these slots.
        source: int64 [D, spare], the home (0 .. E - 1) whose weights a spare slot holds, or `NOTHING`.
        some: whether there is any copy.
    """

    def __init__(self, slots: np.ndarray, copies: np.ndarray, devices: int):
        each, spare = len(slots) // devices, len(copies) // devices
        wide = each + spare
        homes = np.arange(len(slots))
        self.each, self.spare, self.devices = each, spare, devices
        self.count = np.ones(len(slots), np.int64)
        self.instances = np.zeros((len(slots), 1 + devices), np.int64)
        self.instances[:, 0] = homes // each * wide + homes % each
        self.source = np.where(copies == NOTHING, NOTHING, slots[copies]).reshape(devices, spare)
        self.some = bool((copies != NOTHING).any())
        for device, place in np.argwhere(self.source != NOTHING):
            home = self.source[device, place]
            assert home // each != device, "a device has no copy of its own expert"
            self.instances[home, self.count[home]] = device * wide + each + place
            self.count[home] += 1

    def choose(self, homes: np.ndarray, rank: int) -> np.ndarray:
        """Return for each (token, expert) pair of a rank the slot that computes it, as int32 in the shape of `homes`,
        which holds the slot of the original (not of a copy) of each pair's expert.

        The pairs of an expert use its slots in turn, in the order of tokens; each rank begins with another slot, so
        that ranks with few pairs do not all send them to the home.

        Args:
            homes: int, any shape, the homes of experts (their numbers after the placement is applied).
        """
        flat = homes.reshape(-1).astype(np.int64)
        order = np.argsort(flat, kind="stable")
        sorted_ = flat[order]
        turn = np.empty(len(flat), np.int64)
        turn[order] = np.arange(len(flat)) - np.searchsorted(sorted_, sorted_)
        found = self.instances[flat, (turn + rank) % self.count[flat]]
        return found.astype(np.int32).reshape(homes.shape)

    def sent(self, rank: int) -> list[np.ndarray]:
        """Return for each device the experts of this rank (0 to E / D - 1) of which the device holds copies, in the
        order of the device's spare slots.
        """
        mine = [row[(row != NOTHING) & (row // self.each == rank)] for row in self.source]
        return [row % self.each for row in mine]

    def taken(self, rank: int) -> list[np.ndarray]:
        """Return for each device the spare slots of this rank (0 to spare - 1) that hold copies of the device's
        experts.
        """
        row = self.source[rank]
        return [np.flatnonzero((row != NOTHING) & (row // self.each == device)) for device in range(self.devices)]


def with_copies(own: np.ndarray, table: Table, ranks: Ranks, group: Sequence[int], tag: int) -> np.ndarray:
    """Return the weights [(E / D + spare) x rows, width] of a rank's slots: first the weights of its own experts, then
    the weights of the copies that the rank holds.

    Args:
        own: [E / D x rows, width].
        ranks: the connection to all ranks of the EP group, in its order.
        group: the numbers of these ranks in `ranks`.
    """
    rank, experts = group.index(ranks.rank), own.reshape(table.each, -1)
    filled = np.zeros((table.each + table.spare, experts.shape[1]), own.dtype)
    filled[: table.each] = experts
    if table.some:
        parts, taken = [experts[places] for places in table.sent(rank)], table.taken(rank)
        arrived = ranks.all_to_all_v(group, tag, parts, rows=[len(places) for places in taken])
        for places, part in zip(taken, arrived, strict=True):
            filled[table.each + places] = part
    return filled.reshape(-1, own.shape[1])


def added_up(gradient: np.ndarray, table: Table, ranks: Ranks, group: Sequence[int], tag: int) -> np.ndarray:
    """Return the gradients [E / D x rows, width] of a rank's experts: the gradient of each expert's own slot plus those
    of its copies, added in the order of devices and slots.

    Args:
        gradient: [(E / D + spare) x rows, width] of all of the rank's slots. The others are as in `with_copies`.
    """
    rank, slots = group.index(ranks.rank), gradient.reshape(table.each + table.spare, -1)
    total = slots[: table.each].copy()
    if table.some:
        parts, sent = [slots[table.each + places] for places in table.taken(rank)], table.sent(rank)
        arrived = ranks.all_to_all_v(group, tag, parts, rows=[len(places) for places in sent])
        for places, part in zip(sent, arrived, strict=True):
            np.add.at(total, places, part)
    return total.reshape(-1, gradient.shape[1])
