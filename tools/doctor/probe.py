"""This module measures the speed of this host's workers (the probe of `tc3 doctor --probe`). The workers are measured
in rounds, on the cores on which they would train.

In a round all workers multiply matrices at the same time, then copy memory, then write to disk; then the links are
measured one at a time. So in each round every worker runs beside the same other workers, and a load of a few seconds
disturbs the same rounds of all workers.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import click

import tools
from plugins.errors import ClusterError
from tools.affinity.msrun import plan_for
from tools.affinity.topology import read_host
from tools.doctor.checks import Patient
from tools.doctor.outliers import Link, Probe, Worker
from tools.doctor.probe_worker import MARK, PATIENCE
from tools.process import host as npu_smi
from tools.process.children import terminate_as_interrupt
from tools.process.host import Root, compress
from tools.process.waiting import Progressing

# The workers of a probe as processes: started, asked, and ended whatever happens.

ROOT = Path(tools.__file__).resolve().parents[1]
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Seat:
    """A `Seat` is the place where one worker of the probe runs: its host, its cores and its NPU.

    Attributes:
        cores: the cores to which the worker is bound; empty if there are fewer cores than workers.
        npu: the number of the NPU that the worker drives; None for a worker on CPU.
        kind: the name of the kind of workers with which it is compared; "" for the processor's model and the number of
            cores.
        place: the name of another host on which the worker runs; "" for this host.
        prefix: the command that runs another command at that place (``ip netns exec NAME``).
        address: the address at which other workers reach the worker.
    """

    rank: int
    cores: Sequence[int] = ()
    npu: int | None = None
    kind: str = ""
    place: str = ""
    prefix: Sequence[str] = ()
    address: str = "127.0.0.1"

    def command(self) -> list[str]:
        """Return the command that starts the worker's process at this place."""
        return [*self.prefix, sys.executable, "-m", "tools.doctor.probe_worker"]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the worker's process: as many threads as cores, and only the worker's own
        NPU visible.
        """
        threads = dict.fromkeys(_THREADS, str(max(1, len(self.cores))))
        npu = {} if self.npu is None else {"ASCEND_RT_VISIBLE_DEVICES": str(self.npu)}
        return {**os.environ, **threads, **npu, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}


@dataclass
class Member:
    """A `Member` is the process of one worker of the probe. The field `failed` holds the reason if the worker no longer
    answers.
    """

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    failed: str = ""
    rest: bytes = field(default=b"", repr=False)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to the worker's process. If the process has ended, this method raises no error, and no answer
        arrives later.
        """
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """Return the answers that have arrived from the worker; return None if the worker's process has ended."""
        assert self.process.stdout is not None
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.rest = (self.rest + text).split(b"\n")
        found = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK.encode())]
        return found if text or found else None

    def ended(self) -> str:
        """Return the reason why the worker no longer answers, with the last line of its output."""
        code = self.process.wait(60)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how + (f": {lines[-1]}" if lines else "")


class Team:
    """A `Team` holds all workers of the probe as a context manager. When the context ends, no process of the workers is
    left.
    """

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
        """End the processes of all workers of the probe."""
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()
            for stream in (member.process.stdin, member.process.stdout, member.errors):
                with suppress(OSError):  # a command that was never read
                    if stream is not None:
                        stream.close()

    def ask(self, commands: Mapping[int, Mapping[str, Any]], patience: float = PATIENCE) -> dict[int, Any]:
        """Send a command to each of some workers at the same time; return a dictionary index -> answer of the workers
        that answered.

        A worker that returns an error, ends, or takes longer than `patience` seconds has failed; its process is ended,
        and it receives no further command.
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
            late = False
            while waiting and not late:
                left = until - time.monotonic()
                late = left <= 0  # a last look: we may have been held up while the answers came
                for key, _ in selector.select(max(left, 0.0)):
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


ROUNDS = 7
MATMUL, MEMORY, LINK = 0.25, 0.15, 0.03  # seconds of a round; a limit of CPU works in periods of 0.1 s
DISK = 8 << 20  # bytes of a round and worker
MOST = 8  # workers of a host of which neither a recipe, NPUs nor --workers say how many


def probe(recipe: Path | None, workers: int | None, folder: Path) -> Probe:
    """Return the measured speeds of this host with the workers of a recipe, with a given number of workers, with a
    worker for each NPU, or with a worker for each core.

    Raises:
        ClusterError: the cores of the host are unknown, or there are more workers than NPUs.
        RecipeError: the recipe cannot be read.
    """
    root = Root()
    host = read_host(root)
    if recipe is None and workers is None and not host.npus:
        workers = max(1, min(MOST, len(host.allowed)))
    plan = plan_for(host, recipe, workers)
    names = {chip.device: chip.name for chip in npu_smi.chips(root.ask("npu-smi", "info") or "")}
    seats = [
        Seat(worker.rank, worker.cores, worker.npu, "" if worker.npu is None else names.get(worker.npu, "NPU"))
        for worker in plan.workers
    ]
    return measure(seats, folder, ROUNDS, plan.notes)


def measure(seats: Sequence[Seat], folder: Path, rounds: int, notes: Sequence[str] = ()) -> Probe:
    """Start a worker at each of the given places and measure their speeds in the given number of rounds. The workers
    write the files of the disk measurement below `folder`.

    After Ctrl-C or SIGTERM, the processes of the workers end before this process.
    """
    above = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if above is None:
        raise ClusterError(
            f"{folder}: the probe must write a file below this folder, but neither the folder nor any of its "
            "parents exists; name another folder"
        )
    words = f"probing {len(seats)} worker{'s' * (len(seats) > 1)}"
    with terminate_as_interrupt(), Progressing(words, rounds) as progress, Team(seats) as team:
        course = Course(team, str(above))
        for done in range(rounds):
            progress.show(words, done)
            course.round()
        return Probe(
            device="CPU" if seats[0].npu is None else "Ascend",
            rounds=rounds,
            folder=str(above),
            workers=course.workers,
            links=[link for link in course.links if link["bandwidth"] or link["failed"]],
            notes=list(notes),
        )


class Course:
    """A `Course` runs the rounds in which the workers of the probe measure, and collects the results."""

    def __init__(self, team: Team, folder: str):
        self.team = team
        everybody = range(len(team.seats))
        started = team.ask({index: _start(team.seats[index], folder) for index in everybody})
        ports = team.ask({index: {"do": "listen", "address": team.seats[index].address} for index in everybody})
        self.ports: dict[int, int] = ports
        self.workers = [
            Worker(
                rank=seat.rank, place=seat.place, kind=started.get(index, {"kind": seat.kind})["kind"],
                cores=compress(seat.cores), matmul=[], memory=[], disk=[], waited=[], throttled=[], failed="",
            )
            for index, seat in enumerate(team.seats)
        ]  # fmt: skip
        self.links = [
            Link(source=a, target=b, bandwidth=[], latency=[], waited=[], failed="")
            for pair in pairs(len(team.seats))
            for a, b in (pair, pair[::-1])
        ]
        self._note()

    def round(self) -> None:
        """Run one round, in which each kind of measurement (matmul, memory, disk, links) is made once."""
        for index, (rate, waited, throttled) in self._all(do="matmul", seconds=MATMUL).items():
            row = self.workers[index]
            row["matmul"].append(rate)
            row["waited"].append(waited)
            row["throttled"].append(throttled)
        for index, (rate, _, _) in self._all(do="memory", seconds=MEMORY).items():
            self.workers[index]["memory"].append(rate)
        for index, rate in self._all(do="disk", size=DISK).items():
            self.workers[index]["disk"].append(rate)
        for link in self.links:
            self._link(link)
        self._note()

    def _all(self, **command: Any) -> dict[int, Any]:
        return self.team.ask(dict.fromkeys(range(len(self.workers)), command))

    def _link(self, link: Link) -> None:
        source, target = link["source"], link["target"]
        if link["failed"] or self.team.members[source].failed or self.team.members[target].failed:
            return
        connect = {"do": "connect", "address": self._address(target), "port": self.ports[target]}
        answers = self.team.ask({target: {"do": "serve"}, source: {**connect, "seconds": LINK}})
        if broken := [answer for answer in answers.values() if isinstance(answer, str)]:
            link["failed"] = broken[0]
        elif len(answers) == 2:
            bandwidth, latency, waited = answers[source]
            link["bandwidth"].append(bandwidth)
            link["waited"].append(1 - (1 - waited) * (1 - answers[target]))
            if source < target:
                link["latency"].append(latency)

    def _address(self, index: int) -> str:
        return self.team.seats[index].address

    def _note(self) -> None:
        for row, member in zip(self.workers, self.team.members, strict=True):
            row["failed"] = member.failed


def pairs(count: int) -> list[tuple[int, int]]:
    """Return the pairs of workers whose links are measured: each worker with the workers 1, 2, 4, ... places further in
    a ring. The function returns all pairs for up to five workers, and about n log n pairs for n workers.
    """
    steps = [1 << power for power in range(count.bit_length()) if 1 << power <= count // 2]
    return sorted({(min(a, b), max(a, b)) for step in steps for a in range(count) for b in [(a + step) % count]})


def _start(seat: Seat, folder: str) -> dict[str, Any]:
    return {
        "do": "start", "cores": list(seat.cores), "npu": seat.npu is not None, "folder": folder, "kind": seat.kind
    }  # fmt: skip


# The options of the probe on `tc3 doctor`.


def probe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --probe and --workers to a command; the command gets the value of --probe as the argument
    `wants_probe`."""
    workers = click.option(
        "--workers",
        type=int,
        help="Probe this many workers. By default, the workers that RECIPE starts on one host are probed. If RECIPE is "
        f"not given either, one worker is probed for each NPU or, on a host without NPUs, for each of at most {MOST} "
        "cores.",
    )
    flag = click.option(
        "--probe",
        "wants_probe",
        is_flag=True,
        help="Also measure for some seconds how fast each worker's matrix products, memory, disk and links are, using "
        "all of its cores; fail if a worker is slower than the others. Probe only a host on which no training "
        "runs, because the probe and the training would slow each other down.",
    )
    return flag(workers(command))


def probe_if(wanted: bool, patient: Patient, recipe: Path | None, workers: int | None) -> Probe | None:
    """Return the measured speeds of this host if the user asked for them, and None otherwise.

    Raises:
        ClusterError: the options do not go together, or the host cannot be probed.
    """
    if not wanted:
        if workers is not None:
            raise ClusterError(f"--workers {workers} works only with --probe; add --probe, or leave out --workers")
        return None
    if not patient.root.live:
        raise ClusterError(f"--root {patient.root.path}: a recorded host cannot be probed; leave out --root or --probe")

    return probe(recipe, workers, patient.folder)
