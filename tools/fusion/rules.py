"""The rules of both steps with their numbers, so that a test can leave one out and see what it was good for."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rules:
    """How clusters and kernels are made.

    Args:
        convex: no path between two operators of a cluster leaves it.
        types: DVM refuses operators by their types (`support.refusal`).
        reduce_depth: operators of a kernel that a reduction may still take in.
        broadcast_depth: operators of a kernel that its users may still take in.
        broadcast_into_reduce: a reduction takes in kernels with broadcasts, too; Ascend's model does so.
        largest: operators of a kernel (`composite_op_limit_size`).
        chains_of_a_size: chains of one size are joined before other neighbours of one size.
        chains_of_users: what has one user that takes nothing else is joined to it before what has several users.
    """

    convex: bool = True
    types: bool = True
    reduce_depth: int = 10
    broadcast_depth: int = 6
    broadcast_into_reduce: bool = True
    largest: int = 200
    chains_of_a_size: bool = True
    chains_of_users: bool = True


# split_model_ascend.cc and split_model_cpu.cc. A CPU wheel runs the second, whatever the generator: so the first shares
# all but these numbers with what was compared with MindSpore, and these numbers were not.
DVM = Rules()
CPU = replace(DVM, reduce_depth=20, broadcast_depth=20, broadcast_into_reduce=False)
