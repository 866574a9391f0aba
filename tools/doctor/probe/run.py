"""A probe of this host: its workers, on the cores that they would train on, measured in rounds.

In a round all workers multiply at once, then copy, then write; then the links, one at a time. So each round finds every
worker beside the same neighbours, and what a load of a few seconds spoils is the same rounds of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.errors import ClusterError
from tools.affinity.cli import plan_for
from tools.affinity.topology import read_host
from tools.doctor.probe.form import Link, Probe, Worker
from tools.doctor.probe.team import Seat, Team
from tools.host import npu_smi
from tools.host.cores import compress
from tools.host.root import Root
from tools.process.signals import terminate_as_interrupt
from tools.process.waiting import Progressing

ROUNDS = 7
MATMUL, MEMORY, LINK = 0.25, 0.15, 0.03  # seconds of a round; a limit of CPU works in periods of 0.1 s
DISK = 8 << 20  # bytes of a round and worker
MOST = 8  # workers of a host of which neither a recipe, NPUs nor --workers say how many


def probe(recipe: Path | None, workers: int | None, folder: Path) -> Probe:
    """Probe this host with the workers of a recipe, with so many, with one for each NPU, or with one for each core.

    Raises:
        ClusterError: the cores cannot be told; more workers than NPUs. RecipeError: the recipe cannot be read.
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
    """Start a worker on each seat, and measure in so many rounds; files are written below `folder`.

    Ctrl-C and SIGTERM end the workers first.
    """
    above = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if above is None:
        raise ClusterError(f"{folder}: no folder above it is there to write to")
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
    """The rounds of a team, and what they found."""

    def __init__(self, team: Team, folder: str):
        self.team = team
        everybody = range(len(team.seats))
        started = team.ask({index: _start(team.seats[index], folder) for index in everybody})
        ports = team.ask({index: {"do": "listen", "address": team.seats[index].address} for index in everybody})
        self.ports: dict[int, int] = ports
        self.workers = [_blank(seat, started.get(index)) for index, seat in enumerate(team.seats)]
        self.links = [
            Link(source=a, target=b, bandwidth=[], latency=[], waited=[], failed="")
            for pair in pairs(len(team.seats))
            for a, b in (pair, pair[::-1])
        ]
        self._note()

    def round(self) -> None:
        """One round of every measure."""
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
        address = {"address": self._address(target), "port": self.ports[target], "seconds": LINK}
        answers = self.team.ask({target: {"do": "serve"}, source: {"do": "connect", **address}})
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
    """Each worker with those 1, 2, 4, ... places further round a ring: all pairs of up to five, n log n of many."""
    steps = [1 << power for power in range(count.bit_length()) if 1 << power <= count // 2]
    return sorted({(min(a, b), max(a, b)) for step in steps for a in range(count) for b in [(a + step) % count]})


def _start(seat: Seat, folder: str) -> dict[str, Any]:
    return {
        "do": "start", "cores": list(seat.cores), "npu": seat.npu is not None, "folder": folder, "kind": seat.kind
    }  # fmt: skip


def _blank(seat: Seat, started: dict[str, Any] | None) -> Worker:
    return Worker(
        rank=seat.rank,
        place=seat.place,
        kind=started["kind"] if started else seat.kind,
        cores=compress(seat.cores),
        matmul=[],
        memory=[],
        disk=[],
        waited=[],
        throttled=[],
        failed="",
    )
