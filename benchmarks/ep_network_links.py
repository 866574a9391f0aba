"""This module makes two network namespaces that act as two nodes, joined by a shaped link; it needs root and
iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("tc3-ep-node0", "tc3-ep-node1")
HOSTS = ("10.231.77.1", "10.231.77.2")
DEVICE = "tc3-ep"
# Bytes that may pass at once after a pause. Small against a chunk; the loopback's holds one of its packets (65536)
BURSTS = {"inter": 32 << 10, "intra": 96 << 10}


class Unavailable(Exception):
    """This error says why this machine cannot make the network of two namespaces."""


def run(*command: str) -> None:
    """Run a command of iproute2; raise Unavailable with the command's error message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def check() -> None:
    """Raise Unavailable if this process is not root, iproute2 is missing, or the names of the namespaces are in use."""
    if os.geteuid() != 0:
        raise Unavailable("it makes network namespaces: run it as root")
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        raise Unavailable(f"{' and '.join(absent)} not found: install iproute2")
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
    taken = [name for name in NAMES if name in listed]
    if taken:
        rest = " && ".join(f"ip netns del {name}" for name in taken)
        raise Unavailable(f"the namespace {taken[0]} exists: another run, or the rest of a killed one (then: {rest})")


@contextmanager
def nodes(inter_mbit: int, intra_mbit: int) -> Iterator[None]:
    """Make both network namespaces, with the addresses HOSTS, for as long as the block runs; raise Unavailable if that
    is impossible.
    """
    check()
    made = []
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
            made.append(name)
        run("ip", "link", "add", DEVICE, "netns", NAMES[0], "type", "veth", "peer", "name", DEVICE, "netns", NAMES[1])
        for name, host in zip(NAMES, HOSTS, strict=True):
            run("ip", "-n", name, "addr", "add", f"{host}/30", "dev", DEVICE)
            for device, link, mbit in ((DEVICE, "inter", inter_mbit), ("lo", "intra", intra_mbit)):
                run("ip", "-n", name, "link", "set", device, "up")
                rate = ("rate", f"{mbit}mbit", "burst", str(BURSTS[link]), "latency", "200ms")
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *rate)
        yield
    finally:
        for name in made:  # the veth pair goes with them
            subprocess.run(["ip", "netns", "del", name], check=False)


def command_in(node: int, *command: str) -> list[str]:
    """Return the words that run `command` on a node; the command replaces the `ip` process, so the process id is that
    of the command.
    """
    return ["ip", "netns", "exec", NAMES[node], *command]
