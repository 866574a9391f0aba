"""This module runs one collective as one member of its group: every member sends a part to every other member.

Each part has a note with the operator, the number of the call within the group, and the tensors. If members are not at
the same operator, the note shows it at once, and names the operators. Each function in `OPERATORS` computes one
collective: it reads the inputs of this rank, and writes the outputs of this rank in place. Sums and similar results
have the same bits in any order of arrival.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from plugins.cpu_backend.transport import Mesh
from plugins.errors import ClusterError

OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
# added up in float32 and rounded once
LOW_PRECISION = ("float16", "bfloat16")
Attrs = Mapping[str, str]
Arrays = Sequence[np.ndarray]
# bytes below which a round trip costs more than what it saves
SMALL = 1 << 16


def combine(parts: Sequence[np.ndarray], operation: str, out: np.ndarray) -> None:
    """Combine the parts by `operation`, one by one in the order of the group, and write the result into `out`, which
    may be one of the parts.

    Args:
        parts: [members] arrays of one shape and dtype.
        operation: a key of `OPERATIONS`.
        out: the array for the result, of the same shape and dtype. For booleans, sum and max mean "any", and prod and
            min mean "all".

    Raises:
        ClusterError: the operation is unknown.
    """
    if operation not in OPERATIONS:
        raise ClusterError(f"reduction {operation!r} does not exist; the reductions are {', '.join(OPERATIONS)}")
    function = OPERATIONS[operation]
    first, *others = parts
    if not others:
        out[...] = first
        return
    if first.dtype.name in LOW_PRECISION:
        total = first.astype(np.float32)
        for part in others:
            function(total, part.astype(np.float32), out=total)
        out[...] = total
        return
    in_place = not any(np.may_share_memory(out, part) for part in others[1:])
    total = out if in_place else np.empty_like(out)
    function(first, others[0], out=total)
    for part in others[1:]:
        function(total, part, out=total)
    if not in_place:
        out[...] = total


def tag_of(*what: object) -> int:
    """Return the tag of a message: a number that every rank computes as the same for the same values in `what`."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "little")


def describe(array: np.ndarray) -> str:
    """Return an array's type and shape as a text, for messages and comparisons."""
    return f"{array.dtype.name} {list(array.shape)}"


def name_ranks(members: Sequence[int]) -> str:
    """Return the members as text, in the order of their group: "ranks 0, 2, 4"."""
    return f"ranks {', '.join(map(str, members))}"


@dataclass(frozen=True)
class Meeting:
    """A `Meeting` represents the members of a group at one call of a collective, and exchanges their parts.

    Attributes:
        operator, group: names for messages.
        members: global ranks in the order of the group.
        number: the number of collectives that these members made before.
    """

    mesh: Mesh
    operator: str
    group: str
    members: tuple[int, ...]
    number: int

    @property
    def size(self) -> int:
        """Return the number of members of the group."""
        return len(self.members)

    @property
    def me(self) -> int:
        """Return this rank's index in the group of the collective."""
        return self.members.index(self.mesh.rank)

    @property
    def where(self) -> str:
        """Return a text for messages that says in which call of which collective the members meet."""
        return f"rank {self.mesh.rank}, {self._name} (group {self.group!r})"

    @property
    def _name(self) -> str:
        return f"{self.operator}, call {self.number} of {name_ranks(self.members)}"

    def swap(self, parts: Sequence[np.ndarray], what: str) -> list[np.ndarray]:
        """Send part j to member j; return the parts that the members sent to this member, in the order of the group. A
        member's own part is not copied.

        Args:
            parts: [size] arrays of one dtype and one axis.
            what: the values in which all members must agree, such as the dtype.

        Raises:
            ClusterError: a member is lost, late, or at another collective.
        """
        note = f"{self._name}: {what}"
        others = {member: part for member, part in zip(self.members, parts, strict=True) if member != self.mesh.rank}
        arrived = self.mesh.exchange(tag_of("group", sorted(self.members)), others, note, f"{self.where}: {what}")
        elsewhere = [
            f"rank {member} is at {arrived[member].note}" for member in sorted(arrived) if arrived[member].note != note
        ]
        if elsewhere:
            raise ClusterError(f"rank {self.mesh.rank} is at {note}, but {' and '.join(elsewhere)}")
        own = parts[self.me]
        return [own if member == self.mesh.rank else arrived[member].array(own.dtype) for member in self.members]


def all_reduce(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Write into `outputs` the sum of each input tensor over all members (or the maximum, minimum or product, as the
    operator says).

    Small tensors, and tensors of groups with two members, are sent whole to every member. For other tensors each member
    adds up one piece and sends the sum to all members: the result has the same bits, and a member sends 2 (n - 1) / n
    of a tensor instead of n - 1 tensors.
    """
    operation = attrs.get("op", "sum")
    for x, out in zip(inputs, outputs, strict=True):
        flat, total = _flat(x), _result(out)
        what = f"{operation} of {describe(x)}"
        if meeting.size == 2 or x.nbytes < SMALL:
            combine(meeting.swap([flat] * meeting.size, what), operation, total)
            continue
        ends = [flat.size * place // meeting.size for place in range(1, meeting.size + 1)]
        results = _pieces(total, ends)
        mine = results[meeting.me]
        combine(meeting.swap(_pieces(flat, ends), f"{what}, pieces"), operation, mine)
        for result, part in zip(results, meeting.swap([mine] * meeting.size, f"{what}, results"), strict=True):
            result[...] = part


def all_gather(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Write into `outputs` the tensors of all members, concatenated along axis 0. Further input tensors, which the
    operator `_MicroStepAllGather` has, are ignored.
    """
    for x, out in zip(inputs, outputs, strict=False):
        _fits(meeting, out, x.size * meeting.size)
        parts = meeting.swap([_flat(x)] * meeting.size, describe(x))
        for target, part in zip(_result(out).reshape(meeting.size, x.size), parts, strict=True):
            target[...] = part


def reduce_scatter(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Write into `outputs` this member's part, along axis 0, of the sum of each input tensor over all members (or of
    the maximum, minimum or product).
    """
    operation = attrs.get("op", "sum")
    for x, out in zip(inputs, outputs, strict=True):
        _fits(meeting, x, out.size * meeting.size)
        parts = meeting.swap(list(_flat(x).reshape(meeting.size, out.size)), f"{operation} of {describe(x)}")
        combine(parts, operation, _result(out))


def all_to_all(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Send part j of axis split_dim to member j; concatenate the received parts along concat_dim in the order of the
    group.
    """
    count, split, concat = (int(attrs[name]) for name in ("split_count", "split_dim", "concat_dim"))
    (x,), (out,) = inputs[:1], outputs[:1]
    if count != meeting.size or x.shape[split] % count:
        raise ClusterError(
            f"{meeting.where}: {describe(x)} cannot be split into {count} equal parts along axis {split}"
        )
    pieces = np.split(x, count, axis=split)
    shape = list(pieces[0].shape)
    what = f"{describe(x)} split along axis {split}, laid along axis {concat}"
    parts = meeting.swap([_flat(piece) for piece in pieces], what)
    whole = shape.copy()
    whole[concat] *= count
    _fits(meeting, out, x.size)
    for target, part in zip(np.split(out.reshape(whole), count, axis=concat), parts, strict=True):
        target[...] = part.reshape(shape)


def all_to_all_v(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Send to each member as many blocks as the second input states for it, and receive from each as many blocks as the
    third input states. The unused end of the output is filled with zeros.
    """
    block = int(attrs.get("block_size", 1))
    x, out = _flat(inputs[0]), _result(outputs[0])
    send, due = (_counts(meeting, numbers, block) for numbers in inputs[1:3])
    if sum(send) > x.size:
        raise ClusterError(
            f"{meeting.where}: the send counts add up to {sum(send)} elements, but the input has only {x.size}"
        )
    parts = meeting.swap(_pieces(x, list(accumulate(send))), f"{x.dtype.name} in blocks of {block}")
    for member, part, count in zip(meeting.members, parts, due, strict=True):
        if part.size != count:
            told = f"rank {member} sends {part.size} elements, but the receive counts say {count}"
            raise ClusterError(f"{meeting.where}: {told} (a block has {block} elements)")
    if sum(due) > out.size:
        raise ClusterError(f"{meeting.where}: {sum(due)} elements arrive, but the output has room for only {out.size}")
    for target, part in zip(_pieces(out, list(accumulate(due))), parts, strict=True):
        target[...] = part
    out[sum(due) :] = 0


def broadcast(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Write into `outputs` the tensors of root_rank, which is a global rank or, if it is not the rank of a member, an
    index in the group.
    """
    root_rank = int(attrs.get("root_rank", 0))
    place = meeting.members.index(root_rank) if root_rank in meeting.members else root_rank
    if not 0 <= place < meeting.size:
        raise ClusterError(
            f"{meeting.where}: root_rank {root_rank} is neither a member of the group nor an index in it"
        )
    for x, out in zip(inputs, outputs, strict=True):
        flat = _flat(x)
        # empty parts from the others: nobody runs ahead of who is not there yet
        part = flat if place == meeting.me else flat[:0]
        parts = meeting.swap([part] * meeting.size, f"{describe(x)} from rank {meeting.members[place]}")
        _result(out)[...] = parts[place]


def barrier(meeting: Meeting, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> None:
    """Wait until all members of the group have called this function."""
    meeting.swap([np.empty(0, np.uint8)] * meeting.size, "nothing")
    if inputs and outputs:
        _result(outputs[0])[...] = _flat(inputs[0])


def _flat(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1)


def _result(out: np.ndarray) -> np.ndarray:
    """Return an array as [elements], which shares its memory."""
    assert out.flags.c_contiguous
    return out.reshape(-1)


def _pieces(flat: np.ndarray, ends: Sequence[int]) -> list[np.ndarray]:
    """Return views of an array between consecutive ends."""
    return [flat[begin:end] for begin, end in pairwise([0, *ends])]


def _fits(meeting: Meeting, array: np.ndarray, size: int) -> None:
    if array.size != size:
        raise ClusterError(f"{meeting.where}: its input or result {describe(array)} must have {size} elements")


def _counts(meeting: Meeting, numbers: np.ndarray, block: int) -> list[int]:
    """Return the number of elements for each member, computed from the number of blocks for each member."""
    counts = (np.asarray(numbers, np.int64).reshape(-1) * block).tolist()
    if len(counts) != meeting.size or min(counts) < 0:
        raise ClusterError(
            f"{meeting.where}: counts {np.asarray(numbers).tolist()} must be a list with one number, 0 or more, for "
            f"each of the {meeting.size} members"
        )
    return counts


OPERATORS: dict[str, Callable[[Meeting, Attrs, Arrays, Arrays], None]] = {
    "AllReduce": all_reduce,
    "AllGather": all_gather,
    "_MiniStepAllGather": all_gather,
    "_MicroStepAllGather": all_gather,
    "ReduceScatter": reduce_scatter,
    "AlltoAll": all_to_all,
    "AllToAll": all_to_all,
    "AlltoAllV": all_to_all_v,
    "AllToAllV": all_to_all_v,
    "Broadcast": broadcast,
    "Barrier": barrier,
}
