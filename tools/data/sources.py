"""This module reads documents from text files and JSON lines (plain or compressed as `.gz`), from folders of these
files, and from Python's standard library.

The module streams the files: memory holds one document (one line of a JSON lines file, or one whole text file) at a
time.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import json
import os
import platform
import stat
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

from plugins.errors import DataError, did_you_mean
from tools.files.atomic import real_path
from tools.process.waiting import Reporter

# Choices that depend on nothing but a salt and what is chosen from: the same in every run, on every machine.

PIECE = 1 << 14  # characters, at most 64 KiB of UTF-8: the least that is taken of a longer text
_RANGE = float(1 << 64)


def chosen(salt: str, index: int, fraction: float) -> bool:
    """Return whether `index` belongs to a pseudo-random choice of about `fraction` of all indices. The chosen indices
    are the same in every run and on every machine.

    `index` counts from 0. The index of a document counts only documents of the corpus that are kept; skipped documents
    have no index.
    """
    digest = blake2b(f"{salt}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _RANGE < fraction


def held_out(seed: int, index: int, fraction: float) -> bool:
    """Return whether document `index` belongs to the held-out split."""
    return chosen(f"held-out-{seed}", index, fraction)


def spread(texts: Iterable[str], total: int, budget: int) -> Iterator[str]:
    """Yield about `budget` bytes of `texts` in pieces of `PIECE` characters, which are spread over all texts.

    total: the size of `texts` in bytes of UTF-8; if it is within the budget, every text is yielded whole. Otherwise the
    function always yields the first piece, and the total size of the yielded pieces differs from the budget by less
    than the largest piece.
    """
    if total <= budget:
        yield from texts
        return
    seen = taken = 0
    pieces = (text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE))
    for number, piece in enumerate(pieces):
        size = len(piece.encode())
        # what is still wanted of what is still to come (Knuth, TAOCP 2, 3.4.2, algorithm S): exact at the end, and
        # no part of the corpus is more likely than another
        to_come = max(total - seen, 1)  # files can grow while we read
        if not number or chosen("tokenizer", number, (budget - taken) / to_come):
            yield piece
            taken += size
        seen += size


# Counting, and reporting without flooding, what a corpus holds that is no document.

SHOWN = 10


@dataclass
class Skips:
    """A `Skips` counts skipped documents by kind: `empty`, `invalid_utf8` and `broken_lines`.

    strict: raise an error at the first skipped document that is not empty. reporter: prints messages about the first
    `SHOWN` faults.
    """

    strict: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    counts: dict[str, int] = field(default_factory=lambda: {"empty": 0, "invalid_utf8": 0, "broken_lines": 0})
    first: str = ""
    _faults: int = 0

    def add(self, kind: str, where: str, why: str) -> None:
        """Count one skipped document. If `strict` is True, raise `DataError` for a skipped document that is not
        empty.
        """
        message = f"{where}: {why}"
        self.first = self.first or message
        self.counts[kind] += 1
        if kind == "empty":
            return
        if self.strict:
            raise DataError(f"{message} (--strict stops here)")
        self._faults += 1
        if self._faults <= SHOWN:
            self.reporter.log(f"skipped {message}")
        elif self._faults == SHOWN + 1:
            self.reporter.log("skipped ... more: only counted from here on")

    def summary(self) -> str:
        """Return a text such as "skipped items: 2 empty, 1 invalid_utf8", or "" if nothing was skipped."""
        counted = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items() if count)
        return f"skipped items: {counted}" if counted else ""


STDLIB_NAMES = ("stdlib", "python-stdlib")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
# what a folder contributes unless --glob says otherwise; `.json` is left out: there it is mostly settings
FOLDER_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".jsonl", ".ndjson", ".py"),
    *(".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".php"),
    *(".lua", ".scala", ".kt", ".swift", ".r", ".jl", ".sql", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
)
# folders that are not the library, and files that some distributions write for one machine
_STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_STDLIB_SKIPPED_FILES = ("_sysconfigdata*", "sitecustomize.py", "usercustomize.py")


class Document(NamedTuple):
    """A `Document` is one training document with the place from which it was read."""

    text: str
    where: str  # "file", or "file:line"
    consumed: int  # bytes read from disk since the previous document, for the progress bar


@dataclass(frozen=True)
class Corpus:
    """A `Corpus` holds the inputs (files and folders) of one run of `tc3 data prepare`, in order. If a `Corpus` is
    iterated twice, it gives the same documents in the same order.

    inputs: files, folders or "stdlib". jsonl_key: the field of a JSON line that holds the text.
    globs: patterns of the names of files that are read from a folder (if empty, the files with `FOLDER_SUFFIXES`).
    """

    inputs: tuple[str, ...]
    jsonl_key: str = "text"
    globs: tuple[str, ...] = ()

    def files(self) -> Iterator[Path]:
        """Yield every file in the order of the inputs. The files of a folder are sorted, and precede the files of its
        sub-folders.

        Raises `DataError` for an input that does not exist or a folder without a matching file.
        """
        for name in self.inputs:
            yield from _files_of(name, self.globs)

    def documents(self, skips: Skips) -> Iterator[Document]:
        """Yield the documents of every file. A text that cannot be used as a document, such as an empty one, is only
        counted in `skips`.

        Raises `DataError` for a file that cannot be read, for a truncated gzip file, and with `strict` for the first
        skipped document that is not empty.
        """
        for path in self.files():
            read = _read_jsonl if _is_jsonl(path) else _read_text
            yield from read(path, self.jsonl_key, skips)

    def measure(self) -> tuple[int, int]:
        """Return the number of the corpus's files and their bytes on disk. This function raises an error if an input
        does not exist.
        """
        count = size = 0
        for path in self.files():
            count, size = count + 1, size + path.stat().st_size
        return count, size

    def describe(self) -> list[dict[str, str]]:
        """Return the value of the sidecar's key `sources`: absolute paths of the inputs, or "stdlib" with the Python
        version.
        """
        return [
            {"input": STDLIB_NAMES[0], "python": platform.python_version()}
            if name in STDLIB_NAMES
            else {"input": str(real_path(name))}
            for name in self.inputs
        ]


def _files_of(name: str, globs: tuple[str, ...]) -> Iterator[Path]:
    if name in STDLIB_NAMES:
        yield from _walk(Path(sysconfig.get_paths()["stdlib"]), ("*.py",), stdlib=True)
        return
    path = Path(name)
    mode = _mode(name)
    if stat.S_ISREG(mode):
        yield path
        return
    if not stat.S_ISDIR(mode):
        raise DataError(
            f"--input {name}: this is a pipe or a device, but inputs are read more than once; save it as a file"
        )
    found = False
    for file in _walk(path, globs):
        found = True
        yield file
    if not found:
        wanted = " ".join(globs) if globs else "the text-like suffixes that `tc3 data prepare --help` lists"
        raise DataError(f"--input {name}: no file in this folder matches {wanted}; choose files with --glob '*.xyz'")


def _mode(name: str) -> int:
    """Return what kind of file an input is, as `os.stat` says it."""
    try:
        return os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"--input {name}: there is no such file or folder{_nearest(Path(name))}") from None
    except OSError as error:
        raise DataError(f"--input {name}: the file cannot be read ({error.strerror})") from None


def _walk(root: Path, globs: tuple[str, ...], stdlib: bool = False) -> Iterator[Path]:
    """Yield matching files below `root`, sorted; hidden files and folders are left out.

    Links to folders are followed (the standard library's are not: they differ from machine to machine); a folder that
    several lead to is read once, as the first of them. Raises `DataError` for a link to a file that is not there.
    """
    visited: set[str] = set()
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=not stdlib):
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(d for d in folders if d[0] != "." and not (stdlib and d in _STDLIB_SKIPPED_FOLDERS))
        for name in sorted(names):
            if name[0] == "." or not _matches(name, globs):
                continue
            if stdlib and any(fnmatch.fnmatch(name, pattern) for pattern in _STDLIB_SKIPPED_FILES):
                continue
            path = Path(folder, name)
            if _is_file(path):
                yield path


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        link = f"; it is a link to {os.readlink(path)}; correct or delete the link" if os.path.islink(path) else ""
        raise DataError(f"{path}: the file cannot be read ({error.strerror}){link}") from error


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: the file cannot be read ({error.strerror})")


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    if globs:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)
    return Path(name.removesuffix(".gz")).suffix.lower() in FOLDER_SUFFIXES


def _nearest(path: Path) -> str:
    try:
        known = os.listdir(path.parent)
    except OSError:
        known = []
    return did_you_mean(path.name, [*known, *STDLIB_NAMES])


def _is_jsonl(path: Path) -> bool:
    return Path(path.name.removesuffix(".gz")).suffix.lower() in JSONL_SUFFIXES


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (stream of the decompressed content, raw file whose `tell` counts bytes on the disk); without gzip both are
    the same file.
    """
    try:
        with open(path, "rb") as raw:
            if path.name.endswith(".gz"):
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw)), raw
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is truncated or broken ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror})") from error


class _SkipError(Exception):
    """This text is not a document. kind: as `Skips` counts it."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def _read_text(path: Path, jsonl_key: str, skips: Skips) -> Iterator[Document]:
    """Yield the whole file as one document, newlines and a byte-order mark left as they are."""
    with _opened(path) as (stream, raw):
        content = stream.read()
        consumed = raw.tell()
    try:
        yield Document(_some(_decode(content)), str(path), consumed)
    except _SkipError as skip:
        skips.add(skip.kind, str(path), str(skip))


def _read_jsonl(path: Path, jsonl_key: str, skips: Skips) -> Iterator[Document]:
    done = 0
    with _opened(path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            where = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark
            try:
                text = _text_of_line(line, jsonl_key)
            except _SkipError as skip:
                skips.add(skip.kind, where, str(skip))
                continue
            position = raw.tell()
            yield Document(text, where, position - done)
            done = position


def _text_of_line(line: bytes, jsonl_key: str) -> str:
    """Return the text that one JSON line holds; raises `_SkipError` when there is none."""
    try:
        record = json.loads(_some(_decode(line)))
    except json.JSONDecodeError as error:
        raise _SkipError("broken_lines", f"is not JSON ({error.msg.lower()}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _SkipError("broken_lines", f"is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _SkipError("broken_lines", f"is a JSON {type(record).__name__}, not an object")
    if jsonl_key not in record:
        hint = did_you_mean(jsonl_key, list(record)) or f" (it has: {', '.join(map(repr, record)) or 'nothing'})"
        raise _SkipError("broken_lines", f"has no key {jsonl_key!r}{hint[:200]}; choose with --jsonl-key")
    text = record[jsonl_key]
    if not isinstance(text, str):
        raise _SkipError("broken_lines", f"key {jsonl_key!r} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON allows "\ud800", UTF-8 does not
        raise _SkipError("invalid_utf8", "holds half a surrogate pair, which is not Unicode text") from None
    return _some(text)


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 (byte {error.start}: {content[error.start]:#04x})"
        raise _SkipError("invalid_utf8", why) from None


def _some(text: str) -> str:
    if not text or text.isspace():
        raise _SkipError("empty", "holds no text")
    return text
