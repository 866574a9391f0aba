"""Ports, names and packet sizes between hosts."""

from __future__ import annotations

import os

from tools.doctor.checks import Answer, Patient, check
from tools.process.host import Root, compress, expand

MASTER_PORT = 8118  # msrun's own default
_BASE, _COUNT = 60000, 32
_LISTENS = "0A"  # a state of /proc/net/tcp


def _wanted() -> range:
    base = os.environ.get("HCCL_IF_BASE_PORT", "")
    first = int(base) if base.isdigit() else _BASE
    return range(first, first + _COUNT)


@check(
    why="HCCL's ports lie in the range of which Linux gives any client one; then a job fails to start, now and then",
    source="CANN, HCCL_IF_BASE_PORT: 60000-60031 unless it says otherwise",
    mend="sysctl -w net.ipv4.ip_local_reserved_ports=60000-60031",
    npu=True,
)
def reserved_ports(patient: Patient) -> Answer:
    """No client is given a port that HCCL wants."""
    span = patient.root.read("/proc/sys/net/ipv4/ip_local_port_range")
    if span is None:
        return Answer("unknown", "the range of clients' ports cannot be read")
    low, high = map(int, span.split())
    reserved = set(expand(patient.root.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or ""))
    open_ones = [port for port in _wanted() if low <= port <= high and port not in reserved]
    seen = f"clients get {low}-{high}"
    return Answer("warn" if open_ones else "ok", seen + (f", {compress(open_ones)} not reserved" if open_ones else ""))


@check(
    why="HCCL, and the scheduler of a script of tc3 train --script, cannot listen where somebody does already",
    source="msrun --master_port; CANN, HCCL_IF_BASE_PORT",
    mend="ss -ltnp shows who listens; end it, or choose MASTER_PORT, HCCL_IF_BASE_PORT",
)
def free_ports(patient: Patient) -> Answer:
    """Nobody listens on the ports of a launch; for the scheduler tc3 train and tc3 agent take a free one."""
    tables = [patient.root.read(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    if all(table is None for table in tables):
        return Answer("unknown", "/proc/net/tcp cannot be read")
    rows = [line.split() for table in tables for line in (table or "").splitlines()[1:]]
    listening = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}
    needed = set(_wanted()) if patient.wants_npus else set()  # the scheduler's is another where that one is taken
    taken = sorted(listening & {MASTER_PORT, *needed})
    if not taken:
        return Answer("ok", f"{compress({MASTER_PORT, *needed})} free")
    return Answer("fail" if listening & needed else "warn", f"in use: {', '.join(map(str, taken))}")


def card_sizes(root: Root) -> dict[str, str]:
    """Network card -> its packet size; devices of software alone (bridges, lo) are left out."""
    paths = [path for path in root.find("/sys/class/net/*/mtu") if root.find(f"{path.removesuffix('/mtu')}/device*")]
    return {path.split("/")[-2]: root.read(path) or "?" for path in paths}


@check(
    why="cards of different packet sizes on one network lose large packets without a word",
    source="ip-link(8)",
    mend="ip link set CARD mtu 9000 (as the switch, on every host)",
)
def packet_size(patient: Patient) -> Answer:
    """Network cards have one packet size; whether other hosts have the same, tc3 doctor --nodes says."""
    sizes = card_sizes(patient.root)
    if not sizes:
        return Answer("unknown", "no network card is seen (in a container: ask its host)")
    seen = ", ".join(f"{card} {size}" for card, size in sizes.items())
    return Answer("warn" if len(set(sizes.values())) > 1 else "ok", seen)


@check(
    why="other hosts look for the master by this name; one that means 'myself' leads each of them to itself",
    source="hosts(5); Debian writes 127.0.1.1",
    mend="write the host's own address into /etc/hosts, or give msrun an address (MASTER_ADDR)",
)
def host_name(patient: Patient) -> Answer:
    """The host's name leads to an address that others reach."""
    name = patient.root.read("/proc/sys/kernel/hostname")
    if not name:
        return Answer("unknown", "the host does not say its name")
    rows = [line.split("#")[0].split() for line in (patient.root.read("/etc/hosts") or "").splitlines()]
    addresses = [row[0] for row in rows if name in row[1:]]
    if not addresses:
        addresses = (patient.root.ask("getent", "hosts", name) or "").split()[:1]
    if not addresses:
        return Answer("fail", f"{name} leads nowhere")
    inside = all(address.startswith("127.") or address == "::1" for address in addresses)
    return Answer("warn" if inside else "ok", f"{name} is {', '.join(addresses)}")
