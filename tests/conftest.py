import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# quiet, and one thread a process: two cores are shared by up to three workers
os.environ.setdefault("GLOG_v", "3")


@pytest.fixture
def graph_mode():
    """MindSpore's context is global to the process: graph mode on CPU, as in the mini recipes."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    yield
    ms.set_context(mode=before)


def pytest_collection_modifyitems(items):
    """With several processes (`pytest -n`) a file's tests stay in one, as do files that name a group themselves."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))
