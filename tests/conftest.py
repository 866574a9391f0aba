import os

import pytest

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
