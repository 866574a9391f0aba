"""Lists of cores, and files and outputs below a root."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.host.roots import write
from tools.host.cores import compress, expand
from tools.host.root import Root


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
