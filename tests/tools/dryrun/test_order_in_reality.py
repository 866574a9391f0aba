"""The order check's verdict is what happens when ranks run their programs: threads, real messages, short time-outs."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.semi_auto_cpu.collecting import attributes
from tests.plugins.semi_auto_cpu.test_failures import messages
from tools.dryrun.order import Call, check_order

RANKS = 3


def planned(rank, op, members, size, tag=0):
    """One call of a rank: as the check sees it, and as `Collectives.run` takes it."""
    x = np.ones(size, np.float32)
    if op == "p2p":
        source, target = members
        group = sorted(members)
        call = Call(op, members, f"{size} Float32, tag {tag}", "Send")
        if rank == source:
            return call, ("Send", attributes(group, sr_tag=tag, dest_rank=group.index(target)), [x], [])
        return call, ("Receive", attributes(group, sr_tag=tag, src_rank=group.index(source)), [], [x])
    out = np.empty(size * len(members) if op == "AllGather" else size, np.float32)
    return Call(op, members, f"{size} Float32", ""), (op, attributes(members, op="sum"), [x], [out])


def draw(chosen):
    """What a world does together, one after the other: (op, members, size, tag)."""
    if chosen.random() < 0.5:
        return "p2p", tuple(chosen.sample(range(RANKS), 2)), chosen.choice([2, 3]), chosen.choice([1, 2])
    members = tuple(sorted(chosen.sample(range(RANKS), chosen.randint(2, RANKS))))
    return chosen.choice(["AllReduce", "AllGather"]), members, chosen.choice([2, 3]), 0


def disturb(chosen, program):
    """A fault of one rank: another order, a call too few or too many, another size or tag."""
    if not program:
        return
    place = chosen.randrange(len(program))
    kind = chosen.choice(["swap", "remove", "repeat", "size", "tag"])
    op, members, size, tag = program[place]
    if kind == "swap":
        other = chosen.randrange(len(program))
        program[place], program[other] = program[other], program[place]
    elif kind == "remove":
        del program[place]
    elif kind == "repeat":
        program.insert(place, program[place])
    elif kind == "size":
        program[place] = op, members, size + 1, tag
    else:
        program[place] = op, members, size, tag + 1


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 8), st.integers(0, 2))
def test_the_verdict_is_what_happens(seed, calls, faults):
    chosen = random.Random(seed)
    world = [draw(chosen) for _ in range(calls)]
    drawn = [[item for item in world if rank in item[1]] for rank in range(RANKS)]
    for _ in range(faults):
        disturb(chosen, chosen.choice(drawn))
    plans = [[planned(rank, *item) for item in program] for rank, program in enumerate(drawn)]
    verdict = check_order({rank: [call for call, _ in plan] for rank, plan in enumerate(plans)})
    # a machine with much to do may be slow, not wrong: what is to run through gets its time
    timeout = 0.25 if verdict else 20.0
    told = messages([[run for _, run in plan] for plan in plans], timeout, test="synchronous")
    assert bool(verdict) == any(told), (verdict, told)
