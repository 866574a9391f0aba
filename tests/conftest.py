"""The order of the tests, and what all of them share."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.forks import Forks

# a busy machine is no finding
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# quiet, and one thread a process: two cores are shared by up to three workers
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
# Files that take a minute or more, longest first: what is left at the end is short, and no core waits for one file.
# The list of durations that tests/run prints says which ones belong here.
LONG = (
    "training/test_sharded.py",
    "tools/dryrun/test_cli.py",
    "training/test_one_worker.py",
    "training/test_two_workers.py",
    "training/test_equivalence_gate.py",
    "training/test_finetune.py",
    "training/test_attention_balance.py",
    "training/test_expert_balance.py",
    "training/test_minis.py",
    "training/test_expert_parallel.py",
    "plugins/hierarchical_ep/graph/test_exchange.py",
    "tools/accuracy/compare/test_faults.py",
    "training/test_executed_faults.py",
    "plugins/hierarchical_ep/graph/test_compiled.py",
    "training/test_spike_guard.py",
    "training/test_not_finite.py",
    "training/test_executed_equivalence.py",
    "training/test_group_aux_loss.py",
    "tools/dryrun/compile/test_rank.py",
    "training/test_other_layout.py",
    "tools/check/test_mutations.py",
    "tools/accuracy/align/test_mindformers.py",
    "recipes/test_models.py",
    "training/test_own_model.py",
    "training/test_smaller.py",
    "training/test_generate.py",
    "test_lint.py",
    "plugins/cpu_backend/network/test_exchange.py",
    "inputs/test_bad_inputs.py",
    "tools/search/test_search.py",
)


def pytest_collection_modifyitems(items):
    """Files of LONG first; the others, and the tests of each file, stay in their order."""
    place = {HERE / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Processes that have MindFormers imported, see tests/forks.py."""
    server = Forks(tmp_path_factory.mktemp("forks"))
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
