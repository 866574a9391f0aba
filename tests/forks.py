"""Python processes that need not import MindFormers: forks of one that has. The import takes longer than many a test.

What the fork has imported is all that it shares with a process of its own: it sets MindSpore's context itself. Nothing
may be tested here that depends on what happens before MindFormers is imported.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from launch.run.msrun import MASTER, free_port
from launch.workers.lifetime import die_with_parent
from tests import timing
from tools.dryrun import compiles
from tools.process.children import HUGE_PAGES

ROOT = Path(__file__).resolve().parent.parent
NOTHING: Mapping[str, str] = {}
# All that MindFormers imports from elsewhere, for processes that import it themselves: backends of the CPU replace
# functions that MindFormers copies when it is imported.
ALL_BUT_MINDFORMERS = """
import launch.train
import mindspore
launch.train.import_light_nltk()
import aiohttp, astunparse, datasets, ftfy, google.protobuf, jieba, numpy, PIL.Image, psutil, pyarrow, regex
import requests, safetensors.numpy, tokenizers, transformers, yaml
import mindspore.dataset, mindspore.mint, mindspore.parallel, mindspore.profiler, mindspore.train
"""
LISTENS = "0A"  # state of a socket in /proc/net/tcp
GRACE = 30  # seconds that processes may outlast one of them that has failed


class Done(NamedTuple):
    """How a fork ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Member(NamedTuple):
    """One of several processes: its arguments, the files of its stdout and stderr, what its environment has besides."""

    arguments: Sequence
    outputs: Sequence[str]
    environment: Mapping[str, str]


class Forks:
    """The process that forks. Its folder takes the logs of all.

    `prepared`: a statement that it executes first, which imports what the forks need not import.
    """

    def __init__(self, folder, prepared="import mindformers"):
        self.outputs = [str(Path(folder) / name) for name in ("stdout.txt", "stderr.txt")]
        environment = {**HUGE_PAGES, **os.environ, "PYTHONPATH": str(ROOT), "LOCAL_DEFAULT_PATH": str(folder)}
        command = [sys.executable, "-m", "tests.forks", prepared, str(os.getpid())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
        self.seconds = 0.0  # of all forks so far

    def python(self, *arguments, cwd=ROOT, **environment):
        """Run `python -m MODULE ...`, `python -c CODE ...` or `python FILE ...` to its end."""
        (code,) = self.together([Member(arguments, self.outputs, environment)], cwd=cwd)
        return Done(code, *(Path(path).read_text(errors="replace") for path in self.outputs))

    def together(self, members, cwd=ROOT, within=800, port=None):
        """Run several processes at once; return the exit code of each.

        The others are killed `GRACE` seconds after one has failed, and all after `within` seconds, which is before
        pytest's limit of a test: that would leave an answer that nobody has read. With a `port`, the first is a
        scheduler: the others wait for it to listen there, or to end, and once all of them have ended well it is ended,
        because it looks only each five seconds whether they have left.
        """
        jobs = [{**each._asdict(), "arguments": list(map(str, each.arguments)), "cwd": str(cwd)} for each in members]
        self.process.stdin.write(json.dumps([within, port, jobs]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that forks has died: its own words are on stderr"
        codes, seconds = json.loads(answer)
        self.seconds += seconds
        timing.add_forked(seconds)
        return codes

    def cluster(self, workers, arguments, logs, environment=NOTHING):
        """Run `python FILE ...` as msrun does, on a scheduler and workers; return (exit codes, texts of their logs).

        The scheduler is the first of each. The logs have msrun's names. The workers start when the scheduler listens:
        who asks it before waits for half a minute, and these have nothing to import in the meantime.
        """
        port, logs = free_port(), Path(logs)
        common = {"MS_WORKER_NUM": workers, "MS_SCHED_HOST": MASTER, "MS_SCHED_PORT": port, "RANK_SIZE": workers}
        members = {logs / "scheduler.log": {"MS_ROLE": "MS_SCHED"}}
        for rank in range(workers):
            numbers = dict.fromkeys(("MS_NODE_ID", "RANK_ID", "DEVICE_ID"), rank)
            members[logs / f"worker_{rank}.log"] = {"MS_ROLE": "MS_WORKER", **numbers}
        codes = self.together(
            [
                Member(arguments, [str(log)] * 2, {**environment, **{k: str(v) for k, v in (common | own).items()}})
                for log, own in members.items()
            ],
            port=port,
        )
        return codes, [log.read_text(errors="replace") for log in members]

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        timing.add_forked(-self.seconds)  # from here on the kernel counts them among what this process has waited for
        self.process.stdout.close()


@contextlib.contextmanager
def forked_compiles(forks, cache):
    """While the block runs, each compile of a dry run in this process is a fork, and results are kept in `cache`."""

    def start(command, cwd, env, stdout, stderr):
        _, *module, _, job, out = map(str, command)  # its parent is another one here
        done = forks.python(*module, forks.process.pid, job, out, cwd=cwd, **env)
        stdout.write((done.stdout + done.stderr).encode())
        return SimpleNamespace(poll=lambda: done.returncode, returncode=done.returncode)

    instead = mock.patch.object(compiles, "subprocess", SimpleNamespace(Popen=start))
    with instead, mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        yield


def serve(prepared, parent):
    """Read jobs from stdin, a line at a time. Fork for the jobs of a line, and answer with a line of their exit codes
    and of the processor time that they took, in seconds.
    """
    die_with_parent(parent=parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's, which then closes stdin, and the forks'
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MindFormers logs to stdout
    exec(prepared, {})
    gc.freeze()  # a fork that looks for cycles would copy every page
    for line in sys.stdin:
        answers.write(json.dumps(fork_all(*json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # there is nothing to tidy up


def fork_all(within, port, jobs):
    """Fork for each job, and wait for all; return (exit code of each, processor's seconds of all)."""
    server, running, codes, seconds = os.getpid(), {}, [0] * len(jobs), 0.0

    def kill_all(*_):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill_all)
    signal.alarm(within)
    for number, job in enumerate(jobs):
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            die_with_parent(parent=server)
            work(job)
        running[pid] = number
        if port and not number:
            wait_for_listener(pid, port)
    while running:
        pid, status, used = os.wait4(-1, 0)
        code = codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        seconds += used.ru_utime + used.ru_stime
        if code and running:
            signal.alarm(GRACE)
        if port and list(running.values()) == [0] and not any(codes):
            (scheduler,) = running
            os.kill(scheduler, signal.SIGKILL)
            seconds += sum(os.wait4(scheduler, 0)[2][:2])
            del running[scheduler]
    signal.alarm(0)
    return codes, seconds


def wait_for_listener(pid, port):
    """Return once the process listens on the port, or has ended."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            sockets = [line.split()[1:4] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        except OSError:
            continue  # it has just ended, as the scheduler of a single process does at once
        if any(state == LISTENS and int(local.partition(":")[2], 16) == port for local, _, state in sockets):
            return
        time.sleep(0.02)


def work(job):
    """What `python` does with these arguments, then the end of this process."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, path in enumerate(job["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)  # may be one file
        os.chdir(job["cwd"])
        os.environ.update(job["environment"])
        how, *arguments = job["arguments"]
        sys.argv = [how, *arguments[how in ("-c", "-m") :]]
        if how == "-c":
            exec(compile(arguments[0], "<forked>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(how, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if job["arguments"][0] not in ("-c", "-m"):
            atexit._run_exitfuncs()  # of a worker: it leaves its cluster
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
