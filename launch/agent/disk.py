"""This module gives agents four things that they need on a shared disk: files that are either complete or absent,
claims that only one agent can win, one clock, and operations with time limits.

`Disk` reads, replaces and publishes files. `Disk` relies on the following properties, which NFS (versions 3 and 4),
Lustre, GPFS, CephFS and local disks have:

* `rename` replaces a file by another complete file; a process that opens the name reads the old file or the new one.
* `link` fails if the name exists: of all processes that publish one name, on any hosts, exactly one succeeds. If an
  answer of the file server got lost, the link count of the writer's own file shows whether the link was made.
* `open` asks the server whether the cached content is still valid (close-to-open), so files are always opened, never
  only `stat`ed. NFS clients remember for up to a minute that a name was *absent*, unless they change the folder
  themselves: a process that waits for a name must write into that folder now and then, as all agents do.
* If the time of a file is set to "now", NFS takes the time of the server. Lustre and GPFS take the time of the client:
  so times of different hosts order events for readers, but are never used to judge whether a host is alive (see
  `launch.agent.meeting.Watch`).

If the disk is gone, a process hangs inside a call that only SIGKILL ends. So each call is made by a thread that may
hang, while the caller waits for a bounded time. Checkpoints may lie on another disk, and take hours to read:
`while_reading` waits for as long as a thread makes progress.

A `Claim` decides which agent does work that only one agent may do, and how another agent takes over the claim of a dead
agent; exactly one agent succeeds each time. A claim is a row of files `claim-WHAT-0`, `claim-WHAT-1`, ... of which each
is published once and never changed or removed: the agent that published the newest file holds the claim. If the holder
of a claim has given no sign of life for `lost_after` seconds, another agent takes the claim over by publishing the next
file, in which only one agent succeeds. If the holder was only slow, it notices the loss of the claim when it looks at
the files the next time. Between this look and its next action, a slow holder may still do the work of a claim that it
has just lost: therefore the result of the work must also be published (`Disk.publish`), so that there is only one
result. The claim itself only saves work, and decides which agent must do it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from plugins.errors import ClusterError, StoppedError
from tools.files.atomic import part_of

AGAIN = 0.1  # seconds until a call that failed is tried once more
PATIENCE = 4.0  # times the bound for what is published: it must reach the disk, which may be busy with a checkpoint
FRESH = 10.0  # seconds for which one look at the disk's clock serves
LOOK = 0.1  # seconds between looks at whether a thread that reads still works
ROOM = 65536  # bytes, of an agent: some sixteen files
FULL = {errno.ENOSPC, errno.EDQUOT}
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
Answer = TypeVar("Answer")


class LostDiskError(StoppedError):
    """The shared disk does not answer or cannot be written: this node must end, because no other node can see its files
    any more.
    """


@dataclass(frozen=True)
class Found:
    """A `Found` is the content of a file when it was read: the text, and a mark that changes as soon as any process
    writes the file again.
    """

    text: str
    mark: tuple[int, ...]


class Disk:
    """A `Disk` reads and writes the shared disk for one agent. `bound` is the number of seconds after which a disk that
    does not answer counts as lost.
    """

    def __init__(self, bound: float):
        self.bound = bound
        self.name = uuid.uuid4().hex[:12]  # of this process, on all hosts
        self.trouble = ""  # why a call does not succeed, while it is tried again
        self._parts = count()  # published so far
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: _Call | None = None
        self._room: Path | None = None
        self._clock: tuple[float, float] | None = None  # the disk's time, and ours when it was that

    def read(self, path: Path) -> Found | None:
        """Return the content of the file at `path`; return None if the file does not exist.

        Raises:
            LostDiskError: the disk does not answer within the bound. All methods of `Disk` raise this error.
        """
        return self._bounded(path, lambda: _read(path))

    def replace(self, path: Path, text: str) -> None:
        """Write the file at `path` completely, and replace the file if it exists. If the disk is full, the file keeps
        its old content, and only its modification time changes.
        """
        self._bounded(path, lambda: self._replace(path, text))

    def publish(self, path: Path, text: str) -> bool:
        """Write the file at `path` completely, unless it exists; return False if it exists, and change nothing.

        Raises:
            ClusterError: the disk has no hard links.
        """
        return self._bounded(path, lambda: self._publish(path, text), PATIENCE)

    def keep_room(self, path: Path) -> None:
        """Reserve a few blocks on the disk in a separate file, so that this host can still publish files after a
        checkpoint has filled the disk.
        """
        self._bounded(path, lambda: self._keep_room(path))

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder. This call is slow in the folder of an attempt with many hosts,
        which holds several files for each host.
        """
        return self._bounded(folder, lambda: sorted(os.listdir(folder)))

    def folder(self, path: Path) -> None:
        """Make a folder on the shared disk, unless it exists."""
        self._bounded(path, lambda: path.mkdir(parents=True, exist_ok=True))

    def remove(self, folder: Path) -> None:
        """Remove a folder with all that is in it, and the room that `keep_room` has reserved; also remove the folder
        above it if nothing else is in it. The folder is renamed first; if another process makes a folder of the same
        name again, its files stay.
        """

        def clear() -> None:
            part = part_of(folder)
            try:
                folder.rename(part)
            except FileNotFoundError:
                pass
            except OSError:
                part = folder
            shutil.rmtree(part, ignore_errors=True)
            if self._room:
                self._room.unlink(missing_ok=True)
            with suppress(OSError):
                folder.parent.rmdir()

        self._bounded(folder, clear)

    def now(self, folder: Path) -> float:
        """Return the time by the disk's clock, in seconds since 1970: the time of the last write plus the time that has
        passed since that write.
        """
        if self._clock is None or self.ticks() - self._clock[1] > FRESH:
            part = folder / f".clock.{self.name}"
            self.folder(folder)
            self._bounded(part, lambda: self._write(part, ""))
            self._bounded(part, lambda: part.unlink(missing_ok=True))
        return self.guess()

    def guess(self) -> float:
        """Return the time as `now` does, but compute it from the last write only, without asking the disk; return NaN
        before the first write.
        """
        return self._clock[0] + self.ticks() - self._clock[1] if self._clock else math.nan

    def ticks(self) -> float:
        """Return seconds since an arbitrary start; use them only for durations, never as times of day."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait for the given number of seconds."""
        time.sleep(seconds)

    def _keep_room(self, path: Path) -> None:
        try:
            if not path.exists():
                self._write(path, "." * ROOM)
            self._room = path
        except OSError as error:
            if error.errno not in FULL:
                raise
            path.unlink(missing_ok=True)

    def _stamp(self, descriptor: int) -> None:
        os.utime(descriptor)  # to the server's "now"; without this NFS would answer with the client's guess

    def _replace(self, path: Path, text: str) -> None:
        part = path.with_name(f".{path.name}.{self.name}")
        try:
            self._write(part, text)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            if error.errno not in FULL or not path.exists():
                raise
            os.utime(path)  # a sign of life that needs no room

    def _publish(self, path: Path, text: str) -> bool:
        # never a name that was used before: if its removal failed, it is a link to the file that was published
        part = path.with_name(f".{path.name}.{self.name}.{next(self._parts)}")
        try:
            self._write_with_room(part, text)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise
        try:
            os.link(part, path)
        except OSError as error:
            if error.errno in NO_LINKS:
                raise ClusterError(
                    f"{path.parent}: the disk of this folder does not support hard links, which agents need; choose a "
                    "folder on another disk"
                ) from None
            if error.errno != errno.EEXIST:
                raise
            return os.stat(part).st_nlink > 1  # ours after all: the server did it, and its answer got lost
        finally:
            with suppress(OSError):
                os.unlink(part)
        return True

    def _write_with_room(self, path: Path, text: str) -> None:
        """Write what must reach the disk; on a full disk, use the room that `keep_room` has reserved."""
        try:
            self._write(path, text, durable=True)
        except OSError as error:
            if error.errno not in FULL or self._room is None:
                raise
            self._room.unlink(missing_ok=True)
            self._room = None
            self._write(path, text, durable=True)

    def _write(self, path: Path, text: str, durable: bool = False) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            content = text.encode()
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(descriptor)
            self._stamp(descriptor)
            self._clock = (os.fstat(descriptor).st_mtime, self.ticks())
        finally:
            os.close(descriptor)

    def _bounded(self, path: Path, what: Callable[[], Answer], patience: float = 1.0) -> Answer:
        began = self.ticks()
        until = began + patience * self.bound
        while True:
            try:
                answer = self._ask(path, what, until)
                self.trouble = ""
                return answer
            except OSError as error:
                self.trouble = f"{path}: the shared disk cannot be used ({error.strerror or error})"
                if isinstance(error, FileNotFoundError):
                    until = began + self.bound  # a busy disk may need `patience`, but here the folder was removed
                if self.ticks() + AGAIN > until:
                    raise LostDiskError(self.trouble) from None
            self.pause(AGAIN)

    def _ask(self, path: Path, what: Callable[[], Answer], until: float) -> Answer:
        """Return the result of one file operation, which runs in a thread because it may hang; the operations of
        several threads run one after another.
        """
        if not self._turn.acquire(timeout=max(0.0, until - self.ticks())):
            raise LostDiskError(f"{path}: the shared disk does not respond (an earlier call has not returned yet)")
        try:
            return self._answer(path, what, until)
        finally:
            self._turn.release()

    def _answer(self, path: Path, what: Callable[[], Answer], until: float) -> Answer:
        if self._last and not self._last.done.is_set():
            raise LostDiskError(f"{path}: the shared disk does not respond (an earlier call has not returned yet)")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="disk", daemon=True)
            self._thread.start()
        self._last = call = _Call(what)
        self._calls.put(call)
        if not call.done.wait(max(0.0, until - self.ticks())):
            raise LostDiskError(f"{path}: the shared disk does not respond (the call took too long)")
        if call.error:
            raise call.error
        return call.answer

    def _serve(self) -> None:
        while True:
            self._calls.get().make()


class _Call:
    def __init__(self, what: Callable[[], Any]):
        self.what, self.done = what, threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        """Make the call, and keep what it returns or raises."""
        try:
            self.answer = self.what()
        except BaseException as error:  # whatever it is belongs to the caller
            self.error = error
        self.done.set()


def while_reading(folder: Path, patience: float, what: Callable[[], Answer]) -> Answer:
    """Return the result of the function `what`, which may read from the disk of `folder` for hours, because a
    checkpoint may have terabytes. A separate thread calls `what`, because a read from a disk that is gone may never
    return.

    Raises:
        LostDiskError: the thread has used no processor time for `patience` seconds, so the disk hangs. Time in which
            this process was stopped does not count.
    """
    call, clock = _Call(what), queue.SimpleQueue[int]()

    def work() -> None:
        clock.put(time.pthread_getcpuclockid(threading.get_ident()))
        call.make()

    threading.Thread(target=work, name="reads a checkpoint", daemon=True).start()
    own, used, quiet = clock.get(), -1.0, 0.0
    while not call.done.wait(LOOK):
        before, quiet = used, quiet + LOOK
        with suppress(OSError):  # it has just ended
            used = time.clock_gettime(own)
        if used != before:
            quiet = 0.0
        if quiet > patience:
            raise LostDiskError(
                f"{folder}: the disk of the checkpoints does not respond (no answer for {patience:g} s)"
            )
    if call.error:
        raise call.error
    return call.answer


def _read(path: Path) -> Found | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        content = file.read()
        status = os.fstat(descriptor)
    return Found(content.decode("utf-8", "replace"), (status.st_ino, status.st_mtime_ns))


@dataclass(frozen=True)
class Holder:
    """A `Holder` identifies an agent by its host's name and a text that distinguishes this process from other agents of
    the same host.
    """

    host: str
    process: str

    def text(self) -> str:
        """Return the holder's identity as a text, which is the content of a claim's file."""
        return json.dumps({"host": self.host, "process": self.process}) + "\n"

    @staticmethod
    def of(found: Found | None) -> Holder | None:
        """Return the agent that a file names. Return None if the file does not exist, and a `Holder` that matches no
        agent if the file is broken.
        """
        if found is None:
            return None
        try:
            content = json.loads(found.text)
            return Holder(str(content["host"]), str(content["process"]))
        except (ValueError, KeyError, TypeError):
            return Holder("", "")


class Claim:
    """A `Claim` lets one agent claim, by a file on the shared disk, a task that only one agent may do.

    Args:
        disk: the shared disk.
        folder: the folder of the attempt.
        what: the work that is claimed; part of a file's name.
        me: the agent that claims.
        dead: a function that says whether a holder has given no sign of life for too long.
    """

    def __init__(self, disk: Disk, folder: Path, what: str, me: Holder, dead: Callable[[Holder], bool]):
        self.disk, self.folder, self.what, self.me, self.dead = disk, folder, what, me, dead
        self.turn = 0  # of the newest file known
        self.holder: Holder | None = None  # as of the last look

    def hold(self) -> bool:
        """Return whether the claim belongs to this agent now; take the claim if it is free, or if its holder is dead.
        Each call opens a few files on the shared disk.
        """
        while True:
            file = self.folder / f"claim-{self.what}-{self.turn}"
            self.holder = Holder.of(self.disk.read(file))
            if self.holder is None:
                self.disk.folder(self.folder)  # an agent of this name that was refused may have removed it meanwhile
                self.disk.publish(file, self.me.text())
                self.holder = Holder.of(self.disk.read(file))
            if self.lost():
                self.turn += 1
            elif self.holder == self.me:
                return True
            elif self.holder is None or not self.dead(self.holder):
                return False
            else:
                self.turn += 1

    def lost(self) -> bool:
        """Return whether another agent has taken this claim since this agent last looked at the claim; this call opens
        one file.
        """
        return self.disk.read(self.folder / f"claim-{self.what}-{self.turn + 1}") is not None
