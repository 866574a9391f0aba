"""This program is one rank of `ep_network.py`: it moves the planned bytes over `transport.Mesh` and measures the time.

`ep_network.py` starts this program and exchanges JSON lines with it. The program reads a Spec, writes its addresses,
reads the addresses of all ranks, writes the measured stream rates, reads the jobs, and writes (start, end) of each job
of each repetition.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ep_network_model import ITEMSIZE, TOPOLOGY, Case, step_names, stream_of
from plugins.cpu_backend.transport import Mesh
from plugins.ep_overlap.plan import issue_order
from plugins.errors import ClusterError
from plugins.hierarchical_ep.plan import COUNT_BYTES, Plan, Transfer, row_bytes

BARRIER_TAG = 1000
KINDS = ("moves", "whole", "chunks")
# bytes of the plain streams: about a second on either link
STREAM_BYTES = {"inter": 24 << 20, "intra": 240 << 20}


@dataclass(frozen=True)
class Job:
    """A `Job` is one measurement: a case that is dispatched in one mode.

    kind: "moves" (dispatch and combine), "whole" (with the compute stand-in between them) or "chunks" (the same cut
    into chunks that overlap); compute: seconds of the stand-in; stride: the order of issue of the chunks.
    """

    case: int
    mode: str
    kind: str
    compute: float = 0.0
    stride: int = 1


class Rank:
    """A `Rank` runs the jobs of one rank over a connected `mesh`."""

    def __init__(self, mesh: Mesh, cases: Sequence[Case]):
        self.mesh, self.cases = mesh, cases
        self.plans: dict[tuple[int, str, str], list[Plan]] = {}
        # what is sent is cut from one buffer: making rows is no part of the time
        self.blank = np.zeros(0, np.float32)

    def prepare(self, job: Job) -> None:
        """Make the dispatch plan of a job before the job is timed."""
        case = self.cases[job.case]
        key = (job.case, job.mode, job.kind)
        if key in self.plans:
            return
        self.plans[key] = case.chunk_plans(job.mode) if job.kind == "chunks" else [case.plan(job.mode)]
        steps = [(plan, step) for plan in self.plans[key] for step in plan.forward]
        largest = max(int(step.rows.max()) * width_of(plan, step, case.hidden) for plan, step in steps)
        if largest > self.blank.size:
            self.blank = np.ones(largest, np.float32)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.mesh.all_to_all_v(TOPOLOGY.ep_group, BARRIER_TAG, [np.zeros(0)] * TOPOLOGY.ep)

    def timed(self, job: Job) -> tuple[float, float]:
        """Return the start and end time of a job after a barrier; the clock is the same in all processes of a
        machine.
        """
        self.prepare(job)
        self.barrier()
        start = time.monotonic()
        self.run(job)
        return start, time.monotonic()

    def run(self, job: Job) -> None:
        """Run all steps of all chunks, with one thread for each stream, in order of issue, as on a device."""
        plans, hidden = self.plans[job.case, job.mode, job.kind], self.cases[job.case].hidden
        names = step_names(plans[0])
        total = sum(plan.tokens[self.mesh.rank] for plan in plans)
        done = {(chunk, name): threading.Event() for chunk in range(len(plans)) for name in names}
        before = dict(zip(names[1:], names, strict=False))
        order = issue_order(len(plans), names, job.stride)

        def stream(which: str) -> None:
            for chunk, name in order:
                if stream_of(name) != which:
                    continue
                # a lost peer raises in the stream that waits for it; the mesh is then of no use to the others either
                if name in before and not done[chunk, before[name]].wait(self.mesh.timeout):
                    raise TimeoutError(f"chunk {chunk} never did {before[name]}")
                if name == "experts":
                    time.sleep(job.compute * plans[chunk].tokens[self.mesh.rank] / total)
                else:
                    index = [step.step for step in plans[chunk].forward].index(name)
                    self.move(plans[chunk], index, tag=chunk * len(names) + names.index(name), hidden=hidden)
                done[chunk, name].set()

        streams = sorted({stream_of(name) for name in names})
        with ThreadPoolExecutor(len(streams)) as pool:
            list(pool.map(stream, streams))

    def move(self, plan: Plan, index: int, tag: int, hidden: int) -> None:
        """Exchange the data of one step: the counts of rows if the plan sends counts, then rows with expert ids and
        probabilities.
        """
        step, rank = plan.forward[index], self.mesh.rank
        group = step.group_of(rank)
        if step.kind == "all_to_all_v" and step.step.startswith("dispatch"):
            experts = plan.topology.experts_per_rank
            counts = [experts[member] if step.weight == "copy" else 1 for member in group]
            self.mesh.all_to_all_v(group, tag, [np.zeros(count, f"i{COUNT_BYTES}") for count in counts])
        width = width_of(plan, step, hidden)
        parts = [self.blank[: rows * width].reshape(rows, width) for rows in plan.send_counts(step, rank)]
        received = self.mesh.all_to_all_v(group, tag, parts, rows=plan.recv_counts(step, rank).tolist())
        if step.kind == "reduce_scatter":
            np.sum(received, 0)


def width_of(plan: Plan, step: Transfer, hidden: int) -> int:
    """Return the number of 4-byte words in a row that a step sends: float32 values, expert ids and probabilities."""
    return row_bytes(step, plan.top_k, hidden, ITEMSIZE) // ITEMSIZE


def stream_rate(listener: socket.socket, addresses: Sequence, rank: int, source: int, to: int, size: int) -> float:
    """Return the bytes per second of one plain TCP stream from rank `source` to rank `to`, as the receiver measures it;
    0.0 on other ranks.
    """
    if rank == source:
        with socket.create_connection(addresses[to]) as link:
            link.sendall(bytes(size))
            link.recv(1)
    if rank != to:
        return 0.0
    link, _ = listener.accept()
    with link:
        buffer = bytearray(1 << 20)
        # the start of a connection and the burst of the shaping are no part of the rate
        skipped, count = 0, 0
        while skipped < size // 8:
            skipped += link.recv_into(buffer)
        start = time.monotonic()
        while skipped + count < size:
            count += link.recv_into(buffer)
        seconds = time.monotonic() - start
        link.sendall(b".")
    return count / seconds


def measure_links(worker: Rank, listener: socket.socket, addresses: Sequence) -> dict[str, float]:
    """Return the rates of the plain TCP streams that end at this rank; only one stream at a time runs on the
    machine.
    """
    rates: dict[str, float] = {}
    last = TOPOLOGY.ep - 1
    for link, source, to in (("inter", 0, last), ("inter", last, 0), ("intra", 0, 1), ("intra", last - 1, last)):
        worker.barrier()
        rate = stream_rate(listener, addresses, worker.mesh.rank, source, to, STREAM_BYTES[link])
        if rate:
            rates[link] = rate
    return rates


def main() -> None:
    """Serve one run of `ep_network.py`; the module's docstring describes the protocol."""

    def say(message) -> None:
        print(json.dumps(message), flush=True)

    spec = json.loads(input())
    with Mesh(spec["rank"], TOPOLOGY.ep, timeout=30) as mesh, socket.create_server((spec["host"], 0)) as listener:
        say({"mesh": mesh.listen(spec["host"]), "stream": listener.getsockname()})
        addresses = json.loads(input())
        mesh.connect([tuple(each["mesh"]) for each in addresses])
        worker = Rank(mesh, [Case(**case) for case in spec["cases"]])
        say(measure_links(worker, listener, [tuple(each["stream"]) for each in addresses]))
        order = json.loads(input())
        jobs = [Job(**job) for job in order["jobs"]]
        for job in jobs:
            worker.prepare(job)
        for _ in range(order["repetitions"]):
            say([worker.timed(job) for job in jobs])


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        sys.exit(str(error))
