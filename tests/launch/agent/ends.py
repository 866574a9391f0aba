"""Attempts as hosts write them: for tests of who began it, and of what follows."""

from pathlib import Path

from launch.agent.decide import Rules, verdict
from tools.runs.attempts import Attempt, End, Plan

A, B, C = "node-a", "node-b", "node-c"


def end(host, time, cause=None, *, outcome="failed", **more):
    """A host's end in step 21; without a cause it was told to end."""
    outcome = outcome if cause else "told to end" if outcome == "failed" else outcome
    return End(host, time, outcome, **{"phase": "step", "step": 20, "cause": cause, **more})


def told(host, time=101.0, **more):
    return end(host, time, **more)


def attempt(*ends, hosts=(A, B), spares=(), number=0, step=8, beats=(), judged=None):
    plan = Plan(number, 10.0, list(hosts), 1, hosts[0], 8118, list(spares), step=step)
    found = {beat.host: beat for beat in beats}
    return Attempt(Path("run"), number, plan, found, {each.host: each for each in ends}, judged)


def judge(given_attempt, earlier=(), rules=None, can=lambda hosts: None, **more):
    return verdict(given_attempt, list(earlier), rules or Rules(), can, **more)
