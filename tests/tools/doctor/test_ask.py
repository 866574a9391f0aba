"""Hosts by ssh: a stand-in on PATH runs the command here, hangs, or fails as ssh does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest

from launch.run.msrun import ROOT
from tests.tools.doctor.reports import report
from tools.doctor.ask import AT_ONCE, Trouble, ask_all
from tools.doctor.report import Report

TC3 = [sys.executable, "-c", "from launch.cli import main; main()"]
# its last two arguments are the host and the command, which a shell of the host would run
SSH = f"""#!{sys.executable}
import os, subprocess, sys, time
host, command = sys.argv[-2:]
open(os.environ["SSH_LOG"], "a").write(" ".join(sys.argv[1:-1]) + chr(10))
if host == "away":
    print("ssh: connect to host away port 22: Connection timed out", file=sys.stderr)
    sys.exit(255)
if host == "hangs":
    subprocess.run(["sleep", "3600"])
if host == "chatty":
    print("Welcome, all work and no play", flush=True)
if host == "fast-clock":
    command = command.replace("date +%s.%N", 'date -d "+5 seconds" +%s.%N')
if host == "bare":
    command = "exec sh -c 'echo sh: 1: python: not found >&2; exit 127'"
if "REPORT" in os.environ:  # instead of the real one, which takes a second
    command = command.replace("exec env ", 'cat "$REPORT"; exit # ')
if host == "small-date":
    command = command.replace("date +%s.%N", "date +%s.N")
os.execvp("sh", ["sh", "-c", command])
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A folder with `ssh`; what each of its calls was given stands in `log`."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "ssh").write_text(SSH)
    (place / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_LOG", str(tmp_path / "log"))
    return tmp_path


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Hosts have their report ready."""
    (tmp_path / "report.json").write_text(report().text())
    monkeypatch.setenv("REPORT", str(tmp_path / "report.json"))


def watched(shown):
    """A stand-in for the progress bar, which tells how many hosts have answered."""

    class Watch(nullcontext):
        def __init__(self, words, total):
            super().__init__(self)

        def show(self, words, done):
            shown(done)

    return Watch


def test_the_fates_of_hosts(ssh, quick, monkeypatch):
    others = psutil.Process().children(recursive=True)  # of other tests
    shown = [0]  # hosts that have answered: the time of the last one is up when all others have
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 1e6 * (shown[-1] >= 6))
    monkeypatch.setattr("tools.doctor.ask.time", clock)
    monkeypatch.setattr("tools.doctor.ask.Progressing", watched(shown.append))
    answers = ask_all(["here", "away", "hangs", "chatty", "bare", "fast-clock", "small-date"], [], limit=600)
    assert list(answers) == ["here", "away", "hangs", "chatty", "bare", "fast-clock", "small-date"]
    for host in ("here", "chatty", "fast-clock", "small-date"):
        assert isinstance(answers[host].told, Report), answers[host].told
    troubles = {host: answer.told for host, answer in answers.items() if isinstance(answer.told, Trouble)}
    assert troubles.keys() == {"away", "hangs", "bare"}
    assert "Connection timed out" in troubles["away"].words and troubles["away"].what == "ssh"
    assert troubles["hangs"].words == "no answer within 600 s"
    assert troubles["bare"].words == "sh: 1: python: not found" and troubles["bare"].what == "report"
    assert abs(answers["here"].skew.ahead) <= answers["here"].skew.error + 0.01
    fast = answers["fast-clock"].skew
    assert abs(fast.ahead - 5) <= fast.error + 0.01 and answers["small-date"].skew is None
    assert "BatchMode=yes" in (ssh / "log").read_text() and "ConnectTimeout=" in (ssh / "log").read_text()
    assert set(psutil.Process().children(recursive=True)) <= set(others)


def test_the_recipe_goes_along_and_its_errors_come_back(ssh, tmp_path):
    told = ask_all(["here"], [str(tmp_path / "none.yaml")], limit=600)["here"].told
    assert isinstance(told, Trouble) and "none.yaml" in told.words and "no such recipe" in told.words


def test_no_more_than_some_at_once(ssh, monkeypatch):
    """They fail when as many wait as may, and are counted now and then."""
    go = ssh / "go"
    (ssh / "bin" / "ssh").write_text(f"#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.2; done\nexit 255\n")
    counts, others = [], set(psutil.Process().children())

    def shown(done):
        counts.append(len(set(psutil.Process().children()) - others))
        if counts[-1] >= AT_ONCE:
            go.touch()

    monkeypatch.setattr("tools.doctor.ask.Progressing", watched(shown))
    answers = ask_all([f"n{number}" for number in range(AT_ONCE + 40)], [], limit=600)
    assert len(answers) == AT_ONCE + 40 and max(counts) == AT_ONCE
    assert {answer.told.words for answer in answers.values()} == {"exit code 255"}


def test_without_ssh(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    told = ask_all(["here"], [])["here"].told
    assert isinstance(told, Trouble) and "ssh cannot be started" in told.words


def test_the_command_line(ssh, tmp_path):
    (tmp_path / "hosts.txt").write_text("here 8  # the master\naway 8\n")
    command = [*TC3, "doctor", "--nodes", str(tmp_path / "hosts.txt"), "--json", "--limit", "600"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["hosts"] == {"here": True, "away": False}
    assert "here" in found["clocks"] and found["outliers"][0]["hosts"] == ["away"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(ssh, tmp_path, number):
    (tmp_path / "hosts.txt").write_text("hangs\n")
    process = subprocess.Popen(
        [*TC3, "doctor", "--nodes", str(tmp_path / "hosts.txt")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end, below = time.monotonic() + 300, []
        while "sleep" not in [child.name() for child in below]:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
            below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert psutil.wait_procs(below, timeout=300)[1] == []
