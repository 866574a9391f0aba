"""This module writes and reads the JSON files of a run: files to which lines are appended, files that are written as a
whole, and the record of the times in which no training step was made.

A worker on a host that was cut off from the others may append a line when the next attempt of the run has already
begun. So each line names the attempt that wrote it, and readers leave out lines of an attempt that come after lines of
a later attempt (`Newest`).

Every plugin that writes such a file uses the functions in the first half of this module. The functions in the second
half write and read `RUN/metrics/spans.jsonl`, with one line for each time in which training stood still for a save or
an evaluation. On rank 0 the plugins that save and evaluate write this file; `tc3 runs` reads the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

from plugins.errors import DataError, not_json

Kind = Literal["save", "evaluation"]
ATTEMPT = "TC3_ATTEMPT"  # of a worker: the name of the attempt that it is part of
OF = "attempt"  # the key of a line under which that name stands


class Stepped(Protocol):
    """A `Stepped` is the record of one training step."""

    @property
    def step(self) -> int:
        """Return the number of the step."""


Record = TypeVar("Record", bound=Stepped)


def number_of(attempt: object) -> int:
    """Return the number of an attempt from its name, which has the form NUMBER-TOKEN; return -1 if the name has no
    number.
    """
    number = attempt.partition("-")[0] if isinstance(attempt, str) else ""
    return int(number) if number.isdecimal() else -1


class Newest:
    """A `Newest` reads the lines of one file, and finds the lines that an attempt wrote after a later attempt had begun
    to write. Attempts are numbered in the order of their starts.

    A line that names no attempt is never late: it comes from a worker without an attempt (msrun by hand), or from an
    older version.
    """

    number = -1

    def is_late(self, record: dict[str, Any]) -> bool:
        """Return whether a line comes after a line of a later attempt; call this method for each line of the file, in
        order.
        """
        number = number_of(record.get(OF))
        if 0 <= number < self.number:
            return True
        self.number = max(self.number, number)
        return False


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a JSON-lines file, with the name of this worker's attempt. If a killed run left an incomplete
    line, that line is ended first.

    Every append of a run must use this function (tests/plugins/test_lines.py): a record that is joined to an incomplete
    line is lost with it, and if this record is the header of a resumed run, the steps before the header are counted as
    steps of the resumed run.
    """
    attempt = os.environ.get(ATTEMPT)
    text = json.dumps({**record, OF: attempt} if attempt else record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        half = False
        if file.seek(0, 2):
            file.seek(-1, 2)
            half = file.read(1) != b"\n"
        file.write(b"\n" * half + text.encode() + b"\n")


def flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk. If a program renames a file without
    waiting, a power cut may leave an empty file under the new name.

    Raises:
        OSError: the disk has an error, or is full. On a file system that cannot flush a folder, the function continues
            without an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let the processes of one host that change a file in `folder` do so one after another; if a process is killed, the
    system releases its lock.

    Processes of other hosts are not kept out: NFS does not lock folders between hosts, and some network file systems
    have no such locks at all. On such file systems the block runs without a lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: Any) -> None:
    """Write a JSON file atomically: readers find the old file or the complete new file, even after a power cut. Ranks
    on several hosts may write the same file at the same time.
    """
    # not tempfile: the file is for whoever may read the folder, as the umask says
    part = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        flush(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # of a disk that is full
    flush(path.parent)


def read_steps(
    path: Path,
    parse: Callable[[Any, str], Record],
    follow: Callable[[Record, Record, str], None] = lambda before, record, place: None,
    say: Callable[[str], None] | None = None,
) -> list[Record]:
    """Return the records of a file as a dictionary by step; the records of a resumed run replace those of the steps
    that it repeats.

    Args:
        parse: a function from a line's content, without its attempt, and its position (for errors) to a record.
        follow: a function that raises an error if a record cannot follow the previous one; it also gets the position.
        say: a function that is called if the last line is unfinished and left out, because a run is writing it or was
            killed while writing it; any other line that is not JSON is refused. None: every such line is left out,
            because a run that resumes must not fail on a line that a killed run left unfinished.

    Raises:
        DataError: a line is not JSON, and is not an unfinished last one.
    """
    records: list[Record] = []
    written = path.read_bytes()
    lines, newest = written.splitlines(), Newest()
    for number, text in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            if say is None or not text.strip():
                continue
            if records and number == len(lines) and not written.endswith(b"\n"):
                say(f"{place}: this line is not finished, as a run writes it or was killed: it is left out")
                continue
            raise DataError(
                f"{place}: this line {not_json(error)}; delete the line if it was cut off while it was written"
            ) from None
        if isinstance(content, dict):
            if newest.is_late(content):
                continue
            content.pop(OF, None)
        record = parse(content, place)
        while records and records[-1].step >= record.step:
            records.pop()
        if records:
            follow(records[-1], record, place)
        records.append(record)
    return records


@dataclass(frozen=True)
class Span:
    """A `Span` is an interval of time in which no training step was made: from `begin` to `end`, in seconds since 1970
    by the worker's clock.

    Args:
        step: the newest step before it.
        sealed: for a save, whether the checkpoint of `step` was complete at the end of the span. A save in the
            background has two spans.
    """

    kind: Kind
    step: int
    begin: float
    end: float
    sealed: bool = False


def spans_file(run_dir: str | Path) -> Path:
    """Return the file in which a run records its spans, which are times without training steps."""
    return Path(run_dir) / "metrics" / "spans.jsonl"


def note(run_dir: str | Path, span: Span) -> None:
    """Append a span (a time without training steps) to the run's file of spans."""
    append_line(spans_file(run_dir), asdict(span))


def as_span(record: dict[str, Any]) -> Span | None:
    """Return the span that one line describes; return None for a line that has another form."""
    numbers = [record.get(name, math.nan) for name in ("step", "begin", "end")]
    good = all(type(number) in (int, float) and 0 <= number < 1e15 for number in numbers)
    if record.get("kind") not in get_args(Kind) or not good or record["end"] < record["begin"]:
        return None
    return Span(record["kind"], record["step"], record["begin"], record["end"], record.get("sealed") is True)
