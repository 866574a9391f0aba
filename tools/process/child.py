"""Start a training, or another side of a comparison, and take it along when we are ended."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from tools.process.signals import terminate_as_interrupt

GRACE = 20.0  # seconds that `tc3 train` may take to end its workers


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end; like `subprocess.run(..., text=True, check=False)`, `options` being those of Popen.

    Ctrl-C and SIGTERM end the child first, by SIGTERM, and by SIGKILL where that is not enough.

    Raises:
        OSError: it cannot be started. KeyboardInterrupt: we were told to end.
    """
    with terminate_as_interrupt(), subprocess.Popen(command, text=True, **options) as child:
        try:
            out, errors = child.communicate()
        except KeyboardInterrupt:
            _end(child)
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, errors)


def _end(child: subprocess.Popen[str]) -> None:
    """A second Ctrl-C does not wait for it."""
    child.terminate()
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        child.kill()
