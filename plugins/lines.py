"""This module writes and reads the JSON files of a run: appended lines, whole files, and the spans in which training
stood still.

Every plugin that writes such a file uses the first half. The second half is `RUN/metrics/spans.jsonl`, with one line
for each time that a run's training stood still for a save or an evaluation. On rank 0 the plugins that save and
evaluate write this file; `tc3 runs` reads it.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

from plugins.errors import DataError, not_json

Kind = Literal["save", "evaluation"]


class Stepped(Protocol):
    """A `Stepped` is the record of one training step."""

    @property
    def step(self) -> int:
        """Return the number of the step."""


Record = TypeVar("Record", bound=Stepped)


def append_line(path: Path, text: str) -> None:
    """Append a line to a JSON-lines file. If a killed run left an incomplete line, that line is ended first.

    Everything that a run appends to goes through here (tests/plugins/test_lines.py): a record that is glued to half of
    another one is lost with it, and where it is the header of a resumed part, the steps before it count as this part's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        half = False
        if file.seek(0, 2):
            file.seek(-1, 2)
            half = file.read(1) != b"\n"
        file.write(b"\n" * half + text.encode() + b"\n")


def write_whole(path: Path, content: Any) -> None:
    """Write a file of JSON atomically: readers see the old file or the complete new one. Ranks on several hosts may
    write the same file at the same time.
    """
    # open, not tempfile: the file is for whoever may read the folder, as the umask says
    part = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    with part.open("w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


def read_steps(
    path: Path,
    parse: Callable[[Any, str], Record],
    follow: Callable[[Record, Record, str], None] = lambda before, record, place: None,
    say: Callable[[str], None] | None = None,
) -> list[Record]:
    """Return the records of a file by step; a resumed run replaces the steps that it repeats.

    Args:
        parse: a function from a line's content and its position (for errors) to a record.
        follow: a function that raises an error if a record cannot follow the previous one; it also gets the position.
        say: a function that is called if the last line is unfinished and left out, because a run is writing it or was
            killed while writing it; any other line that is not JSON is refused. None: every such line is left out,
            because a run that resumes must not fail on a line that a killed run left unfinished.

    Raises:
        DataError: a line is not JSON, and is not an unfinished last one.
    """
    records: list[Record] = []
    written = path.read_bytes()
    lines = written.splitlines()
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
            raise DataError(f"{place}: this line {not_json(error)}; delete it if it is only half a line") from None
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
    """Return the file in which a run writes its spans."""
    return Path(run_dir) / "metrics" / "spans.jsonl"


def note(run_dir: str | Path, span: Span) -> None:
    """Append a span to the run's file of spans."""
    append_line(spans_file(run_dir), json.dumps(asdict(span)))


def as_span(record: dict[str, Any]) -> Span | None:
    """Return the span of one line; None for a line of another form."""
    numbers = [record.get(name, math.nan) for name in ("step", "begin", "end")]
    good = all(type(number) in (int, float) and 0 <= number < 1e15 for number in numbers)
    if record.get("kind") not in get_args(Kind) or not good or record["end"] < record["begin"]:
        return None
    return Span(record["kind"], record["step"], record["begin"], record["end"], record.get("sealed") is True)
