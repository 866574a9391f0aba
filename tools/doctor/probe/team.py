"""The workers of a probe as processes: started, asked, and ended whatever happens."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tools.doctor.probe.worker import MARK, PATIENCE

ROOT = Path(__file__).resolve().parents[3]
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Seat:
    """Where a worker runs.

    Attributes:
        cores: to bind it to; none where there are fewer cores than workers.
        npu: it drives; None for a worker on CPU.
        kind: what it is compared as; "" for the model of the processor and the number of cores.
        place: another one than this host, "" for this: a name, with
        prefix: the command that runs another one there (``ip netns exec NAME``), and
        address: at which the others reach it.
    """

    rank: int
    cores: Sequence[int] = ()
    npu: int | None = None
    kind: str = ""
    place: str = ""
    prefix: Sequence[str] = ()
    address: str = "127.0.0.1"

    def command(self) -> list[str]:
        """What starts the worker."""
        return [*self.prefix, sys.executable, "-m", "tools.doctor.probe.worker"]

    def environment(self) -> dict[str, str]:
        """With as many threads as cores, and the one NPU in sight."""
        threads = dict.fromkeys(_THREADS, str(max(1, len(self.cores))))
        npu = {} if self.npu is None else {"ASCEND_RT_VISIBLE_DEVICES": str(self.npu)}
        return {**os.environ, **threads, **npu, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}


@dataclass
class Member:
    """A worker's process, and why it gives no more answers."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    failed: str = ""
    rest: bytes = field(default=b"", repr=False)

    def send(self, command: Mapping[str, Any]) -> None:
        """Write a command; a worker that has ended is noticed when it does not answer."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """Answers that have come; None at the end."""
        assert self.process.stdout is not None
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.rest = (self.rest + text).split(b"\n")
        found = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK.encode())]
        return found if text or found else None

    def ended(self) -> str:
        """Why, with the last line that it said."""
        code = self.process.wait(5)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how + (f": {lines[-1]}" if lines else "")


class Team:
    """Workers on their seats. As a context manager it leaves no process behind, also after Ctrl-C."""

    def __init__(self, seats: Sequence[Seat]):
        self.seats = seats
        self.members: list[Member] = []

    def __enter__(self) -> Team:
        try:
            for seat in self.seats:
                errors = tempfile.TemporaryFile()  # as long as the worker
                process = subprocess.Popen(
                    seat.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    env=seat.environment(), cwd=tempfile.gettempdir(),
                )  # fmt: skip
                self.members.append(Member(process, errors))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End them: what they do is of no use to anybody else."""
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()
            for stream in (member.process.stdin, member.process.stdout, member.errors):
                with suppress(OSError):  # a command that was never read
                    if stream is not None:
                        stream.close()

    def ask(self, commands: Mapping[int, Mapping[str, Any]], patience: float = PATIENCE) -> dict[int, Any]:
        """Send a command to some workers at once: index -> value of those that answered.

        Who gives an error, ends, or takes longer than `patience` seconds has failed; it is ended and asked no more.
        """
        waiting = {index for index in commands if not self.members[index].failed}
        for index in waiting:
            self.members[index].send(commands[index])
        answers: dict[int, Any] = {}
        until = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            for index in waiting:
                stream = self.members[index].process.stdout
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, index)
            while waiting and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    self._take(key.data, commands[key.data], answers)
                    if key.data in answers or self.members[key.data].failed:
                        selector.unregister(key.fileobj)
                        waiting.discard(key.data)
        for index in waiting:
            self._fail(index, f"{commands[index]['do']}: no answer within {patience:g} s")
        return answers

    def _take(self, index: int, command: Mapping[str, Any], answers: dict[int, Any]) -> None:
        member = self.members[index]
        found = member.read()
        if found is None:
            self._fail(index, f"{command['do']}: {member.ended()}")
        for answer in found or ():
            if "error" in answer:
                self._fail(index, f"{command['do']}: {answer['error']}")
            else:
                answers[index] = answer["value"]

    def _fail(self, index: int, why: str) -> None:
        self.members[index].failed = why
        self.members[index].process.kill()
