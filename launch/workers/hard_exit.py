"""End a worker without tearing its interpreter down, once everything that wants to run at exit has run.

MindSpore leaves the cluster and gives its devices back in functions that it registers with `atexit`. What the
interpreter and C++ destroy after that has nothing to give back, and may crash on the way: a worker that had trained to
the end and left the cluster was seen to die of SIGSEGV, so that its run read as failed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

_code: int | None = None


def run_then_hard_exit(main: Callable[[], object]) -> None:
    """Run a worker's `main`; the exit code is its own, whatever crashes on the way out.

    An exception takes its usual way, with its traceback. Import this module before MindSpore.
    """
    global _code
    try:
        main()
        _code = 0
    except SystemExit as end:
        _code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


@atexit.register  # the first to be registered is the last to run: imported before MindSpore, this one is behind its
def _leave() -> None:
    if _code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)
