"""What a command says of work that takes its time, where no terminal shows a bar."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tools.data import reporter as reporters
from tools.data.reporter import CountingReporter, TerminalReporter
from tools.process.signals import interruptibly


@pytest.mark.parametrize("kind", [TerminalReporter, CountingReporter])
def test_without_a_terminal_slow_work_says_what_it_does_now_and_then(kind, capsys, monkeypatch) -> None:
    monkeypatch.setattr(reporters, "AFTER", 0.01)
    monkeypatch.setattr(reporters, "EVERY", 0.01)
    with kind() as reporter:
        reporter.start("reading", 200)
        reporter.advance(50)
        seen, deadline = "", time.monotonic() + 30
        while seen.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            seen += capsys.readouterr().err
    assert re.match(r"reading: 25%, \d+ s\nreading: 25%, \d+ s\n", seen), seen


def test_without_a_terminal_quick_work_says_nothing(capsys) -> None:
    with TerminalReporter() as reporter:
        reporter.start("reading", 200)
        reporter.advance(200)
    assert capsys.readouterr().err == ""


def test_work_that_goes_on_after_ctrl_c_is_left_behind() -> None:
    """Rust panicked, with a backtrace, when it came back to an interpreter that was torn down."""
    code = "import time; from tools.process.signals import interruptibly; "
    code += "interruptibly(lambda: (time.sleep(0.5), print('on', flush=True), time.sleep(600)))"  # it waits by now
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout and process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stdout.close()


def test_ctrl_c_is_heard_while_work_holds_on() -> None:
    """In a process of its own: a signal that nobody takes would end the process of the tests."""
    code = """
        import os, signal, threading
        from tools.process.signals import interruptibly
        release = threading.Event()
        try:
            interruptibly(lambda: (os.kill(os.getpid(), signal.SIGINT), release.wait(60)))
        except KeyboardInterrupt:
            release.set()
            print("heard")
    """
    deaf_no_more = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    start = time.monotonic()
    done = subprocess.run(command, preexec_fn=deaf_no_more, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "heard\n" and time.monotonic() - start < 30


def test_what_work_returns_and_raises_comes_through() -> None:
    assert interruptibly(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 / 0)
