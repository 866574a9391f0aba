"""A worker that crashes while its interpreter is torn down has ended as it ended; what runs at exit has run."""

import signal
import subprocess
import sys

import pytest

WORKER = """
import atexit, os, signal, sys
{before}
class Native:
    def __del__(self):  # as MindSpore's C++ objects, after the functions of atexit
        os.kill(os.getpid(), signal.SIGKILL)  # a crash without a core file
sys.modules["native"] = Native()
atexit.register(print, "left the cluster")
def main():
    print("trained")
    {end}
{run}
"""
WAYS = [("pass", 0), ("sys.exit(0)", 0), ("sys.exit(None)", 0), ("sys.exit(2)", 2), ("sys.exit('said')", 1)]


def run(end, before="from launch.workers.lifetime import run_then_hard_exit", call="run_then_hard_exit(main)"):
    code = WORKER.format(end=end, before=before, run=call)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("end", "code"), WAYS)
def test_the_exit_code_is_that_of_the_work(end, code):
    done = run(end)
    assert (done.returncode, done.stdout) == (code, "trained\nleft the cluster\n"), done.stderr


def test_without_it_the_crash_wins():
    assert run("pass", before="", call="main()").returncode == -signal.SIGKILL


@pytest.mark.parametrize("file", ["train.py", "workers/accuracy_worker.py"])
def test_what_msrun_starts_ends_like_this(file, tmp_path):
    code = WORKER.split("def main")[0].format(before="import runpy")
    arguments = [
        "--config",
        str(tmp_path / "none.yaml"),
        "--run-dir",
        str(tmp_path),
        "--level",
        "L0",
        "--task",
        "tensor",
    ]
    arguments = arguments[:4] if file == "train.py" else arguments
    code += f"sys.argv = ['worker', *{arguments}]\nrunpy.run_path('launch/{file}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no such recipe" in done.stderr, done.stderr


def test_an_exception_is_told_and_takes_its_usual_way():
    done = run("raise ValueError('of the work')")
    assert "ValueError: of the work" in done.stderr
    assert done.returncode == -signal.SIGKILL
