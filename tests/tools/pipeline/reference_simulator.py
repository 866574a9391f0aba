"""The obvious simulator: run whatever stage can run its next operation, note when; and random orders to try it on."""

import random

from tools.pipeline.schedules import Op


def model_path(stages, chunks, v_shaped=False):
    path = []
    for v in range(chunks):
        walk = list(range(stages))
        if v_shaped and v % 2:
            walk.reverse()
        path += [(v, s) for s in walk]
    return path


def needed(op, stage, path):
    """(stage, op) that `op` waits for, or None."""
    if op.kind == "W":
        return stage, Op("B", op.micro_batch, op.chunk)
    at = path.index((op.chunk, stage))
    if op.kind == "F":
        other = None if at == 0 else path[at - 1]
    elif at == len(path) - 1:
        return stage, Op("F", op.micro_batch, op.chunk)
    else:
        other = path[at + 1]
    return other and (other[1], Op(op.kind, op.micro_batch, other[0]))


def target_stage(op, stage, path):
    """The stage that waits for what `op` makes, or None."""
    at = path.index((op.chunk, stage)) + (1 if op.kind == "F" else -1)
    return path[at][1] if op.kind != "W" and 0 <= at < len(path) else None


def reference(orders, chunks, forward, backward, weight, transfer, overlap, v_shaped=False):
    """{(stage, op): (start, end)}; raises RuntimeError when no stage can go on."""
    path = model_path(len(orders), chunks, v_shaped)
    when, free, next_op = {}, [0.0] * len(orders), [0] * len(orders)

    def can_run(op, stage):
        need = needed(op, stage, path)
        return need is None or need in when

    while any(at < len(order) for at, order in zip(next_op, orders, strict=True)):
        runnable = [s for s, order in enumerate(orders) if next_op[s] < len(order) and can_run(order[next_op[s]], s)]
        if not runnable:
            raise RuntimeError("deadlock")
        stage = runnable[0]
        order, index = orders[stage], next_op[stage]
        op = order[index]
        after_backward = index > 0 and order[index - 1].kind == "B" and op.kind == "F"
        before_forward = index + 1 < len(order) and op.kind == "B" and order[index + 1].kind == "F"
        need = needed(op, stage, path)
        start = free[stage]
        if need:
            moves = need[0] != stage
            hidden = overlap == "full" or (overlap == "1f1b" and after_backward)
            start = max(start, when[need][1] + (transfer if moves and hidden else 0))
            start += transfer if moves and not hidden else 0
        split = Op("W", op.micro_batch, op.chunk) in order
        place = op.chunk, stage
        duration = {"F": forward, "B": backward, "W": weight}[op.kind][place]
        if op.kind == "B" and split:
            duration -= weight[place]
        when[stage, op] = start, start + duration
        sends = target_stage(op, stage, path) not in (None, stage)
        hidden = overlap == "full" or (overlap == "1f1b" and before_forward)
        free[stage] = start + duration + (transfer if sends and not hidden else 0)
        next_op[stage] += 1
    return when


def random_orders(seed, stages, chunks, micro_batches, v_shaped=False, split=0.0):
    """Orders that no stage can get stuck in: operations in any order in which they could run one by one."""
    rng = random.Random(seed)
    path = model_path(stages, chunks, v_shaped)
    todo = {(s, Op(kind, m, v)) for kind in "FB" for m in range(micro_batches) for v, s in path}
    todo |= {(s, Op("W", m, v)) for m in range(micro_batches) for v, s in path if rng.random() < split}
    done, orders = set(), [[] for _ in range(stages)]
    while todo:
        ready = sorted(item for item in todo if (need := needed(item[1], item[0], path)) is None or need in done)
        stage, op = rng.choice(ready)
        todo.remove((stage, op))
        done.add((stage, op))
        orders[stage].append(op)
    return orders
