"""Standard output that fails as shells expect: a reader that has left ends `tc3` quietly, a full disk with one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

SIGPIPE_EXIT = 141  # what a shell reports of a program that SIGPIPE ended


class OutputFailed(BaseException):
    """Nothing can be written any more. No `Exception`: nobody on the way mistakes it for an error of their own."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Output:
    """Passes everything on to a stream; what cannot be written raises `OutputFailed`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As `TextIO.write`."""
        return self._try(self._stream.write, text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As `TextIO.writelines`."""
        self._try(self._stream.writelines, lines)

    def flush(self) -> None:
        """As `TextIO.flush`."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @staticmethod
    def _try(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as reason:
            raise OutputFailed(reason) from None


def exit_code_of(failed: OutputFailed) -> int:
    """The exit code of a run whose output failed, after a line for what is not a reader that left.

    What is still buffered goes nowhere: the interpreter would try once more at its end, and complain.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if failed.reason.errno == errno.EPIPE:
        return SIGPIPE_EXIT
    print(f"tc3: standard output cannot be written: {failed.reason.strerror}", file=sys.stderr)
    return 2
