"""Recorded hosts for tests, written from a few words. Sources of the outputs stand beside them."""

from __future__ import annotations

from pathlib import Path

from tools.process.host import Root, expand

OUTPUTS = Path(__file__).with_name("outputs")  # of real tools; SOURCES.md among them says whose

# `npu-smi info -t topo` of an Atlas 800T A2 (910B3), ModelScope's ms-swift, its page on NPU support
TOPOLOGY = """
\t   NPU0       NPU1       NPU2       NPU3       NPU4       NPU5       NPU6       NPU7       CPU Affinity
{rows}

Legend:

  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
  HCCS = Connection traversing HCCS.
"""
PAIRS = ["144-167"] * 2 + ["96-119"] * 2 + ["0-23"] * 2 + ["48-71"] * 2  # that page's
MIXED = ["144-167", "0-23", "144-167", "0-23", "96-119", "48-71", "96-119", "48-71"]  # the other public placement
FOUR = ["144-191"] * 2 + ["96-143"] * 2 + ["0-47"] * 2 + ["48-95"] * 2  # as PAIRS, one NUMA node a socket


def topology(columns: list[str]) -> str:
    """Return what `npu-smi info -t topo` prints of NPUs with these last columns."""
    rows = [
        f"NPU{npu}       " + "".join(f"{'X' if other == npu else 'HCCS':11s}" for other in range(len(columns))) + column
        for npu, column in enumerate(columns)
    ]
    return TOPOLOGY.lstrip("\n").format(rows="\n".join(rows))


def write(folder: Path, files: dict[str, str]) -> Root:
    """A recorded host of these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Root(folder)


def numa_files(nodes: int, cores: int = 192, sockets: int = 4) -> dict[str, str]:
    """/sys of a host of equal nodes, with the distances of a Kunpeng 920: 10, 12 in a socket, 35 beyond."""
    size, files = cores // nodes, {}
    for node in range(nodes):
        row = [
            10 if node == other else 12 if node * sockets // nodes == other * sockets // nodes else 35
            for other in range(nodes)
        ]
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{node * size}-{(node + 1) * size - 1}\n"
        files[f"sys/devices/system/node/node{node}/distance"] = " ".join(map(str, row)) + "\n"
    return files


def cpuset_files(cores: str, version: int = 1, group: str = "") -> dict[str, str]:
    """A cpuset of control groups of a version, and the process in it."""
    status = {"proc/self/status": f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cores}\n"}
    if version == 1:
        return {
            **status,
            "proc/self/cgroup": f"3:cpuset:{group or '/'}\n2:memory:/\n",
            f"sys/fs/cgroup/cpuset{group}/cpuset.cpus": cores + "\n",
        }
    return {
        **status,
        "proc/self/cgroup": f"0::{group or '/'}\n",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory\n",
        f"sys/fs/cgroup{group}/cpuset.cpus.effective": cores + "\n",
    }


def atlas(folder: Path, nodes: int = 8, npus: list[str] = PAIRS, allowed: str = "0-191", version: int = 1) -> Root:
    """An Atlas 800T A2: four Kunpeng 920 of 48 cores, eight NPUs."""
    files = {**numa_files(nodes), **cpuset_files(allowed, version), "usr/bin/numactl": "", "usr/bin/taskset": ""}
    return write(folder, {**files, "outputs/npu-smi_info_-t_topo.txt": topology(npus)})


def cores_of(text: str) -> set[int]:
    """As a set."""
    return set(expand(text))
