"""Which ranks a collective concerns, from what Python created and from the operator's own attributes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.ranks import MADE_UP, Ranks, made_up_name

WORLDS = ("hccl_world_group", "mccl_world_group", "nccl_world_group")
# MindSpore states the ranks of groups that C++ made up in one of these: "(0, 4)", "[0, 4]" or "0-4". Of groups that
# Python created they may say the world, which is wrong
STATED = ("rank_list", "group_rank_ids", "group_ranks")


class Groups:
    """The groups of one rank.

    Args:
        ranks: who this is, and the groups that Python created.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def members(self, operator: str, attrs: Mapping[str, str]) -> tuple[int, ...]:
        """Global ranks of an operator's group, in the order of the group.

        Raises:
            ClusterError: nobody says which ranks these are, or this rank is none of them.
        """
        name = attrs.get("group", "")
        created = self.ranks.groups.get(name)
        if created is not None:
            return self._with_me(operator, name, created)
        key = name, *(attrs.get(stated, "") for stated in STATED)
        if key not in self._known:
            members = self._with_me(operator, name, self._stated(operator, name, attrs))
            self._known[key] = self._proven(operator, name, members)
        return self._known[key]

    def _stated(self, operator: str, name: str, attrs: Mapping[str, str]) -> tuple[int, ...]:
        """The ranks that attributes name: those with this rank first; the world's, where there are none."""
        lists = [tuple(map(int, re.findall(r"\d+", attrs.get(stated, "")))) for stated in STATED]
        found = sorted(filter(None, lists), key=lambda ranks: self.ranks.rank not in ranks)
        if found:
            return found[0]
        if name in WORLDS:
            return tuple(range(self.ranks.devices))
        known = [*self.ranks.groups, *WORLDS]
        raise ClusterError(
            f"rank {self.ranks.rank}: {operator} uses group {name!r}, which nobody created and whose ranks its "
            f"attributes ({', '.join(STATED)}) do not state; known are {', '.join(known)}"
        )

    def _proven(self, operator: str, name: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """The stated ranks, which a name that C++ made up must agree with: weights are cut by it."""
        if MADE_UP.fullmatch(name) and name != made_up_name(members):
            raise ClusterError(
                f"rank {self.ranks.rank}: {operator} says that group {name!r} has ranks {list(members)}, "
                f"of which MindSpore makes the name {made_up_name(members)!r}"
            )
        return members

    def _with_me(self, operator: str, name: str, members: tuple[int, ...]) -> tuple[int, ...]:
        if self.ranks.rank not in members:
            raise ClusterError(
                f"rank {self.ranks.rank} runs {operator} in group {name!r} of ranks {list(members)}: it is none of them"
            )
        if len(set(members)) != len(members) or max(members) >= self.ranks.devices:
            raise ClusterError(
                f"{operator}: group {name!r} of ranks {list(members)} is no group of {self.ranks.devices} processes"
            )
        return members
