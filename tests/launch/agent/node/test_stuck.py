"""Which worker holds the others up: where each of them is, asked of real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch.agent.node.stuck import Place, place_of, places, stopped
from launch.run.msrun import ROOT

WAITS = "/x/mindspore/common/api.py"
CODE = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from launch.workers import stacks
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
{{answer}}
def load_next_batch():
    print("ready", flush=True)
    time.sleep(60)
load_next_batch()
"""


@pytest.fixture
def worker(tmp_path):
    """Start a worker that says when it is where it stays."""
    started = []

    def start(rank, answer="stacks.answer()"):
        log = tmp_path / f"worker_{rank}.log"
        environ = {**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": str(rank)}
        with log.open("wb") as file:
            code = CODE.format(answer=answer)
            process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=file, stderr=file)
        started.append(process)
        until = time.monotonic() + 60
        while "ready" not in log.read_text():
            assert time.monotonic() < until and process.poll() is None, log.read_text()
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_each_worker_says_where_it_is_and_lives_on(worker, tmp_path):
    processes = [worker(2), worker(3, answer="pass")]
    found = places(tmp_path, [2, 3])
    assert list(found) == [2], "the other one has no answer, and would have died of the question"
    assert found[2].function == "load_next_batch" and not found[2].waits
    assert [process.poll() for process in processes] == [None, None]


def test_a_stopped_worker_is_found(worker):
    process = worker(5)
    assert stopped() is None
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 60
    while stopped() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert stopped() == 5


def test_who_is_in_mindspore_waits():
    said = b"""Step 3
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007f02 (most recent call first):
  File "/x/mindspore/common/api.py", line 10 in run_graph
  File "/repo/launch/train.py", line 3 in train
"""
    place = place_of(said)
    assert place == Place(WAITS, 10, "run_graph") and place.waits
    assert str(place) == "run_graph (common/api.py:10)"
    assert not Place("/x/mindspore/dataset/engine/iterators.py", 1, "__next__").waits, "for its own data"
    assert place_of(b"Step 4\n") is None and place_of(b"Current thread 0x1 (most recent call first):\n") is None
