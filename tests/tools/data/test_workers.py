from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from plugins.errors import DataError
from tools.data.workers import DEPTH, ordered_map

HERE = Path(__file__).resolve()


def squarer(naps: bool) -> Callable[[int], tuple[int, int]]:
    """What a worker runs: squares, at a different pace for each number."""

    def square(number: int) -> tuple[int, int]:
        if naps:
            time.sleep(0.002 * (number * 7 % 5))
        if number == 99:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 98:
            raise DataError("98 is not wanted")
        return number * number, os.getpid()

    return square


def test_order_is_kept_and_all_workers_work() -> None:
    results = list(ordered_map(partial(squarer, True), range(60), workers=3))
    assert [square for square, _ in results] == [n * n for n in range(60)]
    assert len({pid for _, pid in results}) == 3
    assert os.getpid() not in {pid for _, pid in results}


def test_jobs_are_taken_only_as_results_are_wanted() -> None:
    before = set(psutil.Process().children())  # other tests of this process may keep workers of their own
    taken: list[int] = []
    results = ordered_map(partial(squarer, False), (taken.append(n) or n for n in range(50)), workers=2)
    next(results)
    assert len(taken) <= DEPTH * 2 + 1
    results.close()
    left = set(psutil.Process().children()) - before
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in left)


def test_large_jobs_and_results_do_not_block_each_other() -> None:
    jobs = [[n] * 300_000 for n in range(12)]  # far more than a pipe holds, both ways
    assert [result[0] for result in ordered_map(echo, jobs, workers=2)] == list(range(12))


def echo() -> Callable[[list[int]], list[int]]:
    return list


@pytest.mark.parametrize(("number", "why"), [(99, r"a worker process died \(exit code -9\)"), (98, "98 is not wanted")])
def test_a_failing_worker_is_an_error_and_not_a_hang(number: int, why: str) -> None:
    with pytest.raises(DataError, match=why):
        list(ordered_map(partial(squarer, False), [1, 2, number, 3, 4, 5, 6, 7, 8, 9, 10], workers=2))


def test_one_worker_works_in_this_process() -> None:
    assert list(ordered_map(partial(squarer, False), [3], workers=1)) == [(9, os.getpid())]


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(HERE.parent)!r}, {str(HERE.parents[3])!r}]\n"
        "from functools import partial; from itertools import count; import test_workers as t\n"
        "if __name__ == '__main__':\n"
        "    for square, pid in t.ordered_map(partial(t.squarer, True), (n % 50 for n in count()), 2):\n"
        "        print(pid, flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    workers = [psutil.Process(pid) for pid in {int(parent.stdout.readline()) for _ in range(4)}]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
