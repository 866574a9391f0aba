"""The process that tests/forks.py asks for forks: one for all processes of pytest, which imports MindSpore once.

It imports when the first of them connects. Each gets a fork of its own, which reads jobs from the connection, a line at
a time, forks for the jobs of a line, and answers with a line of their exit codes and of the processor time that they
took, in seconds.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path

from launch.workers.lifetime import die_with_parent

LISTENS = "0A"  # state of a socket in /proc/net/tcp
known_sources: set[str] = set()  # digests of those that are in MindSpore's cache of parsed sources
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)
GRACE = 30  # seconds that processes may outlast one of them that has failed
# All that MindFormers imports from elsewhere. Backends of the CPU replace functions that MindFormers copies when it is
# imported, so that each fork imports MindFormers itself, which takes a fifth of a second then.
PREPARED = """
import mindspore
from tools.process.children import import_light_nltk
import_light_nltk()
import launch.train
import aiohttp, astunparse, datasets, ftfy, google.protobuf, jieba, numpy, PIL.Image, psutil, pyarrow, regex
import requests, safetensors.numpy, tokenizers, transformers, yaml
import mindspore.dataset, mindspore.mint, mindspore.parallel, mindspore.profiler, mindspore.train
"""


def accept_all(listener, parent):
    """Fork for each process of pytest that connects, until `parent` ends."""
    die_with_parent(parent=parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's, and the forks'
    os.dup2(2, 1)  # MindFormers logs to stdout
    server, prepared = os.getpid(), False
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            if not prepared:
                exec(PREPARED, {})
                gc.freeze()  # a fork that looks for cycles would copy every page
                prepared = True
            if not os.fork():
                listener.close()
                serve(connection, server)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def serve(connection, server):
    """Greet a process of pytest with this one's pid, and work for it until it closes the connection."""
    die_with_parent(parent=server)
    lines, answers = connection.makefile(), connection.makefile("w")
    greeting = json.loads(lines.readline())
    os.environ["LOCAL_DEFAULT_PATH"] = greeting["folder"]  # of MindFormers' logs
    os.chdir(greeting["folder"])
    exec(greeting["first"], {})
    gc.freeze()
    answers.write(f"{os.getpid()}\n")
    answers.flush()
    for line in lines:
        keep_parsed(greeting["folder"])
        answers.write(json.dumps(fork_all(greeting["folder"], *json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # there is nothing to tidy up


def tell_parsed(folder):
    """Write the sources of functions that MindSpore has parsed in this process, and their forks' server has not.

    Parsing is a tenth of the processor time of a compile, and most forks compile the same functions.
    """
    parser = sys.modules.get("mindspore.graph._parse.parser")
    cached = parser.Parser.ast_cache if parser else {}
    new = {key: (tree.text, column) for key, (tree, column) in cached.items() if key not in known_sources}
    if new:
        part = Path(folder) / f"parsed.{os.getpid()}.part"
        part.write_text(json.dumps(new))
        part.rename(part.with_suffix(".json"))


def keep_parsed(folder):
    """Parse what forks have told into MindSpore's own cache, whose keys are digests of sources: all later forks have
    it.
    """
    for file in Path(folder).glob("parsed.*.json"):
        import asttokens
        from mindspore.graph._parse.parser import Parser

        for key, (text, column) in json.loads(file.read_text()).items():
            if key not in known_sources:
                known_sources.add(key)
                Parser.ast_cache[key] = asttokens.ASTTokens(text, parse=True), column
        file.unlink()
        gc.freeze()


def fork_all(folder, within, port, jobs):
    """Fork for each job, and wait for all; return (exit code of each, processor's seconds of all).

    The forks tell what is for this process in files of `folder`: MindFormers sets LOCAL_DEFAULT_PATH anew in each.
    """
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
            work(folder, job)
        running[pid] = number
        if port and not number:
            wait_for_listener(pid, port)
    while running:
        pid, status, used = os.wait4(-1, 0)
        code = codes[running.pop(pid)] = ended_work(folder, pid, os.waitstatus_to_exitcode(status))
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


def ended_work(folder, pid, code):
    """Return the exit code of a fork's work, which it tells before its exit functions run.

    MindSpore's own exit functions crash once in some thousands of workers, when all work is done and has been told; a
    worker that crashes before, or that is killed, keeps the code of its process.
    """
    told = ended_file(folder, pid)
    try:
        before = int(told.read_text())
    except FileNotFoundError:
        return code
    told.unlink()
    if code in CRASHES:
        print(f"process {pid} ended its work with {before}, then crashed in an exit function ({code})", file=sys.stderr)
        return before
    return code


def ended_file(folder, pid):
    return Path(folder, f"ended.{pid}")


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


def work(folder, job):
    """Do what `python` would do with these arguments, then end this process."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, path in enumerate(job["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)  # may be one file
        faulthandler.enable()  # on the job's own stderr: a crash says where it was
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
        with contextlib.suppress(OSError):  # later forks then parse for themselves
            tell_parsed(folder)
        if job["arguments"][0] not in ("-c", "-m"):
            with contextlib.suppress(OSError):
                ended_file(folder, os.getpid()).write_text(str(code))
            atexit._run_exitfuncs()  # of a worker: it leaves its cluster
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    accept_all(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
