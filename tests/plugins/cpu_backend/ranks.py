"""Ranks as threads of one process, for tests of the transport."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from plugins.cpu_backend import mailbox
from plugins.cpu_backend.transport import Mesh

LONG = 600.0  # seconds: bounds what would otherwise hang, on any machine


def on_ranks(size, work):
    """work(rank) on a thread each; the results by rank, or the first error."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(LONG) for future in [pool.submit(work, rank) for rank in range(size)]]


@contextmanager
def meshes(size, timeout=LONG):
    every = [Mesh(rank, size, timeout) for rank in range(size)]
    addresses = [mesh.listen() for mesh in every]
    try:
        on_ranks(size, lambda rank: every[rank].connect(addresses, timeout=LONG))
        yield every
    finally:
        for mesh in every:
            mesh.close()


def until(holds):
    """Return once something holds; a test that hangs here is ended by pytest."""
    while not holds():
        time.sleep(0.002)


class Clock:
    """The time of all calls that wait: it passes when a test says so, however busy the machine is."""

    def __init__(self):
        self.now = 0.0
        self.places = {}  # mailbox -> its last call

    def monotonic(self):
        return self.now

    def passes(self, seconds, *mailboxes):
        """Let time pass, and the calls that wait at these mailboxes look at it."""
        self.now += seconds
        for mail in mailboxes:
            with mail.changed:
                mail.changed.notify_all()


def stopped_clock(monkeypatch):
    """Return the clock by which calls wait from now on in this test; `place` says in which call a mailbox waits."""
    found, wait = Clock(), mailbox.Mailbox.wait

    def recorded(mail, call):
        found.places[mail] = call.where
        wait(mail, call)

    monkeypatch.setattr(mailbox.Mailbox, "wait", recorded)
    monkeypatch.setattr(mailbox, "time", found)
    return found


def waits(mail):
    """Return whether a call waits at this mailbox, and has begun to count its time."""
    with mail.changed:
        return bool(mail.changed._waiters)


def heard(mesh, peer):
    """Return what a peer has last said of itself to the rank of this mesh."""
    return mesh._mail._said.get(peer)


def has(mesh, peer, tag):
    """Return whether a frame of a peer has arrived that nobody has asked for."""
    with mesh._mail.changed:
        return bool(mesh._mail._inbox[peer, tag])
