"""Python processes that need not import MindFormers: forks of one that has. The import takes longer than many a test.

What the fork has imported is all that it shares with a process of its own: it sets MindSpore's context itself. Nothing
may be tested here that depends on what happens before MindFormers is imported.
"""

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from tests import timing

ROOT = Path(__file__).resolve().parent.parent


class Done(NamedTuple):
    """How a fork ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """The process that forks. Its folder takes the logs of all."""

    def __init__(self, folder):
        self.outputs = [Path(folder) / name for name in ("stdout.txt", "stderr.txt")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_DEFAULT_PATH": str(folder)}
        command = [sys.executable, "-m", "tests.forks", *map(str, self.outputs)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
        self.seconds = 0.0  # of all forks so far

    def python(self, *arguments, cwd=ROOT, **environment):
        """Run `python -m MODULE ...` or `python -c CODE ...` to its end."""
        job = {"arguments": list(map(str, arguments)), "cwd": str(cwd), "environment": environment}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that forks has died: its own words are on stderr"
        code, seconds = answer.split()
        self.seconds += float(seconds)
        timing.add_forked(float(seconds))
        return Done(int(code), *(path.read_text(errors="replace") for path in self.outputs))

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        timing.add_forked(-self.seconds)  # from here on the kernel counts them among what this process has waited for
        self.process.stdout.close()


def serve(outputs):
    """Fork for each line of stdin, one after another; answer with the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MindFormers logs to stdout
    import mindformers  # noqa: F401 (what the forks are for)

    for line in sys.stdin:
        child = os.fork()
        if not child:
            work(json.loads(line), outputs)
        _, status, used = os.wait4(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}\n")
        answers.flush()
    os._exit(0)  # there is nothing to tidy up


def work(job, outputs):
    """What `python` does with these arguments, then the end of this process."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.chdir(job["cwd"])
        os.environ.update(job["environment"])
        how, what, *arguments = job["arguments"]
        sys.argv = [how, *arguments]
        if how == "-c":
            exec(compile(what, "<forked>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
