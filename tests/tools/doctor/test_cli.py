"""`tc3 doctor` from the command line, on this host and on others, which it asks by ssh.

A stand-in on PATH for ssh runs the command here, hangs, or fails as ssh does.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from tests.tools.doctor.reports import report
from tests.tools.process.roots import OUTPUTS, write
from tools.doctor.ask import AT_ONCE, Trouble, ask_all
from tools.doctor.cli import doctor
from tools.doctor.report import Report

MINI = str(Path(__file__).resolve().parents[3] / "recipes/mini/pretrain_dp2.yaml")
GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"


def call(*arguments):
    return CliRunner().invoke(doctor, list(arguments))


def test_a_failing_check_is_exit_code_1_and_mending_it_0(tmp_path):
    root = write(tmp_path, {GOVERNOR: "powersave\n"})
    result = call(MINI, "--root", str(root.path))
    assert result.exit_code == 1
    assert "fail    governor" in result.stdout and "mend: cpupower frequency-set -g performance" in result.stdout
    last = result.stdout.splitlines()[-2]
    assert last.startswith("fail: governor: ") and last.endswith("; mend: cpupower frequency-set -g performance")
    (tmp_path / GOVERNOR).write_text("performance\n")
    result = call(MINI, "--root", str(root.path))
    assert result.exit_code == 0 and "ok      governor" in result.stdout and "cpupower frequency" not in result.stdout


def test_json(tmp_path):
    result = call(MINI, "--root", str(write(tmp_path, {GOVERNOR: "powersave\n"}).path), "--json")
    found = {item["check"]: item for item in json.loads(result.stdout)["findings"]}
    assert found["governor"]["verdict"] == "fail" and found["governor"]["mend"] and found["governor"]["source"]


def test_this_host():
    """On any host every check has a verdict."""
    result = call("--json")
    report = json.loads(result.stdout)
    found, facts = report["findings"], report["facts"]
    assert result.exit_code in (0, 1) and len(found) > 25 and report.keys() == {"findings", "facts", "probe"}
    assert facts["Python"] == platform.python_version() and facts["cores"] == str(len(os.sched_getaffinity(0)))
    assert result.exit_code == any(item["verdict"] == "fail" for item in found)


ROOT = Path(__file__).resolve().parents[3]
TC3 = [sys.executable, "-c", "from launch.cli import main; main()"]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
LARGE = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
HEAVY = {"mindspore", "mindformers", "torch", "transformers", "scipy", "matplotlib", "datasets"}
# what Ascend's tools say to somebody who is not root
REFUSE = '#!/bin/sh\n[ "$(id -u)" = 0 ] && { echo "$ANSWER"; exit 0; }\necho "Permission denied" >&2; exit 1\n'


@pytest.fixture
def folder():
    """Make a folder that everybody may write to, because only the owner may write to pytest's own folders."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def verdicts(folder, *before):
    """Check -> (verdict, what was seen)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [*before, *TC3, "doctor", "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    return {item["check"]: (item["verdict"], item["seen"]) for item in json.loads(done.stdout)["findings"]}


@pytest.mark.slow
def test_somebody_without_rights_is_told_what_wants_root(folder):
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("becoming somebody else wants root and setpriv")
    if subprocess.run([*NOBODY, *TC3, "--help"], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        pytest.skip("nobody may not read this checkout or this Python")
    output = (OUTPUTS / "910B2C_23.0.2.1.txt").read_text()
    (folder / "npu-smi").write_text(REFUSE.replace("$ANSWER", output))
    (folder / "npu-smi").chmod(0o755)
    root, nobody = verdicts(folder), verdicts(folder, *NOBODY)
    assert root.keys() == nobody.keys() and root["npu_health"] == ("ok", "2 OK")
    asked = {"npu_health", "npu_processes", "npu_clock"}
    assert {nobody[name][0] for name in asked} == {"unknown"} and all("root" in nobody[name][1] for name in asked)
    others = root.keys() - asked - {"disk_write", "memory", "free_ports", "disk"}  # which change meanwhile
    assert {name: nobody[name][0] for name in others} == {name: root[name][0] for name in others}
    assert nobody["disk_write"][0] in ("ok", "warn")


def test_it_loads_nothing_that_takes_long(folder):
    """It takes a second because it does without MindSpore and all that comes with it."""
    code = f"""
import sys
from launch.cli import main
sys.argv = ["tc3", "doctor", {str(LARGE)!r}, "--json"]
try:
    main()
finally:
    print({HEAVY} & sys.modules.keys() or "nothing", file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stderr.splitlines()[-1] == "nothing"


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_command_line(ssh, tmp_path):
    (tmp_path / "hosts.txt").write_text("here 8  # the master\naway 8\n")
    command = [*TC3, "doctor", "--nodes", str(tmp_path / "hosts.txt"), "--json", "--limit", "600"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["hosts"] == {"here": True, "away": False}
    assert "here" in found["clocks"] and found["outliers"][0]["hosts"] == ["away"]


@pytest.mark.slow
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
