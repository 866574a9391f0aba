"""On SIGUSR2 a worker writes where each of its threads is into its log: what to know of a run that hangs."""

from __future__ import annotations

import faulthandler
import signal

ASK = signal.SIGUSR2


def answer() -> None:
    """From now on; also while the interpreter waits in C++, for the answer needs no lock of it."""
    faulthandler.register(ASK, all_threads=True)
