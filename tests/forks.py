"""Python processes that need not import MindSpore: forks of one that has. The import takes longer than many a test.

What the fork has imported is all that it shares with a process of its own: it sets MindSpore's context itself. Nothing
may be tested here that depends on what happens before MindSpore is imported.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from launch.run.msrun import MASTER, free_port
from tests import timing
from tools.dryrun import compiles
from tools.process.children import HUGE_PAGES

ROOT = Path(__file__).resolve().parent.parent
NOTHING: Mapping[str, str] = {}
ADDRESS = "TC3_TEST_FORKS"  # where tests/fork_server.py listens: an abstract socket, the same for all of pytest


def start_server():
    """Start the process that forks, for this process of pytest and those that it starts; return what ends it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel finds a name
    listener.listen()
    os.environ[ADDRESS] = listener.getsockname()[1:].decode()
    environment = {**HUGE_PAGES, **os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.fork_server", str(listener.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[listener.fileno()])
    listener.close()

    def end():
        process.kill()
        process.wait()

    return end


class Done(NamedTuple):
    """A `Done` holds the exit code of a fork and the texts that it printed."""

    returncode: int
    stdout: str
    stderr: str


class Member(NamedTuple):
    """A `Member` is one of several processes: its arguments, the files of its stdout and stderr, and the variables
    that its environment has in addition.
    """

    arguments: Sequence
    outputs: Sequence[str]
    environment: Mapping[str, str]


class Forks:
    """A connection to the process that forks. Its folder takes the logs of all.

    `first`: a statement that is executed once, which imports what these forks need not import.
    """

    def __init__(self, folder, first="import mindformers"):
        self.outputs = [str(Path(folder) / name) for name in ("stdout.txt", "stderr.txt")]
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(f"\0{os.environ[ADDRESS]}")
        self.stream = self.connection.makefile("rw")
        self.pid = int(self._ask({"folder": str(folder), "first": first}))

    def _ask(self, question):
        self.stream.write(json.dumps(question) + "\n")
        self.stream.flush()
        answer = self.stream.readline()
        assert answer, "the process that forks has died: its own words are on stderr"
        return answer

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
        codes, seconds = json.loads(self._ask([within, port, jobs]))
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
        self.stream.close()
        self.connection.close()


@contextlib.contextmanager
def forked_compiles(forks, cache):
    """While the block runs, each compile of a dry run in this process is a fork, and results are kept in `cache`."""

    def start(command, cwd, env, stdout, stderr):
        _, *module, _, job, out = map(str, command)  # its parent is another one here
        done = forks.python(*module, forks.pid, job, out, cwd=cwd, **env)
        stdout.write((done.stdout + done.stderr).encode())
        return SimpleNamespace(poll=lambda: done.returncode, returncode=done.returncode)

    instead = mock.patch.object(compiles, "subprocess", SimpleNamespace(Popen=start))
    with instead, mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        yield
