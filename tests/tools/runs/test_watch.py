"""`tc3 runs watch`: what it says is what the report says, with bounded memory, and it ends as the run does.

`tc3 runs` of records with values that no run writes: no value ends it in a traceback.
"""

import fcntl
import io
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from plugins.errors import DataError, TC3Error
from plugins.expert_balance.routers import Watcher, routers_file
from plugins.lines import ATTEMPT, Span, note
from plugins.straggler_probe.record import Record, probe_file
from plugins.straggler_probe.record import append as corrupted_append
from tests.corrupted import corrupted, places
from tests.tools.runs import builders
from tests.tools.runs.builders import Builder, append, random_run
from tools.files.locks import LOCK
from tools.runs import cli, readings
from tools.runs.attempts import END, End, Plan, folder_of, write
from tools.runs.cli import runs
from tools.runs.goodput import ledger
from tools.runs.readings import load_run
from tools.runs.watch import Kept, Watch


def run(*arguments):
    return CliRunner().invoke(runs, ["watch", *map(str, arguments)])


def growing(folder, copy, seed):
    """`folder`'s files arrive in `copy` in the order of their times, some lines at a time."""
    rng = random.Random(seed)
    rows = [("metrics/rank_0.jsonl", line) for line in (folder / "metrics/rank_0.jsonl").open()]
    while rows:
        size = rng.randrange(1, 9)
        for name, line in rows[:size]:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            with (copy / name).open("a") as out:
                out.write(line)
        rows = rows[size:]
        yield


@pytest.mark.parametrize("seed", range(12))
def test_goodput_is_the_reports_however_the_lines_arrive(tmp_path, seed):
    built = random_run(tmp_path / "run", seed)
    shutil.copytree(tmp_path / "run" / "attempts", tmp_path / "copy" / "attempts")
    shutil.copytree(tmp_path / "run" / "metrics", tmp_path / "copy" / "metrics", ignore=lambda *_: ["rank_0.jsonl"])
    watch = Watch(tmp_path / "copy")
    for _ in growing(tmp_path / "run", tmp_path / "copy", seed):
        status = watch.look()
    found = ledger(load_run(tmp_path / "run"))
    assert status.goodput == pytest.approx(found.goodput, abs=1e-9)
    assert status.goodput == pytest.approx(built.truth["kept"] / built.wall)
    assert (status.step, status.total_steps, status.failures) == (60, 60, built.failures)
    assert status.wall_seconds == pytest.approx(built.wall / 10)


def test_a_run_that_goes_on(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(7, every=5)
    builder.spend(25, "stop")
    builder.beat("evaluation")
    status = Watch(tmp_path / "run").look()
    assert (status.state, status.over, status.attempt, status.hosts) == ("running", None, 0, 2)
    assert (status.phase, status.step, status.loss, status.tokens_per_second) == ("evaluation", 7, 5.0, 500.0)
    # two steps of 2 s and two gaps of 0.1 s after the save, and 2.5 s since
    assert status.checkpoint_step == 5 and status.checkpoint_age == pytest.approx(6.7)
    assert status.failures == 0 and status.last_failure is None
    assert status.goodput == pytest.approx(ledger(load_run(tmp_path / "run")).goodput)


def write_recipe(folder, stages):
    """Of a run whose loss is on its last worker."""
    kept = {"data_parallel": 1, "pipeline_stage": stages}
    (folder / "recipe.yaml").write_text(json.dumps({"use_parallel": True, "parallel_config": kept}))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("attempts_before", [1, 3])
def test_a_run_that_was_started_over_in_the_folder_is_read_from_its_beginning(tmp_path, attempts_before, planned):
    """It showed the old run, whatever the new one did; likewise where the old run's last attempt has no plan."""
    folder = tmp_path / "run"
    old = Builder(folder, 100)
    write_recipe(folder, 1)
    for _ in range(attempts_before):
        old.plan()
        old.train(20)
    told = []
    watch = Watch(folder, told.append)
    if not planned:
        folder_of(folder, attempts_before).mkdir()
    assert watch.look().step == 20
    for name in ("metrics", "attempts"):
        shutil.rmtree(folder / name)
    new = Builder(folder, 50)
    new.spend(999, "start")
    new.plan()
    told.clear()
    new.train(7)
    status = watch.look()
    assert (status.step, status.total_steps, status.attempt) == (7, 50, 0)
    assert status == replace(Watch(folder).look(), quiet=status.quiet) and [one["step"] for one in told] == [
        *range(1, 8)
    ]


@pytest.mark.parametrize("before", [True, False], ids=["started over", "at first"])
def test_a_look_before_the_recipe_is_there_does_not_follow_the_wrong_worker(tmp_path, before):
    """The recipe is written after the plan. The metrics of worker 0, which has no loss, were followed for ever."""
    folder = tmp_path / "run"
    if before:
        old = Builder(folder, 100)
        write_recipe(folder, 1)
        old.plan()
        old.train(20)
        watch = Watch(folder)
        assert watch.look().step == 20
        for name in ("metrics", "attempts"):
            shutil.rmtree(folder / name)
        (folder / "recipe.yaml").unlink()
    new = Builder(folder, 50)
    new.spend(999, "start")
    new.plan()
    watch = watch if before else Watch(folder)
    watch.look()
    write_recipe(folder, 2)
    new.train(7)
    (folder / "metrics" / "rank_0.jsonl").rename(folder / "metrics" / "rank_1.jsonl")
    status = watch.look()
    assert (status.step, status.total_steps) == (7, 50)


def test_a_loss_that_is_not_finite_is_shown(tmp_path):
    file = builders.empty(tmp_path)
    append(file, builders.header(10), builders.step(1) | {"global_norm": 1.0})
    watch = Watch(tmp_path)
    assert watch.look().not_finite == [] and "not finite" not in cli.line(watch.look())
    append(file, builders.step(2, loss=math.nan) | {"global_norm": math.inf})
    status = watch.look()
    assert (status.loss, status.not_finite) == (None, ["loss", "global_norm"])
    assert "loss not finite, global norm not finite" in cli.line(status)
    json.loads(cli.json_line(status), parse_constant=pytest.fail)


@pytest.mark.parametrize(("loss", "told"), [(6.0, []), (math.nan, ["loss"])])
def test_the_norm_of_a_step_that_the_loss_scale_skipped_is_no_fault(tmp_path, loss, told):
    file = builders.empty(tmp_path)
    skipped = builders.step(1, loss=loss) | {"global_norm": math.inf, "overflow": True}
    append(file, builders.header(10), skipped)
    assert Watch(tmp_path).look().not_finite == told


@pytest.mark.parametrize("behind", [0, 3600])
def test_goodput_by_clocks_that_do_not_agree_is_unknown(tmp_path, behind):
    """Steps by the clock of a host, and plans by that of the disk."""
    folder = tmp_path / "run"
    builder = Builder(folder, 100)
    builder.plan()
    builder.train(80, every=5)
    file = folder / "metrics" / "rank_0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"time": line["time"] - behind}) + "\n" for line in lines))
    (folder / "metrics" / "spans.jsonl").unlink(missing_ok=True)
    builder.now = 50
    builder.plan()
    goodput = Watch(folder).look().goodput
    assert goodput is None if behind else 0 < goodput <= 1


def test_the_newest_held_out_losses_are_shown(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(7)
    file, watch = tmp_path / "run" / "metrics" / "held_out.jsonl", Watch(tmp_path / "run")
    assert watch.look().held_out_step is None and "held-out" not in cli.line(watch.look())
    append(file, {"step": 5, "held_out_loss": 4.5, "corpora": {"code": 4.0, "prose": math.nan}})
    status = watch.look()
    assert (status.held_out_step, status.held_out_loss, status.held_out_corpora) == (5, 4.5, {"code": 4.0})
    assert "held-out loss 4.5000, perplexity 90.02 (step 5); code 4.0000, perplexity 54.6" in cli.line(status)
    append(file, {"step": 7, "held_out_loss": math.inf})
    assert "held-out loss not finite (step 7)," in cli.line(watch.look())
    assert watch.look().held_out_corpora == {}


def test_a_run_whose_launch_was_killed_is_not_said_to_be_running(tmp_path):
    """Nothing was written after the kill, so `--once` said `running`, and ended with 0, for ever."""
    folder = tmp_path / "run"
    builder = Builder(folder, 100)
    builder.plan()
    builder.train(7)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for lock, state in (
        (f"{os.getpid()} {socket.gethostname()}", "running"),
        (f"{dead.pid} {socket.gethostname()}", "unfinished"),
        (f"{dead.pid} another-host", "running"),
        ("", "running"),  # of agents
    ):
        (folder / LOCK).write_text(lock)
        result = run(folder, "--once", "--json")
        status = json.loads(result.output)
        assert (status["state"], result.exit_code) == (state, int(state == "unfinished"))
        assert (status["failures"], status["untold"]) == ((None, [0]) if state == "unfinished" else (0, []))
    (folder / LOCK).write_text(f"{dead.pid} {socket.gethostname()}")
    assert "unknown (no record says how attempt 0 ended)" in run(folder, "--once").output
    text = CliRunner().invoke(runs, ["report", str(folder)]).output
    assert "No record says how attempt 0 ended" in text and "There was no failure" not in text
    with (folder / LOCK).open() as held:  # by a process of a container, whose number is another one here
        fcntl.flock(held, fcntl.LOCK_EX)
        assert Watch(folder).look().state == "running"
    builder.kill(host=1)
    status = Watch(folder).look()
    assert (status.state, status.failures, status.untold) == ("unfinished", 1, []), "nobody begins the next attempt"
    builder.plan()
    builder.plan()
    assert (Watch(folder).look().failures, Watch(folder).look().untold) == (None, [1, 2])


def test_a_watching_host_whose_clock_is_days_behind_sees_all_steps(tmp_path, monkeypatch):
    """It left all steps out, as steps of the future, without a word."""
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(7)
    monkeypatch.setattr(readings.time, "time", lambda: 0.0)
    assert Watch(tmp_path / "run").look().step == 7


def test_the_newest_checkpoint_is_one_that_was_not_left_behind(tmp_path, monkeypatch):
    """After a spike the checkpoint that had been saved last was still named, although it was set aside."""
    folder = tmp_path / "run"
    write(folder_of(folder, 0) / "plan.json", Plan(0, 100.0, ["a"], 1, "a", 9000, name="0000-a"))
    monkeypatch.setenv(ATTEMPT, "0000-a")
    for step in (4, 8):
        note(folder, Span("save", step, 100.0 + step, 101.0 + step, sealed=True))
    watch = Watch(folder)
    assert (watch.look().checkpoint_step, watch.look().checkpoint_age) == (8, 0.0)
    resumed = Plan(1, 125.0, ["a"], 1, "a", 9000, name="0001-b", resume="/x/iteration_00000004", step=4, start=4)
    write(folder_of(folder, 1) / "plan.json", resumed)
    assert (watch.look().checkpoint_step, watch.look().checkpoint_age) == (4, 20.0)
    write(folder_of(folder, 2) / "plan.json", replace(resumed, attempt=2, name="0002-c", resume=None, step=0))
    assert (watch.look().checkpoint_step, watch.look().checkpoint_age) == (None, None)
    monkeypatch.setenv(ATTEMPT, "0002-c")
    note(folder, Span("save", 6, 130.0, 131.0, sealed=True))
    assert watch.look().checkpoint_step == 6


def test_an_attempt_that_has_not_trained_yet_takes_its_steps_back(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(7, every=5)
    watch = Watch(tmp_path / "run")
    assert watch.look().step == 7
    builder.kill(host=1, lines=("OSError: [Errno 28] No space left on device",))
    status = watch.look()
    assert status.state == "between attempts" and status.step == 7
    assert status.last_failure.startswith("attempt 0: node1, worker 1, disk full, step 7: ") and status.failures == 1
    builder.plan(wait=50)
    builder.beat("start")
    status = watch.look()
    assert (status.state, status.attempt, status.phase, status.step) == ("running", 1, "start", 5)
    assert status.goodput == pytest.approx(ledger(load_run(tmp_path / "run")).goodput)
    builder.train(9)
    status = watch.look()
    assert status.step == 9 and status.goodput == pytest.approx(ledger(load_run(tmp_path / "run")).goodput)


def test_the_error_is_shown_and_not_cut_off(tmp_path):
    """On a terminal of 60 columns, and in a line of a log."""
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(3)
    error = "FileNotFoundError: '/shared/corpora/" + "x" * 90 + "/tokens.bin'"
    message = f"worker 1 failed with exit code 1: {error}"
    write(
        builder.folder() / f"{END}node1.json", End("node1", builder.time(), "failed", "step", 3, "exit", 1, 1, message)
    )
    status = Watch(tmp_path / "run").look()
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None, soft_wrap=True)
    console.print(cli.table(status))
    assert "x" * 90 in "".join(line.strip() for line in console.file.getvalue().splitlines())
    assert status.last_failure.endswith(error) and error in cli.line(status)


def test_who_began_it_is_told_anew_when_the_verdict_is_there(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(3)
    victim = End("node0", builder.time(), "failed", "step", 3, "exit", 0, 1)
    write(builder.folder() / f"{END}node0.json", victim)
    watch = Watch(tmp_path / "run")
    assert "node0" in watch.look().last_failure
    builder.kill(host=1)
    status = watch.look()
    assert "node1" in status.last_failure and status.failures == 1


def test_without_attempts_the_end_is_told_by_the_steps(tmp_path):
    builder = Builder(tmp_path / "run", 20)
    builder.plan()
    builder.train(15)
    shutil.rmtree(tmp_path / "run" / "attempts")
    watch = Watch(tmp_path / "run")
    status = watch.look()
    assert (status.state, status.attempt, status.failures) == ("running", None, None)
    builder.train(20, start=0, compiling=0)
    assert watch.look().over == 0


def test_memory_and_reading_do_not_grow_with_the_run(tmp_path, monkeypatch):
    file = tmp_path / "rank_0.jsonl"
    with file.open("w") as out:
        out.write(json.dumps({"total_steps": 10**6, "start_step": 0, "time": 1.0}) + "\n")
        for step in range(1, 8001):
            out.write(json.dumps({"step": step, "time": 2.0 + step, "seconds": 1.0, "tokens": 10}) + "\n")
    kept = Kept(file)
    tracemalloc.start()
    kept.look()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.step == 8000 and most < 1 << 18  # the file holds twice that, its records as objects 15 times as much
    read = []
    monkeypatch.setattr(readings, "_parse", lambda line: read.append(line) or json.loads(line))
    for step in range(8001, 8011):
        with file.open("a") as out:
            out.write(json.dumps({"step": step, "time": 2.0 + step, "seconds": 1.0, "tokens": 10}) + "\n")
        kept.look()
    assert len(read) == 10 and kept.step == 8010


def test_once_says_it_and_leaves(tmp_path):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(7, every=5)
    result = run(tmp_path / "run", "--once")
    assert result.exit_code == 0
    for words in ("run: running", "0 on 2 hosts", "7 of 10", "500 tokens/s", "step 5, "):
        assert words in result.output
    assert json.loads(run(tmp_path / "run", "--once", "--json").output)["step"] == 7
    builder.kill(decision="give up")
    assert run(tmp_path / "run", "--once").exit_code == 1
    assert run(tmp_path / "run").exit_code == 1  # it is over: nothing to follow
    with pytest.raises(DataError, match="no such run"):
        raise run(tmp_path / "none").exception


@pytest.mark.parametrize("terminal", [False, True])
def test_it_follows_to_the_end(tmp_path, terminal):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    moments = iter(
        [lambda: builder.train(4), lambda: builder.beat(), lambda: builder.train(10), lambda: builder.done()]
    )
    watch, out = Watch(tmp_path / "run"), io.StringIO()

    def look():
        next(moments)()
        return watch.look()

    console = Console(file=out, force_terminal=terminal, width=100)
    assert cli.follow(look, console, 0.01, False) == 0
    assert ("run: done" in out.getvalue()) and ("10 of 10" in out.getvalue())
    if not terminal:
        assert len(out.getvalue().splitlines()) == 3  # at first, in another phase, at the end


def test_a_silence_is_said():
    from tools.runs.watch import Status

    status = Status("a", "running", None, None, None, None, 0, None, None, None, None, None, None, None, None, None)
    assert "no new output" not in cli.line(status)
    assert "no new output for 5 min" in cli.line(Status(**vars(status) | {"quiet": 300.0}))


def test_ctrl_c_is_quiet(tmp_path):
    Builder(tmp_path / "run", 10).plan()
    command = [sys.executable, "-c", "from tools.runs.cli import runs; runs()", "watch", str(tmp_path / "run")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ, text=True)
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (130, "") and "running" in first
    assert "Traceback" not in out  # a busy machine may take so long that there is another line


def test_the_routers_of_the_newest_step_are_shown_with_their_alarms(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(80)
    watcher, lines = Watcher([1, 2], 0.0), []
    for step in range(1, 81):
        tokens = np.full((2, 8), 100)
        tokens[1, 5] = 0
        lines.append(json.dumps(watcher.see(step, tokens).as_json(1_700_000_000.0 + step)))
    file = routers_file(tmp_path / "run")
    file.write_text("\n".join(lines) + '\n{"step": 81, "lay')
    shown = run(tmp_path / "run", "--once").output
    alarm = "look at layer 2, since step 64: expert 5 got no token in 64 steps"
    fullest, idle = "the busiest expert gets 1.14 times the mean (layer 2)", "experts without a token, in all layers: 1"
    assert f"{fullest}; {idle}; {alarm}" in " ".join(shown.split())
    status = Watch(tmp_path / "run").look()
    assert (status.fullest_layer, status.idle_experts, len(status.router_alarms)) == (2, 1, 1)
    told = []
    Watch(tmp_path / "run", routers=told.append).look()
    assert [record["step"] for record in told] == list(range(1, 81))
    file.write_text('{"step": 3, "layers": [1], "fullest": "much"}\n')
    assert Watch(tmp_path / "run").look().fullest_expert is None


def test_prometheus_reads_what_is_written(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: the extra [metrics]")
    from prometheus_client.parser import text_string_to_metric_families

    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(7, every=5)
    builder.beat("save")
    assert run(tmp_path / "run", "--once", "--prometheus", tmp_path / "new" / "a.prom").exit_code == 0
    families = text_string_to_metric_families((tmp_path / "new" / "a.prom").read_text())
    found = {sample.name: sample for family in families for sample in family.samples}
    status = Watch(tmp_path / "run").look()
    assert found["tc3_run_step"].value == 7 and found["tc3_run_step"].labels == {"run": "run"}
    assert found["tc3_run_goodput"].value == pytest.approx(status.goodput)
    assert found["tc3_run_phase"].labels["phase"] == "save"
    assert found["tc3_run_state"].labels["state"] == "running"
    assert not {"tc3_run_slow_ranks", "tc3_run_router_alarms"} & {*found}, "nothing measured them"
    assert os.listdir(tmp_path / "new") == ["a.prom"]


def test_without_prometheus_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    Builder(tmp_path / "run", 10).plan()
    missing = r"prometheus-client is not installed .*\[metrics\]"
    for name, words in (("a.prom", missing), ("a.txt", "must end in .prom")):
        with pytest.raises(DataError, match=words):
            raise run(tmp_path / "run", "--once", "--prometheus", tmp_path / name).exception
    assert run(tmp_path / "run", "--once").exit_code == 0


def test_tensorboard_reads_what_is_written(tmp_path):
    reason = "tensorboard is not installed"
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(7, every=5, loss=lambda step: float(step))
    for _ in range(2):  # a second watch replaces what the first one wrote
        assert run(tmp_path / "run", "--once", "--tensorboard").exit_code == 0
    found = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(step, step) for step in range(1, 8)]
    assert found.Scalars("tokens_per_second")[1].value == 500.0
    assert found.Scalars("loss")[0].wall_time == pytest.approx(builder.built.moments[2][1] / 10 + 1_700_000_000)
    assert len(os.listdir(tmp_path / "run" / "tensorboard")) == 1


@pytest.fixture(scope="module")
def run_corrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    builder = Builder(folder, 4)
    builder.plan()
    builder.beat()
    builder.train(3, every=2)
    for rank in range(2):
        corrupted_append(probe_file(folder, rank), Record(2, rank, "node0", "CPU", 4, 0.01, 1.0, 1, 0.1, 0.5, 0.0, 0.0))
    evaluation = {"step": 2, "held_out_loss": 5.0, "corpora": {"code": 4.0}}
    (folder / "metrics" / "held_out.jsonl").write_text(json.dumps(evaluation) + "\n")
    return folder


@pytest.mark.parametrize("wrong", [10**400, {}, "text"], ids=["huge", "object", "text"])
@pytest.mark.parametrize("name", ["rank_0.jsonl", "held_out.jsonl", "probe_0.jsonl", "spans.jsonl"])
def test_no_value_ends_a_report_or_a_status_in_a_traceback(run_corrupted, name, wrong):
    """Each key of the last line."""
    file = run_corrupted / "metrics" / name
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    command = ["watch", str(run_corrupted), "--once"] if name == "held_out.jsonl" else ["report", str(run_corrupted)]
    for path in places(json.loads(lines[-1])):
        changed, _ = corrupted(lines[-1], path, wrong)
        file.write_text("".join([*lines[:-1], changed]))
        result = CliRunner().invoke(runs, command)
        file.write_text(text)
        assert result.exception is None or isinstance(result.exception, (SystemExit, TC3Error)), path
