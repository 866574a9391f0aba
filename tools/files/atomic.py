"""This module holds functions with which all commands read and write files. The functions write each file either
completely or not at all. The module also computes digests of files, and reads the last lines of logs.

Therefore a reader never finds an incomplete report, plan or picture under its final name, also after a power cut: the
content is on the disk before the file gets this name. `what_is` says what exists at a path that a user gave; it follows
links, also those that form a cycle. Digests cover a whole file, or blocks spread over a file that may have terabytes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from plugins.errors import DataError
from plugins.lines import flush
from plugins.sealed_checkpoint.plan import checksum


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` with its symbolic links resolved as far as possible. Symbolic links that form a cycle are an error
    for `Path.resolve`, but not for this function.
    """
    return Path(os.path.realpath(path))


def what_is(path: str | os.PathLike[str]) -> str:
    """Return in words what `path` is, such as "a folder", "a file" or "no such file or folder", for messages about
    paths.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        gone = os.path.islink(path)
        return f"a link to {os.readlink(path)}, which is not there" if gone else "no such file or folder"
    except OSError as error:
        known = {errno.ELOOP: "a link that leads back to itself", errno.ENOTDIR: "no such file or folder"}
        return known.get(error.errno or 0, f"cannot be read ({error.strerror})")
    except ValueError:  # a NUL
        return "not the name of a file"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "a device, a pipe or a socket, not a file"


BLOCK, BLOCKS = 1 << 16, 256


def sampled_digest(path: Path) -> str:
    """Return the SHA-256 of `BLOCKS` blocks spread over a file, including its first and its last block. A file of at
    most `BLOCKS` blocks is read completely.
    """
    size = path.stat().st_size
    if size <= BLOCK * BLOCKS:
        return checksum(path)
    digest = hashlib.sha256()
    with path.open("rb") as data:
        for block in range(BLOCKS):
            data.seek((size - BLOCK) * block // (BLOCKS - 1))
            digest.update(data.read(BLOCK))
    return digest.hexdigest()


_PART = re.compile(r"\.[0-9a-f]+(?:-[0-9a-f]+)?\.(.+)")  # a name of `part_of`, or of plugins.lines.write_whole


def part_of(path: Path) -> Path:
    """Return the path of a temporary file in the folder of `path`, to which only the caller writes; the file is later
    renamed to `path`.

    A process id in the name would not suffice: in containers, processes of several hosts have equal process ids, and so
    can a process that is started after a killed process.
    """
    return path.with_name(f".{os.getpid()}-{uuid.uuid4().hex[:8]}.{path.name}")


def becomes(name: str) -> str:
    """Return the final name of a file from the name of its temporary file (see `part_of`); return any other name
    unchanged.
    """
    found = _PART.fullmatch(name)
    return found[1] if found else name


def atomic_file(path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
    """Yield a path beside `path`, with the same ending, for the caller to write to. The written file replaces `path`
    when the `with` block ends without an error.

    The function makes missing folders. If an exception (also of Ctrl-C) ends the block, the earlier file at `path`
    stays unchanged.

    Raises:
        DataError: `path` cannot be written.
    """
    return _beside(path, lambda part: part.parent.mkdir(parents=True, exist_ok=True), Path.replace, _unlink)


def atomic_folder(path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
    """Yield a folder beside `path` for the caller to write into. The folder is renamed to `path`, which must not exist
    yet, when the `with` block ends without an error.

    If an exception (also of Ctrl-C) ends the block, the folder is removed.

    Raises:
        DataError: `path` cannot be written, or another process has written a folder at `path` in the meantime.
    """
    return _beside(path, lambda part: part.mkdir(parents=True), Path.rename, _remove)


_unlink = partial(Path.unlink, missing_ok=True)
_remove = partial(shutil.rmtree, ignore_errors=True)


@contextmanager
def _beside(
    path: str | os.PathLike[str],
    make: Callable[[Path], object],
    move: Callable[[Path, Path], object],
    clear: Callable[[Path], object],
) -> Iterator[Path]:
    """Yield a path beside `path` that only this caller uses, made before the block and moved to `path` after it."""
    target = Path(path)
    if not target.name:  # "", "." or "/"
        raise DataError(f"{os.fspath(path)!r}: this path cannot be written (it is a folder)")
    part = part_of(target)
    try:
        if wrong := _no_file(target):
            raise DataError(f"{target}: this path cannot be written (it is {wrong})")
        make(part)
        try:
            yield part
            flush_all(part)
            move(part, target)
            flush(target.parent)
        finally:
            clear(part)
    except OSError as error:
        raise not_written(target, error) from None
    except DataError as error:
        if str(part) not in str(error):
            raise
        raise DataError(str(error).replace(str(part), str(target))) from None  # `part` is gone, and says nothing


def _no_file(target: Path) -> str | None:
    """Return in words what exists at a path if a new file must not replace it: a device such as /dev/null, a pipe, a
    socket, or a link to an open file such as /dev/stdout. Root may rename a file over each of them, and every later
    command on this machine would find that file.
    """
    if target.is_symlink() and os.readlink(target).startswith("/proc/"):
        return f"a link to {os.readlink(target)}, not a file"
    if target.exists() and not target.is_file() and not target.is_dir():
        return what_is(target)
    return None


def flush_all(part: Path) -> None:
    """Flush a file, or a folder with all that is in it, to the disk."""
    for path in [*part.rglob("*"), part]:
        if path.is_dir() or path.is_file():
            flush(path)


def not_written(target: Path, error: OSError) -> DataError:
    """Return the error that says why `target` was not written. If `target` is now a folder, the error says that another
    process has written this folder in the meantime.
    """
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.is_dir():
        return DataError(
            f"{target}: another process has written this folder meanwhile; this command wrote nothing, and left the "
            "other process's files unchanged"
        )
    return DataError(f"{target}: this path cannot be written ({error.strerror or error})")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise an error if the file `path` cannot be written. Commands call this function before long work begins. The
    check leaves no file behind.

    Raises:
        DataError: `path` is a folder, a device, a pipe or a socket, or its parent is not a folder into which files can
            be written.
    """
    target = Path(path).absolute()
    if wrong := "a folder" if target.is_dir() else _no_file(target):
        raise DataError(f"{path}: this path cannot be written (it is {wrong})")
    above = next(folder for folder in target.parents if os.path.lexists(folder))  # a link that leads nowhere, too
    if not above.is_dir():
        raise DataError(f"{path}: this path cannot be written ({above} is {what_is(above)})")
    try:
        tempfile.TemporaryFile(dir=above).close()  # root may write where permissions say otherwise, but not everywhere
    except OSError as error:
        raise DataError(f"{path}: this path cannot be written ({above}: {error.strerror or error})") from None


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` in UTF-8.

    Raises:
        DataError: as in `atomic_file`.
    """
    with atomic_file(path) as part:
        part.write_text(text, encoding="utf-8")


def keep_existing(option: str, path: str | os.PathLike[str] | None, force: bool) -> None:
    """Raise an error if a command's result would replace an existing file or folder and `force` is not given. Commands
    call this function before long work begins.

    Args:
        option: the name of the option on the command line, for the message.
        path: the path of the result; None if no result is written.

    Raises:
        DataError: a file or folder exists at `path`, and `force` is not given.
    """
    if path is not None and os.path.lexists(path) and not force:
        raise DataError(f"{option} {path}: the file exists; choose another name, or replace it with --force")


_LIMIT = 1 << 20  # bytes


def last_lines(log: Path) -> list[str]:
    """Return the lines in the last megabyte of a log file; return no lines if the file cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LIMIT))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
