from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tools.data.workers import ordered_map
from tools.process.signals import deaf_children, terminate_as_interrupt, uninterrupted

BOTH = (signal.SIGINT, signal.SIGTERM)


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


def test_a_signal_is_delivered_though_the_block_fails() -> None:
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt(), uninterrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("disk full")


def test_sigterm_without_a_handler_ends_the_process_after_the_block() -> None:
    code = (
        "import os, signal; from tools.process.signals import uninterrupted\n"
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


def interrupted_worker():
    return lambda number: os.kill(os.getpid(), signal.SIGINT) or number


def test_workers_do_not_hear_ctrl_c_and_end_by_sigterm() -> None:
    before = set(psutil.Process().children())
    results = ordered_map(interrupted_worker, range(20), workers=2)
    assert next(results) == 0
    started = set(psutil.Process().children()) - before  # on a busy machine one may not have become Python's yet
    workers = [each for each in started if "resource_tracker" not in " ".join(each.cmdline())]
    assert list(results) == list(range(1, 20)) and len(workers) == 2
    assert psutil.wait_procs(workers, timeout=60)[1] == []
