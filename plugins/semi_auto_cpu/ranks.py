"""This module describes the cluster from the point of view of one rank: the number of this rank, the number of ranks,
and the ranks of each communication group.

Python creates some groups, and knows their ranks. MindSpore's C++ code creates other groups, of which Python gets only
a name, "<size>-<hash of the ranks>". The hash is that of the C++ standard library over "0-2-4-6", so a name identifies
its ranks (`made_up_name`): the parts of a device mesh that contain a rank are tried until one has this name
(`parts_of_meshes`). If no set of ranks matches a group's name, the group counts as unknown, because weights would be
sliced wrongly with wrong ranks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, combinations
from math import prod

from plugins.errors import ClusterError

WORLD = "hccl_world_group"
MADE_UP = re.compile(r"(\d+)-\d+")


class Ranks:
    """A `Ranks` describes the cluster of one rank: its number `rank` among `devices` ranks, and the communication
    groups that it knows.

    Attributes:
        groups: name -> global ranks of the created groups, in order, without the group of all ranks.
        places: group -> this rank's index in the group, as MindSpore was given it.

    Raises:
        ClusterError: the rank does not exist.
    """

    def __init__(self, devices: int, rank: int):
        if not 0 <= rank < devices:
            raise ClusterError(f"rank {rank} does not exist; the ranks of {devices} devices are 0 to {devices - 1}")
        self.devices = devices
        self.rank = rank
        self.groups: dict[str, tuple[int, ...]] = {}
        self.places: dict[str, int] = {}

    def create(self, group: str, ranks: list[int]) -> None:
        """Record a communication group with its ranks, as every member of the group does on a real cluster.

        Raises:
            ClusterError: this rank is not a member (a real cluster would hang), or a rank does not exist.
        """
        outside = [rank for rank in ranks if not 0 <= rank < self.devices]
        if outside:
            raise ClusterError(
                f"group {group!r} names ranks {outside}, but the cluster has ranks 0 to {self.devices - 1}"
            )
        if self.rank not in ranks:
            raise ClusterError(f"rank {self.rank} creates group {group!r} of ranks {ranks}, but is not one of them")
        self.groups[group] = tuple(ranks)

    def ranks_of(self, group: str) -> tuple[int, ...] | None:
        """Return the global ranks of a group in the order of the group; return None if these ranks are not known."""
        if group == WORLD:
            return tuple(range(self.devices))
        return self.groups.get(group) or members_of(group, self.devices, self.rank)

    def size_of(self, group: str) -> int:
        """Return the number of ranks in a group.

        Raises:
            ClusterError: no rank created this group.
        """
        if group != WORLD and group not in self.groups and (made_up := MADE_UP.fullmatch(group)):
            return int(made_up[1])
        return len(self.known(group))

    def rank_in(self, group: str) -> int:
        """Return this rank's index in a group, which selects the rank's slice of a weight if the group shards the
        optimizer.

        Raises:
            ClusterError: the ranks of the group are unknown.
        """
        self.places[group] = self.known(group).index(self.rank)
        return self.places[group]

    def order_of(self, group: str) -> int:
        """Return a number that depends only on the distances of a group's ranks from its first rank. All ranks put
        collectives of different groups into one order by this number. The number of a group whose ranks are unknown is
        0.
        """
        ranks = self.ranks_of(group) or ()
        return zlib.crc32("-".join(str(rank - ranks[0]) for rank in ranks).encode())

    def known(self, group: str) -> tuple[int, ...]:
        """Return the global ranks of a group; raise ClusterError if these ranks are not known.

        Raises:
            ClusterError: the ranks of the group are unknown.
        """
        ranks = self.ranks_of(group)
        if ranks is not None:
            return ranks
        if MADE_UP.fullmatch(group):
            raise ClusterError(
                f"rank {self.rank} needs its index in group {group!r}, whose ranks are unknown: MindSpore itself named "
                f"this group, which is neither a pair of ranks nor a part of a device mesh of {self.devices} "
                "devices"
            )
        raise ClusterError(f"group {group!r} was never created; the groups are {[WORLD, *self.groups]}")


def made_up_name(ranks: tuple[int, ...]) -> str:
    """Return the name that MindSpore's C++ gives to a group of these ranks (`GenerateGroupNameByRanks`)."""
    return f"{len(ranks)}-{_standard_hash('-'.join(map(str, ranks)).encode())}"


@lru_cache(maxsize=4096)
def members_of(group: str, devices: int, rank: int) -> tuple[int, ...] | None:
    """Return the ranks of the group `name` that MindSpore's C++ code created and that contains `rank`; return None if
    no set of ranks has this name.

    The ranks are in ascending order.
    """
    made_up = MADE_UP.fullmatch(group)
    if made_up is None:
        return None
    size = int(made_up[1])
    pairs = ((min(rank, other), max(rank, other)) for other in range(devices) if size == 2 and other != rank)
    candidates = chain(parts_of_meshes(devices, rank, size), pairs)
    return next((ranks for ranks in candidates if made_up_name(ranks) == group), None)


def parts_of_meshes(devices: int, rank: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield every group of `size` ranks that contains `rank` and whose ranks differ only in their positions along some
    axes of a device mesh.

    After these groups, if `optimizer_weight_shard_size` cuts a larger group into equal parts of `size` ranks, the
    function also yields the part that contains `rank`. The axes of any device mesh are products of axes with prime
    lengths, so the function tries the prime factors of the number of devices in each order.
    """
    for limit in (size, devices):
        seen: set[tuple[int, ...]] = set()
        for axes in map(_with_strides, sorted(_orders(_primes(devices)))):
            for chosen in chain.from_iterable(combinations(axes, count) for count in range(len(axes) + 1)):
                ranks = prod(length for length, _ in chosen)
                if ranks % size or ranks > limit:
                    continue
                group = [rank - sum(rank // stride % length * stride for length, stride in chosen)]
                for length, stride in chosen:
                    group = [first + place * stride for place in range(length) for first in group]
                group.sort()
                start = group.index(rank) // size * size
                part = tuple(group[start : start + size])
                if part not in seen:
                    seen.add(part)
                    yield part


def _with_strides(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return axes of a mesh, the one of neighbouring ranks first: (length, how far apart its ranks are)."""
    return [(length, prod(lengths[:axis])) for axis, length in enumerate(lengths)]


def _primes(number: int) -> tuple[int, ...]:
    found = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return tuple(found)


def _orders(primes: tuple[int, ...]) -> set[tuple[int, ...]]:
    if not primes:
        return {()}
    return {
        (first, *rest)
        for first in set(primes)
        for rest in _orders(primes[: primes.index(first)] + primes[primes.index(first) + 1 :])
    }


def _standard_hash(text: bytes) -> int:
    """Return `std::hash<std::string>` of the GNU C++ library, with which MindSpore's wheel is built: MurmurHash64A."""
    factor, low = 0xC6A4A7935BD1E995, (1 << 64) - 1
    whole = len(text) - len(text) % 8
    state = 0xC70F6907 ^ (len(text) * factor & low)
    for place in range(0, whole, 8):
        part = int.from_bytes(text[place : place + 8], "little") * factor & low
        state = (state ^ (part ^ part >> 47) * factor & low) * factor & low
    if whole < len(text):
        state = (state ^ int.from_bytes(text[whole:], "little")) * factor & low
    state = (state ^ state >> 47) * factor & low
    return state ^ state >> 47
