"""Who does what only one may do: claims on names, and how those of the dead are taken over, each time by exactly one.

A claim is a row of files `claim-WHAT-0`, `claim-WHAT-1`, ... of which each is published once and never changed or
removed: whoever published the newest one holds it. It is taken over when its holder has given no sign of life for
`lost_after` seconds, by publishing the next file, which one succeeds in. A holder that was only slow finds out at its
next look. A look and what follows it are two things, so a slow holder may still do the work of a claim that it has just
lost: the outcome must be published (`Disk.publish`), too, and then there is one outcome. The claim saves work, and
settles who must do it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.agent.disk import Disk, Found


@dataclass(frozen=True)
class Holder:
    """An agent: its host's name, and what sets this process apart from others that had or have the same."""

    host: str
    process: str

    def text(self) -> str:
        """As it stands in a file."""
        return json.dumps({"host": self.host, "process": self.process}) + "\n"

    @staticmethod
    def of(found: Found | None) -> Holder | None:
        """Who a file names; None where it is not there, nobody where it is broken."""
        if found is None:
            return None
        try:
            content = json.loads(found.text)
            return Holder(str(content["host"]), str(content["process"]))
        except (ValueError, KeyError, TypeError):
            return Holder("", "")


class Claim:
    """One claim, as one agent sees it.

    Args:
        disk: the shared one.
        folder: the attempt's.
        what: is claimed; part of a file's name.
        me: who claims.
        dead: whether a holder has given no sign of life for too long.
    """

    def __init__(self, disk: Disk, folder: Path, what: str, me: Holder, dead: Callable[[Holder], bool]):
        self.disk, self.folder, self.what, self.me, self.dead = disk, folder, what, me, dead
        self.turn = 0  # of the newest file known
        self.holder: Holder | None = None  # as of the last look

    def hold(self) -> bool:
        """Whether the claim is ours now; takes it where it is free, or its holder is dead. A handful of opens."""
        while True:
            file = self.folder / f"claim-{self.what}-{self.turn}"
            self.holder = Holder.of(self.disk.read(file))
            if self.holder is None:
                self.disk.publish(file, self.me.text())
                self.holder = Holder.of(self.disk.read(file))
            if self.lost():
                self.turn += 1
            elif self.holder == self.me:
                return True
            elif self.holder is None or not self.dead(self.holder):
                return False
            else:
                self.turn += 1

    def lost(self) -> bool:
        """Whether the holder of the newest file known has been followed by another one. One open."""
        return self.disk.read(self.folder / f"claim-{self.what}-{self.turn + 1}") is not None
