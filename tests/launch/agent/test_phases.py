"""Limits of phases: nothing known, learned, and how often a healthy run would be taken for a hang."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.agent.loop import Agent
from launch.agent.phases import COMPILING, DEFAULTS, ENOUGH, FLOORS, LONGEST, TYPICAL, Limits, Phases, learn_steps
from launch.agent.planning import Job
from plugins.sealed_checkpoint.plan import REMOVING, saving_folder, write_seal
from tests.plugins.held_out_loss.evaluation import Evaluated
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
    """A hang is seen in time if the durations of steps scatter by less than half."""
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


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def run(tmp_path):
    """Two workers after step 4; `step(rank, n)` and so on do what workers do, `look()` says the phase."""

    class Run:
        folder, clock, learned = tmp_path, Clock(), []
        recipe = {"checkpoint": {"save_path": str(tmp_path / "checkpoint")}, "plugins": {}}

        def begin(self):
            for name in ("metrics", "logs"):
                (tmp_path / name).mkdir(exist_ok=True)
            self.step(0, 9)  # of an earlier attempt, after the checkpoint of step 4
            self.phases = Phases(
                self.recipe, tmp_path, tmp_path / "logs", (0, 1), 4, lambda *pair: self.learned.append(pair), self.clock
            )

        def write(self, rank, **record):
            with (tmp_path / "metrics" / f"rank_{rank}.jsonl").open("a") as out:
                out.write(json.dumps(record) + "\n")

        def step(self, rank, number):
            self.write(rank, step=number)

        def log(self, rank, text):
            with (tmp_path / "logs" / f"worker_{rank}.log").open("ab") as out:
                out.write(text)

        def look(self, after=1.0):
            self.clock.now += after
            self.phases.look()
            return self.phases.phase

    return Run()


def test_start_compile_step_end(run):
    run.begin()
    assert (run.look(), run.phases.step) == ("start", 4)
    run.log(0, b"x" * 50 + COMPILING)
    assert run.look() == "start", "the other one has not come so far"
    run.log(1, COMPILING[:20])
    run.look()
    run.log(1, COMPILING[20:])
    assert run.look() == "compile"
    for rank in (0, 1):
        run.write(rank, total_steps=7, start_step=4)
        run.step(rank, 5)
    assert (run.look(), run.phases.step) == ("step", 5)
    run.step(0, 6)
    assert (run.look(), run.phases.step, run.phases.behind) == ("step", 6, 1)
    run.step(1, 6)
    assert run.look() == "step" and run.phases.behind is None
    for rank in (0, 1):
        run.step(rank, 7)
    assert run.look() == "end"
    assert [phase for phase, _ in run.learned] == ["start", "compile", "step", "step", "step"]


def test_a_late_worker_of_another_attempt_moves_nothing(run):
    run.begin()
    run.phases.name = "0001-b"
    for rank in (0, 1):
        run.write(rank, step=5, attempt="0001-b")
    assert (run.look(), run.phases.step, run.phases.behind) == ("step", 5, None)
    run.write(0, step=9, attempt="0000-a")
    run.write(0, step=9, attempt="0002-c")
    assert (run.look(), run.phases.step, run.phases.behind) == ("step", 5, None)


def test_the_first_step_of_a_larger_batch_may_compile(run):
    run.recipe = {**run.recipe, "plugins": {"batch_ramp": {"stages": [[6, 4]]}}, "runner_config": {"batch_size": 8}}
    run.begin()
    phases = []
    for number in (5, 6, 7):
        for rank in (0, 1):
            run.step(rank, number)
            phases.append(run.look())
    assert phases[1:] == ["step", "step", "first step", "first step", "step"]


def test_since_is_that_of_the_newest_step(run):
    run.begin()
    for rank in (0, 1):
        run.step(rank, 5)
    run.look()
    since = run.phases.since
    run.look(), run.look()
    assert run.phases.since == since
    run.step(0, 6)
    run.look()
    assert run.phases.since == run.clock.now


def test_a_checkpoint_is_saved_until_both_have_sealed_it(run):
    run.begin()
    for rank in (0, 1):
        run.step(rank, 8)
    folder = run.folder / "checkpoint" / "iteration_00000008"
    assert run.look() == "step"
    folder.mkdir(parents=True)
    assert run.look() == "save"
    for rank in (0, 1):
        (folder / f"mini-model-{rank:07d}-0000002.safetensors").write_bytes(b"weights")
    write_seal(folder, 0, 2, 8)
    assert run.look() == "save"
    write_seal(folder, 1, 2, 8)
    assert run.look() == "step"


def test_an_attempt_saves_in_its_own_folder_and_removes_what_is_one_too_many(run):
    run.begin()
    run.phases.name = "0001-a"
    saves = run.folder / "checkpoint"
    saving = saving_folder(saves, "0001-a")
    for rank in (0, 1):
        run.step(rank, 8)
    (saving_folder(saves, "0000-b") / "iteration_00000008").mkdir(parents=True)
    assert run.look() == "step", "that is another attempt's"
    (saving / "iteration_00000008").mkdir(parents=True)
    assert run.look() == "save"
    (saving / "iteration_00000008").rename(saves / "iteration_00000008")
    assert run.look() == "step"
    (saving / f"{REMOVING}iteration_00000004").mkdir()
    assert run.look() == "save", "which may take minutes, in which all ranks wait"
    (saving / f"{REMOVING}iteration_00000004").rmdir()
    assert run.look() == "step"


def test_what_an_earlier_attempt_did_not_finish_to_save_is_no_save_now(run):
    run.begin()
    (run.folder / "checkpoint" / "iteration_00000008").mkdir(parents=True)
    for rank in (0, 1):
        run.step(rank, 5)
    assert run.look() == "step"


def test_the_held_out_loss_is_due_until_it_is_on_record(run):
    run.recipe["plugins"] = {"held_out_loss": {"data_path": "x", "samples": 8, "every": 5}}
    run.begin()
    for rank in (0, 1):
        run.step(rank, 5)
    assert run.look() == "evaluation"
    with (run.folder / "metrics" / "held_out.jsonl").open("a") as out:
        out.write(json.dumps({"step": 5, "held_out_loss": 1.0}) + "\n")
    assert run.look() == "step"
    for rank in (0, 1):
        run.step(rank, 6)
    assert run.look() == "step"


@pytest.mark.parametrize("done", [0, 4, 20])
def test_the_agent_and_the_worker_agree_on_when_a_resumed_run_evaluates(run, done):
    """An evaluation that the agent takes for a step is a hang as soon as it is longer than a step may be."""
    run.recipe["plugins"] = {"held_out_loss": {"data_path": "x", "samples": 8, "every": 10}}
    run.begin()
    worker = Evaluated(run.folder, done, every=10)
    for rank in (0, 1):
        run.write(rank, total_steps=33, start_step=done)
    for number in range(done + 1, 34):
        for rank in (0, 1):
            run.step(rank, number)
        before = run.look()
        worker.step(number)
        if number == 33:
            worker.end()
        assert (before == "evaluation") == (worker.callback.last_step == number), number
        assert run.look() == ("step" if number < 33 else "end")
