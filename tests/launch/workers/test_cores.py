"""A worker on its own cores: every thread, those that exist and those that come; MindSpore does not move it."""

import json
import os
import subprocess
import sys

import pytest

from launch.run.msrun import ROOT

WORKER = """
import json, os, threading
event = threading.Event()
early = threading.Thread(target=event.wait)
early.start()
from launch.workers.cores import stay_on_own_cores
stay_on_own_cores()
late = threading.Thread(target=event.wait)
late.start()
cores = {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
event.set()
print(json.dumps([list(cores.values()), os.environ.get("MSRUN_CPU_LIST")]))
"""
ALL = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(ALL) < 2, reason="one core cannot be divided")


def worker(**environment):
    """(cores of each of its three threads, what MindSpore is told, what it says) of a worker's process."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("TC3_CORES", "MSRUN_CPU_LIST", "MS_ROLE")
    }
    given = {**clean, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", WORKER], env=given, capture_output=True, text=True, check=True)
    *said, answer = done.stdout.splitlines()
    return *json.loads(answer), said


@two_cores
@pytest.mark.parametrize("rank", [0, 1])
def test_every_thread_of_a_worker_is_on_its_cores(rank):
    lists = f"{ALL[0]} {ALL[1]}"
    threads, told, said = worker(TC3_CORES=lists, MS_ROLE="MS_WORKER", DEVICE_ID=str(rank))
    assert threads == [[ALL[rank]]] * 3 and told == str([ALL[rank]]) and said == []


@two_cores
@pytest.mark.parametrize("environment", [{"MS_ROLE": "MS_SCHED"}, {}], ids=["the scheduler", "by hand"])
def test_only_a_worker_is_bound(environment):
    assert worker(TC3_CORES=str(ALL[0]), DEVICE_ID="0", **environment) == ([ALL] * 3, None, [])


@pytest.mark.parametrize(
    ("lists", "rank"), [("0-x", "0"), ("0", "1"), ("99999", "0")], ids=["a broken list", "no list", "no such core"]
)
def test_what_cannot_be_bound_goes_on_and_says_so(lists, rank):
    threads, told, said = worker(TC3_CORES=lists, MS_ROLE="MS_WORKER", DEVICE_ID=rank)
    assert threads == [ALL] * 3 and told is None
    assert len(said) == 1 and said[0].startswith(f"note: TC3_CORES={lists}: this worker stays where it was started (")


def test_mindspore_binds_the_main_thread_to_the_same_cores(monkeypatch):
    """MindFormers asks it to bind every worker; left alone it would deal out the whole host's cores."""
    from mindspore.runtime import thread_bind_core

    monkeypatch.setattr(thread_bind_core, "_get_available_cpus", lambda: list(range(8)))
    monkeypatch.setattr(thread_bind_core, "get_local_rank_size", lambda: 2)
    monkeypatch.delenv("MSRUN_CPU_LIST", raising=False)
    assert thread_bind_core._get_cpu_affinity_strategy() == {"main": [0, 1, 2, 3]}, "its own choice"
    monkeypatch.setenv("MSRUN_CPU_LIST", str([6, 7]))
    assert thread_bind_core._get_cpu_affinity_strategy() == {"main": [6, 7]}
