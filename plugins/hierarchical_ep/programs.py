"""This module checks statically, before launch, that the collectives of a set of ranks cannot hang. The module is pure
Python.

A collective waits for every member of its group. A collective hangs if the members do not make the same calls on the
group in the same order, if their split lists disagree, or if two groups that share ranks are called in orders that wait
for each other. All of these faults can be found from the ranks' programs without running them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from plugins.errors import ClusterError
from plugins.hierarchical_ep.plan import Plan, Transfer
from plugins.hierarchical_ep.topology import Topology


@dataclass(frozen=True)
class Call:
    """A `Call` is one call of a collective by one rank.

    Attributes:
        op: "all_gather", "all_to_all", "all_to_all_v", "reduce_scatter", "create_group".
        group: ranks, in the group's order.
        send, recv: the numbers of rows that are sent to and received from each member, in the group's order; None if
            shapes are fixed.
        tag: the name of the data, such as "dispatch.inter.rows".
    """

    op: str
    group: tuple[int, ...]
    send: tuple[int, ...] | None = None
    recv: tuple[int, ...] | None = None
    tag: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.tag} on {self.group}".replace("  ", " ")


Program = Sequence[Call]


def programs_of(*plans: Plan, order: Sequence[tuple[int, int]] | None = None) -> list[list[Call]]:
    """Return the calls of each rank for one layer, forward and backward, in the order in which they are issued.

    A dispatch step first exchanges counts (only for All-to-All(V)), then ids and probabilities, then the rows; groups
    of one rank make no calls. The backward pass is the mirror image of the forward pass: the adjoint of each call, from
    last to first, without counts.

    Args:
        plans: one plan for each chunk (one plan means no overlap).
        order: (chunk, step) in the order in which the forward steps are issued; by default a wavefront, with step i of
            chunk c in slot c + i, the older chunk first.
    """
    steps = range(len(plans[0].forward))
    order = order or sorted(((c, i) for c in range(len(plans)) for i in steps), key=lambda item: (sum(item), item))
    ranks = range(plans[0].topology.ep)
    programs: list[list[Call]] = []
    for rank in ranks:
        forward = [call for c, i in order for call in _forward_calls(plans[c].forward[i], rank, c)]
        backward = [call for c, i in reversed(order) for call in _backward_calls(plans[c].forward[i], rank, c)]
        programs.append(forward + backward)
    return programs


def _forward_calls(step: Transfer, rank: int, chunk: int) -> list[Call]:
    group = step.group_of(rank)
    if len(group) == 1:
        return []
    rows = _call(step, rank, f"chunk {chunk} {step.step}.rows")
    if step.step.startswith("combine"):
        return [rows]
    meta = _call(step, rank, f"chunk {chunk} {step.step}.meta")
    if step.kind == "all_gather":
        return [meta, rows]
    return [Call("all_to_all", group, tag=f"chunk {chunk} {step.step}.counts"), meta, rows]


def _backward_calls(step: Transfer, rank: int, chunk: int) -> list[Call]:
    adjoint = step.adjoint()
    if len(step.group_of(rank)) == 1:
        return []
    calls = [_call(adjoint, rank, f"chunk {chunk} {step.step}.rows.backward")]
    if step.step.startswith("dispatch"):  # the probabilities have a gradient
        calls.append(_call(adjoint, rank, f"chunk {chunk} {step.step}.meta.backward"))
    return calls


def _call(step: Transfer, rank: int, tag: str) -> Call:
    group = step.group_of(rank)
    send, recv = step.rows[rank, list(group)], step.rows[list(group), rank]
    return Call(step.kind, group, tuple(send.tolist()), tuple(recv.tolist()), tag)


def creation_orders(topology: Topology) -> list[list[tuple[int, ...]]]:
    """Return the groups that each rank creates, in the order that all ranks share: EP group, inter-node group,
    intra-node group.
    """
    groups = dict.fromkeys((topology.ep_group, *topology.inter_groups, *topology.intra_groups))
    return [[group for group in groups if rank in group and len(group) > 1] for rank in range(topology.ep)]


def check_groups(orders: Sequence[Sequence[tuple[int, ...]]]) -> None:
    """Check the groups that each rank creates; creating a group waits for its members, as the call of a collective
    does.

    Args:
        orders: for each rank the groups it creates, in order.

    Raises ClusterError where a rank creates a group twice, a member does not create a group, or orders do not agree.
    """
    for rank, groups in enumerate(orders):
        for index, group in enumerate(groups):
            if group in groups[:index]:
                raise ClusterError(
                    f"rank {rank}, group {index}: a group of the ranks {group} is created twice; create it once, and "
                    "use it for all calls"
                )
    check_programs([[Call("create_group", tuple(group)) for group in groups] for groups in orders])


def check_programs(programs: Sequence[Program]) -> None:
    """Check that all ranks, 0 .. len(programs) - 1, finish if each call of a collective blocks until every member of
    its group has made the same call.

    Raises ClusterError naming the first rank and call that cannot be, and what differs: a rank outside the group it
    calls; members that order or fill a group differently; an n-th call on a group that is another operation, or has
    other split lists, on two members, or that one of them never makes; calls on overlapping groups that wait for each
    other in a circle.
    """
    for rank, program in enumerate(programs):
        for index, call in enumerate(program):
            _check_membership(rank, index, call, len(programs))
    calls = [_calls_by_group(program) for program in programs]
    for rank in range(len(programs)):
        for members in calls[rank]:
            for other in sorted(members - {rank}):
                _check_pair(programs, calls, members, rank, other)
    _check_rendezvous(programs)


def _check_membership(rank: int, index: int, call: Call, ranks: int) -> None:
    where = f"rank {rank}, call {index} ({call})"
    if rank not in call.group:
        raise ClusterError(f"{where}: rank {rank} is not a member of this group")
    if len(set(call.group)) < len(call.group) or not all(0 <= member < ranks for member in call.group):
        raise ClusterError(f"{where}: the members of a group must be different ranks from 0 to {ranks - 1}")
    for name in ("send", "recv"):
        splits = getattr(call, name)
        if splits is not None and len(splits) != len(call.group):
            raise ClusterError(f"{where}: the {name} list has {len(splits)} entries for {len(call.group)} members")


def _calls_by_group(program: Program) -> dict[frozenset[int], list[int]]:
    calls: dict[frozenset[int], list[int]] = {}
    for index, call in enumerate(program):
        calls.setdefault(frozenset(call.group), []).append(index)
    return calls


def _check_pair(programs, calls, members: frozenset[int], rank: int, other: int) -> None:
    mine, theirs = calls[rank][members], calls[other].get(members, [])
    if not theirs:
        group = programs[rank][mine[0]].group
        known = sorted({call.group for call in programs[other]})
        raise ClusterError(
            f"rank {other} has no collective in group {group}, but call {mine[0]} of rank {rank} is in this group; "
            f"rank {other} has collectives in the groups {known}"
        )
    for my_index, their_index in zip(mine, theirs, strict=False):
        _check_match(rank, my_index, programs[rank][my_index], other, their_index, programs[other][their_index])
    if len(mine) != len(theirs):
        more, index, fewer = (rank, mine, other) if len(mine) > len(theirs) else (other, theirs, rank)
        call = programs[more][index[min(len(mine), len(theirs))]]
        raise ClusterError(
            f"rank {more}, call {index[min(len(mine), len(theirs))]} ({call}): no call of rank {fewer} matches this "
            f"call; rank {fewer} makes {min(len(mine), len(theirs))} calls on this group, and rank {more} makes "
            f"{max(len(mine), len(theirs))}"
        )


def _check_match(rank: int, index: int, call: Call, other: int, their_index: int, theirs: Call) -> None:
    where = f"rank {rank}, call {index} ({call})"
    there = f"rank {other}, call {their_index}"
    if call.group != theirs.group:
        raise ClusterError(
            f"{where}: {there} lists the group's ranks in the order {theirs.group}; all members must use one order"
        )
    if (call.op, call.tag) != (theirs.op, theirs.tag):
        raise ClusterError(
            f"{where}: this call meets {there} ({theirs}), but both calls must have the same operation and the same tag"
        )
    me, them = call.group.index(rank), call.group.index(other)
    for send, recv, sender, receiver, at, to in (
        (call.send, theirs.recv, rank, other, them, me),
        (theirs.send, call.recv, other, rank, me, them),
    ):
        if send is not None and recv is not None and send[at] != recv[to]:
            raise ClusterError(
                f"{where}: rank {sender} sends {send[at]} rows to rank {receiver}, which expects {recv[to]} ({there})"
            )


def _check_rendezvous(programs: Sequence[Program]) -> None:
    """Simulate the programs; if all unfinished calls wait, raise an error that names the cycle of waits."""
    at = [0] * len(programs)

    def waits_for(rank: int) -> list[int]:
        group = programs[rank][at[rank]].group
        return [m for m in group if at[m] == len(programs[m]) or set(programs[m][at[m]].group) != set(group)]

    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        if at[rank] == len(programs[rank]) or waits_for(rank):
            continue
        group = programs[rank][at[rank]].group
        for member in group:
            at[member] += 1
        ready.extend(group)
    stuck = [rank for rank in range(len(programs)) if at[rank] < len(programs[rank])]
    if stuck:
        path = [stuck[0]]
        while path[-1] not in path[:-1]:
            path.append(waits_for(path[-1])[0])
        circle = path[path.index(path[-1]) :]
        lines = [
            f"rank {rank} is in call {at[rank]} ({programs[rank][at[rank]]}) and waits for rank {other}"
            for rank, other in pairwise(circle)
        ]
        raise ClusterError("these calls wait for each other forever: " + "; ".join(lines))
