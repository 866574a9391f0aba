"""What no plan can be faster than.

`work_bound` is the plain one: all work shared evenly, without recomputation or waiting. `path_bound` solves the model
of `tools.placement.ilp` with layers that may be cut at will, adding the longest chain of each answer until the
simulator agrees: the least step time of any plan, were layers divisible. It respects memory, the schedule's fill and
drain and the times of head and tail.
"""

from __future__ import annotations

from tools.placement.budget import Budget
from tools.placement.ilp import PathModel
from tools.placement.instance import Instance

AGREED = 1e-4
_CHAINS_PER_CHUNK = 6
_CHAIN = 1e-6  # effort of the longest chain, for each micro-batch and chunk


def work_bound(instance: Instance) -> float:
    """Return micro-batches x (work of one without recomputation) / stages."""
    least = [kind.forward + kind.backward + min(o.extra_backward for o in kind.options) for kind in instance.types]
    layers = sum(kind.count * work for kind, work in zip(instance.types, least, strict=True))
    return instance.micro_batches * (layers + float(instance.ends.sum())) / instance.stages


def path_bound(instance: Instance, model: PathModel, budget: Budget) -> float:
    """Return the bound, leaving in `model` the chains it rests on; infinite when no cut layers would fit either.

    Stops early when `budget` does or when chains outnumber the chunks by far (each makes every later solve slower):
    the bound is then weaker but still one.
    """
    bound = work_bound(instance)
    while not budget.over and model.chains < _CHAINS_PER_CHUNK * model.size:
        answer = model.relaxed(budget)
        if answer.plan is None:
            return answer.bound if answer.done else bound
        bound = max(bound, answer.bound)
        budget.spend(_CHAIN * instance.micro_batches * model.size)
        simulated, visits = instance.longest_chain(answer.plan)
        if simulated - answer.value <= AGREED * simulated:
            break
        model.add_chain(visits)
    return bound
