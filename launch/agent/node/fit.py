"""Whether this node may take part again: the gate of `tc3 doctor`, on a probe of some seconds."""

from __future__ import annotations

import socket
from pathlib import Path

from plugins.errors import TC3Error
from tools.doctor.probe.outliers import gate


def unfit(slots: int, folder: Path) -> list[str]:
    """Why a run had better not start on this host; none where it may, or where nobody can tell.

    The host's workers are held against each other, so one worker alone is never unfit.
    """
    from tools.doctor.probe.run import probe  # brings the solver of the plan

    try:
        found = gate({socket.gethostname(): probe(None, slots, folder)})
    except (TC3Error, OSError):  # what cannot be probed keeps nobody out
        return []
    return found.reasons if found.verdict == "fail" else []
