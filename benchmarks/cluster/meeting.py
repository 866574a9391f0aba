"""This program measures the calls to a shared disk, and the time, that the agents of a run need to meet on it, for 16
to 2,048 hosts.

    python -m benchmarks.cluster.meeting [--hosts 16,128,512,2048] [--folder DIR]

The program prints Markdown. First it simulates runs (tests/launch/agent/simulation.py: agents write real files, time is
counted and not waited for, and each agent checks the folder every 0.9 s): all hosts come within 5 s, one host's workers
fail 20 s later, all agents learn of it, and one verdict is written. Then it simulates the same runs with one host in
fifty killed at a random system call. Last it measures in DIR the real time of one check by an agent (it writes its sign
of life, looks for the end of the attempt, and reads its neighbour's sign of life). The baseline for the number of calls
are agents that list the folder and open the sign of life of every host: 2 + the number of hosts calls for each check.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from launch.agent.meeting import Meeting
from tests.launch.agent.simulation import CALLS, PERIOD, World
from tools.runs.attempts import Beat, read_attempt


def simulate(hosts: int, deaths: float, memory: str | None) -> list[str]:
    """Return a row of the table for one simulated run of `hosts`, in which a share `deaths` of the agents is killed at
    random system calls.
    """
    with tempfile.TemporaryDirectory(dir=memory) as path, pytest.MonkeyPatch.context() as monkeypatch:
        world = World(Path(path), monkeypatch, seed=1)
        nodes = hosts - max(1, hosts // 10) if deaths else hosts
        for number in range(hosts):
            dies = world.random.randrange(1, 400) if world.random.random() < deaths else None
            world.add(f"node{number:04d}", nodes, dies, comes=world.random.uniform(0, 5))
        began, real = world.time, time.process_time()
        world.fail = (f"node{hosts // 2:04d}", began + 25)
        world.run(300)
        real = time.process_time() - real
        attempt = read_attempt(Path(path), 0)
        assert attempt.plan and attempt.verdict
        alive = [agent for agent in world.agents if not agent.dead]
        assert all(agent.plan == attempt.plan and agent.verdict == attempt.verdict for agent in alive)
        bad = min(end.time for end in attempt.ends.values() if end.outcome == "failed")
        told = max(end.time for end in attempt.ends.values() if end.outcome == "told to end")
        ring = [sum(agent.running[name] for name in CALLS) / agent.seconds for agent in alive if agent.seconds > 5]
        most = max(sum(agent.calls[name] for name in CALLS) for agent in alive)
        return [
            f"{hosts:,}", f"{len(world.agents) - len(alive)}", f"{max(ring):.1f}" if ring else "-",
            f"{(2 + hosts) / PERIOD:,.0f}", f"{most:,}", f"{attempt.plan.time - began - 5:.1f}",
            f"{told - bad:.1f}", f"{attempt.verdict.time - bad:.1f}", f"{real:.1f}",
        ]  # fmt: skip


def look(folder: Path, hosts: int = 64, looks: int = 300) -> list[float]:
    """Return the milliseconds that one agent takes for each check of the shared folder, which holds the files of
    `hosts` hosts.
    """
    meetings = [Meeting(folder, f"node{number}") for number in range(hosts)]
    for meeting in meetings:
        meeting.come(0)
        meeting.beat(0, Beat(meeting.host, meeting.now(), "step", 0.0))
    times = []
    for step in range(looks):
        began = time.perf_counter()
        meetings[0].beat(0, Beat("node0", meetings[0].now(), "step", 0.0, step))
        meetings[0].over(0)
        meetings[0].stale(0, "node1")
        times.append(1e3 * (time.perf_counter() - began))
    return times


def main() -> None:
    """Print the table of simulated runs and the measured time of an agent's checks of the shared folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="16,128,512,2048")
    parser.add_argument("--folder", type=Path, help="use this folder, on the disk that is to be timed")
    arguments = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    heads = [
        "hosts", "dead", "calls an agent and second", "without a ring", "calls of the busiest in all",
        "s from the last to come to the plan", "s from the first bad end until all are told", "s to the verdict",
        "CPU s of the simulation",
    ]  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for deaths in (0.0, 0.02):
        for hosts in arguments.hosts.split(","):
            print(f"| {' | '.join(simulate(int(hosts), deaths, memory))} |", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as path:
        times = sorted(look(Path(path)))
    print(
        f"\nOne look: median {statistics.median(times):.2f} ms, 99 of 100 below {times[int(0.99 * len(times))]:.2f} ms"
    )


if __name__ == "__main__":
    main()
