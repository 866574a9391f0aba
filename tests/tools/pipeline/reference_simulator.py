"""The obvious simulator: run whatever stage can run its next operation, note when; and random orders to try it on."""

import random

import numpy as np

from tools.pipeline.orders import BOTH_WAYS, LOOP, Op


def model_paths(stages, chunks, shape=LOOP):
    """Lists of (chunk, stage) that a micro-batch goes through."""
    walks = [[(v, s) for s in range(stages)][:: -1 if shape != LOOP and v % 2 else 1] for v in range(chunks)]
    return walks if shape == BOTH_WAYS else [[place for walk in walks for place in walk]]


def _at(op, stage, paths):
    """The path of an operation, and where on it the operation is."""
    path = next(path for path in paths if (op.chunk, stage) in path)
    return path, path.index((op.chunk, stage))


def needed(op, stage, paths):
    """(stage, op) that `op` waits for, or None."""
    if op.kind == "W":
        return stage, op._replace(kind="B")
    path, at = _at(op, stage, paths)
    if op.kind == "F":
        other = None if at == 0 else path[at - 1]
    elif at == len(path) - 1:
        return stage, op._replace(kind="F")
    else:
        other = path[at + 1]
    return other and (other[1], op._replace(chunk=other[0]))


def target_stage(op, stage, paths):
    """The stage that waits for what `op` makes, or None."""
    path, at = _at(op, stage, paths)
    at += 1 if op.kind == "F" else -1
    return path[at][1] if op.kind != "W" and 0 <= at < len(path) else None


def with_pairs(orders, tables):
    """Operations of each stage, those that run together as one item."""
    items = [[] for _ in orders]
    for stage, (order, table) in enumerate(zip(orders, tables, strict=True)):
        for op, row in zip(order, table.tolist(), strict=True):
            if row[-1]:
                items[stage][-1] = (items[stage][-1], op)
            else:
                items[stage].append(op)
    return items


def reference(orders, chunks, times, shape=LOOP):
    """{(stage, op): (start, end)} of `times` (Durations); raises RuntimeError when no stage can go on."""
    paths = model_paths(len(orders), chunks, shape)
    when, free, at = {}, [0.0] * len(orders), [0] * len(orders)
    parts = 1 + max(op.part for order in orders for item in order for op in together(item))

    def ready(item, stage):
        return all(need is None or need in when for need in (needed(op, stage, paths) for op in together(item)))

    while any(done < len(order) for done, order in zip(at, orders, strict=True)):
        runnable = [s for s, order in enumerate(orders) if at[s] < len(order) and ready(order[at[s]], s)]
        if not runnable:
            raise RuntimeError("deadlock")
        stage = runnable[0]
        order, index = orders[stage], at[stage]
        item = order[index]
        pair = not isinstance(item, Op)
        hides = {"full": (True, True), "none": (pair, pair), "1f1b": (pair, pair)}[times.overlap]
        if times.overlap == "1f1b" and not pair:
            hides = tuple(
                [getattr(one, "kind", "pair") for one in order[low:high]] == ["B", "F"]
                for low, high in ((max(index - 1, 0), index + 1), (index, index + 2))
            )
        start, sending = free[stage], 0.0
        for op in together(item):
            need = needed(op, stage, paths)
            if need:
                moves = need[0] != stage
                start = max(start, when[need][1] + (times.transfer if moves and hides[0] else 0))
                start += times.transfer if moves and not hides[0] else 0
            if target_stage(op, stage, paths) not in (None, stage) and not hides[1]:
                sending = times.transfer
        end = start + duration(item, order, stage, times, parts)
        when |= {(stage, op): (start, end) for op in together(item)}
        free[stage] = end + sending
        at[stage] += 1
    return when


def together(item):
    return (item,) if isinstance(item, Op) else item


def duration(item, order, stage, times, parts):
    if not isinstance(item, Op):
        forward, backward = item
        hidden = 0 if times.hidden is None else times.hidden[forward.chunk][backward.chunk][stage]
        return times.forward[forward.chunk][stage] + times.backward[backward.chunk][stage] - hidden

    def of(what):
        whole = np.ndim(what) == 2
        return what[item.chunk][stage] / parts if whole else what[item.part][item.chunk][stage]

    if item.kind == "B" and item._replace(kind="W") in order:
        return of(times.backward) - of(times.weight)
    return of({"F": times.forward, "B": times.backward, "W": times.weight}[item.kind])


def random_orders(seed, stages, chunks, micro_batches, shape=LOOP, split=0.0, pair=0.0):
    """Orders that no stage can get stuck in: operations in any order in which they could run one by one; a part of the
    forwards with a backward that was ready, too, as a pair."""
    rng = random.Random(seed)
    paths = model_paths(stages, chunks, shape)
    places = [(m, v, s) for m in range(micro_batches) for v in range(chunks) for s in range(stages)]
    todo = {(s, Op(kind, m, v)) for kind in "FB" for m, v, s in places}
    todo |= {(s, Op("W", *op[1:])) for s, op in sorted(todo) if op.kind == "B" and rng.random() < split}
    done, orders = set(), [[] for _ in range(stages)]
    while todo:
        ready = sorted(item for item in todo if (need := needed(item[1], item[0], paths)) is None or need in done)
        stage, op = rng.choice(ready)
        whole = [b for s, b in ready if s == stage and b.kind == "B" and (s, b._replace(kind="W")) not in todo]
        if op.kind == "F" and whole and rng.random() < pair:
            run = (op, rng.choice(whole))
        else:
            run = (op,)
        todo -= {(stage, one) for one in run}
        done |= {(stage, one) for one in run}
        orders[stage].append(run if len(run) == 2 else op)
    return orders
