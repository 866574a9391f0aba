"""What a log says of a failure, in words: the rows of signatures.yaml, which name their sources. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

UNKNOWN = "unknown"
_TABLE = Path(__file__).with_name("signatures.yaml")
_SHOWN, _WIDTH = 3, 300  # lines that are quoted, and characters of one
_TELLING = re.compile(r"error|exception|critical|failed|killed", re.IGNORECASE)
_NOISE = re.compile(  # MindSpore's and MindFormers' levels below an error, Python's warnings, rules and marks
    r"^\[(DEBUG|INFO|WARNING)\]| - (DEBUG|INFO|WARNING) - |^\S*:\d+: \w*Warning: |^\s*(warnings\.warn\(|[-=~^*_.\s]*$)"
)


@dataclass(frozen=True)
class Signature:
    """A row of signatures.yaml."""

    name: str
    pattern: re.Pattern[str]
    words: str
    source: str
    mend: str = ""
    victim: bool = False


@dataclass(frozen=True)
class Found:
    """What a log says: the row that matched and the line that did, or `UNKNOWN` and the lines that tell most.

    `victim`: others that fail bring such a line about, too; by itself it does not say who began.
    """

    name: str
    words: str
    lines: tuple[str, ...]
    mend: str = ""
    victim: bool = False
    telling: bool = True  # the lines say something of a failure; else they are only the last ones


@cache
def signatures() -> tuple[Signature, ...]:
    """The rows, the most telling first."""
    rows = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return tuple(Signature(**row | {"pattern": re.compile(row["pattern"])}) for row in rows)


def without_noise(lines: Sequence[str]) -> list[str]:
    """The lines of a log that may say something of a failure: no warnings, no progress, no rules."""
    return [line for line in lines if not _NOISE.search(line)]


def diagnose(lines: Sequence[str]) -> Found:
    """What the lines of one log say. A row that only failures of one's own bring about goes before the others."""
    loud = without_noise(lines)
    for victim in (False, True):
        for row in signatures():
            said = lines if victim else loud
            if row.victim == victim and (telling := [line for line in said if row.pattern.search(line)]):
                return Found(row.name, row.words, _quoted(telling[-1:]), row.mend, victim)
    telling = [line for line in loud if _TELLING.search(line)]
    shown = telling or loud
    words = "no known signature" if any(map(str.strip, lines)) else "the log is empty, or is not there"
    return Found(UNKNOWN, words, _quoted(shown[-_SHOWN:]), telling=bool(telling))


def _quoted(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.strip()[:_WIDTH] for line in lines)
