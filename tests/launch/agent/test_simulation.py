"""Hundreds of agents on one folder, some dead at any system call: those who live agree on one plan and one verdict."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.sealed_checkpoint.plan import fault, iterations
from plugins.spike_guard import reference
from plugins.spike_guard.ledger import read_ledger, samples_of
from tests.launch.agent.simulation import CALLS, World
from tests.launch.agent.training import KEPT, Training
from tools.runs.attempts import PLAN, VERDICT, folder_of, read_attempt, read_attempts


@pytest.fixture
def folder():
    """In memory where there is such a disk: thousands of files are written anew each second of a simulation."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


def agreed(world, folder):
    """All who live were told one plan and one verdict, those of the files."""
    attempt = read_attempt(folder, 0)
    alive = [agent for agent in world.agents if not agent.dead]
    assert all(agent.plan == attempt.plan and agent.verdict == attempt.verdict for agent in alive)
    if alive:
        assert attempt.plan in world.plans and attempt.verdict in world.verdicts
    return attempt


@pytest.mark.slow
def test_512_agents_of_whom_some_die_anywhere(folder, monkeypatch):
    world = World(folder, monkeypatch, seed=1)
    for number in range(512):
        dies = world.random.randrange(1, 400) if world.random.random() < 0.05 else None
        world.add(f"node{number:03d}", 480, dies, comes=world.random.uniform(0, 5))
    world.run(120)
    attempt = agreed(world, folder)
    dead = {agent.host for agent in world.agents if agent.dead}
    assert 10 < len(dead) < 50 and len(attempt.plan.hosts) == 480
    assert attempt.verdict.initiator in dead
    lost = {host for host, end in attempt.ends.items() if end.cause == "lost node"}
    assert lost <= dead and lost
    assert len(world.plans) <= 1 + len(dead) and len(world.verdicts) <= 1 + len(dead)


def costs(folder, monkeypatch, hosts):
    """Calls that a file server sees, an agent and second while workers run: the most of any agent."""
    world = World(folder, monkeypatch)
    for number in range(hosts):
        world.add(f"node{number}", hosts)
    world.until = world.time + 25
    world.run(60)
    attempt = agreed(world, folder)
    assert {end.outcome for end in attempt.ends.values()} == {"done"} and len(attempt.ends) == hosts
    assert not (folder_of(folder, 0) / "over.json").exists()
    return max(sum(agent.running[name] for name in CALLS) / agent.seconds for agent in world.agents)


def test_an_agent_asks_as_much_of_the_disk_among_64_as_among_4(folder, monkeypatch):
    few, many = (costs(folder / str(hosts), monkeypatch, hosts) for hosts in (4, 64))
    assert many == pytest.approx(few, rel=0.1) and many < 8


def test_a_host_that_fails_is_heard_of_by_all_within_two_looks(folder, monkeypatch):
    world = World(folder, monkeypatch)
    for number in range(16):
        world.add(f"node{number}", 16)
    world.fail = ("node5", world.time + 30)
    world.run(120)
    attempt = agreed(world, folder)
    assert attempt.verdict.initiator == "node5" and attempt.ends["node5"].cause == "exit"
    others = [end for host, end in attempt.ends.items() if host != "node5"]
    assert {end.outcome for end in others} == {"told to end"} and len(others) == 15
    assert max(end.time for end in others) - attempt.ends["node5"].time < 2
    assert attempt.verdict.time - attempt.ends["node5"].time < 4


def test_a_host_that_dies_is_missed_in_time(folder, monkeypatch):
    world = World(folder, monkeypatch)
    for number in range(8):
        world.add(f"node{number}", 8, 150 if number == 3 else None)
    world.run(120)
    attempt = agreed(world, folder)
    assert attempt.verdict.initiator == "node3" and attempt.ends["node3"].cause == "lost node"
    assert 4 <= attempt.ends["node3"].time - attempt.beats["node3"].time < 6
    assert attempt.verdict.time - attempt.ends["node3"].time < 4


DEATHS = st.lists(st.one_of(st.none(), st.integers(1, 250)), min_size=5, max_size=5)


@given(deaths=DEATHS, seed=st.integers(0, 99), fails=st.booleans(), until=st.sampled_from([20.0, 1e9]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_dies_wherever_the_others_agree(folder, deaths, seed, fails, until):
    folder = Path(tempfile.mkdtemp(dir=folder))  # the fixture's serves all examples
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(folder, monkeypatch, seed=seed)
        for number, dies in enumerate(deaths):
            world.add(f"node{number}", 3, dies)
        world.until = world.time + until
        if fails or (until > 1e6 and None in deaths):  # something must end it
            world.fail = (f"node{deaths.index(None) if None in deaths else 0}", world.time + 15)
            world.until = min(world.until, world.time + 60)
        world.run(200)
        agreed(world, folder)


def test_a_plan_stays_as_it_was_written_and_the_verdict_names_who_failed(folder, monkeypatch):
    world = World(folder, monkeypatch, seed=3)
    for number in range(12):
        world.add(f"node{number:02d}", 6)
    world.fail = ("node01", world.time + 30)
    world.run(10)
    plan = json.loads((folder_of(folder, 0) / PLAN).read_text())
    world.run(110)
    assert json.loads((folder_of(folder, 0) / PLAN).read_text()) == plan
    assert json.loads((folder_of(folder, 0) / VERDICT).read_text())["initiator"] == "node01"


STEPS = 20


def through(world):
    """Run to the end; no sample was trained twice, left out without need, or is bad."""
    world.run(5000)
    attempts = read_attempts(world.folder)
    assert attempts[-1].verdict.decision == "done", attempts[-1].verdict
    left_out = samples_of(read_ledger(world.folder))
    trained = world.ramp.samples_until(STEPS)
    assert world.trained == reference.samples(10 * trained, left_out)[:trained]
    assert not world.bad & set(world.trained)
    spiked = [attempt for attempt in attempts if attempt.verdict.cause == "spike"]
    assert len(spiked) == len(read_ledger(world.folder)), "each was met once"
    assert list((world.folder / "checkpoint").glob("set_aside_*")), "there was something to go back from"
    found = iterations(world.folder / "checkpoint")
    assert len(found) <= KEPT + world.late and fault(found[0]) is None, "those that rank 0 could not put in place"
    return attempts


@pytest.mark.slow
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


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_that_grows_trains_each_sample_once_through_kills_and_a_spike_at_its_change(folder, monkeypatch, seed):
    """The spike is in step 9, and the steps that are left out begin with step 6, the last one of two samples."""
    world = Training(folder, monkeypatch, seed, STEPS, {20}, kills=0.12, naps=0.0, stages=[(6, 2), (12, 4)])
    world.start("a", "b")
    through(world)
    assert world.ramp.samples_until(STEPS) == 6 * 2 + 6 * 4 + 8 * 8
    (entry,) = read_ledger(folder)
    assert (entry.step, entry.first, entry.samples) == (9, 6, ((10, 24),))


@pytest.mark.parametrize("seed", [1, 4, 7, 16, 41])
def test_agents_that_are_held_up_in_a_plan_or_before_a_rename_spoil_nothing(folder, monkeypatch, seed):
    """Three of whom two train: while one is held up for 40 s, another one plans, and trains on."""
    world = Training(folder, monkeypatch, seed, STEPS, {90, 130}, kills=0.1, naps=0.15)
    world.start("a", "b", "c")
    through(world)
