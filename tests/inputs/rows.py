"""The tables of bad inputs: what a row holds, and the folder in which it runs.

A table is a YAML list; its file is named after its command. A row:

    name       what is wrong, in words: the test's id
    run        the command line without `tc3`; {tmp} {mini} {recipes} {corpus} ... stand for paths (`places`)
    shell      instead of `run`: a line of bash, in a process of its own, where `tc3` is the command; for redirections
    process    true: `run` in a process of its own, for what could take all memory or ignore a time limit
    interrupt  words on stderr after which Ctrl-C is pressed (in a process of its own)
    locked     paths under {tmp} that may not be read or written while the command runs (in a process of its own)
    files      file under {tmp} -> its text or bytes; null makes a folder
    copies     file under {tmp} -> a place that it is a copy of
    edits      file of `files` or `copies` -> a list of [text, what to write in its place, once]
    links      file under {tmp} -> what it is a link to
    make       builders of `builders.py` that put larger files there
    code       the exit code, or a list of codes; 2 unless it says otherwise
    says       texts that stdout and stderr hold, in any case; line breaks count as blanks
    lines      at most so many lines are printed; 12 unless it says otherwise
    writes     patterns of files that may appear under {tmp}; none unless it says otherwise
    seconds    an upper bound against hangs, no measurement; 60 unless it says otherwise; a busy machine: `BUSY` times
               that, and `LEAST` at least
    after      the same from Ctrl-C on; 10 unless it says otherwise
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.inputs import builders

TABLES = Path(__file__).parent
ROOT = TABLES.parents[1]
BUSY = 4
LEAST = 300.0  # seconds
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Row:
    """A `Row` describes one bad input; the docstring of this module explains its fields."""

    table: str
    name: str
    says: list[str]
    run: str = ""
    shell: str = ""
    process: bool = False
    interrupt: str = ""
    locked: list[str] = field(default_factory=list)
    files: dict[str, str | bytes | None] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    edits: dict[str, list[list[str]]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    make: list[str] = field(default_factory=list)
    code: int | list[int] = 2
    lines: int = 12
    writes: list[str] = field(default_factory=list)
    seconds: float = 60
    after: float = 10

    @property
    def limit(self) -> float:
        """Seconds after which a command hangs, also where many others run beside it."""
        return max(BUSY * self.seconds, LEAST)

    @property
    def apart(self) -> bool:
        """Return whether the row needs a separate process."""
        return bool(self.process or self.shell or self.interrupt or self.locked)

    @property
    def codes(self) -> list[int]:
        """The exit codes that are right."""
        return [self.code] if isinstance(self.code, int) else self.code

    def place(self, text: str, folder: Path) -> str:
        """`text` with its placeholders filled in; other braces stay."""
        for name, path in places(folder).items():
            text = text.replace(f"{{{name}}}", str(path))
        return text

    def furnish(self, folder: Path) -> None:
        """Make the row's files in `folder`."""
        for name in self.make:
            getattr(builders, name)(folder)
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content if isinstance(content, bytes) else self.place(content, folder).encode())
        for name, original in self.copies.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(Path(self.place(original, folder)).read_bytes())
        for name, edits in self.edits.items():
            _edit(folder / name, edits)
        for name, target in self.links.items():
            os.symlink(self.place(target, folder), folder / name)


def _edit(path: Path, edits: list[list[str]]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, f"{path.name} holds {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def places(folder: Path) -> dict[str, Path]:
    """Return the paths that replace the placeholders."""
    recipes = ROOT / "recipes"
    return {
        "tmp": folder,
        "root": ROOT,
        "recipes": recipes,
        "mini": recipes / "mini" / "pretrain.yaml",
        "105b": recipes / "telechat3_105b" / "pretrain_4k.yaml",
        "438b": recipes / "telechat3_438b" / "pretrain_4k.yaml",
        "128k": recipes / "telechat3_438b" / "context_128k.yaml",
    }


def read_tables() -> list[Row]:
    """Every row of every table."""
    rows = []
    for path in sorted(TABLES.glob("*.yaml")):
        found: list[dict[str, Any]] = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
        rows += [Row(table=path.stem, **row) for row in found]
    return rows
