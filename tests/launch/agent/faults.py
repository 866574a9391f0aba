"""Faults of a cluster, one a run: what is done to it, what the agents are to make of it, and what they made of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.run.msrun import ROOT
from tests.launch.agent.netns import Nodes, small_disk
from tests.launch.agent.small.worker import losses
from tools.runs.attempts import Attempt, numbers, read_attempt

STEPS, RECIPE_STEPS, EVERY = 40, 20, 10
Act = Callable[["Trial"], None]


@dataclass(frozen=True)
class Fault:
    """A `Fault` is one row of the table.

    Attributes:
        act: does the harm, and mends later what is to be mended.
        by: hosts that may be named for it, by their numbers; None: nobody is.
        cause: that is named.
        seen: seconds within which the first node is to notice; None: what follows takes a while itself.
        at_step: when it happens; None: before the start.
        codes: exit codes of the agents that were not killed.
        hosts, nodes: of the cluster, and of them those that train; the rest are spares.
        restarts: attempts that follow the first one.
        real: whether it can be put into the run of a recipe, under MindSpore.
    """

    name: str
    act: Act
    by: Sequence[int | None] = (1,)
    cause: Sequence[str | None] = ("signal",)
    seen: float | None = 5.0
    codes: int = 0
    hosts: int = 2
    restarts: int = 1
    port: int | None = None
    at_step: int | None = 12
    real: bool = True


@dataclass
class Trial:
    """A run in progress."""

    fault: Fault
    nodes: Nodes
    run_dir: Path
    limit: float = 60.0  # seconds that something may take to happen
    agents: list[subprocess.Popen] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes."""
        return [self.nodes.host(node) for node in range(self.fault.hosts)]

    def step(self) -> int:
        """The newest step that rank 0 has on record."""
        return max(self.losses(), default=0)

    def records(self, rank: int) -> list[dict]:
        """All lines of a rank's metrics; one that a death cut off is left out."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.run_dir / f"metrics/rank_{rank}.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def losses(self) -> dict[int, float]:
        """Step -> loss of rank 0; of a step that was made again the last one."""
        return {line["step"]: line["loss"] for line in self.records(0) if "step" in line}

    def starts(self) -> int:
        """Return how many times rank 0 has started to train."""
        return sum("total_steps" in line for line in self.records(0))

    def fresh(self) -> bool:
        """Return whether rank 0 has made a step since it last started."""
        return "step" in self.records(0)[-1]

    def attempts(self) -> list[Attempt]:
        """As they are on disk."""
        return [read_attempt(self.run_dir, number) for number in numbers(self.run_dir)]

    def wait(self, holds: Callable[[], bool], what: str, limit: float | None = None) -> float:
        """Wait until something holds; seconds that it took."""
        began, limit = time.monotonic(), limit or self.limit
        while not holds():
            if time.monotonic() - began > limit:
                raise TimeoutError(f"{self.fault.name}: no {what} after {limit:.0f} s, see {self.run_dir}")
            time.sleep(0.02)
        return time.monotonic() - began

    def kill_node(self, node: int) -> None:
        """Power off."""
        self.killed.add(node)
        self.nodes.signal(node, signal.SIGKILL)

    def left(self, node: int) -> list[str]:
        """Return the processes that still run in a node, without those that a fault started there."""
        return sorted(set(self.nodes.running(node).values()) - {"other"})

    def go(self) -> None:
        """Let workers go on that wait for the harm to be done."""
        (self.run_dir / "go").touch()

    def failed(self) -> bool:
        """Return whether an agent has written that the first attempt failed."""
        first = next(iter(self.attempts()), None)
        return bool(first) and any(end.outcome != "done" for end in first.ends.values())


@dataclass(frozen=True)
class Result:
    """A `Result` holds what happened to a run. The seconds count from the fault; None means that it did not happen."""

    name: str
    seen: float | None
    decided: float | None
    planned: float | None
    stepping: float | None
    named: str
    cause: str | None
    decisions: list[str]
    why: str
    codes: list[int | None]
    left: dict[int, list[str]]
    equal: bool
    losses: dict[int, float]
    lost_steps: int
    seconds: float


def run(fault: Fault, folder: Path, recipe: str = "", expected: Mapping[int, float] | None = None) -> Result:
    """Put one fault into a run in `folder`, of small workers, or of a recipe of two workers under `tc3 agent`.

    `expected`: the losses of an uninterrupted run of that recipe, by step; None where this is one.
    """
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(Nodes(fault.hosts))
        limits = (900.0, 900.0) if recipe else (300.0, 600.0)  # seconds to the fault, and from there to the end
        trial = Trial(fault, nodes, run_dir, limits[0])
        stack.enter_context(small_disk(run_dir / "checkpoint", "1500m" if recipe else "4m"))  # one that can be filled
        if fault.port:
            stack.enter_context(_listener(nodes, fault.port))
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SMALL_STEPS": str(STEPS), "SMALL_EVERY": str(EVERY)}
        if fault.at_step is not None:
            environment["SMALL_HOLD"] = str(fault.at_step)
        for node in range(fault.hosts):
            out = folder / f"agent{node}.txt"
            command = recipe_agent(trial, node, recipe) if recipe else small_agent(trial, node)
            trial.agents.append(nodes.start(node, command, environment, out))
        if fault.at_step is not None:
            trial.wait(lambda: trial.step() >= fault.at_step, f"step {fault.at_step}", limits[0])
        wanted = expected if recipe else dict(enumerate(losses(STEPS, 2), 1))
        return _watch(trial, began, wanted, limits[1])


def small_agent(trial: Trial, node: int) -> list[str]:
    """The agent of a node, of small workers."""
    hosts, port = trial.hosts, trial.fault.port
    words = [str(trial.run_dir), hosts[node], ",".join(hosts), "2", *([str(port)] if port else [])]
    return [sys.executable, "-m", "tests.launch.agent.small.agent", *words]


def recipe_agent(trial: Trial, node: int, recipe: str) -> list[str]:
    """The agent of a node, of a recipe with further options."""
    hosts = trial.run_dir.with_name("hosts.txt")
    hosts.write_text("".join(f"{host} 1\n" for host in trial.hosts), encoding="utf-8")
    words = ["agent", *shlex.split(recipe), "--nodes", str(hosts), "--host", trial.hosts[node]]
    words += ["--run-dir", str(trial.run_dir), "--steps", str(RECIPE_STEPS), "--spares", str(trial.fault.hosts - 2)]
    words += ["--set", f"checkpoint.save_interleaved_steps={EVERY}", "--no-bind"]
    return [str(Path(sys.executable).with_name("tc3")), *words]


def _watch(trial: Trial, began: float, expected: Mapping[int, float] | None, limit: float) -> Result:
    """Do the harm, and see it through."""
    fault, at = trial.fault, time.time()
    before = trial.step()
    fault.act(trial)
    trial.go()
    stepping: list[float] = []

    def ended() -> bool:
        if not stepping and trial.starts() > 1 and trial.fresh():
            stepping.append(time.time())
        alive = [agent for node, agent in enumerate(trial.agents) if node not in trial.killed]
        return all(agent.poll() is not None for agent in alive)

    trial.wait(ended, "end of the agents", limit)
    attempts = trial.attempts()
    bad = [end.time for end in attempts[0].ends.values() if end.outcome != "done"]
    verdict = attempts[0].verdict
    again = attempts[1].plan if len(attempts) > 1 else None
    return Result(
        fault.name,
        min(bad) - at if bad else None,
        verdict.time - at if verdict and bad else None,
        again.time - at if again else None,
        stepping[0] - at if stepping else None,
        _name(trial, verdict.initiator if verdict else None),
        verdict.cause if verdict else None,
        [each.verdict.decision if each.verdict else "none" for each in attempts],
        verdict.why if verdict else "no verdict",
        [agent.poll() for agent in trial.agents],
        {node: trial.left(node) for node in range(fault.hosts)},
        trial.losses() == dict(expected or trial.losses()),
        trial.losses(),
        before - again.step if again else 0,
        time.monotonic() - began,
    )


def _name(trial: Trial, host: str | None) -> str:
    return f"node {trial.hosts.index(host)}" if host else "nobody"


@contextlib.contextmanager
def _listener(nodes: Nodes, port: int) -> Iterator[None]:
    """Somebody else listens at `port` of node 0."""
    code = f"import socket, time; s = socket.create_server(('', {port})); print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{nodes._name(0)}", sys.executable, "-c", code], stdout=subprocess.PIPE
    )
    assert process.stdout
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wrong(fault: Fault, result: Result, slack: float = 0.0) -> list[str]:
    """Return what differs from the expected result, in words; `slack` is the number of seconds that a busy machine may
    need in addition to see the fault.
    """
    found = []
    names = ["nobody" if node is None else f"node {node}" for node in fault.by]
    if fault.restarts or fault.codes:
        if result.named not in names:
            found.append(f"named {result.named}: {result.why}")
        if result.cause not in fault.cause:
            found.append(f"cause {result.cause}: {result.why}")
        if fault.seen is not None and (result.seen is None or result.seen > fault.seen + slack):
            found.append(f"seen after {result.seen} s")
    if len(result.decisions) != fault.restarts + 1:
        found.append(f"decisions {result.decisions}")
    if set(result.codes) - {fault.codes, -signal.SIGKILL}:
        found.append(f"exit codes {result.codes}")
    if any(result.left.values()):
        found.append(f"left {result.left}")
    if fault.codes == 0 and not result.equal:
        found.append("losses differ from an uninterrupted run's")
    return found
