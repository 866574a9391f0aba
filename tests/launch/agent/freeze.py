"""Stop the main thread of a process, and only it, until the process ends: python -m tests.launch.agent.freeze PID

As a hang: the other threads of a worker of MindSpore go on to send heartbeats, so that MindSpore sees nothing. A
debugger's system call does it (PTRACE_SEIZE and PTRACE_INTERRUPT of Linux), and the thread stays stopped while this
process lives. Prints a line when it is stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_SEIZE, _INTERRUPT = 0x4206, 0x4207  # PTRACE_* of <sys/ptrace.h>
_WALL = 0x40000000  # __WALL of <sys/wait.h>: threads, too


def freeze(pid: int) -> None:
    """Return when the process has ended; OSError where it cannot be traced."""
    library = ctypes.CDLL(None, use_errno=True)
    for request in (_SEIZE, _INTERRUPT):
        if library.ptrace(ctypes.c_long(request), ctypes.c_int(pid), None, None):
            raise OSError(ctypes.get_errno(), f"ptrace of {pid}")
    os.waitpid(pid, _WALL)
    print(pid, flush=True)
    with contextlib.suppress(ChildProcessError):
        while True:  # a process that is traced is gone only when its tracer has taken note
            _, status = os.waitpid(pid, _WALL)
            if os.WIFSIGNALED(status) or os.WIFEXITED(status):
                return


if __name__ == "__main__":
    freeze(int(sys.argv[1]))
