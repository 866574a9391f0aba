"""The order of the tests, and what all of them share."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import timing
from tests.forks import Forks, start_server

# tests/run draws the same examples each time, so that it is red for a change and never by chance; tests/explore draws
# others. A busy machine is not a finding.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True, "database": None}
settings.register_profile("same", derandomize=True, **patient)
settings.register_profile("fresh", derandomize=False, **patient)
settings.load_profile("fresh" if os.environ.get("TC3_EXPLORE") else "same")
if not os.environ.get("TC3_EXPLORE"):
    # Hypothesis also draws constants from the sources of all modules that a process has imported, which depends on the
    # tests that ran before in the same process; no setting leaves them out
    providers._get_local_constants = lambda: providers._local_constants

# imports and the collection of tests make millions of objects that stay: looking for cycles among them finds none
gc.set_threshold(100_000)

# quiet, and one thread a process: two cores are shared by up to four workers
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A shell without job control ignores Ctrl-C for what it puts into the background, and every child inherits that: tests
# of interrupts would then wait for nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    timing.configure(config)
    if not hasattr(config, "workerinput"):
        config.add_cleanup(start_server())


def pytest_collection_modifyitems(items):
    timing.longest_first(items)
    # thousands of tests live to the end: no collection of garbage needs to look at them again
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Processes that have MindFormers imported, see tests/forks.py."""
    server = Forks(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    """Processes that have MindSpore imported, and all that MindFormers imports, but not MindFormers."""
    server = Forks(tmp_path_factory.mktemp("workers"), first="")
    yield server
    server.close()


@pytest.fixture
def graph_mode():
    """MindSpore's context is global to the process: graph mode on CPU, as in the mini recipes."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    yield
    ms.set_context(mode=before)
