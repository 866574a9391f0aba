"""Limits of phases: nothing known, learned, and how often a healthy run would be taken for a hang."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.agent.job import Job
from launch.agent.limits import DEFAULTS, ENOUGH, FLOORS, LONGEST, TYPICAL, Limits, learn_steps
from launch.agent.loop import Agent
from tools.recipe.load import Recipe

SECONDS = st.floats(0.001, 1e5)


def learned(durations, phase="step", **more):
    limits = Limits(**more)
    for seconds in durations:
        limits.learn(phase, seconds)
    return limits


def test_every_phase_has_a_default_and_a_smaller_floor():
    assert DEFAULTS.keys() == FLOORS.keys()
    assert all(Limits().limit(phase) == DEFAULTS[phase] > FLOORS[phase] for phase in DEFAULTS)


def test_what_the_caller_knows_better():
    limits = learned([0.1] * 9, defaults={"compile": 5.0}, floors={"step": 2.0})
    assert (limits.limit("compile"), limits.limit("step"), limits.limit("save")) == (5.0, 2.0, DEFAULTS["save"])


def test_a_few_durations_do_not_shorten_a_limit():
    assert learned([1.0] * (ENOUGH - 1)).limit("step") == DEFAULTS["step"]
    assert learned([1.0] * ENOUGH).limit("step") == FLOORS["step"]
    assert learned([2000.0]).limit("step") == LONGEST * 2000


def test_phases_learn_apart():
    limits = learned([0.5] * 50)
    for _ in range(ENOUGH):
        limits.learn("save", 200.0)
    assert (limits.limit("step"), limits.limit("save")) == (FLOORS["step"], TYPICAL * 200)


@given(st.lists(SECONDS, min_size=1, max_size=40))
def test_what_was_seen_is_never_a_hang(durations):
    """The limit is above everything that was seen, by a factor, and above the floor."""
    limits = Limits()
    for seconds in durations:
        limits.learn("step", seconds)
    assert limits.limit("step") >= max(FLOORS["step"], LONGEST * max(durations))


def test_an_old_pause_is_forgotten():
    limits = learned([100.0] + [1.0] * 199)
    assert limits.limit("step") == LONGEST * 100
    limits.learn("step", 1.0)
    assert limits.limit("step") == FLOORS["step"]


@given(st.lists(SECONDS, min_size=ENOUGH, max_size=50), st.floats(1.0, 100.0))
def test_a_slower_device_has_longer_limits(durations, factor):
    assert learned([each * factor for each in durations]).limit("step") >= learned(durations).limit("step")


@given(st.floats(0.01, 1000.0), st.integers(ENOUGH, 200))
def test_a_hang_is_seen_within_ten_steps_or_the_floor(usual, count):
    """Where steps scatter by less than half."""
    durations = usual * np.random.default_rng(count).uniform(0.75, 1.5, count)
    assert learned(durations).limit("step") <= max(FLOORS["step"], TYPICAL * 1.5 * usual)


def false_alarms(durations, floors):
    """Steps that last longer than the limit before them."""
    limits, found = Limits(defaults={"step": float("inf")}, floors=floors), 0
    for seconds in durations:
        found += seconds > limits.limit("step")
        limits.learn("step", seconds)
    return found


@pytest.mark.parametrize(
    ("name", "draw"),
    {
        "jitter of 10 %": lambda rng, n: rng.normal(1, 0.1, n).clip(0.5),
        "documents: log-normal": lambda rng, n: rng.lognormal(0, 0.4, n),
        "one step in 500 takes 5 times as long": lambda rng, n: np.where(rng.random(n) < 0.002, 5.0, 1.0),
        "drifts to twice as long": lambda rng, n: np.linspace(1, 2, n) * rng.normal(1, 0.05, n),
    }.items(),
)
def test_no_false_alarm_in_clean_runs_even_without_a_floor(name, draw):
    rng = np.random.default_rng(0)
    assert sum(false_alarms(draw(rng, 2000), {"step": 0.0}) for _ in range(2)) == 0


def test_steps_are_learned_from_metrics_without_the_first_of_each_part():
    records = [
        {"total_steps": 24, "start_step": 0}, {"step": 1, "seconds": 28.4}, {"step": 2, "seconds": 0.2},
        {"step": 3, "seconds": 0.3}, {"total_steps": 24, "start_step": 2}, {"step": 3, "seconds": 5.9},
        {"step": 4, "seconds": 0.25}, {"event": "other"},
    ]  # fmt: skip
    limits = Limits()
    learn_steps(limits, records)
    assert {phase: list(seen) for phase, seen in limits.seen.items()} == {"step": [0.2, 0.3, 0.25]}


def test_an_agent_that_joins_a_run_knows_its_steps(tmp_path):
    (tmp_path / "metrics").mkdir()
    lines = [{"total_steps": 99}, *({"step": step, "seconds": 9.0} for step in range(1, 9))]
    (tmp_path / "metrics/rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Agent(Job(Recipe({}), tmp_path)).limits.limit("step") == TYPICAL * 9.0
