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

STEPS = 24


@pytest.fixture
def folder():
    """In memory where there is such a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


def through(world):
    """Run to the end; no sample was trained twice, left out without need, or is bad."""
    world.run(20_000)
    attempts = read_attempts(world.folder)
    assert attempts[-1].verdict.decision == "done", attempts[-1].verdict
    left_out = samples_of(read_ledger(world.folder))
    assert world.trained == reference.samples(10 * STEPS * world.batch, left_out)[: STEPS * world.batch]
    assert not world.bad & set(world.trained)
    spiked = [attempt for attempt in attempts if attempt.verdict.cause == "spike"]
    assert len(spiked) == len(world.bad), "each was met once"
    found = iterations(world.folder / "checkpoint")
    assert len(found) <= KEPT + 1 and fault(found[0]) is None, "one that was saved and not put in its place yet"
    return attempts


@pytest.mark.parametrize("seed", range(10))
def test_two_agents_a_spike_and_kills_after_it_whoever_plans(folder, monkeypatch, seed):
    world = Training(folder, monkeypatch, seed, STEPS, {90}, kills=0.12, naps=0.0)
    world.start("a", "b")
    attempts = through(world)
    assert len(world.planners) == len(attempts)


def test_the_seeds_above_have_every_order_of_who_plans_after_a_spike(folder, monkeypatch):
    """Attempt by attempt from the spiked one on: the same agent, the other one, and back."""
    orders = set()
    for seed in range(10):
        world = Training(folder / str(seed), monkeypatch, seed, STEPS, {90}, kills=0.12, naps=0.0)
        world.start("a", "b")
        spiked = [attempt.number for attempt in through(world) if attempt.verdict.cause == "spike"][0]
        mine, *others = world.planners[spiked + 1 : spiked + 3] + [""]
        orders.add(others[0] == mine if others[0] else None)
    assert {True, False} <= orders


@pytest.mark.parametrize("seed", range(10))
def test_agents_that_are_held_up_in_a_plan_or_before_a_rename_spoil_nothing(folder, monkeypatch, seed):
    """Three of whom two train: while one is held up for 40 s, another one plans, and trains on."""
    world = Training(folder, monkeypatch, seed, STEPS, {90, 130}, kills=0.1, naps=0.15)
    world.start("a", "b", "c")
    through(world)
