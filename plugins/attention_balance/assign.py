"""This module assigns the samples of one global batch to (data-parallel rank, micro-batch, slot), so that the step
takes as little time as possible. The module needs only NumPy.

The first case has one sample in each slot and all R ranks in one barrier (g = R): the samples are sorted, and each R
consecutive samples form a micro-batch.

    Claim. The k-th largest of the micro-batches' maxima is, in any assignment, at least x[(k - 1) R] (x sorted
    falling, from 0), which is what the sorted assignment has.
    Proof. The k - 1 micro-batches with the largest maxima hold (k - 1) R samples. So among the (k - 1) R + 1 largest
    samples at least one lies in another micro-batch, whose maximum is then at least x[(k - 1) R].

So the sorted assignment minimises every non-decreasing function of the maxima at once: their sum, and also a pipeline's
makespan for the best order of micro-batches; of a pipeline's plan only the order of the micro-batches is a heuristic.

In the second case there are several groups of ranks (g < R), and the same claim holds for blocks of g samples over all
groups; dividing the blocks among the groups is number partitioning with equally many numbers in each part
(`partition`), as with plain data parallelism (g = 1, a block is a sample). In the third case a slot holds several
samples: `_blocks` tries two constructions and takes the better one.

Costs are first turned into integers, because every rank computes the plan for itself, and sums of floating-point
numbers could differ between processors. Samples with equal costs keep their order.
"""

from __future__ import annotations

import numpy as np

from plugins.attention_balance.objective import Objective, best_order

# up to so many items the start looks at the loads for each item, above for each round
_ITEM_BY_ITEM = 1024
_FEW = 16  # and so many in a part: with more, no single item weighs much
# rounds of the greedy start that look at the loads; later rounds hold the light items and just go back and forth
_GREEDY_ROUNDS = 16
_SWAP_ROUNDS = 12
# a heaviest part within 1 / 2^17 of the mean is good enough: costs are not known better
_CLOSE = 17
_SCALE = float(1 << 32)


def falling_order(weights: np.ndarray) -> np.ndarray:
    """Return int64 [rows, n]: indices that sort each row of `weights` (int64, at least 0) in falling order; equal
    weights are sorted by index.

    Weight and index are sorted as one combined number: all these numbers are different, so the fast unstable sort gives
    the same result as a stable sort.
    """
    count = weights.shape[1]
    bits = max(count - 1, 1).bit_length()
    top = int(weights.max(initial=0))
    if top.bit_length() + bits > 62:
        return np.argsort(-weights, axis=1, kind="stable")
    keys = np.left_shift(top - weights, bits)
    keys |= np.arange(count)
    keys.sort(axis=1)
    keys &= (1 << bits) - 1
    return keys


def taken(values: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the elements of `values` [rows, n] at the positions `indices` [rows, ...], in the shape of `indices`; row
    r of `indices` selects from row r of `values`.
    """
    rows, count = values.shape
    if rows == 1:
        return values[0].take(indices)
    flat = indices.reshape(rows, -1) + np.arange(rows)[:, None] * count
    return values.ravel().take(flat).reshape(indices.shape)


def partition(weights: np.ndarray, parts: int, *, by_item: bool = True, swap: bool = True) -> np.ndarray:
    """Divide the items of each row into `parts` parts with equal numbers of items, so that the total weight of the
    heaviest part is small.

    1. Sort the items by falling weight. If there are few items and few in a part, each item goes to the lightest part
       that is not full (LPT), so a part that begins with a very heavy item ends with the lightest items of all.
       Otherwise the items are cut into rounds of `parts` items, and in each round the heaviest item goes to the
       lightest part, the second heaviest item to the second lightest part, and so on. With two items in each part this
       assignment is optimal.
    2. Pair the heaviest part with the lightest, the second heaviest with the second lightest and so on; each pair swaps
       the two items that bring it closest to equal. Step 2 is repeated with shifted pairs; it stops when the row's
       heaviest part is close to the mean, or after a fixed number of rounds (not of seconds: the plan must not depend
       on the clock).

    Args:
        weights: int64 [rows, items], at least 0; items is a multiple of `parts`, and items times the largest weight
            below 2^62.
        parts: number of parts.
        by_item: if False, step 1 always deals round by round.
        swap: if False, step 2 is left out.

    Returns:
        int64 [rows, parts, items / parts]: indices into a row. The result of a row depends only on that row.
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
    """Do step 1 item by item; arguments and results are those of `_greedy`."""
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
    """Do step 1 round by round. rounds, weight: [rows, size, parts], items and their weights, heaviest first.

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
    """Do step 2 in place. chosen, weight: [rows, parts, size]."""
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
    """Return for each pair of parts an item of `heavy`, an item of `light` and the difference of their weights, which
    is nearly `wanted`: three arrays int64 [pairs].

    Args:
        heavy, light: int64 [pairs, size], the weights of the items.
        wanted: int64 [pairs], at least 0.
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


def unscheduled(ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Return int64 [ranks, micro-batches, slots]: the position in the global batch of each sample as MindFormers
    delivers the samples without this plugin.

    `GeneratorDataset` deals positions to ranks in turn; a rank's samples fill its micro-batches one after the other. If
    the graph gathers the batches first (`plan.delivery_order`), MindFormers' order is another one, but it does not
    depend on costs either.
    """
    return np.arange(ranks * micro_batches * slots).reshape(micro_batches, slots, ranks).transpose(2, 0, 1)


def assign(costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Assign each sample of a global batch (or of each of several global batches) to a rank, a micro-batch and a slot.

    Args:
        costs: float64 [..., ranks * micro_batches * slots], at least 0, in the order of the global batch.
        ranks: data-parallel ranks.
        micro_batches: the number of micro-batches of a step.
        slots: samples of a rank's micro-batch.
        objective: the points at which ranks wait for each other.

    Returns:
        int64 [..., ranks, micro_batches, slots]: positions in the global batch, each once. Samples with equal costs
            keep their order. The result of a batch depends only on its costs, and is the same on every machine. It is
            never slower than `unscheduled`, which is returned if nothing is faster.
    """
    *lead, size = costs.shape
    assert size == ranks * micro_batches * slots
    weights = integers(costs.reshape(-1, size))
    if objective.ranks_per_barrier == 1:
        plan = _ranks_alone(weights, ranks, micro_batches, slots, objective)
    else:
        plan = _groups(weights, ranks, micro_batches, slots, objective)
    if objective.stages > 1:
        plan = _ordered(weights, plan, objective)
    natural = np.broadcast_to(unscheduled(ranks, micro_batches, slots), plan.shape)
    plan = _fastest(weights, [natural, plan], objective)
    return plan.reshape(*lead, ranks, micro_batches, slots)


def loads_of(costs: np.ndarray, plan: np.ndarray) -> np.ndarray:
    """Return the total cost of each rank's micro-batches, [..., ranks, micro-batches]. The argument `costs` holds the
    cost of each sample, [..., samples]; `plan` has the shape that `assign` returns.
    """
    rows = int(np.prod(plan.shape[:-3]))
    return taken(costs.reshape(rows, -1), plan.reshape(rows, -1)).reshape(plan.shape).sum(-1)


def integers(costs: np.ndarray) -> np.ndarray:
    """Return costs [rows, n] as int64 numbers of at most 32 bits, whose sums are exact, so that every rank of a mixed
    cluster finds the same plan.
    """
    largest = costs.max(1, keepdims=True)
    return np.rint(costs * (_SCALE / np.where(largest > 0, largest, 1.0))).astype(np.int64)


def _ranks_alone(weights: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Return the assignment for plain data parallelism, in which only the total cost of each rank matters and, with a
    pipeline, the balance of its micro-batches.
    """
    rows = len(weights)
    parts = partition(weights, ranks)
    if objective.stages > 1 and slots > 1:
        inner = partition(taken(weights, parts).reshape(rows * ranks, -1), micro_batches).reshape(rows, ranks, -1)
        parts = np.take_along_axis(parts, inner, 2)
    return parts.reshape(rows, ranks, micro_batches, slots)


def _groups(weights: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Return the assignment for barriers inside groups of ranks: it forms blocks of samples that run together, then
    assigns blocks to groups.
    """
    rows, together = len(weights), objective.ranks_per_barrier
    groups = ranks // together
    plans = []
    for blocks in _blocks(weights, together, slots):
        mine = partition(taken(weights, blocks).sum(-1).max(-1), groups)  # [rows, groups, micro_batches]
        plan = blocks[np.arange(rows)[:, None, None], mine]
        # heavy to light, then light to heavy: ranks' totals come close too, for the waits that no barrier forces
        plan[:, :, 1::2] = plan[:, :, 1::2, ::-1]
        plans.append(plan.transpose(0, 1, 3, 2, 4).reshape(rows, ranks, micro_batches, slots))
    if slots > 1:
        plans.append(_sorted_inside(weights, partition(weights, ranks)).reshape(plans[0].shape))
    return plans[0] if len(plans) == 1 else _fastest(weights, plans, objective)


def _sorted_inside(weights: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the items of each part [rows, parts, size] in falling order."""
    rows, count, size = parts.shape
    order = falling_order(taken(weights, parts).reshape(-1, size))
    return taken(parts.reshape(-1, size), order).reshape(rows, count, size)


def _blocks(weights: np.ndarray, together: int, slots: int):
    """Yield ways to cut the samples into blocks [rows, blocks, together, slots] that run at the same time.

    1. Sort, cut into blocks of together * slots, divide each evenly over its ranks: best when costs vary smoothly.
    2. (several slots) Divide all samples evenly into rank-sized bins, sort the bins, cut: best when a few samples
       are far heavier than the rest and each needs the lightest ones beside it.
    """
    rows, size = weights.shape
    order = falling_order(weights)
    if slots == 1:
        yield order.reshape(rows, -1, together, 1)
        return
    blocks = order.reshape(-1, together * slots)
    inside = partition(taken(weights, order).reshape(blocks.shape), together, by_item=False)
    yield taken(blocks, inside).reshape(rows, -1, together, slots)
    # they are sorted next, so closer bins gain nothing
    bins = partition(weights, size // slots, by_item=False, swap=False)
    falling = falling_order(taken(weights, bins).sum(-1))
    yield np.take_along_axis(bins, falling[:, :, None], 1).reshape(rows, -1, together, slots)


def _ordered(weights: np.ndarray, plan: np.ndarray, objective: Objective) -> np.ndarray:
    """Return the same plan, in which the micro-batches of each group have an order that makes the pipeline fast."""
    micro_batches, slots = plan.shape[2:]
    together = objective.ranks_per_barrier
    times = taken(weights, plan).sum(-1).reshape(-1, together, micro_batches).max(1)
    order = best_order(times, objective.stages, objective.forward_share)
    grouped = plan.reshape(-1, together, micro_batches, slots)
    return np.take_along_axis(grouped, order[:, None, :, None], 2).reshape(plan.shape)


def _fastest(weights: np.ndarray, plans: list[np.ndarray], objective: Objective) -> np.ndarray:
    """Return for each row the fastest of the plans; of equally fast plans, return the first."""
    times = objective.step_time(np.stack([taken(weights, plan).sum(-1) for plan in plans]))
    best = times.argmin(0)
    if (best == best[0]).all():
        return plans[best[0]]
    return np.stack(plans)[best, np.arange(len(weights))]
