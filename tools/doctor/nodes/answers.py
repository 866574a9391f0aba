"""What came of asking a host: its report and the difference of its clock, or what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import ClusterError
from tools.doctor.report import Report, ReportError, read_report

_MOST = 1 << 22  # bytes of a report; a real one has some 20 thousand


@dataclass(frozen=True)
class Skew:
    """Seconds that a host's clock is ahead of ours, and by how much that may be wrong: half of the round trip."""

    ahead: float
    error: float


@dataclass(frozen=True)
class Trouble:
    """Why there is no report of a host: what failed (`ssh`, `report`), in words, and what to do."""

    what: str
    words: str
    mend: str


@dataclass(frozen=True)
class Answer:
    """Of one host; `skew` is None where nobody measured."""

    told: Report | Trouble
    skew: Skew | None = None


def parsed(text: str) -> Report | Trouble:
    """A report, or why a text is none."""
    if len(text) > _MOST:
        return Trouble("report", f"{len(text):,} characters: no report", "look what prints there when a shell starts")
    try:
        return read_report(text)
    except ReportError as error:
        return Trouble("report", str(error), "tc3 doctor --json on that host, with the same checkout as here")


def read_folder(folder: Path) -> Mapping[str, Answer]:
    """Host -> its answer, of a folder with a file HOST.json for each.

    Raises:
        ClusterError: there is no such file, or the folder cannot be listed.
    """
    try:
        files = sorted(folder.glob("*.json"))
    except OSError as error:
        raise ClusterError(f"--nodes {folder}: cannot be listed: {error.strerror}") from None
    if not files:
        raise ClusterError(f"--nodes {folder}: no *.json there; want HOST.json of each host, by tc3 doctor --json")
    return {path.stem: Answer(_of_file(path)) for path in files}


def _of_file(path: Path) -> Report | Trouble:
    try:
        if path.stat().st_size > _MOST:
            return parsed(" " * (_MOST + 1))
        return parsed(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return Trouble("report", f"{path}: {error.strerror}", "write it anew: tc3 doctor --json there")
