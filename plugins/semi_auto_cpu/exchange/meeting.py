"""One collective of a group as one of its members takes part in it: everybody gives everybody a part.

Each part carries a note: which operator, the how manieth of the group, of what. Members that are not at the same
operator are told apart by it, at once and by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plugins.cpu_backend.network.transport import Mesh
from plugins.errors import ClusterError


def tag_of(*what: object) -> int:
    """The same number on every rank for the same words."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "little")


def describe(array: np.ndarray) -> str:
    """Type and shape for messages and to compare."""
    return f"{array.dtype.name} {list(array.shape)}"


def name_ranks(members: Sequence[int]) -> str:
    """Members in the order of their group."""
    return f"ranks {', '.join(map(str, members))}"


@dataclass(frozen=True)
class Meeting:
    """Members of a group at one collective.

    Attributes:
        operator, group: names for messages; members: global ranks in the order of the group;
        number: how many collectives these members had before.
    """

    mesh: Mesh
    operator: str
    group: str
    members: tuple[int, ...]
    number: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def me(self) -> int:
        """This rank's place in the group."""
        return self.members.index(self.mesh.rank)

    @property
    def where(self) -> str:
        """For messages."""
        return f"rank {self.mesh.rank}, {self._name} (group {self.group!r})"

    @property
    def _name(self) -> str:
        return f"{self.operator}, call {self.number} of {name_ranks(self.members)}"

    def swap(self, parts: Sequence[np.ndarray], what: str) -> list[np.ndarray]:
        """Give part j to member j; return what each member gave, in the order of the group. The own is not copied.

        Args:
            parts: [size] arrays of one dtype and one axis.
            what: that in which all members must agree; it says the dtype.

        Raises:
            ClusterError: a member is lost, late, or at something else.
        """
        note = f"{self._name}: {what}"
        others = {member: part for member, part in zip(self.members, parts, strict=True) if member != self.mesh.rank}
        arrived = self.mesh.exchange(tag_of("group", sorted(self.members)), others, note, f"{self.where}: {what}")
        elsewhere = [
            f"rank {member} is at {arrived[member].note}" for member in sorted(arrived) if arrived[member].note != note
        ]
        if elsewhere:
            raise ClusterError(f"rank {self.mesh.rank} is at {note}, where {' and '.join(elsewhere)}")
        own = parts[self.me]
        return [own if member == self.mesh.rank else arrived[member].array(own.dtype) for member in self.members]
