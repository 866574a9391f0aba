"""Files of JSON lines that a run appends to: the one function that writes them, reading that plugins share. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Stepped(Protocol):
    """A record of a step."""

    @property
    def step(self) -> int:
        """Its number."""


Record = TypeVar("Record", bound=Stepped)


def append_line(path: Path, text: str) -> None:
    """Add a line. It stands on a line of its own, also where a killed run left half of one behind.

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


def read_steps(
    path: Path,
    parse: Callable[[Any, str], Record],
    follow: Callable[[Record, Record, str], None] = lambda before, record, place: None,
) -> list[Record]:
    """The records of a file, by step; a resumed run replaces what it repeats, half a killed one's line is left out.

    Args:
        parse: makes a record of a line's content and its place, which is for errors.
        follow: raises where a record cannot follow the one before it; gets the place, too.
    """
    records: list[Record] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            content = json.loads(text)
        except ValueError:
            continue
        place = f"{path}:{number}"
        record = parse(content, place)
        while records and records[-1].step >= record.step:
            records.pop()
        if records:
            follow(records[-1], record, place)
        records.append(record)
    return records
