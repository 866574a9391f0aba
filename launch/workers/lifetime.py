"""This module controls the life of a worker: it defines how a worker exits, ends the worker together with its parent
process, and makes a worker print where it hangs.

`run_then_hard_exit` ends a worker without tearing down its interpreter, once all exit functions have run. MindSpore
leaves the cluster and releases its devices in functions that it registers with `atexit`. The objects that the
interpreter and C++ destroy afterwards hold no such resource, and destroying them may crash: a worker that had trained
to the end and left the cluster was observed to end by SIGSEGV, so that its run counted as failed.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable

ASK_STACKS = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_worker_code: int | None = None


def run_then_hard_exit(main: Callable[[], object], done: str = "") -> None:
    """Run a worker's `main` and exit with the exit code of `main`, even if MindSpore crashes while the process ends.

    An exception is printed with its traceback as usual. Import this module before MindSpore.

    Args:
        done: a line that is printed if `main` has succeeded and its threads have ended, before all exit functions:
            if MindSpore crashes in one of them, the line says that the work had been done.
    """
    global _worker_code
    try:
        main()
        _worker_code = 0
    except SystemExit as end:
        _worker_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        if done and _worker_code == 0:
            atexit.register(print, done, flush=True)  # the last to be registered is the first to run


@atexit.register  # the first to be registered is the last to run: imported before MindSpore, this one is behind its
def _exit_hard() -> None:
    if _worker_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_worker_code)


def die_with_parent(signal_number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to send `signal_number` when the parent process ends, even by SIGKILL (Linux); `parent` is its
    pid, if known.

    This is safe between fork and exec. The setting survives exec, but not fork, so each child process must ask again.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if parent is not None and os.getppid() != parent:  # it ended before we could ask
            os.kill(os.getpid(), signal_number)


def adopt_orphans(on: bool = True) -> None:
    """Become the parent of every descendant process whose own parent ends, so that no descendant escapes
    (PR_SET_CHILD_SUBREAPER).
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def answer_with_stacks() -> None:
    """On SIGUSR2, write the stack of each thread of a hanging run into the log, even while a thread waits in C++."""
    faulthandler.register(ASK_STACKS, all_threads=True)
