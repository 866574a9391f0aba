"""Signals around work that must not be cut in half, and a map over worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import psutil
import pytest

from plugins.errors import DataError
from tools.process import children
from tools.process.children import (
    DEPTH,
    collected_signals,
    deaf_children,
    ordered_map,
    run_child,
    terminate_as_interrupt,
    uninterrupted,
)

BOTH = (signal.SIGINT, signal.SIGTERM)
LONG = 300.0  # seconds: a bound against hangs


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in BOTH]
    done = []
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt(), uninterrupted():
        with uninterrupted():
            os.kill(os.getpid(), number)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert [signal.getsignal(each) for each in BOTH] == before


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_interrupts_unless_nohup_has_made_its_signal_ignored(nohup: bool) -> None:
    """A command left its temporary folder behind, and `nohup tc3 train` ended with the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    arrived: list[int] = []
    try:
        with nullcontext() if nohup else pytest.raises(KeyboardInterrupt), terminate_as_interrupt(), uninterrupted():
            os.kill(os.getpid(), signal.SIGHUP)
        with collected_signals(arrived):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert arrived == ([] if nohup else [signal.SIGHUP])


def test_a_signal_is_delivered_though_the_block_fails() -> None:
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt(), uninterrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("disk full")


def test_sigterm_without_a_handler_ends_the_process_after_the_block() -> None:
    code = (
        "import os, signal; from tools.process.children import uninterrupted\n"
        "with uninterrupted():\n    os.kill(os.getpid(), signal.SIGTERM); print('done', flush=True)\n"
        "print('never')"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "done\n")


@pytest.mark.parametrize("number", BOTH)
def test_what_is_started_inside_hears_sigterm_only(number: signal.Signals) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)}); print('alive')"
    with uninterrupted(), deaf_children():
        ended = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == {signal.SIGINT: (0, "alive\n"), signal.SIGTERM: (-15, "")}[number]


def test_ctrl_c_while_children_are_started_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted(), deaf_children():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_before_anybody_knows_of_a_process_ends_it_too(number: signal.Signals, monkeypatch) -> None:
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(children.subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        run_child(["sleep", "3600"])
    assert started[0].wait(LONG) == -signal.SIGTERM


def interrupted_worker():
    return lambda number: os.kill(os.getpid(), signal.SIGINT) or (number, os.getpid())


@pytest.mark.parametrize(("how", "grace"), [("SIG_DFL", LONG), ("SIG_IGN", 0.1)])
def test_what_a_process_has_started_ends_with_it(how: str, grace: float) -> None:
    """A process that ended at SIGTERM left behind what it had started itself."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
    code = f"import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.{how}); "
    code += f"print(subprocess.Popen({sleep!r}).pid, flush=True); time.sleep(3600)"
    with children.child([sys.executable, "-c", code], grace, stdout=subprocess.PIPE, text=True) as process:
        below = psutil.Process(int(process.stdout.readline()))
    until = time.monotonic() + LONG  # the kernel ends what was killed when it gets to it
    with contextlib.suppress(psutil.NoSuchProcess):
        while below.is_running() and below.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_workers_do_not_hear_ctrl_c_and_end_by_sigterm() -> None:
    results = ordered_map(interrupted_worker, range(20), workers=2)
    first = [next(results) for _ in range(2)]
    workers = [psutil.Process(pid) for _, pid in first]
    rest = list(results)
    assert [number for number, _ in [*first, *rest]] == list(range(20)) and len(set(workers)) == 2
    assert psutil.wait_procs(workers, timeout=LONG)[1] == []


HERE = Path(__file__).resolve()
# for `python -c`: lets it import this module
IMPORTABLE = f"import sys; sys.path[:0] = [{str(HERE.parent)!r}, {str(HERE.parents[3])!r}]\n"


def squarer(naps: bool) -> Callable[[int], tuple[int, int]]:
    """Return a function for workers that squares numbers, with a different delay for each number."""

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


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        f"{IMPORTABLE}"
        "from functools import partial; from itertools import count; import test_children as t\n"
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
    _, alive = psutil.wait_procs(workers, timeout=LONG)
    assert alive == []


@pytest.mark.slow
def test_workers_of_a_pool_end_when_their_parent_is_killed() -> None:
    """Idle ones, which nothing else would tell; the pool is that of a search."""
    code = (
        f"import os, sys, time; sys.path.insert(0, {str(HERE.parents[3])!r})\n"
        "from tools.search.ranking.workers import working\n"
        "if __name__ == '__main__':\n"
        "    with working(2) as results:\n"
        "        print(*{pid for _, pid in results(os.getpid, [()] * 50)}, flush=True)\n"
        "        time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert parent.stdout.readline()
    workers = [each for each in psutil.Process(parent.pid).children() if "resource_tracker" not in str(each.cmdline())]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=LONG)
    assert alive == []


class Deserted:
    """A connection whose other end is gone, which its reader has not found out."""

    def __init__(self) -> None:
        self.jobs = [[1]]

    def recv(self) -> list[int]:
        while not self.jobs:
            time.sleep(1)
        return self.jobs.pop()

    def send(self, result: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_worker_that_cannot_answer_ends_without_a_word() -> None:
    code = (
        f"{IMPORTABLE}"
        "import test_children as t; from tools.process import children\n"
        "children._serve(t.Deserted(), t.echo)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


CODE = """
import json, sys
from tools.process import children
children.import_light_nltk()
before = [name for name in children.UNUSED if name in sys.modules]
from nltk.translate.bleu_score import sentence_bleu
score = sentence_bleu([["a", "b", "c", "d", "e"]], ["a", "b", "c", "d", "f"])
import scipy.stats, sklearn
print(json.dumps([before, score, scipy.stats.norm.cdf(0.0), bool(sklearn.__version__)]))
"""


@pytest.mark.slow
def test_scores_are_there_and_helpers_are_not_imported_and_can_be():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, score, half, there = json.loads(done.stdout)
    assert before == [] and 0.6 < score < 0.8 and half == 0.5 and there


LOADERS = """
import json, pickle, sys
from tools.process import children
children.import_mindformers()
import mindformers.dataset.dataloader.hf_dataloader as loaders
before = [name for name in ("datasets", "datasets.distributed", "pandas") if name in sys.modules]
given = loaders.datasets.Dataset.from_dict({"a": list(range(6))})
half = loaders.split_dataset_by_node(given, 1, 2)
import datasets, datasets.distributed
print("said:", json.dumps([before, list(half["a"]), isinstance(half, datasets.Dataset),
    pickle.loads(pickle.dumps(loaders.datasets)) is datasets]))
"""


@pytest.mark.slow
def test_hugging_face_s_datasets_are_imported_when_a_loader_uses_them():
    done = subprocess.run([sys.executable, "-c", LOADERS], capture_output=True, text=True, check=True)
    (said,) = (line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("said: "))
    assert json.loads(said) == [[], [3, 4, 5], True, True]
