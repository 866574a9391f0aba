"""This module plans which cores of a host each worker of a training uses. The plan gives each worker cores by role
(MindSpore's modules) and keeps cores for interrupts and for the system. The functions of this module have no side
effects.

Workers have cores of their own, and all other processes have other cores (report, section 6: isolation). `make_plan`
assigns the cores. `shares` computes how many cores each worker takes from each NUMA node; this is a transport problem,
which HiGHS solves:

    minimise    sum over workers w and nodes n of  distance(w, n) * x[w, n]      and, among those plans, the largest
                                                                                 sum of a single worker
    subject to  sum over n of x[w, n] = share       every worker as many
                sum over w of x[w, n] <= free(n)    no core twice
                x[w, n] whole and not negative

The second aim lets two NPUs of one node share the node's cores, instead of giving one of them cores of another node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from plugins.errors import ClusterError
from tools.affinity.topology import OWN, SOCKET, Host

SYSTEM = 2  # cores of each NUMA node left to the host: the first for interrupts, the others for what else runs
LEAST = 8  # cores that a worker needs; with as many near ones it takes none of another socket
DATA = 4  # of a worker's cores, at most, for the threads of the dataset


def shares(near: Sequence[int], free: Mapping[int, int], distance: Mapping[tuple[int, int], int]) -> np.ndarray:
    """Return the number of cores [W, N] that each of W workers gets from each of N NUMA nodes; the nodes are in the
    order of `free`. Every worker gets the same number of cores.

    Args:
        near: [W] the node nearest to each worker's NPU.
        free: node -> cores that may be given away, at least W in all.
        distance: (node, node) -> distance.
    """
    nodes = list(free)
    workers, count = len(near), len(nodes)
    share = sum(free.values()) // workers
    cost = np.array([[distance[home, node] for node in nodes] for home in near], dtype=float)
    solver = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-7, "mip_allow_restart": False}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    for amount in cost.ravel():
        solver.addCol(amount, 0.0, float(share), 0, np.array([], np.int32), np.array([]))
    # less than the smallest difference of the first aim: distances are whole numbers
    solver.addCol(0.5 / (cost.max() * share + 1), 0.0, highspy.kHighsInf, 0, np.array([], np.int32), np.array([]))
    which = np.arange(workers * count, dtype=np.int32).reshape(workers, count)
    worst = np.int32(workers * count)
    for worker in range(workers):
        solver.addRow(share, share, count, which[worker], np.ones(count))
        row, values = np.append(which[worker], worst), np.append(cost[worker], -1.0)
        solver.addRow(-highspy.kHighsInf, 0.0, count + 1, row, values)
    for column, node in enumerate(nodes):
        solver.addRow(0.0, float(free[node]), workers, which[:, column].copy(), np.ones(workers))
    kinds = np.array([highspy.HighsVarType.kInteger] * which.size)
    solver.changeColsIntegrality(which.size, which.ravel(), kinds)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal, "the shares always fit"
    return np.rint(np.array(solver.getSolution().col_value[: which.size])).astype(int).reshape(which.shape)


@dataclass(frozen=True)
class Worker:
    """A `Worker` holds the cores of one worker (ordered from near to far, and by role), its local rank, its NPU (None
    on CPU), the NUMA node nearest to it, and the nodes whose memory it uses.
    """

    rank: int
    npu: int | None
    home: int
    cores: list[int]
    roles: dict[str, list[int]]
    memory: list[int]

    def counts(self, host: Host) -> dict[str, int]:
        """Return how many of the worker's cores are on its own NUMA node, elsewhere in its socket, and on other
        sockets.
        """
        return how_far(host, self.home, self.cores)


@dataclass(frozen=True)
class Plan:
    """A `Plan` holds the cores of each worker, the cores for interrupts (by NUMA node) and for the system, and the
    unused cores.
    """

    host: Host
    workers: list[Worker]
    interrupts: dict[int, list[int]]
    system: list[int]
    idle: list[int]
    notes: list[str] = field(default_factory=list)

    @property
    def binds(self) -> bool:
        """Return whether the plan has cores for every worker."""
        return all(worker.cores for worker in self.workers)


def how_far(host: Host, home: int, cores: Sequence[int]) -> dict[str, int]:
    """Return how many of `cores` are on node `home`, elsewhere in the socket of that node, and on another socket."""
    far = [host.distance[home, host.node_of(core)] for core in cores]
    own = sum(distance == OWN for distance in far)
    remote = sum(distance >= SOCKET for distance in far)
    return {"own": own, "socket": len(far) - own - remote, "remote": remote}


def make_plan(host: Host, count: int, npus: Sequence[int] | None) -> Plan:
    """Return a plan that divides the cores among `count` workers. The first worker uses the first NPU of `npus`, and so
    on; None means workers on CPU.

    Raises:
        ClusterError: there are fewer NPUs than workers.
    """
    if npus is not None and len(npus) < count:
        raise ClusterError(
            f"{count} workers do not fit on {len(npus)} NPUs, because every worker needs its own NPU; start fewer "
            "workers"
        )
    devices: list[int | None] = list(npus[:count]) if npus is not None else [None] * count
    total = sum(len(host.free(node)) for node in host.nodes)
    if total < count:
        return _unbound(host, devices, total)
    notes = []
    reserved = SYSTEM if (total - SYSTEM * len(host.nodes)) // count >= LEAST else 0
    if not reserved:
        notes.append(f"{total} cores for {count} workers: none is left for the system and for interrupts")
    free = {node: host.free(node)[reserved:] for node in host.nodes}
    if lost := [npu for npu in devices if npu is not None and host.npus.get(npu) is None]:
        notes.append(f"the host does not say which cores are near NPU {', '.join(map(str, lost))}: spread evenly")
    homes = _homes(host, devices, free)
    workers = _workers(host, devices, homes, free)
    if short := [worker.rank for worker in workers if worker.counts(host)["remote"]]:
        notes.append(
            f"workers {', '.join(map(str, short))} have cores of another socket: near their NPU too few are allowed"
        )
    taken = {core for worker in workers for core in worker.cores}
    interrupts = {node: host.free(node)[: reserved and 1] for node in host.nodes}
    system = [core for node in host.nodes for core in host.free(node)[reserved and 1 : reserved]]
    idle = sorted(host.allowed - taken - set(system) - {core for cores in interrupts.values() for core in cores})
    return Plan(host, workers, interrupts, system, idle, notes)


def _unbound(host: Host, devices: list[int | None], total: int) -> Plan:
    note = f"{len(devices)} workers, but {total} cores are allowed: none is bound, and all share them"
    home = next(iter(host.nodes))
    workers = [Worker(i, npu, home, [], {}, []) for i, npu in enumerate(devices)]
    return Plan(host, workers, {}, [], sorted(host.allowed), [note])


def _homes(host: Host, devices: list[int | None], free: Mapping[int, list[int]]) -> list[int]:
    """Return the NUMA node nearest to each worker's NPU; without an NPU, or if this node is not known, assign the nodes
    in turn by their numbers of cores.
    """
    by_core = [node for node, cores in free.items() for _ in cores]
    spread = [by_core[rank * len(by_core) // len(devices)] for rank in range(len(devices))]
    known = [None if npu is None else host.npus.get(npu) for npu in devices]
    return [even if near is None else near for near, even in zip(known, spread, strict=True)]


def _workers(host: Host, devices: list[int | None], homes: list[int], free: Mapping[int, list[int]]) -> list[Worker]:
    """Return workers with whole cores: each node's cores are dealt out in the order of the workers, and each worker's
    nearest cores come first.
    """
    nodes = list(free)
    counts = shares(homes, {node: len(cores) for node, cores in free.items()}, host.distance)
    left = {node: list(cores) for node, cores in free.items()}
    workers = []
    for rank, home in enumerate(homes):
        given: dict[int, list[int]] = {}
        for node in sorted(nodes, key=lambda other: host.distance[home, other]):
            amount = counts[rank, nodes.index(node)]
            given[node], left[node] = left[node][:amount], left[node][amount:]
        near = sum(len(cores) for node, cores in given.items() if host.distance[home, node] < SOCKET)
        far = near < LEAST  # then cores of another socket are taken, too
        kept = {node: each for node, each in given.items() if each and (far or host.distance[home, node] < SOCKET)}
        cores = [core for part in kept.values() for core in part]
        memory = sorted(host.memory.intersection({home, *kept}))
        workers.append(Worker(rank, devices[rank], home, cores, roles(cores), memory))
    return workers


def roles(cores: list[int]) -> dict[str, list[int]]:
    """Return a worker's cores by the names of MindSpore's modules. Among the cores of a module, the cores near the
    worker's NPU come first.

    The module `main` has many cores, because msrun starts the process on them, and every thread that belongs to no
    module (the pool of CPU kernels, the communication library) stays on these cores. The first two cores of `main` are
    not used by the fixed threads of the runtime. With fewer than 8 cores all modules share all cores.
    """
    if len(cores) < LEAST:
        return dict.fromkeys(("main", "runtime", "pynative", "minddata"), cores)
    data = min(DATA, len(cores) // 4)
    computing = cores[:-data]
    return {"main": computing, "runtime": computing[2:], "pynative": computing[2:], "minddata": cores[-data:]}
