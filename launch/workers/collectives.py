"""This module is the program that msrun starts on every device to time the collectives of a recipe's communication
groups.

    msrun --worker_num=N --local_worker_num=N --join=True launch/workers/collectives.py PLAN.json FOLDER

PLAN.json holds "target" (Ascend or CPU), "rounds", and "rows": for each kind of group (such as tp or ep) its
"operator", "bytes" and "groups", lists of ranks. All groups of a row run at the same time, as in a training run. Each
rank writes FOLDER/rank_N.json: for each row the seconds of each round; an empty list if the rank is in no group of the
row.

AllReduce is the only of these collectives that has a CPU kernel for groups, and the only one that has run; the other
collectives have not run on an NPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.workers.lifetime import die_with_parent, run_then_hard_exit
from tools.files.atomic import write_atomically

_FLOAT = 4  # bytes of an element


def call_of(row: Mapping[str, Any], ranks: Sequence[int], rank: int, name: str) -> Callable[[], Any]:
    """Return a function that runs a collective of the plan once, in the communication group `name` of the given ranks.

    The bytes of a row are those of the whole tensor for an AllGather or AllReduce, and those that one rank sends for an
    AlltoAll or a Send.
    """
    from mindspore import Tensor, ops
    from mindspore.communication import comm_func

    count = max(1, row["bytes"] // _FLOAT // len(ranks))
    operator = row["operator"]
    if operator == "AllReduce":
        whole, reduce = Tensor(np.ones(count * len(ranks), np.float32)), ops.AllReduce(group=name)
        return lambda: reduce(whole)
    if operator == "AllGather":
        part, gather = Tensor(np.ones(count, np.float32)), ops.AllGather(group=name)
        return lambda: gather(part)
    if operator == "AlltoAll":
        count = max(1, row["bytes"] // _FLOAT // (len(ranks) - 1))  # one row is the rank's own
        rows = Tensor(np.ones((len(ranks), count), np.float32))
        exchange = ops.AlltoAll(len(ranks), 0, 0, group=name)
        return lambda: exchange(rows)
    sent = Tensor(np.ones(count * len(ranks), np.float32))
    if rank == ranks[0]:
        return lambda: comm_func.send(sent, ranks[1], name)
    return lambda: comm_func.recv(sent, ranks[0], name)


def _nothing() -> None:
    """Do nothing; this function replaces the collective on a rank outside all groups."""


def measure(plan: Mapping[str, Any], rank: int) -> list[list[float]]:
    """Return for each collective of a plan the seconds that each of its rounds took on this rank."""
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore.communication import create_group

    meet = ops.AllReduce()  # of all ranks: a barrier has no CPU kernel
    found: list[list[float]] = []
    for number, row in enumerate(plan["rows"]):
        own = next((place for place, ranks in enumerate(row["groups"]) if rank in ranks), None)
        call: Callable[[], Any] = _nothing
        if own is not None:
            name = f"firsthour_{number}_{own}"
            create_group(name, row["groups"][own])
            call = call_of(row, row["groups"][own], rank, name)
            call()  # the first call connects the ranks
        times = []
        for _ in range(plan["rounds"]):
            meet(Tensor([0.0], ms.float32)).asnumpy()
            began = time.perf_counter()
            call()
            ms.runtime.synchronize()
            times.append(time.perf_counter() - began)
        found.append(times if own is not None else [])
    return found


def main() -> None:
    """Time the collectives of the plan on this rank, and write the measured seconds to a file."""
    if "TC3_SUPERVISED" in os.environ:
        die_with_parent()
    from mindspore.communication import get_rank, init

    if os.environ.get("MS_ROLE") == "MS_SCHED":  # msrun starts this file for its scheduler, too
        init()
        return
    import mindspore as ms

    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ms.set_device(plan["target"])
    init()
    rank = get_rank()
    write_atomically(Path(sys.argv[2]) / f"rank_{rank}.json", json.dumps(measure(plan, rank)) + "\n")


if __name__ == "__main__":
    run_then_hard_exit(main)
