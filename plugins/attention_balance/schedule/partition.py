"""Equal-cardinality number partitioning: as many items in every part, the heaviest part as light as possible. NumPy.

Integers only: every rank computes the plan for itself, and float sums could differ between processors.
"""

from __future__ import annotations

import numpy as np

from plugins.attention_balance.schedule.order import falling_order, taken

# up to so many items the start looks at the loads for each item, above for each round
_ITEM_BY_ITEM = 1024
_FEW = 16  # and so many in a part: with more, no single item weighs much
# rounds of the greedy start that look at the loads; later rounds hold the light items and just go back and forth
_GREEDY_ROUNDS = 16
_SWAP_ROUNDS = 12
# a heaviest part within 1 / 2^17 of the mean is good enough: costs are not known better
_CLOSE = 17


def partition(weights: np.ndarray, parts: int, *, by_item: bool = True, swap: bool = True) -> np.ndarray:
    """Divide the items of each row into `parts` parts of as many items, with small heaviest part.

    1. Sort falling. Few items, few in a part: each goes to the lightest part that is not full (LPT), so a part that
       begins with a giant ends with the lightest items of all. Else: cut into rounds of `parts` items, and each round
       gives its heaviest item to the lightest part, the next to the next. With two items a part this is optimal.
    2. Pair the heaviest part with the lightest, the second heaviest with the second lightest and so on; each pair
       swaps the two items that bring it closest to equal. Repeat with shifted pairs; stop when the row's heaviest
       part is close to the mean or after a fixed number of rounds (not of seconds: the plan must not depend on the
       clock).

    Args:
        weights: int64 [rows, items], at least 0; items is a multiple of `parts`, and items times the
            largest weight below 2^62.
        parts: number of parts.
        by_item: False starts round by round always. swap: False leaves step 2 out.

    Returns:
        int64 [rows, parts, items / parts]: indices into a row. A row's result depends on that row alone.
    """
    rows, items = weights.shape
    size = items // parts
    assert size * parts == items
    order = falling_order(weights)
    if parts == 1 or size == 1:
        return order.reshape(rows, parts, size)
    few = by_item and 2 < size <= _FEW and items <= _ITEM_BY_ITEM
    start = _lightest_part if few else _greedy
    chosen, weight = start(order.reshape(rows, size, parts), taken(weights, order).reshape(rows, size, parts))
    if swap and size > 2:
        # the swaps sort a few numbers as one; so many rows fit into 62 bits
        at_a_time = max((1 << 62) // (items * (int(weights.max()) + 1)), 1)
        for row in range(0, rows, at_a_time):
            _swap(chosen[row : row + at_a_time], weight[row : row + at_a_time])
    return chosen


def _lightest_part(rounds: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step 1 item by item. Arguments and results as in `_greedy`."""
    rows, size, parts = rounds.shape
    rounds, weight = rounds.reshape(rows, -1), weight.reshape(rows, -1)
    loads, room = np.zeros((rows, parts), np.int64), np.full(rows * parts, size)
    flat, first = loads.ravel(), np.arange(rows) * parts
    part_of = np.empty_like(rounds)
    for number in range(parts * size):
        part = loads.argmin(1)
        part_of[:, number] = part
        part += first
        flat[part] += weight[:, number]
        room[part] -= 1
        flat[part[room[part] == 0]] = np.iinfo(np.int64).max
    by_part = np.argsort(part_of, axis=1, kind="stable").reshape(rows, parts, size)
    return taken(rounds, by_part), taken(weight, by_part)


def _greedy(rounds: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step 1 round by round. rounds, weight: [rows, size, parts], items and their weights, heaviest first.

    Returns both as [rows, parts, size].
    """
    rows, size, parts = rounds.shape
    row = np.arange(rows)[:, None]
    source = np.empty_like(rounds)  # which item of the round goes to each part
    loads = np.zeros((rows, parts), np.int64)
    numbers = np.broadcast_to(np.arange(parts), (rows, parts))
    greedy = min(size, _GREEDY_ROUNDS)
    for number in range(greedy):
        lightest = np.argsort(loads, axis=1, kind="stable")
        source[row, number, lightest] = numbers
        loads[row, lightest] += weight[:, number]
    lightest = np.argsort(loads, axis=1, kind="stable")
    inverse = np.empty_like(lightest)
    inverse[row, lightest] = numbers
    source[:, greedy::2] = inverse[:, None]
    source[:, greedy + 1 :: 2] = (parts - 1 - inverse)[:, None]
    flat = (source + np.arange(rows * size).reshape(rows, size, 1) * parts).transpose(0, 2, 1)
    return rounds.ravel().take(flat), weight.ravel().take(flat)


def _swap(chosen: np.ndarray, weight: np.ndarray) -> None:
    """Step 2, in place. chosen, weight: [rows, parts, size]."""
    parts = chosen.shape[1]
    pairs = parts // 2
    loads = weight.sum(2)
    enough = -(-loads.sum(1) // parts)
    enough += enough >> _CLOSE
    for number in range(_SWAP_ROUNDS):
        active = np.flatnonzero(loads.max(1) > enough)
        if not len(active):
            return
        order = falling_order(loads[active])
        row = np.repeat(active, pairs)
        heavy = order[:, :pairs].ravel()
        light = np.roll(order[:, ::-1][:, :pairs], number % pairs, axis=1).ravel()
        wanted = loads[row, heavy] > enough[row]
        row, heavy, light = row[wanted], heavy[wanted], light[wanted]
        excess = loads[row, heavy] - loads[row, light]
        give, take, gain = _closest(weight[row, heavy], weight[row, light], excess // 2)

        better = (gain > 0) & (gain < excess)
        row, heavy, light, give, take, gain = (a[better] for a in (row, heavy, light, give, take, gain))
        for table in (chosen, weight):
            given = table[row, heavy, give]
            table[row, heavy, give] = table[row, light, take]
            table[row, light, take] = given
        loads[row, heavy] -= gain
        loads[row, light] += gain


def _closest(heavy: np.ndarray, light: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each pair of parts the items whose weights differ by close to `wanted`.

    heavy, light: int64 [pairs, size]; wanted: int64 [pairs], at least 0.
    Returns give (of heavy), take (of light), and the difference: int64 [pairs].
    """
    pairs, size = heavy.shape
    top = int(max(heavy.max(), light.max())) + 1
    # one sorted array for all pairs; a number is (pair, weight, item)
    base = np.arange(pairs)[:, None] * top
    bits = (size - 1).bit_length()
    keys = ((light + base) << bits | np.arange(size)).ravel()
    keys.sort()
    target = np.clip(heavy - wanted[:, None], 0, top - 1) + base
    position = np.searchsorted(keys, (target << bits).ravel()).reshape(pairs, size)
    first = np.arange(pairs)[:, None] * size
    above = np.minimum(position, first + size - 1)
    below = np.maximum(position - 1, first)
    goal = heavy - wanted[:, None] + base
    values = keys >> bits
    over, under = np.abs(values.take(above) - goal), np.abs(values.take(below) - goal)
    nearest = np.where(over < under, above, below)
    give = np.minimum(over, under).argmin(1)
    pair = np.arange(pairs)
    key = keys.take(nearest[pair, give])
    return give, key & (1 << bits) - 1, heavy[pair, give] - ((key >> bits) - base[:, 0])
