"""Lists of cores, and files and outputs below a root."""

import os
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.host.roots import write
from tools.host.root import Root, compress, expand


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
    tool.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nsleep 600 &\nsleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("tools.host.root._PATIENCE", 0.5)
    host = Root()
    assert host.ask("slow-smi", "info") is None and host.ask("slow-smi", "info", "-t", "topo") is None
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 1
    until = time.monotonic() + 30  # the kernel ends what was killed when it gets to it
    while left := [process for process in psutil.process_iter() if _session(process) == int(started[0])]:
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
