"""Agents by the hundred in one process: real files of real `Meeting`s, a time of our own, death at any system call."""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import launch.agent.disk
from launch.agent.disk import Disk
from launch.agent.lookout import Around
from launch.agent.meeting import Meeting
from tools.runs.attempts import Attempt, Beat, End, Plan, Verdict

PERIOD = 0.9  # seconds between two looks of an agent
CALLS = ("open", "replace", "link", "listdir")  # what a file server sees


class Died(BaseException):
    """This agent was killed: nothing of it runs any more."""


@dataclass
class Agent:
    """An `Agent` is one simulated agent: what it does, what it asked of the disk, and the verdict that it got at the
    end.
    """

    host: str
    skew: float
    dies_at: int | None  # system calls from now
    life: Iterator[None] | None = None
    calls: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)  # of them while its workers ran
    seconds: float = 0.0  # for which they did
    plan: Plan | None = None
    verdict: Verdict | None = None
    dead: bool = False


class World:
    """A run of `hosts` agents on one folder. What differs from a run: who is called when, what time it is, who dies."""

    def __init__(self, folder: Path, monkeypatch, lost_after: float = 4.0, seed: int = 0):
        self.folder, self.lost_after, self.random = folder, lost_after, random.Random(seed)
        self.time = 1000.0
        self.agents: list[Agent] = []
        self.queue: list[tuple[float, int, Agent]] = []
        self.now: Agent | None = None
        self.plans: list[Plan] = []  # asked for, by whomever
        self.verdicts: list[Verdict] = []
        self.fail: tuple[str, float] | None = None  # a host whose workers fail, and when
        self.until = float("inf")  # the workers are done
        monkeypatch.setattr(launch.agent.disk, "os", _System(self))

    def add(self, host: str, nodes: int, dies_at: int | None = None, comes: float = 0.0) -> Agent:
        """An agent of `host` that comes after `comes` seconds and wants a plan of `nodes` hosts."""
        agent = Agent(host, self.random.uniform(-9e3, 9e3), dies_at)
        agent.life = self._live(agent, nodes)
        self.agents.append(agent)
        heapq.heappush(self.queue, (self.time + comes, len(self.agents), agent))
        return agent

    def run(self, seconds: float) -> None:
        """Let everybody live until all are dead or know the verdict, for at most so many seconds of its time."""
        end = self.time + seconds
        while self.queue and self.queue[0][0] <= end:
            when, order, agent = heapq.heappop(self.queue)
            self.time, self.now = max(self.time, when), agent
            try:
                next(agent.life)
            except StopIteration:
                continue
            except Died:
                agent.dead = True
                continue
            heapq.heappush(self.queue, (self.time + PERIOD * self.random.uniform(0.9, 1.1), order, agent))

    def _live(self, agent: Agent, nodes: int) -> Iterator[None]:
        meeting = Meeting(self.folder, agent.host, lost_after=self.lost_after, disk=_Disk(self, agent))
        meeting.come(0)
        yield
        came = self.time

        def wanted(there: list[str]) -> Plan | None:
            if len(there) < nodes and self.time - came < 3 * self.lost_after:
                return None
            self.plans.append(Plan(0, meeting.now(), there[:nodes], 1, there[0], 9000, there[nodes:]))
            return self.plans[-1]

        while not agent.plan:
            agent.plan = meeting.plan(0, wanted)
            yield
        if agent.host in agent.plan.hosts:
            yield from self._work(agent, meeting)
        else:
            around = Around(meeting, agent.plan, agent.host)
            while not around.look() and self.time < self.until:
                meeting.beat(0, Beat(agent.host, meeting.now(), "start", 0.0))
                yield

        def decide(attempt: Attempt) -> Verdict:
            self.verdicts.append(Verdict(meeting.now(), "restart", f"by {agent.host}", meeting.over(0)))
            return self.verdicts[-1]

        around = Around(meeting, agent.plan, agent.host)
        while not agent.verdict:
            around.look()
            agent.verdict = meeting.verdict(0, decide)
            yield

    def _work(self, agent: Agent, meeting: Meeting) -> Iterator[None]:
        around = Around(meeting, agent.plan, agent.host)
        began, before = self.time, agent.calls.copy()
        while True:
            meeting.beat(0, Beat(agent.host, meeting.now(), "step", began, int(self.time - began)))
            agent.running, agent.seconds = agent.calls - before, self.time - began
            if around.look():
                how = End(agent.host, meeting.now(), "told to end", "step")
            elif self.fail and self.fail[0] == agent.host and self.time >= self.fail[1]:
                how = End(agent.host, meeting.now(), "failed", "step", cause="exit", code=1)
            elif self.time >= self.until:
                how = End(agent.host, meeting.now(), "done", "end")
            else:
                how = None
            if how:
                meeting.end(0, how)
                return
            yield


class _Disk(Disk):
    def __init__(self, world: World, agent: Agent):
        super().__init__(world.lost_after)
        self.world, self.agent = world, agent

    def ticks(self) -> float:
        return self.world.time + self.agent.skew  # each host's own clock, hours apart

    def pause(self, seconds: float) -> None:
        raise NotImplementedError("agents of this simulation have different names, and the disk always answers")

    def _stamp(self, descriptor: int) -> None:
        os.utime(descriptor, ns=(0, int(self.world.time * 1e9)))

    def _bounded(self, path, what, patience=1.0):
        return what()


class _System:
    """The module `os`, which counts what each agent calls, and kills it there if its time has come."""

    def __init__(self, world: World):
        self.world = world

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if not callable(real):
            return real

        def call(*arguments):
            agent = self.world.now
            if name == "close":
                return real(*arguments)
            if agent.dead:
                raise Died
            agent.calls[name] += 1
            if agent.dies_at is not None and agent.calls.total() > agent.dies_at:
                agent.dead = True
                raise Died
            return None if name == "fsync" else real(*arguments)

        return call
