"""Runs of simulated agents that meet spikes and kills, whoever plans: none is given up, no sample is lost."""

import os
import tempfile
from pathlib import Path

import pytest

from plugins.sealed_checkpoint.plan import fault, iterations
from plugins.spike_guard import reference
from plugins.spike_guard.ledger import read_ledger, samples_of
from tests.launch.agent.training import KEPT, Training
from tools.runs.attempts import read_attempts

STEPS = 20


@pytest.fixture
def folder():
    """In memory where there is such a disk: thousands of files are written anew each second of a simulation."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


def through(world):
    """Run to the end; no sample was trained twice, left out without need, or is bad."""
    world.run(5000)
    attempts = read_attempts(world.folder)
    assert attempts[-1].verdict.decision == "done", attempts[-1].verdict
    left_out = samples_of(read_ledger(world.folder))
    assert world.trained == reference.samples(10 * STEPS * world.batch, left_out)[: STEPS * world.batch]
    assert not world.bad & set(world.trained)
    spiked = [attempt for attempt in attempts if attempt.verdict.cause == "spike"]
    assert len(spiked) == len(read_ledger(world.folder)), "each was met once"
    assert list((world.folder / "checkpoint").glob("set_aside_*")), "there was something to go back from"
    found = iterations(world.folder / "checkpoint")
    assert len(found) <= KEPT + 1 and fault(found[0]) is None, "one that was saved and not put in its place yet"
    return attempts


def test_two_agents_a_spike_and_kills_after_it_whoever_plans(folder, monkeypatch):
    """Ten interleavings: after the spiked attempt the same agent plans on, or the other one, and any of them later."""
    orders = set()
    for seed in range(10):
        world = Training(folder / str(seed), monkeypatch, seed, STEPS, {90}, kills=0.12, naps=0.0)
        world.start("a", "b")
        attempts = through(world)
        assert len(world.planners) == len(attempts)
        spiked = next(attempt.number for attempt in attempts if attempt.verdict.cause == "spike")
        orders |= set(zip(world.planners[spiked:], world.planners[spiked + 1 :], strict=False))
    assert orders == {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}


@pytest.mark.parametrize("seed", range(5))
def test_agents_that_are_held_up_in_a_plan_or_before_a_rename_spoil_nothing(folder, monkeypatch, seed):
    """Three of whom two train: while one is held up for 40 s, another one plans, and trains on."""
    world = Training(folder, monkeypatch, seed, STEPS, {90, 130}, kills=0.1, naps=0.15)
    world.start("a", "b", "c")
    through(world)
