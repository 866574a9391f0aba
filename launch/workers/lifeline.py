"""Let a process end with its parent, also when the parent is killed with SIGKILL (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel for `signal_number` when our parent ends; `parent` is its pid, if known.

    Safe between fork and exec. The setting survives exec, not fork: each generation asks for itself.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if parent is not None and os.getppid() != parent:  # it ended before we could ask
            os.kill(os.getpid(), signal_number)


def adopt_orphans(on: bool = True) -> None:
    """Become the parent of every descendant whose own parent ends, so that none escapes (PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


_LIBC = ctypes.CDLL(None, use_errno=True)
