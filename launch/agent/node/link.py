"""The network interface by which this node reaches the others: whether its cable is in.

A link that is gone stops the workers of all nodes alike: each waits for the others, and none can say whose it is. Its
own node can: the interface has lost its carrier. (A switch in between is seen by nobody.)
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

ANY_PORT = 9  # nothing is sent


@dataclass(frozen=True)
class Link:
    """`interface` is None where nobody else is to be reached, or it is not known by what."""

    interface: str | None = None

    def lost(self) -> list[str]:
        """That the interface has no link, in words; none while it has, or cannot be looked at."""
        known = psutil.net_if_stats().get(self.interface or "")
        return [f"network interface {self.interface} has no link"] if known and not known.isup else []


def link_to(others: Iterable[str]) -> Link:
    """The link to the first of `others` whose name or address is known."""
    for host in others:
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return Link(_interface_of(probe.getsockname()[0]))
    return Link()


def _interface_of(address: str) -> str | None:
    """The interface that has an address; loopback is none, for it needs no link."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address for each in addresses) and not address.startswith("127."):
            return name
    return None
