"""These tests check the cores that workers get on public topologies, on cut cpusets and with odd numbers of workers,
what must hold for every host, and how a host is read from files and from the output of tools.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import ClusterError
from tests.tools.process.roots import FOUR, MIXED, PAIRS, atlas, cpuset_files, numa_files, write
from tools.affinity.plan import LEAST, make_plan, roles, shares
from tools.affinity.topology import Host, allowed, msrun_sees, read_host
from tools.process.host import compress

NPUS = list(range(8))


def all_cores(plan):
    """Every core that the plan mentions, as often as it does."""
    dealt = [core for worker in plan.workers for core in worker.cores]
    return sorted([*dealt, *plan.system, *plan.idle, *(core for cores in plan.interrupts.values() for core in cores)])


@pytest.mark.parametrize(("nodes", "npus"), [(8, PAIRS), (8, MIXED), (4, FOUR)], ids=["pairs", "mixed", "four nodes"])
def test_no_worker_of_an_atlas_a2_leaves_its_socket(tmp_path, nodes, npus):
    host = read_host(atlas(tmp_path, nodes, npus))
    plan = make_plan(host, 8, NPUS)
    assert [worker.counts(host)["remote"] for worker in plan.workers] == [0] * 8
    assert len({len(worker.cores) for worker in plan.workers}) == 1
    assert all_cores(plan) == list(range(192)) and plan.notes == []
    assert len(plan.system) == nodes and all(len(cores) == 1 for cores in plan.interrupts.values())
    half = 22 if nodes == 8 else 23
    assert compress(plan.workers[NPUS[0]].cores) == {22: "146-156,170-180", 23: "146-168"}[half]


def test_a_worker_whose_socket_is_cut_away_alone_gets_remote_cores(tmp_path):
    host = read_host(atlas(tmp_path, allowed="0-20,22-95,144-191"))
    plan = make_plan(host, 8, NPUS)
    remote = [worker.counts(host)["remote"] for worker in plan.workers]
    assert remote == [0, 0, 16, 16, 0, 0, 0, 0]
    assert set(all_cores(plan)) == host.allowed
    assert plan.notes == ["workers 2, 3 have cores of another socket: near their NPU too few are allowed"]


def test_a_socket_that_is_cut_short_makes_its_workers_narrower_not_remote(tmp_path):
    host = read_host(atlas(tmp_path, allowed="0-159,168-171"))  # 20 cores near NPU 0 and 1
    plan = make_plan(host, 8, NPUS)
    assert [worker.counts(host)["remote"] for worker in plan.workers] == [0] * 8
    assert [len(worker.cores) for worker in plan.workers[:3]] == [
        8,
        8,
        18,
    ]  # 148 cores beside the system's, in eight parts


def test_two_workers_share_the_node_of_both(tmp_path):
    """Neither is sent next door alone."""
    host = read_host(atlas(tmp_path))
    counts = [worker.counts(host) for worker in make_plan(host, 8, NPUS).workers]
    assert counts == [{"own": 11, "socket": 11, "remote": 0}] * 8


def test_memory_is_that_of_the_cores(tmp_path):
    plan = make_plan(read_host(atlas(tmp_path)), 8, NPUS)
    assert [worker.memory for worker in plan.workers[:3]] == [[6, 7], [6, 7], [4, 5]]


def test_memory_that_the_cpuset_denies_is_left_out(tmp_path):
    root = atlas(tmp_path)
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list:\t0-191\nMems_allowed_list:\t0-6\n")
    assert make_plan(read_host(root), 8, NPUS).workers[0].memory == [6]


def test_fewer_workers_than_npus_take_the_cores_that_are_near(tmp_path):
    host = read_host(atlas(tmp_path))
    plan = make_plan(host, 2, [4, 6])
    assert [(worker.npu, worker.home, worker.counts(host)["remote"]) for worker in plan.workers] == [
        (4, 0, 0),
        (6, 2, 0),
    ]
    assert len(plan.idle) == 192 - 16 - 2 * 44


def test_more_workers_than_cores_is_said_and_nothing_bound(tmp_path):
    host = read_host(write(tmp_path, {**numa_files(1, 2, 1), **cpuset_files("0-1")}))
    plan = make_plan(host, 4, None)
    assert not plan.binds and [worker.cores for worker in plan.workers] == [[]] * 4
    assert plan.notes == ["4 workers, but 2 cores are allowed: none is bound, and all share them"]


def test_workers_on_cpu_divide_the_cores(tmp_path):
    host = read_host(write(tmp_path, {**numa_files(2, 16, 2), **cpuset_files("0-15")}))
    plan = make_plan(host, 4, None)
    assert [compress(worker.cores) for worker in plan.workers] == ["0-3", "4-7", "8-11", "12-15"]
    assert plan.notes == ["16 cores for 4 workers: none is left for the system and for interrupts"]


def test_more_workers_than_npus_are_refused(tmp_path):
    with pytest.raises(ClusterError, match="9 workers do not fit on 8 NPUs"):
        make_plan(read_host(atlas(tmp_path)), 9, NPUS)


def test_an_npu_of_which_nothing_is_known_is_said(tmp_path):
    host = read_host(atlas(tmp_path))
    plan = make_plan(Host(host.nodes, host.distance, host.allowed, {**host.npus, 3: None}), 8, NPUS)
    assert "near NPU 3" in plan.notes[0]


def test_roles():
    assert roles(list(range(20))) == {
        "main": list(range(16)),
        "runtime": list(range(2, 16)),
        "pynative": list(range(2, 16)),
        "minddata": [16, 17, 18, 19],
    }
    assert set(map(tuple, roles([5, 6]).values())) == {(5, 6)}


@st.composite
def hosts(draw):
    """Sockets of one or two nodes, some cores forbidden, an NPU near any node that has cores."""
    sockets, inner = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    count, size = sockets * inner, draw(st.integers(1, 24))
    nodes = {node: list(range(node * size, (node + 1) * size)) for node in range(count)}
    distance = {
        (a, b): 10 if a == b else 12 if a // inner == b // inner else 35 for a, b in product(range(count), repeat=2)
    }
    allowed = draw(st.sets(st.sampled_from(range(count * size)), min_size=1))
    near = draw(st.lists(st.sampled_from(range(count)), min_size=1, max_size=8))
    return Host(nodes, distance, frozenset(allowed), dict(enumerate(near)), (), frozenset(nodes))


@settings(max_examples=80)
@given(hosts())
def test_each_core_is_given_once_and_none_that_is_not_allowed(host):
    plan = make_plan(host, len(host.npus), sorted(host.npus))
    assert all_cores(plan) == sorted(host.allowed)
    assert all(set().union(*worker.roles.values()) == set(worker.cores) for worker in plan.workers)
    assert plan.binds == (len(host.allowed) >= len(host.npus))


@settings(max_examples=80)
@given(hosts())
def test_no_remote_core_where_none_is_needed(host):
    """A worker with enough cores near it has no other; and nobody has one if every socket holds its workers' shares."""
    plan = make_plan(host, len(host.npus), sorted(host.npus))
    if not plan.binds:
        return
    counts = [worker.counts(host) for worker in plan.workers]
    assert all(not count["remote"] or count["own"] + count["socket"] < LEAST for count in counts)
    free = {node: set(host.free(node)) - set(plan.system) - set(plan.interrupts[node]) for node in host.nodes}
    share = sum(map(len, free.values())) // len(counts)
    enough = all(
        sum(len(free[node]) for node in host.nodes if host.distance[home, node] < 20)
        >= share * sum(host.distance[home, worker.home] < 20 for worker in plan.workers)
        for home in {worker.home for worker in plan.workers}
    )
    if enough:
        assert sum(count["remote"] for count in counts) == 0


@settings(max_examples=40)
@given(st.data())
def test_the_shares_are_optimal(data):
    """Against every plan that there is."""
    workers, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    free = {node: data.draw(st.integers(0, 4)) for node in range(nodes)}
    if sum(free.values()) < workers:
        return
    near = [data.draw(st.integers(0, nodes - 1)) for _ in range(workers)]
    distance = {(a, b): 10 if a == b else data.draw(st.integers(11, 40)) for a in range(nodes) for b in range(nodes)}
    found, share = shares(near, free, distance), sum(free.values()) // workers
    cost = np.array([[distance[home, node] for node in range(nodes)] for home in near])

    def aims(plan):
        return (plan * cost).sum(), (plan * cost).sum(axis=1).max()

    rows = [row for row in product(range(share + 1), repeat=nodes) if sum(row) == share]
    every = (np.array(plan) for plan in product(rows, repeat=workers))
    best = min(aims(plan) for plan in every if all(plan.sum(axis=0) <= list(free.values())))
    assert aims(found) == best


LSCPU = """\
# The following is the parsable format, which can be fed to other
# programs. Each different item in every column has an unique ID
# starting usually from zero.
# CPU,Core,Socket,Node,,L1d,L1i,L2,L3
0,0,0,0,,0,0,0,0
1,1,0,0,,1,1,1,0
2,2,1,1,,2,2,2,1
3,3,1,1,,3,3,3,1
"""
# two chips a card: `npu-smi info` of an Atlas A3, vllm-project/vllm-ascend issue 2534
A3 = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
| 1     Ascend910           | OK            | 186.3       36                0    / 0             |
| 0     2                   | 0000:99:00.0  | 0           0    / 0          3415 / 65536         |
+===========================+===============+====================================================+
"""


def test_an_atlas(tmp_path):
    host = read_host(atlas(tmp_path))
    assert host.npus == dict(enumerate([6, 6, 4, 4, 0, 0, 2, 2]))
    assert (host.distance[0, 0], host.distance[0, 1], host.distance[0, 2]) == (10, 12, 35)
    assert len(host.allowed) == len(host.msrun) == 192 and host.node_of(150) == 6


@pytest.mark.parametrize("group", ["", "/kubepods/pod1"])
@pytest.mark.parametrize("kind", [1, 2])
def test_the_cpuset_of_both_versions(tmp_path, kind, group):
    root = write(tmp_path, {**numa_files(4), **cpuset_files("4-7,96-99", kind, group)})
    assert allowed(root) == [4, 5, 6, 7, 96, 97, 98, 99]
    assert compress(read_host(root).allowed) == "4-7,96-99"


def test_in_a_container_the_group_is_mounted_at_the_top(tmp_path):
    root = write(tmp_path, {**numa_files(4), **cpuset_files("0-3")})
    (tmp_path / "proc/self/cgroup").write_text("3:cpuset:/docker/0123\n")
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list:\t0-191\n")
    assert allowed(root) == [0, 1, 2, 3] == msrun_sees(root)


def test_msrun_knows_nothing_of_version_2(tmp_path):
    assert read_host(atlas(tmp_path, version=2)).msrun == ()


def test_lscpu_where_there_is_no_sys(tmp_path):
    host = read_host(write(tmp_path, {"outputs/lscpu_-p.txt": LSCPU}))
    assert host.nodes == {0: [0, 1], 1: [2, 3]} and host.distance[0, 1] == 20 and host.npus == {}
    assert host.allowed == {0, 1, 2, 3}


def test_nodes_of_memory_alone_are_left_out(tmp_path):
    files = numa_files(2, 8, 2)
    files["sys/devices/system/node/node2/cpulist"] = "\n"
    for node in range(2):
        files[f"sys/devices/system/node/node{node}/distance"] = "10 32 17" if node == 0 else "32 10 18"
    host = read_host(write(tmp_path, files))
    assert list(host.nodes) == [0, 1] and host.distance == {(0, 0): 10, (0, 1): 32, (1, 0): 32, (1, 1): 10}


def test_npus_by_their_pci_address_where_topo_has_no_cores(tmp_path):
    files = {**numa_files(4), "outputs/npu-smi_info.txt": A3}
    for bus, node in (("9d", 3), ("9f", 3), ("99", -1)):
        files[f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node"] = f"{node}\n"
    assert read_host(write(tmp_path, files)).npus == {0: 3, 1: 3, 2: None}


def test_an_empty_root_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="the cores of this host are unknown"):
        read_host(write(tmp_path, {}))


def test_a_broken_list_is_refused(tmp_path):
    root = write(tmp_path, {**numa_files(2, 8, 2), "proc/self/status": "Cpus_allowed_list:\t0-x\n"})
    with pytest.raises(ClusterError, match="cannot be read"):
        read_host(root)


def test_the_recorded_topology_is_the_public_one(tmp_path):
    """The table of ms-swift's page, as `roots.topology` writes it."""
    from tests.tools.process.roots import topology

    rows = [line.split() for line in topology(PAIRS).splitlines()[1:9]]
    assert rows[0] == ["NPU0", "X", *["HCCS"] * 7, "144-167"] and rows[7][-1] == "48-71"
