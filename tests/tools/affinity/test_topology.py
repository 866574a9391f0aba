"""A host read from files and from what tools print."""

import pytest

from plugins.errors import ClusterError
from tests.tools.process.roots import PAIRS, atlas, cpuset_files, numa_files, write
from tools.affinity.topology import allowed, msrun_sees, read_host
from tools.process.host import compress

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
    with pytest.raises(ClusterError, match="does not say which cores it has"):
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
