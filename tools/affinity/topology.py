"""This module reads the NUMA nodes of a host, the distances between them, and the node nearest to each NPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from plugins.errors import ClusterError
from plugins.processor_time import groups, upwards
from tools.process import host
from tools.process.host import OUTPUTS, Root, expand

MSRUN_READS = "/sys/fs/cgroup/cpuset/cpuset.cpus"  # mindspore/runtime/thread_bind_core.py, _get_available_cpus (2.9.0)
NODES = "/sys/devices/system/node"
OWN, SOCKET = 10, 20  # distances of the ACPI: a node's own is 10; below 20 is taken for the same socket
_NODE_NUMBER = re.compile(r"(\d+)$")
_HOST_FOLDERS = ("proc", "sys", "etc", "usr", OUTPUTS)  # of a host, of which a recorded one has some


def allowed(root: Root) -> list[int] | None:
    """Return the cores on which this process may be scheduled (its cpuset limits them); return None if no file states
    them.

    The function reads control groups of version 1 and of version 2; in a container the process's own group is mounted
    as the top group, so the function tries the path of a group from the deepest folder upwards.
    """
    lists = [expand(text) for text in (_status(root, "Cpus_allowed_list:"), _group_cores(root)) if text]
    if not lists:
        return None
    return sorted(set(lists[0]).intersection(*lists[1:]))


def _status(root: Root, name: str) -> str:
    """Return a line of Linux's status of this process; "" if Linux does not state it."""
    lines = (root.read("/proc/self/status") or "").splitlines()
    return next((line.removeprefix(name) for line in lines if line.startswith(name)), "")


def msrun_sees(root: Root) -> list[int]:
    """Return the cores that msrun may bind. On a host with control groups of version 2, msrun cannot bind any core."""
    return sorted(set(expand(root.read(MSRUN_READS) or "")))


def _group_cores(root: Root) -> str:
    """Return the cpuset of the process's control group."""
    own = dict(groups(root.read("/proc/self/cgroup") or ""))
    for path in upwards(own.get("cpuset", "/")):
        if cores := root.read(f"/sys/fs/cgroup/cpuset{path}cpuset.cpus"):
            return cores
    for path in upwards(own.get("", "/")):
        if cores := root.read(f"/sys/fs/cgroup{path}cpuset.cpus.effective"):
            return cores
    return ""


@dataclass(frozen=True)
class Host:
    """A `Host` holds the cores, NUMA nodes and NPUs from which a plan is made.

    Attributes:
        nodes: NUMA node -> all of its cores.
        distance: (node, node) -> distance, 10 for a node's own.
        allowed: cores that may be used.
        npus: NPU -> nearest node; None where the host does not say.
        msrun: cores of which msrun knows; none on a host with control groups of version 2.
        memory: nodes whose memory may be used.
    """

    nodes: Mapping[int, list[int]]
    distance: Mapping[tuple[int, int], int]
    allowed: frozenset[int]
    npus: Mapping[int, int | None]
    msrun: tuple[int, ...] = ()
    memory: frozenset[int] = frozenset()

    def free(self, node: int) -> list[int]:
        """Return the cores of a node that this process may use."""
        return [core for core in self.nodes[node] if core in self.allowed]

    def node_of(self, core: int) -> int:
        """Return the NUMA node of a core."""
        return next(node for node, cores in self.nodes.items() if core in cores)


def read_host(root: Root) -> Host:
    """Return the cores, NUMA nodes and NPUs of the host whose files (such as `sys/`) are below the folder `root`.

    Raises:
        ClusterError: no file below `root` says which cores the host has, or such a file cannot be read.
    """
    try:
        nodes = _nodes(root)
        cores = {core for members in nodes.values() for core in members}
        may = allowed(root)
        distance = _distances(root, sorted(nodes))
        return Host(
            nodes,
            distance,
            frozenset(cores if may is None else cores.intersection(may)),
            _npus(root, nodes),
            tuple(msrun_sees(root)),
            frozenset(_memory_nodes(root, nodes)),
        )
    except ValueError as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"{root.path}: a list of cores or of NUMA distances of this host cannot be read ({error})"
        ) from None


def _nodes(root: Root) -> dict[int, list[int]]:
    """Return the cores of each node from /sys, or from `lscpu -p` if /sys lacks them. Nodes with only memory have no
    cores and are left out.
    """
    found = {}
    for path in root.find(f"{NODES}/node[0-9]*"):
        if number := _NODE_NUMBER.search(path):
            found[int(number[1])] = expand(root.read(f"{path}/cpulist") or "")
    if not any(found.values()):
        found = _lscpu_nodes(root.ask("lscpu", "-p") or "")
    if not any(found.values()):
        raise ClusterError(
            f"{root.path}: the cores of this host are unknown: there is neither {NODES}/node*/cpulist nor output "
            "of `lscpu -p`"
        )
    return {node: sorted(cores) for node, cores in sorted(found.items()) if cores}


def _lscpu_nodes(text: str) -> dict[int, list[int]]:
    """Return a dictionary node -> cores from the output of `lscpu -p`, whose lines are CPU,Core,Socket,Node,... and
    comments that begin with #; a core without a node counts to node 0.
    """
    found: dict[int, list[int]] = {}
    for line in text.splitlines():
        row = line.split(",")
        if line and line[0] != "#" and len(row) >= 4:
            found.setdefault(int(row[3] or 0), []).append(int(row[0]))
    return found


def _distances(root: Root, nodes: list[int]) -> dict[tuple[int, int], int]:
    """Return distances from /sys, whose columns are the online nodes; otherwise each other node is as far as another
    socket.
    """
    online = sorted(int(match[1]) for path in root.find(f"{NODES}/node[0-9]*") if (match := _NODE_NUMBER.search(path)))
    found = {(a, b): OWN if a == b else SOCKET for a in nodes for b in nodes}
    for node in nodes:
        row = [int(word) for word in (root.read(f"{NODES}/node{node}/distance") or "").split()]
        if len(row) == len(online):
            found.update({(node, other): far for other, far in zip(online, row, strict=True) if other in nodes})
    return found


def _memory_nodes(root: Root, nodes: Mapping[int, list[int]]) -> set[int]:
    """Return the NUMA nodes that have memory which this process may use; all nodes if Linux does not state them."""
    texts = (_status(root, "Mems_allowed_list:"), root.read(f"{NODES}/has_memory"))
    lists = [expand(text) for text in texts if text]
    return set(nodes).intersection(*lists)


def _npus(root: Root, nodes: Mapping[int, list[int]]) -> dict[int, int | None]:
    """Return the node of each NPU from `npu-smi info -t topo`, or else from its PCI address in `npu-smi info`."""
    chips = host.chips(root.ask("npu-smi", "info") or "")
    found: dict[int, int | None] = {chip.device: _pci_node(root, chip.bus, nodes) for chip in chips}
    # its rows are cards; a container that sees only some of them numbers devices from 0
    single = len({chip.card for chip in chips}) == len(chips)
    device_of = {chip.card: chip.device for chip in chips} if single else {}
    for card, cores in host.core_lists(root.ask("npu-smi", "info", "-t", "topo") or "").items():
        near, npu = set(expand(cores)), device_of.get(card, card)
        node = max(nodes, key=lambda number: len(near.intersection(nodes[number])))
        found[npu] = node if near.intersection(nodes[node]) else None
    return dict(sorted(found.items()))


def _pci_node(root: Root, bus: str, nodes: Mapping[int, list[int]]) -> int | None:
    """Return the NUMA node of a PCI device; Linux states -1 if the firmware does not name the node."""
    number = int(root.read(f"/sys/bus/pci/devices/{bus}/numa_node") or -1)
    return number if number in nodes else None


def _refuse_empty_root(context: click.Context, option: click.Parameter, root: Path) -> Path:
    """Refuse a folder that holds no file of a host, because every check would then be unknown and none would fail."""
    if not any((root / name).is_dir() for name in _HOST_FOLDERS):
        raise ClusterError(
            f"--root {root}: the folder is not a recording of a host: it holds none of {', '.join(_HOST_FOLDERS)}"
        )
    return root


root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    callback=_refuse_empty_root,
    help="Read the hardware of another host from this folder, in which it was recorded, instead of the hardware of "
    "this machine.",
)
