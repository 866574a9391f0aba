"""This module locks folders, so that two commands do not work in one folder at the same time.

A command locks a folder by a lock on the file `.lock` in this folder. The operating system releases the lock when the
process ends, also after a kill, so no lock is ever left over. The lock also holds for other hosts that share the folder
if the file system supports this: NFS version 4, NFS version 3 with its lock service (not with the mount option
`nolock`), and Lustre with the mount option `flock` (not with `localflock`, which locks on one host only). The
documentation of these file systems says so; the locks were not tested on them. A file system without locks is reported,
and does not stop a command.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import click
import psutil

from plugins.errors import DataError, TC3Error
from tools.files.atomic import not_written, real_path

LOCK = ".lock"
TRIES = 100  # to open it, while other starts fail
Busy = Callable[[Path, str], TC3Error]  # (folder, who holds its lock, or "" if several do) -> the error


@contextmanager
def only_command_in(folders: Sequence[Path], busy: Busy, together: bool = False) -> Iterator[None]:
    """Hold the locks of folders; folders that do not exist are made. If the `with` block raises an error, the locks and
    the folders that were made for them are removed.

    Args:
        busy: a function that returns the error to raise if another command holds the lock of a folder.
        together: whether the lock is shared with other commands that also set `together`; all other commands are locked
            out.

    Raises:
        DataError: a folder cannot be made, or nothing can be written into it.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(map(real_path, folders)):
            made = [each for each in [folder, *folder.parents] if not each.exists()]
            held.push(partial(_leave_nothing, made))
            _lock(folder, held, busy, together)
        yield


def only_process_in(folder: Path, command: str, option: str) -> AbstractContextManager[None]:
    """Hold the lock of a folder, so that the same command cannot be started a second time in the folder while it runs;
    the training processes of two starts would disturb each other.

    Args:
        option: the option by which the user chooses the folder.

    Raises:
        DataError: another start of `command` is at work in the folder, or the folder cannot be made.
    """

    def busy(_: Path, who: str) -> DataError:
        return DataError(
            f"{folder}: another {command} is at work in this folder{who and f' ({who})'}; wait for its end, or "
            f"choose another {option}"
        )

    return only_command_in([folder], busy)


def refuse_busy(folder: Path, busy: Busy) -> None:
    """Raise an error if another command holds the lock of a folder now; a folder without a lock is free."""
    with suppress(OSError), (folder / LOCK).open("r+") as lock:  # what else is wrong is said elsewhere
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy(folder, _who(lock)) from None


def is_left(folder: Path) -> bool:
    """Return whether a command of this host has written that it holds the lock of a folder, and whether this process
    has ended. Return False if several commands, or a command of another host, held the lock. Also return False if the
    lock is still held, for example by a process in a container that has the name of this host but its own process
    numbers.
    """
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            pid, _, host = lock.read().strip().partition(" ")
            if host != socket.gethostname() or psutil.pid_exists(int(pid)):
                return False
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # and released when the file is closed
            return True
    except (OSError, ValueError):
        return False


def _who(lock: TextIO) -> str:
    """Return in words which process has written that it holds a lock; "" if none has."""
    lock.seek(0)
    pid, _, host = lock.read().strip().partition(" ")
    return f"pid {pid}{f' on {host}' if host not in ('', socket.gethostname()) else ''}" if pid else ""


def _leave_nothing(made: list[Path], kind: type[BaseException] | None, *error: object) -> None:
    """After a failed start, remove the folders that were `made` for it, innermost first, as far as they are empty."""
    if kind is not None:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def _remove_own(path: Path, lock: TextIO, together: bool, kind: type[BaseException] | None, *error: object) -> None:
    """After a failed start, remove the file of a lock, unless other commands hold the lock together with this one."""
    if kind is not None:
        with suppress(OSError):
            if together:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def _opened(path: Path) -> TextIO:
    """Open a lock file, in a folder that is made for it. A start that fails meanwhile removes folders that it has
    made.
    """
    for left in reversed(range(TRIES)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a+")
        except OSError as error:
            if not (left and isinstance(error, FileNotFoundError)):
                raise not_written(path.parent, error) from None
    raise AssertionError("unreachable: the last attempt to open a lock file returns the file or raises an error")


def _take(lock: TextIO, together: bool) -> None:
    """Lock an open file. If several commands may hold the lock at a time (`together`), try again for a second: a
    command whose start fails takes an exclusive lock for a moment, to remove the file.
    """
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if together else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not (left and together and not _who(lock)):
                raise
            time.sleep(0.01)


def _lock(folder: Path, held: ExitStack, busy: Busy, together: bool) -> None:
    """Take the lock of a folder, write into the lock file which process holds it, and release the lock when `held`
    closes; if the start fails, remove the file.
    """
    path = folder / LOCK
    lock = held.enter_context(_opened(path))
    try:
        _take(lock, together)
    except BlockingIOError:
        raise busy(folder, _who(lock)) from None
    except OSError as error:
        click.echo(
            f"{folder}: its file system has no locks ({error.strerror}): start no second run in this folder", err=True
        )
    try:
        ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        ours = False
    if not ours:
        _lock(folder, held, busy, together)  # a start that failed has removed the file between our opening and locking
        return
    lock.truncate(0)
    held.push(partial(_remove_own, path, lock, together))
    if together:
        return
    try:
        os.write(lock.fileno(), f"{os.getpid()} {socket.gethostname()}".encode())
    except OSError as error:  # a quota, which the free space of the disk does not show
        raise not_written(folder, error) from None
