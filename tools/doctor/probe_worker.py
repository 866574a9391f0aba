"""This module is the process of one worker of the probe (`tc3 doctor --probe`), started by `python -m
tools.doctor.probe_worker`. The process reads commands and writes answers as lines of JSON.

The worker ends when its stdin is closed, which happens when the process that started it ends, and by an alarm signal
when a command takes too long.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from plugins.processor_time import scheduled, text_of, throttled

# How fast a worker is while it is let run, and what kept it from running.

Result = TypeVar("Result")


class Piece(NamedTuple):
    """A `Piece` is the result of one round of a measurement: the rate, and the shares of the time in which the worker
    could not run.

    Attributes:
        rate: the amount of work per second of the time in which the worker could run.
        waited: the share of the time in which the worker was ready to run, but other processes used its cores.
        throttled: the share of the time in which a limit had stopped the worker's control group.
    """

    rate: float
    waited: float
    throttled: float


def timed(work: Callable[[], float], seconds: float) -> Piece:
    """Call the function `work` again and again for `seconds` seconds, and return the amount of work done per second.
    The function `work` returns the amount of work of one call.

    The rate leaves out the time in which other processes used the cores, because this time does not depend on this
    worker's hardware. The rate includes the time in which a CPU limit stopped the worker. The kernel counts both times
    as waiting (schedstat), and counts the time of the limit also separately.
    """
    began, (ran, waited), stopped = time.perf_counter(), scheduled(), throttled(text_of)
    amount = work()  # once at least: on a busy host the time can be over before it begins, and a rate of 0 has no time
    while time.perf_counter() - began < seconds:
        amount += work()
    took = time.perf_counter() - began
    now_ran, now_waited = scheduled()
    stop = throttled(text_of) - stopped
    wait = max(0.0, now_waited - waited - stop)
    share = wait / max(took, now_ran - ran + wait)  # of all threads; one that waits for a device is not ready
    return Piece(amount / took / (1 - share), share, min(1.0, stop / took))


def waiting(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of `work`, and the share of its time in which this process waited for a core because other
    processes used it.
    """
    began, (_, before) = time.perf_counter(), scheduled()
    result = work()
    waited = max(0.0, scheduled()[1] - before)
    return result, min(1.0, waited / (time.perf_counter() - began))


# A link between two workers: TCP, a connection for each round.

MESSAGE = 1 << 20  # bytes: more than the bucket of a shaped link usually lets pass at once
_PINGS = 100
_PATIENCE = 12.0  # seconds for one message or connection on a busy host: a link below some 0.7 Mbit/s is broken


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of `address`."""
    return socket.create_server((address, 0))


def serve(listener: socket.socket) -> None:
    """Accept one connection, and answer each of its messages with a byte until the connection ends.

    A message consists of its length in 8 bytes, followed by as many bytes. A connection without a message was given up
    in an earlier round and is skipped.
    Raises OSError, also after a time-out.
    """
    listener.settimeout(_PATIENCE)
    while not _answer(listener.accept()[0]):
        pass


def _answer(connection: socket.socket) -> int:
    """Return the number of messages that arrived."""
    buffer, count = memoryview(bytearray(MESSAGE)), 0
    with connection:
        _prepare(connection)
        while head := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big")
            while left:
                received = connection.recv_into(buffer[:left])
                if not received:
                    return count
                left -= received
            connection.sendall(b"1")
            count += 1
    return count


def measure(address: str, port: int, seconds: float) -> tuple[float, float]:
    """Return the bandwidth in GB/s and the one-way latency in microseconds of the link to the worker that listens at an
    address.

    Messages of 1 MiB follow each other for `seconds`, at least three of them. The bandwidth is that of the fastest
    message: other processes on the cores of the two workers delay some messages, and a slow link delays all messages.
    Raises OSError.
    """
    content = bytes(MESSAGE)
    with socket.create_connection((address, port), _PATIENCE) as connection:
        _prepare(connection)
        pings = [_send(connection, b"1") for _ in range(_PINGS)]
        _send(connection, content)  # the window of TCP opens
        took: list[float] = []
        while len(took) < 3 or sum(took) < seconds:
            took.append(_send(connection, content))
    return MESSAGE / 1e9 / min(took), min(pings) / 2 * 1e6


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, content: bytes) -> float:
    """Return the seconds until the other worker has acknowledged a message."""
    began = time.perf_counter()
    connection.sendall(len(content).to_bytes(8, "big") + content)
    if not connection.recv(1):
        raise ConnectionResetError("the worker with which this worker exchanges data has ended")
    return time.perf_counter() - began


PATIENCE = 60  # seconds for one command; the first product on a device is compiled
MARK = "tc3-probe "  # what libraries print on stdout has no such mark


class Desk:
    """A `Desk` carries out the commands that a worker of the probe receives, and keeps the worker's state between them.
    Each public method is a command with JSON arguments.
    """

    def start(self, cores: list[int], npu: bool, folder: str, kind: str) -> dict[str, Any]:
        """Bind this process to cores and prepare the measurements. If no cores are given, the process is not bound."""
        if cores:
            os.sched_setaffinity(0, cores)
        from tools.doctor import measures  # NumPy's threads stay on the cores that it finds

        threads = max(1, len(cores))
        self.measures, self.folder = measures, folder
        self.matmul_work = measures.device_matmul() if npu else measures.cpu_matmul(threads)
        self.copy = measures.memory_copy()
        return {"kind": kind or f"{processor()}, {threads} core{'s' * (threads > 1)}"}

    def matmul(self, seconds: float) -> list[float]:
        """Return the rate of matrix products (GFLOP/s), the share of the time in which this worker waited for a core,
        and the share in which a CPU limit stopped it.
        """
        return list(timed(self.matmul_work, seconds))

    def memory(self, seconds: float) -> list[float]:
        """Return the rate of copying in memory (GB/s), the share of the time in which this worker waited for a core,
        and the share in which a CPU limit stopped it.
        """
        return list(timed(self.copy, seconds))

    def disk(self, size: int) -> float:
        """Return the rate, in MB/s, at which a file of `size` bytes is written and synchronised to the disk."""
        return self.measures.disk_write(self.folder, size)

    def listen(self, address: str) -> int:
        """Listen for connections of other workers at an address, and return the port."""
        self.listener = listen(address)
        return int(self.listener.getsockname()[1])

    def serve(self) -> float | str:
        """Accept the connection of another worker and answer its messages until the connection ends. Return the share
        of the time for which this worker waited for a core, or the reason why there was no connection.
        """
        try:
            return waiting(lambda: serve(self.listener))[1]
        except OSError as error:  # the link's, not the worker's
            return str(error)

    def connect(self, address: str, port: int, seconds: float) -> list[float] | str:
        """Return the bandwidth (GB/s) and the one-way latency (microseconds) of the link to the worker that listens at
        `address` and `port`, with the share of the time for which this worker waited for a core. If the link cannot be
        measured, return the reason as text.
        """
        try:
            found, share = waiting(lambda: measure(address, port, seconds))
        except OSError as error:  # the link's, not the worker's
            return str(error)
        return [*found, share]


def processor() -> str:
    """Return the name of the processor's model from /proc/cpuinfo; on Arm, return the numbers of its maker and part."""
    rows: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            rows.setdefault(key.strip(), value.strip())
    return rows.get("model name") or f"CPU {rows.get('CPU implementer', '?')} {rows.get('CPU part', '?')}"


def main() -> None:
    """Carry out the commands on stdin, which are lines such as ``{"do": name, ...}``, until stdin ends."""
    desk = Desk()
    for line in sys.stdin:
        signal.alarm(PATIENCE)  # its default action ends the process, also inside a library
        command = json.loads(line)
        try:
            answer = {"value": getattr(desk, command.pop("do"))(**command)}
        except Exception as error:  # of the device, its libraries, the disk or the network: the finding
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(MARK + json.dumps(answer), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
