"""Which phase the workers of a node are in, by the files that they write."""

import json

import pytest

from launch.agent.node.phase import COMPILING, Phases
from plugins.sealed_checkpoint.plan import REMOVING, saving_folder, write_seal
from tests.plugins.held_out_loss.evaluation import Evaluated


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
