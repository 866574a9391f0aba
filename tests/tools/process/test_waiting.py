"""These tests check what a command prints about long work, on a terminal and where no terminal shows a bar."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext

import pytest

from tools.process import waiting
from tools.process.children import interruptibly
from tools.process.waiting import CountingReporter, Progressing, TerminalReporter, saying

LONG = 300.0  # seconds: a bound against hangs


def test_what_lasts_is_said_now_and_then_on_stderr_alone(monkeypatch, capsys):
    said, enough = [], threading.Event()

    def note(*args, **kwargs):
        said.append((args, kwargs["file"]))
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(waiting, "AFTER", 0.01)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    monkeypatch.setattr("builtins.print", note)
    with saying("counting"):
        assert enough.wait(LONG)
    assert all(words[0].startswith("counting (") and file is waiting.sys.stderr for words, file in said)
    count = len(said)
    assert not enough.wait(0) or len(said) == count  # and nothing after the end


def test_what_is_soon_done_is_silent(capsys, monkeypatch):
    assert waiting.AFTER >= 2
    monkeypatch.setattr(waiting, "AFTER", LONG)  # so long no machine holds us up
    with saying("counting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_command_that_is_soon_loaded_is_silent(monkeypatch, capsys):
    """Loading takes three seconds on a busy machine: nothing to speak of."""
    pauses = []
    monkeypatch.setattr(waiting, "meanwhile", lambda what, first, every: pauses.append(first) or nullcontext())
    with saying("tc3 doctor is being loaded", after=5.0):
        pass
    assert pauses == [5.0] and capsys.readouterr() == ("", "")


def test_an_error_passes_through():
    try:
        with saying("counting"):
            raise ValueError("x")
    except ValueError as error:
        assert str(error) == "x"
    assert threading.active_count() >= 1 and not any(item.name.startswith("saying") for item in threading.enumerate())


def test_what_counts_says_what_it_is_at(monkeypatch):
    said, enough = [], threading.Event()

    def note(*args, **kwargs):
        said.append(args[0])
        if len(said) == 1:
            progress.show("39 of 40 done: matmul", 39, 40)
        if len(said) == 2:
            monkeypatch.setattr(waiting, "AGAIN", 0.0)
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(waiting, "AFTER", 0.01)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    monkeypatch.setattr("builtins.print", note)
    with Progressing("comparing operators") as progress:
        assert enough.wait(LONG)
    assert said[:2] == ["comparing operators ...", "39 of 40 done: matmul ..."]
    assert said[2].startswith("39 of 40 done: matmul ... ("), "only after a while the same again"


def test_words_that_stay_are_said_again_only_after_two_minutes(monkeypatch):
    """A search said seven times that it ranks the space."""
    said, now = [], [100.0]
    monkeypatch.setattr(waiting, "_print", said.append)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    progress = Progressing("ranking the space")
    for now[0] in range(102, 102 + 9 * 15, 15):
        progress._say()
    assert said == ["ranking the space ...", "ranking the space ... (122 s so far)"]
    progress.show("placing 3 of 40")
    progress._say()
    assert said[2:] == ["placing 3 of 40 ..."]


@pytest.mark.parametrize("kind", [TerminalReporter, CountingReporter])
def test_without_a_terminal_slow_work_says_what_it_does_now_and_then(kind, capsys, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "AFTER", 0.01)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    with kind() as reporter:
        reporter.start("reading", 200)
        reporter.advance(50)
        seen, deadline = "", time.monotonic() + LONG
        while seen.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            seen += capsys.readouterr().err
    assert re.match(r"reading: 25%, \d+ s\nreading: 25%, \d+ s\n", seen), seen


def test_without_a_terminal_quick_work_says_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "AFTER", LONG)
    with TerminalReporter() as reporter:
        reporter.start("reading", 200)
        reporter.advance(200)
    assert capsys.readouterr().err == ""


def test_work_that_goes_on_after_ctrl_c_is_left_behind() -> None:
    """Rust panicked, with a backtrace, when it came back to an interpreter that was torn down."""
    code = """
        import sys, threading, time
        from tools.process.children import interruptibly

        def waits(frame):
            return frame is not None and (frame.f_code.co_name == "join" or waits(frame.f_back))

        def work():
            while not waits(sys._current_frames()[threading.main_thread().ident]):
                time.sleep(0.01)
            print("on", flush=True)
            time.sleep(3600)

        interruptibly(work)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout and process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG) == 130
    process.stdout.close()


def test_ctrl_c_is_heard_while_work_holds_on() -> None:
    """In a process of its own: a signal that nobody takes would end the process of the tests."""
    code = """
        import os, signal, threading
        from tools.process.children import interruptibly
        release = threading.Event()
        try:
            interruptibly(lambda: (os.kill(os.getpid(), signal.SIGINT), release.wait(3600)))
        except KeyboardInterrupt:
            release.set()
            print("heard")
    """
    deaf_no_more = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, preexec_fn=deaf_no_more, stdout=subprocess.PIPE, text=True, timeout=LONG)
    assert done.stdout == "heard\n"


def test_what_work_returns_and_raises_comes_through() -> None:
    assert interruptibly(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 / 0)
