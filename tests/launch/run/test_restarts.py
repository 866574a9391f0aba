"""`tc3 train` and the attempts of a run: what each leaves, and how --restarts goes on."""

import os
from pathlib import Path

import pytest

from launch.agent.decide import Rules
from launch.run import cache_key
from launch.run.failure import Failure
from launch.run.supervise import Outcome
from tools.runs.attempts import read_attempts

DEAD = Outcome(1, Failure("worker 1 was killed (SIGKILL)", Path("/l/worker_1.log"), rank=1, code=-9, cause="signal"))


@pytest.fixture
def ends(runs, monkeypatch):
    """Outcomes of the attempts to come, one after the other; no waits between them."""

    def ends(*outcomes):
        left = iter(outcomes)
        monkeypatch.setattr(type(runs), "outcome", property(lambda self: next(left)), raising=False)

    monkeypatch.setattr(Rules, "wait", lambda self, failures: 0.0)
    return ends


def test_every_run_writes_its_attempt(train, runs, workplace):
    assert train("mini/toy.yaml")[0] == 0
    run_dir = workplace / "output" / "mini-toy"
    (attempt,) = read_attempts(run_dir)
    (host,) = attempt.plan.hosts
    assert (attempt.plan.slots, attempt.plan.master, attempt.plan.resume) == (2, "127.0.0.1", None)
    assert f"--master_port={attempt.plan.port}" in runs[0]
    assert f"--log_dir={run_dir}/attempts/0000/logs" in runs[0]
    assert (attempt.ends[host].outcome, attempt.ends[host].step) == ("done", 3)
    assert attempt.verdict.decision == "done"
    assert os.readlink(run_dir / "logs") == "attempts/0000/logs"


def test_a_failure_is_written_down_and_the_next_start_is_another_attempt(train, runs, workplace, save):
    runs.outcome = DEAD
    run_dir = workplace / "output" / "mini-toy"
    code, _, err = train("mini/toy.yaml")
    assert code == 1 and "restart" not in err and len(runs) == 1
    save(run_dir / "checkpoint", 2)
    runs.outcome = Outcome(0)
    assert train("mini/toy.yaml", "--resume", "auto", "--steps", "9")[0] == 0
    first, second = read_attempts(run_dir)
    (end,) = first.ends.values()
    assert (end.outcome, end.cause, end.rank, end.code) == ("failed", "signal", 1, -9)
    assert (first.verdict.decision, second.verdict.decision) == ("give up", "done")
    assert (second.plan.step, second.plan.resume) == (2, str(run_dir / "checkpoint" / "iteration_00000002"))
    assert os.readlink(run_dir / "logs") == "attempts/0001/logs"


@pytest.mark.slow
def test_restarts_go_on_from_the_newest_checkpoint_and_say_so_in_a_line(train, runs, ends, workplace, save):
    ends(DEAD, DEAD, Outcome(0))
    saved = save(workplace / "output" / "mini-toy" / "checkpoint", 2)
    code, out, _ = train("mini/toy.yaml", "--restarts", "2", "--steps", "9", "--resume", "auto")
    assert code == 0 and len(runs) == 3
    lines = [line for line in out.splitlines() if line.startswith("tc3: ")]
    assert len(lines) == 3 and lines[2] == "tc3: 2 restarts in all"
    for number, line in enumerate(lines[:2]):
        assert f"attempt {number} ended: " in line and "worker 1 was killed (SIGKILL)" in line
        assert line.endswith(f"attempt {number + 1} goes on from step 2: {saved}")
    assert runs[2][-2:] == ["--resume", str(saved)]


def test_after_as_many_failures_it_gives_up_with_the_last_one(train, runs, ends, workplace):
    ends(DEAD, DEAD, Outcome(0))
    code, out, err = train("mini/toy.yaml", "--restarts", "1")
    assert (
        code == 1 and len(runs) == 2 and "Log: /l/worker_1.log" in err and ("tc3: worker 1 was killed (SIGKILL)" in err)
    )
    assert "attempt 1 starts from the beginning" in out and "tc3: 1 restart in all" in out


def test_a_users_error_is_not_tried_again(train, runs, ends):
    ends(Outcome(2, Failure("plugins.x: no such plugin", Path("/l"), user_error=True, cause="user error")))
    code, _, err = train("mini/toy.yaml", "--restarts", "5")
    assert code == 2 and len(runs) == 1 and err.endswith("tc3: plugins.x: no such plugin\n")


def test_the_logs_of_a_run_from_before_attempts_are_kept(train, runs, workplace):
    run_dir = workplace / "output" / "mini-toy"
    train("mini/toy.yaml")
    (run_dir / "logs").unlink()
    (run_dir / "attempts").rename(workplace / "elsewhere")
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "worker_0.log").write_text("of before")
    assert train("mini/toy.yaml", "--resume", "auto")[0] == 0
    assert (run_dir / "attempts/0000/logs/worker_0.log").read_text() == "of before"
    assert os.readlink(run_dir / "logs") == "attempts/0001/logs"


def test_force_removes_the_attempts_and_a_dry_run_knows_the_next_one(train, runs, workplace):
    run_dir = workplace / "output" / "mini-toy"
    train("mini/toy.yaml")
    assert f"--log_dir={run_dir}/attempts/0001/logs" in train("mini/toy.yaml", "--dry-run", "--resume", "auto")[1]
    assert f"--log_dir={run_dir}/attempts/0000/logs" in train("mini/toy.yaml", "--dry-run", "--force")[1]
    assert train("mini/toy.yaml", "--force")[0] == 0
    assert [each.number for each in read_attempts(run_dir)] == [0]


def test_mindspores_own_compile_cache_is_refused(train, runs, monkeypatch):
    monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
    code, _, err = train("mini/toy.yaml")
    assert code == 2 and not runs
    assert err.startswith("tc3: MS_COMPILER_CACHE_ENABLE=1: ") and "--compile-cache" in err and err.count("\n") == 1


@pytest.mark.slow
def test_the_compile_cache_is_used_where_asked_for_and_with_restarts(train, runs, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_key, "PACKAGES", ())
    assert "compile cache" not in "".join(train("mini/toy.yaml", "--force")[1:])
    for words in (["--compile-cache"], ["--restarts", "1"]):
        assert "compile cache: writes" in "".join(train("mini/toy.yaml", "--force", *words)[1:]), words
    monkeypatch.setenv("TC3_COMPILE_CACHE", str(tmp_path / "mine"))
    assert f"compile cache: writes {tmp_path}/mine/" in "".join(train("mini/toy.yaml", "--force")[1:])
