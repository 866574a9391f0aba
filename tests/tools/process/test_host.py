"""Lists of cores and of hosts, files and outputs below a root, and outputs of real tools by drivers 22.0 to 26.0.

SOURCES.md beside the outputs says whose they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import ClusterError
from tests.tools.process.roots import OUTPUTS, write
from tools.process import host
from tools.process.host import Root, compress, expand, shorten


@given(st.sets(st.integers(0, 300)))
def test_there_and_back(cores):
    assert expand(compress(cores)) == sorted(cores)


def test_as_linux_writes_them():
    assert expand("0-3, 8\n") == [0, 1, 2, 3, 8] and expand("") == []
    with pytest.raises(ValueError):
        expand("all")
    with pytest.raises(ValueError, match="more than"):
        expand("0-99999999999")


def test_a_recorded_host(tmp_path):
    root = write(tmp_path, {"proc/cmdline": "quiet\n", "outputs/npu-smi_info_-t_topo.txt": "x", "usr/bin/numactl": ""})
    assert root.read("/proc/cmdline") == "quiet" and root.read("/proc/none") is None
    assert root.find("/proc/*") == ["/proc/cmdline"]
    assert root.ask("npu-smi", "info", "-t", "topo") == "x" and root.ask("npu-smi", "info") is None
    assert root.has_tool("numactl") and not root.has_tool("taskset") and not root.live


def test_this_host():
    root = Root()
    assert root.live and root.read("/proc/self/status") and root.has_tool("python3")
    assert root.ask("no-such-tool") is None and root.ask("false") is None and root.ask("echo", "a") == "a\n"


def test_a_tool_that_hangs_is_ended_and_not_asked_again(tmp_path, monkeypatch):
    """Its children, too: one that keeps the pipe would hold us up."""
    tool = tmp_path / "slow-smi"
    tool.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nsleep 3600 &\nsleep 3600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = tmp_path / "started"

    class Started(subprocess.Popen):
        def communicate(self, *arguments, **options):
            """Wait until the tool has begun to hang, which takes a busy machine longer than our patience."""
            while not (started.exists() and started.read_text().endswith("\n")):
                time.sleep(0.01)
            return super().communicate(*arguments, **options)

    monkeypatch.setattr("tools.process.host.Popen", Started)
    monkeypatch.setattr("tools.process.host._PATIENCE", 0.1)
    host = Root()
    assert host.ask("slow-smi", "info") is None and host.ask("slow-smi", "info", "-t", "topo") is None
    numbers = started.read_text().split()
    assert len(numbers) == 1
    until = time.monotonic() + 300  # the kernel ends what was killed when it gets to it
    while left := [process for process in psutil.process_iter() if _session(process) == int(numbers[0])]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def _session(process):
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else -1
    except (OSError, psutil.Error):
        return -1


def test_a_tool_is_asked_once(tmp_path, monkeypatch):
    (tmp_path / "count").write_text("#!/bin/sh\necho x >> $0.log; wc -l < $0.log\n")
    (tmp_path / "count").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = Root()
    assert [host.ask("count"), host.ask("count"), Root().ask("count")] == ["1\n", "1\n", "2\n"]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["node3", "node5", "node4", "master"], "master,node[3-5]"),
        (["node7"], "node7"),
        (["n008", "n010", "n009", "n12"], "n12,n[008-010]"),
        (["node098", "node099", "node100"], "node[098-100]"),
        (["node9", "node10"], "node[9-10]"),
        (["gpu1.example.org", "gpu3.example.org"], "gpu[1,3].example.org"),
        (["10.0.0.1", "10.0.0.2", "10.0.1.2"], "10.0.0.[1-2],10.0.1.2"),
        ([], ""),
    ],
)
def test_many_hosts_in_few_words(hosts, words):
    assert shorten(hosts) == words


# file -> (version, (device, card, name, health, bus) of each chip, processes or None where no table is shown)
TABLES = {
    "910B_22.0.4.1": ("22.0.4.1", [(0, 0, "910B", "OK", "0000:81:00.0")], None),
    "910A_23.0.rc1": (
        "23.0.rc1.b070",
        [(0, 0, "910A", "Warning", "0000:c1:00.0"), (1, 1, "910A", "Warning", "0000:81:00.0")],
        [],
    ),
    "310B4_23.0.0": ("23.0.0", [(0, 0, "310B4", "Alarm", "")], None),
    "910B2C_23.0.2.1": (
        "23.0.2.1",
        [(0, 0, "910B2C", "OK", "0000:5a:00.0"), (1, 1, "910B2C", "OK", "0000:19:00.0")],
        [(0, 124528, "python3.8")],
    ),
    "910B4_24.1.1": (
        "24.1.1",
        [(0, 0, "910B4", "OK", "0000:c1:00.0"), (1, 1, "910B4", "OK", "0000:c2:00.0")],
        None,
    ),
    "A3_25.2.0": (
        "25.2.0",
        [
            (0, 0, "Ascend910", "OK", "0000:9c:00.0"),
            (1, 0, "Ascend910", "OK", "0000:9e:00.0"),
            (2, 1, "Ascend910", "OK", "0000:37:00.0"),
            (3, 1, "Ascend910", "OK", "0000:39:00.0"),
        ],
        [(1, 990711, "python")],
    ),
    "910B3_25.2.3": ("25.2.3", [(0, 3, "910B3", "OK", "0000:82:00.0")], []),
    "A3_26.0.rc2": (
        "26.0.rc2",
        [(0, 0, "Ascend910", "OK", "0000:9d:00.0"), (1, 0, "Ascend910", "OK", "0000:9f:00.0")],
        None,
    ),
    "A5_layout": (
        "99.0.rc1.b1",
        [(0, 0, "Ascend950DT", "OK", ""), (1, 3, "Ascend950DT", "Alarm", "")],
        [(0, 1001, "python"), (0, 1002, "python")],
    ),
}


def read(name):
    return (OUTPUTS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_devices_and_processes(name):
    version, chips, processes = TABLES[name]
    text = read(name)
    assert host.npu_smi_version(text) == version
    assert host.chips(text) == [host.Chip(*chip) for chip in chips]
    assert host.npu_processes(text) == processes


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_was_cut_off_names_no_device_twice_or_wrongly(name):
    text = read(name)
    whole = host.chips(text)
    for end in range(0, len(text), 37):
        found = host.chips(text[:end])
        assert [chip.card for chip in found] == [chip.card for chip in whole[: len(found)]]


@pytest.mark.parametrize(
    "text", ["", "dcmi model initialized failed, because the device is used. ret is -8020", "| a | b |"]
)
def test_no_table_at_all(text):
    assert host.chips(text) == [] and host.npu_processes(text) is None and host.core_lists(text) == {}


def test_a_row_of_processes_in_another_form_is_not_taken_for_none():
    text = read("A3_25.2.0").replace("| 1       1                 | 990711 ", "| card 1  chip 1            | 990711 ")
    assert host.npu_processes(text) is None


def test_cores_near_each_npu():
    nodes = ["144-167", "0-23", "144-167", "0-23", "96-119", "48-71", "96-119", "48-71"]
    assert host.core_lists(read("topo_910B1_23.0.rc2")) == dict(enumerate(nodes))
    assert host.core_lists(read("topo_four")) == {0: "144-167", 1: "96-119", 2: "48-71", 3: "0-23"}
    assert host.core_lists(read("topo_unsupported")) == {}


def test_every_output_has_its_source():
    named = (OUTPUTS / "SOURCES.md").read_text()
    assert [path.name for path in OUTPUTS.glob("*.txt") if f"`{path.name}`" not in named] == []


def test_a_hosts_file_of_a_windows_editor_with_comments_and_addresses_of_ipv6(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(
        b"\xef\xbb\xbf# rack 7\r\nnode-0.cluster. 4 # the first\r\n10.1.2.3\tslots=4\r\n[FD00:0::7] 4\r\nfe80::1 4"
    )
    assert host.read_hosts(file) == (["node-0.cluster", "10.1.2.3", "fd00::7", "fe80::1"], 4)


@pytest.mark.parametrize(
    "line, hint",
    [
        ("node0:8", "leave out the port"),
        ("[fd00::7]:22 8", "leave out the port"),
        ("node[0-3] 8", "scontrol show hostnames 'node[0-3]'"),
        ("[10.0.0.1]", "NAME WORKERS"),
        ("10.0.0.300", "NAME WORKERS"),
        ("fe80::1%eth0", "NAME WORKERS"),
    ],
)
def test_a_line_that_would_name_another_host_than_its_user_meant_is_refused(tmp_path, line, hint):
    file = tmp_path / "hosts"
    file.write_text(f"node9\n{line}\n")
    with pytest.raises(ClusterError, match=rf"hosts:2: each line must be .*{re.escape(hint)}") as caught:
        host.read_hosts(file)
    assert ("scontrol" in str(caught.value)) == line.startswith("node[")


@pytest.mark.parametrize("name", ["localhost", "LocalHost.", "127.0.0.1", "127.0.0.2", "::1", "[::1]"])
def test_a_name_that_each_node_has_is_refused_beside_other_hosts(tmp_path, name):
    """Each agent of such a file took itself for this host, and workers looked for their scheduler on their own node."""
    file = tmp_path / "hosts"
    file.write_text(f"{name} 4\n")
    assert host.read_hosts(file)[1] == 4, "one host may be called so"
    for others in ("", "localhost.cluster\n", "1\n"):
        file.write_text(f"node9\n{others}{name}\n")
        with pytest.raises(ClusterError, match=rf"hosts:{3 if others else 2}: .* means each node itself; "):
            host.read_hosts(file)
    file.write_text("node9\nlocalhost.cluster\n1\n128.0.0.1\n")
    assert len(host.read_hosts(file)[0]) == 4


def test_two_spellings_of_a_host_are_one_host(tmp_path):
    file = tmp_path / "hosts"
    for first, second in (("Node0.", "node0"), ("[fd00:0::7]", "fd00::7")):
        file.write_text(f"{first}\n{second}\n")
        with pytest.raises(ClusterError, match=r"hosts:2: .*is already named in line 1"):
            host.read_hosts(file)
        assert host.usual_form(first) == host.usual_form(second)
