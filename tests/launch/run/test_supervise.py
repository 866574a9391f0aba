"""The supervisor: notices at once, says why, and leaves nothing running. Most with a stand-in for msrun."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launch.run import supervise as module
from launch.run.failure import Failure
from launch.run.msrun import free_port, msrun_command, worker_environment
from launch.run.supervise import supervise
from plugins.cpu_backend import mailbox

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LONG = 300  # seconds: a bound against hangs; the stand-in for msrun notices nothing for an hour, and its workers sleep


def fake_msrun(run_dir, *actions):
    return [sys.executable, str(HERE / "fake_msrun.py"), str(run_dir), *actions]


def run(run_dir, *actions):
    return supervise(fake_msrun(run_dir, *actions), os.environ, run_dir, len(actions))


def started(run_dir):
    """name -> pid of every process of the stand-in."""
    names = [path.name.rsplit("_", 1) for path in (run_dir / "pids").glob("*_*")]
    return {name: int(pid) for name, pid in names}


def running(run_dir):
    """Names of those that still run."""
    found = []
    for name, pid in started(run_dir).items():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, perhaps just now
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(name)
    return found


def wait_until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("actions", [["ok", "ok"], ["quick"]])
def test_success(tmp_path, actions):
    outcome = run(tmp_path, *actions)
    assert (outcome.code, outcome.failure, outcome.left) == (0, None, ())
    assert len(started(tmp_path)) == 2 + len(actions) and not running(tmp_path)


@pytest.mark.parametrize("first", ["fail", "fail_at_once"])
def test_the_first_failing_workers_traceback_is_shown_and_all_are_gone(tmp_path, first):
    outcome = run(tmp_path, "stubborn", first, "fail_later")
    assert not running(tmp_path) and not outcome.left
    assert outcome.code == 1
    assert outcome.failure.message == "worker 1 failed with exit code 1"
    assert outcome.failure.log == tmp_path / "logs" / "worker_1.log"
    assert first == "fail_at_once" or "in deep" in outcome.failure.lines[-2]
    assert outcome.failure.lines[-1] == outcome.failure.error == "RuntimeError: the first error"


def test_a_user_error_of_all_workers_is_one_message_and_code_2(tmp_path):
    outcome = run(tmp_path, "user_error", "user_error")
    assert (outcome.code, outcome.failure.message) == (2, "plugins.x: no such plugin")
    assert not running(tmp_path)


def test_a_worker_killed_by_sigkill_is_called_that(tmp_path):
    outcome = run(tmp_path, "sleep", "killed")
    assert outcome.code == 1
    assert outcome.failure.message == "worker 1 was killed (SIGKILL)" and "memory" in outcome.failure.mend
    assert not running(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["ok"], ["crashes_done"]])
def test_a_worker_that_crashes_after_its_work_has_not_failed(tmp_path, monkeypatch, capsys, others):
    monkeypatch.setattr(module, "FINISH", 0.1)
    outcome = run(tmp_path, "crashes_done", *others)
    assert (outcome.code, outcome.failure, outcome.left) == (0, None, ()) and not running(tmp_path)
    told = capsys.readouterr().err
    assert " was killed (SIGKILL) while exiting, its work done; the run has finished all the same (" in told


@pytest.mark.slow
def test_others_that_msrun_kills_for_such_a_crash_have_failed_because_of_it(tmp_path):
    outcome = run(tmp_path, "crashes_done", "killed_late")
    assert outcome.code == 1 and not running(tmp_path)
    assert outcome.failure.message == "worker 0 was killed (SIGKILL) while exiting, its work done"
    other = run(tmp_path / "b", "crashes_done", "fail_late")
    assert other.failure.message == "worker 1 failed with exit code 1", "it has an error of its own"
    crash = run(tmp_path / "c", "crashes_done", "aborts_late")
    assert crash.failure.rank == 1 and "while exiting" not in crash.failure.message, "msrun sends SIGKILL only"


@pytest.mark.slow
def test_a_worker_that_finishes_while_another_hangs_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STRAGGLE", 1.0)
    outcome = run(tmp_path, "ok", "sleep")
    assert outcome.code == 1 and "worker 0 finished while worker 1 still waits" in outcome.failure.message
    assert not running(tmp_path)


@pytest.mark.slow
def test_workers_that_write_may_outlast_the_one_that_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STRAGGLE", 1.0)
    (tmp_path / "metrics").mkdir()
    clock, metrics, ticks = [0.0], tmp_path / "metrics" / "rank_1.jsonl", []

    def pause(seconds):
        clock[0] += seconds
        time.sleep(seconds)

    def tick():  # stands for the steps that the slower worker reports, for longer than the limit
        if "worker_0" in started(tmp_path) and "worker_0" not in running(tmp_path):
            ticks.append(clock[0])
            if ticks[-1] - ticks[0] < 2.5:
                metrics.write_text("{}" * len(ticks))

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pause))
    outcome = supervise(fake_msrun(tmp_path, "ok", "sleep"), os.environ, tmp_path, 2, tick)
    assert "worker 0 finished" in outcome.failure.message
    assert 3 < ticks[-1] - ticks[0] < 4


@pytest.mark.parametrize("skew", [0, -3600, 3600], ids=["alike", "an hour behind", "an hour ahead"])
@pytest.mark.parametrize("writes", [True, False], ids=["writes", "silent"])
def test_whether_a_worker_writes_is_seen_whatever_the_clock_of_the_disk(tmp_path, monkeypatch, skew, writes):
    """A file server's clock may be hours off: only changes count, by our own clock."""
    clock = [1e6]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock[0], monotonic=lambda: clock[0]))
    process = SimpleNamespace(is_running=lambda: True, status=lambda: "running")
    members = [SimpleNamespace(ended=rank == 1, rank=rank, process=process) for rank in (0, 1)]
    family = SimpleNamespace(workers=lambda: members)
    watch = module._Watch(None, family, tmp_path, tmp_path, 2, [], lambda: None, lambda number: True)
    logs, failure = [tmp_path / f"worker_{rank}.log" for rank in (0, 1)], None
    for look in range(int(module.STRAGGLE / module.POLL) + 5):
        for log in logs[: 1 + (look == 0)]:
            if look == 0 or (writes and look % 25 == 0):
                log.write_text("saving " * look)
                os.utime(log, (clock[0] + skew,) * 2)
        failure = failure or watch._straggling()
        clock[0] += module.POLL if look % 50 else 3600.0  # of the hour in which this process is held up little counts
        assert failure is None or look > 0.8 * module.STRAGGLE / module.POLL
    assert (failure is None) == writes


def test_one_that_failed_before_we_saw_it_is_named_not_those_that_msrun_killed_for_it(tmp_path):
    (tmp_path / "msrun.log").write_text("Worker process 4242 exit with exception. Error code: 1.\n")
    (tmp_path / "worker_0.log").write_text("fine so far\n")
    (tmp_path / "worker_1.log").write_text("Traceback (most recent call last):\nRuntimeError: no such module\n")
    killed = module.Member(psutil.Process(), 0, ended=True, code=-signal.SIGKILL)
    family = module.Family(os.getpid(), members={killed.process.pid: killed})
    watch = module._Watch(None, family, tmp_path, tmp_path, 2, [], lambda: None, lambda number: True)
    failure = watch._failure([killed])
    assert (failure.rank, failure.code, failure.lines[-1]) == (1, 1, "RuntimeError: no such module")


def test_msrun_that_cannot_start_workers_is_reported_with_its_own_words(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such option --worker_nun')"]
    outcome = supervise(command, os.environ, tmp_path, 1)
    assert (outcome.code, outcome.failure.message) == (1, "msrun ended with code 1")
    assert outcome.failure.lines == ("no such option --worker_nun",)


def test_who_looks_on_may_end_the_run_and_says_why(tmp_path):
    reason = Failure("hang: nothing moved", tmp_path / "log", cause="hang")

    def tick():
        return reason if len(started(tmp_path)) == 4 else None

    outcome = supervise(fake_msrun(tmp_path, "sleep", "stubborn"), os.environ, tmp_path, 2, tick)
    assert (outcome.code, outcome.failure, outcome.left) == (1, reason, ()) and not running(tmp_path)


def test_a_signal_that_came_before_the_start_is_not_lost(tmp_path):
    """While an agent reads the compile cache, say."""
    outcome = supervise(fake_msrun(tmp_path, "ok"), os.environ, tmp_path, 1, signals=[signal.SIGINT])
    assert (outcome.code, outcome.failure) == (128 + signal.SIGINT, None) and not running(tmp_path)


def test_what_is_said_of_a_failure_is_asked_while_other_workers_are_there(tmp_path):
    def explain(failure):
        assert "worker_0" in running(tmp_path)
        return replace(failure, message=f"{failure.message}, and why")

    outcome = supervise(fake_msrun(tmp_path, "sleep", "killed"), os.environ, tmp_path, 2, explain=explain)
    assert outcome.failure.message.endswith("and why") and not running(tmp_path)


def test_a_signal_may_be_a_notice_and_the_run_goes_on(tmp_path):
    asked = []

    def ends(number):
        asked.append(number)
        return len(asked) > 1

    def tick():
        if len(asked) < 2 and len(started(tmp_path)) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    logs = tmp_path / "elsewhere"
    (tmp_path / "logs").mkdir()  # the stand-in's own
    outcome = supervise(fake_msrun(tmp_path, "sleep"), os.environ, tmp_path, 1, tick, logs, ends)
    assert (outcome.code, asked) == (143, [signal.SIGTERM] * 2) and (logs / "msrun.log").exists()
    assert not running(tmp_path)


def test_a_failure_names_the_worker_and_its_code(tmp_path):
    outcome = run(tmp_path, "sleep", "killed")
    assert (outcome.failure.rank, outcome.failure.code, outcome.failure.cause) == (1, -signal.SIGKILL, "signal")


@pytest.mark.parametrize("action", ["detach", "orphan"])
def test_descendants_that_left_the_session_or_lost_their_parent_are_ended_too(tmp_path, action):
    wanted = {"detach": "child", "orphan": "orphan"}[action]

    def tick():
        if wanted in started(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = supervise(fake_msrun(tmp_path, action), os.environ, tmp_path, 1, tick)
    assert outcome.code == 143 and wanted in started(tmp_path)
    assert not running(tmp_path)


def test_a_long_pause_of_ours_leaves_nothing_running(tmp_path, monkeypatch):
    """This process may be stopped right after it has sent SIGTERM, for longer than all the time that it would wait."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    clock = [0.0]

    def pause(seconds):
        clock[0] += 100.0
        time.sleep(seconds)

    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pause))
        left = module.Family(process.pid, before).kill()
        process.kill()
    assert (left, process.returncode) == ([], -signal.SIGKILL)


def test_children_of_ours_that_have_nothing_to_do_with_the_run_live_on(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        run(tmp_path, "fail")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def supervisor(run_dir, *actions):
    """`supervise` in a process of its own, which exits with the outcome's code."""
    source = (
        "import json, os, signal, sys; from pathlib import Path; from launch.run.supervise import supervise\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup tests/run` ignores it, and children inherit that\n"
        "command, run_dir = json.loads(sys.argv[1]), Path(sys.argv[2])\n"
        "sys.exit(supervise(command, os.environ, run_dir, int(sys.argv[3])).code)"
    )
    arguments = [json.dumps(fake_msrun(run_dir, *actions)), str(run_dir), str(len(actions))]
    process = subprocess.Popen([sys.executable, "-c", source, *arguments], cwd=ROOT)
    wait_until(lambda: len(started(run_dir)) == 2 + len(actions))
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_a_signal_to_us_ends_everything(tmp_path, number, code):
    process = supervisor(tmp_path, "stubborn", "sleep")
    process.send_signal(number)
    assert process.wait(timeout=LONG) == code
    assert not running(tmp_path)


def test_sigkill_to_us_ends_everything_too(tmp_path):
    process = supervisor(tmp_path, "sleep", "sleep")
    process.kill()
    process.wait()
    wait_until(lambda: not running(tmp_path))


def test_a_process_with_a_lifeline_ends_with_its_parent(tmp_path):
    child = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from launch.workers.lifetime import die_with_parent
die_with_parent()
open({str(tmp_path / "child")!r}, "w").write(str(__import__("os").getpid()))
time.sleep(3600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    )
    wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    process = psutil.Process(int((tmp_path / "child").read_text()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


SCRIPT = """
import os, sys, time
rank, role = os.environ["RANK_ID"], os.environ["MS_ROLE"]
open(os.path.join({pids!r}, f"{{role}}{{rank}}_{{os.getpid()}}"), "w").close()
if role == "MS_SCHED":
    sys.exit(0)
while len(os.listdir({pids!r})) < 3:  # msrun starts them one after another
    time.sleep(0.05)
{body}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code"),
    [("print('fine')", 0), ("if rank == '1': raise RuntimeError('worker one broke')\ntime.sleep(3600)", 1)],
    ids=["success", "failure"],
)
def test_under_the_real_msrun(tmp_path, monkeypatch, body, code):
    (tmp_path / "pids").mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(pids=str(tmp_path / "pids"), body=body))
    recipe = {"use_parallel": True, "parallel_config": {"data_parallel": 2}}
    command = msrun_command(recipe, tmp_path, free_port())
    command[command.index(str(ROOT / "launch" / "train.py"))] = str(script)
    outcome = supervise(command, worker_environment(2, tmp_path), tmp_path, 2)
    assert outcome.code == code
    if code:
        assert outcome.failure.lines[-1] == "RuntimeError: worker one broke"
    assert set(started(tmp_path)) == {"MS_SCHED0", "MS_WORKER0", "MS_WORKER1"} and not running(tmp_path)


@pytest.mark.parametrize("how", ["is out of reach: reset", "closed its connection"])
def test_a_killed_worker_is_told_before_one_that_lost_it(how):
    lost = Failure(f"rank 0, Barrier: nothing: rank 1 {how}", Path("a"), user_error=True, rank=0, code=2)
    killed = Failure("worker 1 was killed (SIGKILL)", Path("b"), rank=1, code=-9)
    mistake = Failure("recipe.yaml: no such key", Path("a"), user_error=True, rank=0, code=2)
    assert max([lost, killed], key=module._how_telling) is killed
    assert max([killed, mistake], key=module._how_telling) is mistake


def test_a_worker_that_waits_for_what_it_has_sent_is_not_taken_for_one_that_hangs():
    assert module.STRAGGLE > mailbox.LEAVING
