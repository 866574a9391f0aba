"""A rank's view of its cluster: who it is, how many there are, and the communication groups in order of creation."""

from __future__ import annotations

import re

from plugins.errors import ClusterError

WORLD = "hccl_world_group"
_GENERATED = re.compile(r"(\d+)-\d+")  # groups that MindSpore's C++ makes up: "<size>-<hash>"


class Ranks:
    """Rank `rank` of `devices`.

    Attributes:
        groups: name -> global ranks of the created ones, in order; the world is not among them.

    Raises:
        ClusterError: there is no such rank.
    """

    def __init__(self, devices: int, rank: int):
        if not 0 <= rank < devices:
            raise ClusterError(f"rank {rank} is not one of {devices} devices: 0 to {devices - 1}")
        self.devices = devices
        self.rank = rank
        self.groups: dict[str, tuple[int, ...]] = {}

    def create(self, group: str, ranks: list[int]) -> None:
        """Remember a group, as every member does on a real cluster.

        Raises:
            ClusterError: this rank is no member (a real cluster would hang), or a rank does not exist.
        """
        outside = [rank for rank in ranks if not 0 <= rank < self.devices]
        if outside:
            raise ClusterError(f"group {group!r} names ranks {outside}, the cluster has 0 to {self.devices - 1}")
        if self.rank not in ranks:
            raise ClusterError(f"rank {self.rank} creates group {group!r} of ranks {ranks}, of which it is none")
        self.groups[group] = tuple(ranks)

    def ranks_of(self, group: str) -> tuple[int, ...] | None:
        """Global ranks of a group in the order of their ranks in it; None for one that MindSpore's C++ made up."""
        if group == WORLD:
            return tuple(range(self.devices))
        return self.groups.get(group)

    def size_of(self, group: str) -> int:
        """Number of ranks in a group.

        Raises:
            ClusterError: nobody created it.
        """
        ranks = self.ranks_of(group)
        if ranks is not None:
            return len(ranks)
        generated = _GENERATED.fullmatch(group)
        if generated is None:
            raise ClusterError(f"no group {group!r} was created; there are {[WORLD, *self.groups]}")
        return int(generated[1])

    def rank_in(self, group: str) -> int:
        """This rank's place in a group.

        A group that C++ made up reaches Python by name only, when a collective is inserted. Its place is then not known
        and not used: `comm_ops.py` only checks that it is below the size. Its ranks are in the graph.
        """
        ranks = self.ranks_of(group)
        return self.rank % self.size_of(group) if ranks is None else ranks.index(self.rank)
