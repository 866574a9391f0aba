"""This module protects work from signals that must not interrupt it, and starts child processes that end with their
parent.

`child` starts a process that ends with a `with` block, whatever ends the block; `run_child` runs a process (such as a
training) to its end, and ends it if this process is ended. `ordered_map` maps a function over jobs in worker processes;
it keeps the order of the jobs, bounds memory, and its workers end with the parent process and after Ctrl-C. Each worker
has its own pipe and receives jobs in turn, so reading the pipes in the same turn gives the results in the order of the
jobs. At most `DEPTH` jobs of each worker are in progress: memory is O(workers x job), however many jobs there are. If a
worker dies, its pipe is closed, which the parent notices at once; if the parent dies, all pipes are closed, which ends
the workers. (`multiprocessing.Pool` hangs in the first case, `ProcessPoolExecutor` leaves orphans in the second.)

A process that compiles runs with `HUGE_PAGES`, because MindSpore's front end allocates very many small objects: if
glibc's malloc uses transparent huge pages, a compile takes a tenth (mini recipes) to a fifth (large recipes) less time
(benchmarks/RESULTS.md). An older glibc, another libc or a kernel without such pages ignores the setting.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import cycle
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import FrameType, ModuleType
from typing import Any, TypeVar

import psutil

from plugins.errors import DataError

Result = TypeVar("Result")
INTERRUPTED = 130  # exit code
_LOOK = 0.2  # seconds after which a waiting main thread looks for signals


def interruptibly(work: Callable[[], Result]) -> Result:
    """Run the function `work` in a thread, and return the result of `work`. Ctrl-C ends the wait immediately, even if
    `work` stays in C code for minutes.

    The function `work` goes on until the process ends, so it must not write files. `work` must release Python's global
    interpreter lock. Outside the main thread, which receives no signals, `work` runs in the calling thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK)  # Python handles a signal between two waits
    except BaseException:
        atexit.register(_leave_behind, outcome)
        raise
    return outcome.result()


def _leave_behind(outcome: Future[Any]) -> None:
    """End this process although a thread still works, because Rust code panics when it returns to an interpreter that
    has ended.
    """
    if not outcome.done():  # an interrupted join takes its thread for stopped: is_alive() does not tell
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask a process to end


@contextmanager
def collected_signals(received: list[int]) -> Iterator[list[int]]:
    """While the `with` block runs, signals do not end this process, but are appended to the list `received`."""
    with ExitStack() as handlers:
        for number in NUMBERS:
            handlers.enter_context(handled(number, lambda number, frame: received.append(number)))
        yield received


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end of the `with` block, which should take only milliseconds."""
    arrived: list[int] = []
    try:
        with collected_signals(arrived):
            yield
    finally:
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


@contextmanager
def deaf_children() -> Iterator[None]:
    """While the `with` block runs, start child processes so that Ctrl-C reaches only this process, and not the child
    processes. SIGTERM still ends the child processes that the `with` block starts.

    The child processes inherit a blocked SIGINT. Python's signal handlers are not inherited, and if this process
    ignored SIGINT, a Ctrl-C during the block would be lost.
    """
    resource_tracker.ensure_running()  # else the first process starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP of a terminal that closes, raise KeyboardInterrupt in the `with` block as Ctrl-C does,
    so that every `with` and `finally` cleans up.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handled(signal.SIGTERM, interrupt), handled(signal.SIGHUP, interrupt):
        yield


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle a signal with the function `handler` while the `with` block runs. Do nothing outside the main thread,
    where Python allows no signal handlers, and do nothing for a SIGHUP that is already ignored, as under nohup.
    """
    nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
    if nohup or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


GRACE = 20.0  # seconds that `tc3 train` may take to end its workers


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `command` until it ends, like `subprocess.run(..., text=True, check=False)`. The keyword arguments `options`
    are passed to `subprocess.Popen`.

    On Ctrl-C or SIGTERM the child process ends first, by SIGTERM, and by SIGKILL if SIGTERM does not suffice.

    Raises:
        OSError: the command cannot be started.
        KeyboardInterrupt: this process received Ctrl-C or SIGTERM.
    """
    with terminate_as_interrupt(), child(command, GRACE, text=True, **options) as process:
        out, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


@contextmanager
def child(command: Sequence[str], grace: float = 0.0, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process that ends at the latest when the `with` block ends. If `grace` is given, the process first
    receives SIGTERM, and SIGKILL if it has not ended after `grace` seconds. The child processes of the started process
    are ended, too.

    After a second Ctrl-C, `kill` ends the process at once. `options` are passed to Popen. Raises OSError if the process
    cannot be started.
    """
    with ExitStack() as over:
        with uninterrupted():  # a signal in between would leave the process behind that has just begun
            process = over.enter_context(subprocess.Popen(command, **options))
            over.callback(_end, process, grace)
        yield process


def _end(process: subprocess.Popen[Any], grace: float) -> None:
    below: list[psutil.Process] = []
    try:
        if grace and process.poll() is None:
            with suppress(psutil.Error):
                below = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
    finally:
        kill(process)
        for each in below:  # which the process may have left behind
            with suppress(psutil.Error):
                each.kill()


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all processes that it has started; if the process leads a session, kill the whole session,
    too.

    The function does nothing if the process has already been waited for, because another process may have received the
    same process id.
    """
    if process.returncode is not None:
        return
    with suppress(psutil.Error):
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


UNUSED = ("sklearn", "scipy.stats")  # MindFormers imports NLTK for scores of texts, which training calls none of


def import_light_nltk() -> None:
    """Import NLTK, if it is installed, without scikit-learn and scipy.stats, which NLTK imports but does not need.

    These two packages take a sixth of the time in which each worker imports MindFormers, so call this function before
    that import. Other code can still use all helpers of NLTK.
    """
    absent = [name for name in UNUSED if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]  # None: an import of it says that it is not there
    try:
        with suppress(ImportError):  # MindFormers' own import says so
            importlib.import_module("nltk")
    finally:
        for name in absent:
            sys.modules.pop(name, None)


LATE = ("datasets", "datasets.distributed")  # MindFormers' loaders of Hugging Face's data import them, for calls only


class _Late(ModuleType):
    """A `_Late` stands for a module, which it imports when something of the module is used."""

    def __getattr__(self, name: str) -> Any:
        # an import of datasets.distributed asks for the path of datasets, which imports the package itself
        if name.startswith("__") and not (self.__name__ == LATE[0] and name == "__path__"):
            raise AttributeError(name)
        _remove_late()
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickle a reference to the module itself, for functions of loaders that are sent to other processes."""
        return importlib.import_module, (self.__name__,)


def _remove_late() -> None:
    for name in LATE:
        if isinstance(sys.modules.get(name), _Late):
            del sys.modules[name]


def _split_dataset_by_node(*arguments: Any, **named: Any) -> Any:
    return importlib.import_module(LATE[1]).split_dataset_by_node(*arguments, **named)


def import_mindformers() -> None:
    """Import MindFormers without the parts of other packages that only some trainings use.

    These parts are what `import_light_nltk` leaves out, and Hugging Face's `datasets` (with pandas), which is imported
    when a loader first uses it.
    """
    import_light_nltk()
    late = {} if LATE[0] in sys.modules or find_spec(LATE[0]) is None else {name: _Late(name) for name in LATE}
    for name, module in late.items():
        module.__spec__ = ModuleSpec(name, None)  # Transformers asks whether the package is there
    if late:
        late[LATE[1]].__dict__["split_dataset_by_node"] = _split_dataset_by_node
    sys.modules |= late
    try:
        importlib.import_module("mindformers")
    finally:
        _remove_late()


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Yield a folder that is removed at the end; in the meantime all files that this process makes by `tempfile` are in
    this folder. MindFormers' `build_context` leaves in this folder the JSON file of `dataset_broadcast_opt_level`,
    which MindSpore reads at once.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # a default: what the user has set stays


Job = TypeVar("Job")
DEPTH = 3  # one being worked on, one waiting, one on its way back


def ordered_map(make: Callable[[], Callable[[Job], Result]], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """Yield ``make()(job)`` for every job, in the order of the jobs; `workers` processes compute these results.

    make: builds the function once in each worker; `make` must be picklable (a function of a module or a
    `functools.partial`).
    workers: the number of processes; with 1 the jobs run in this process. Raises `DataError` if a worker dies.
    """
    if workers == 1:
        yield from map(make(), jobs)
        return
    with _started(make, workers) as team:
        pending: deque[_Member] = deque()
        for job, member in zip(jobs, cycle(team), strict=False):
            if len(pending) == DEPTH * workers:
                yield pending.popleft().receive()
            member.send(job)
            pending.append(member)
        while pending:
            yield pending.popleft().receive()


def end_with_parent() -> None:
    """Make this process, which `multiprocessing` has started, end as soon as its parent process has ended, even if
    SIGKILL ended the parent.

    The workers of a `ProcessPoolExecutor` need this function: each worker holds both ends of the queues, so that no
    worker notices the end of the parent, and the workers would wait for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(INTERRUPTED)

        threading.Thread(target=follow, daemon=True).start()


class _Member:
    """A `_Member` is the parent's side of one worker."""

    def __init__(self, make: Callable[[], Callable]) -> None:
        context = multiprocessing.get_context("spawn")  # forking after threads have run is not safe
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, job: object) -> None:
        try:
            self.connection.send(job)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def _death(self) -> DataError:
        self.process.join(timeout=60)
        code = self.process.exitcode
        return DataError(
            f"a worker process died (exit code {code}); exit code -9 mostly means that the memory was full: try fewer "
            "--workers"
        )


@contextmanager
def _started(make: Callable[[], Callable], workers: int) -> Iterator[list[_Member]]:
    team: list[_Member] = []
    try:
        with uninterrupted(), deaf_children():
            team.extend(_Member(make) for _ in range(workers))
        yield team
    finally:
        with uninterrupted():
            for member in team:
                member.stop()


def _serve(connection: Connection, make: Callable[[], Callable]) -> None:
    """Answer jobs until the parent closes the pipe."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    # a thread of its own empties the pipe, so that the parent's send never waits for our send: no deadlock
    threading.Thread(target=_fetch, args=(connection, inbox), daemon=True).start()
    function = make()
    while True:
        job = inbox.get()
        try:
            result = function(job)
        except Exception as error:
            result = error
        try:
            connection.send(result)
        except OSError:  # the parent was killed; the thread that reads may find out later than this one
            os._exit(0)


def _fetch(connection: Connection, inbox: queue.SimpleQueue) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent is done, or gone; either way nobody wants what is still being worked on
