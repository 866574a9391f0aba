"""These tests check the parts of a worker: its backend, its exit code, saves on request, its cores, and its metrics.

A worker that crashes while its interpreter is torn down has ended as it ended; what runs at exit has run.

Ranks that are asked to save and leave: threads here, each a rank that steps, and waits in collectives.

A worker on its own cores: every thread, those that exist and those that come; MindSpore does not move it.

The callbacks that leave the rounding to float16 and bfloat16 out of float32 models.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindformers import MindFormerConfig
from mindformers.core.optim import muon
from mindformers.tools.register import MindFormerRegister
from mindspore import nn

from launch.run.msrun import ROOT
from launch.workers import save_on_request
from launch.workers.backends import Ascend, Cpu, ShardedCpu, backend_of
from launch.workers.leave_request import DECISION, FILE, FOLDER, SAVE, agree, environment, request, requested, saved_at
from launch.workers.metrics import FirstStep, RecordingLossMonitor, enable, metrics_file
from launch.workers.unrounded import UnroundedAttention, UnroundedMuon
from plugins.cpu_backend.attention import Unrounded
from tests.crashes import deaths
from tests.plugins.cpu_backend.test_layers import of_mindformers
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives
from tests.plugins.sinking import fetching


@pytest.mark.parametrize(
    ("target", "mode", "backend"),
    [
        ("Ascend", 1, Ascend),
        ("Ascend", 0, Ascend),
        ("CPU", 0, Cpu),
        ("CPU", "data_parallel", Cpu),
        ("CPU", 1, ShardedCpu),
        ("CPU", "semi_auto_parallel", ShardedCpu),
    ],
)
def test_target_and_parallel_mode_choose_it(target, mode, backend):
    recipe = {"context": {"device_target": target}, "parallel": {"parallel_mode": mode}}
    assert type(backend_of(recipe)) is backend


def test_on_ascend_nothing_is_replaced():
    """Each step of an Ascend device does nothing, and imports neither MindSpore nor a plugin's adapter."""
    backend = Ascend()
    assert backend.collectives is None
    assert [backend.before_mindformers({}), backend.after_import(), backend.after_context(), backend.enable({})] == [
        None
    ] * 4
    with backend.own_errors():
        pass


WORKER = """
import atexit, os, signal, sys
{before}
class Native:
    def __del__(self):  # as MindSpore's C++ objects, after the functions of atexit
        os.kill(os.getpid(), signal.SIGKILL)  # a crash without a core file
sys.modules["native"] = Native()
atexit.register(print, "left the cluster")
def main():
    print("trained")
    {end}
{run}
"""
WAYS = [("pass", 0), ("sys.exit(0)", 0), ("sys.exit(None)", 0), ("sys.exit(2)", 2), ("sys.exit('said')", 1)]


def run(end, before="from launch.workers.lifetime import run_then_hard_exit", call="run_then_hard_exit(main)"):
    code = WORKER.format(end=end, before=before, run=call)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("end", "code"), WAYS)
def test_the_exit_code_is_that_of_the_work(end, code):
    done = run(end)
    assert (done.returncode, done.stdout) == (code, "trained\nleft the cluster\n"), done.stderr


@pytest.mark.parametrize(("end", "code"), WAYS)
def test_the_end_of_the_work_is_said_before_the_first_exit_function(end, code):
    """A crash in one of MindSpore's own exit functions comes behind it."""
    done = run(end, call="run_then_hard_exit(main, 'all done')")
    assert done.stdout == "trained\n" + "all done\n" * (code == 0) + "left the cluster\n"


def test_without_it_the_crash_wins():
    assert run("pass", before="", call="main()").returncode == -signal.SIGKILL


@pytest.mark.parametrize("file", ["train.py", "workers/accuracy_worker.py"])
def test_what_msrun_starts_ends_like_this(file, tmp_path):
    code = WORKER.split("def main")[0].format(before="import runpy")
    arguments = [
        "--config",
        str(tmp_path / "none.yaml"),
        "--run-dir",
        str(tmp_path),
        "--level",
        "L0",
        "--task",
        "tensor",
    ]
    arguments = arguments[:4] if file == "train.py" else arguments
    code += f"sys.argv = ['worker', *{arguments}]\nrunpy.run_path('launch/{file}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "no such recipe" in done.stderr, done.stderr


def test_an_exception_is_told_and_takes_its_usual_way():
    done = run("raise ValueError('of the work')")
    assert "ValueError: of the work" in done.stderr
    assert done.returncode == -signal.SIGKILL


NOW = 1e9  # the time of the disk whenever somebody asks


@pytest.fixture
def disk(monkeypatch):
    touch = Path.touch

    def at_that_time(path, *rest, **more):
        touch(path, *rest, **more)
        os.utime(path, (NOW, NOW))

    monkeypatch.setattr(Path, "touch", at_that_time)


@pytest.fixture
def attempt(tmp_path, disk):
    environment(tmp_path / "attempts" / "0000")
    for file in (tmp_path / "attempts" / "0000").iterdir():
        os.utime(file, (1000, 1000))
    return tmp_path / "attempts" / "0000"


def stepped(run_dir, rank, steps, seconds, ago, **more):
    """Metrics of a rank whose last step ended `ago` seconds before now."""
    file = run_dir / "metrics" / f"rank_{rank}.jsonl"
    file.parent.mkdir(exist_ok=True)
    lines = [{"total_steps": 100, "start_step": 0}, *({"step": step, "seconds": seconds, **more} for step in steps)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(file, (NOW - ago, NOW - ago))


@pytest.mark.parametrize(
    ("seconds", "ago", "step"),
    [
        (10.0, 2.0, 8),  # step 8 ends in eight seconds at the earliest: all can know by then
        (10.0, 9.5, 9),  # step 8 may end before the request is seen
        (0.1, 0.0, 17),  # a second is ten steps
        (60.0, 59.9, 9),
        (0.1, 300.0, 18),  # step 8 compiles the graph of a larger batch, or an evaluation takes long
    ],
)
def test_the_step_is_the_first_that_no_rank_can_have_passed(attempt, tmp_path, seconds, ago, step):
    stepped(tmp_path, 0, range(1, 7), seconds, ago + 1)
    stepped(tmp_path, 1, range(1, 8), seconds, ago)
    assert request(tmp_path, attempt, [0, 1]) == requested(attempt / FILE) == step


def test_lines_with_the_digests_of_many_samples_are_read(attempt, tmp_path):
    """The end of the file that was read held no whole line, so a notice of preemption ended the run without a save."""
    samples = {"input_ids": ["0" * 16] * 2048, "labels": ["0" * 16] * 2048}
    stepped(tmp_path, 0, range(1, 8), 10.0, 2.0, samples=samples)
    assert request(tmp_path, attempt, [0]) == 8


@pytest.mark.parametrize(("step", "seconds"), [(20, -0.3), (20, 0.02), (99, -0.3)])
def test_a_step_that_was_much_shorter_long_ago_does_not_count(attempt, tmp_path, step, seconds):
    """A clock was set back, or the batch has grown: the run was to save a thousand steps later, and was killed."""
    stepped(tmp_path, 0, range(1, 101), 8.0, 2.0)
    file = tmp_path / "metrics" / "rank_0.jsonl"
    lines = file.read_text().splitlines()
    lines[step] = json.dumps({"step": step, "seconds": seconds})
    file.write_text("\n".join(lines) + "\n")
    os.utime(file, (NOW - 2.0, NOW - 2.0))
    assert request(tmp_path, attempt, [0]) == 101


def test_where_not_every_step_is_recorded_the_others_may_have_been_made(attempt, tmp_path):
    stepped(tmp_path, 0, range(10, 60, 10), 1.0, 7.5)
    assert request(tmp_path, attempt, [0]) == 50 + 9
    (attempt / "save_claim").unlink()
    stepped(tmp_path, 0, range(10, 60, 10), 1.0, 300.0)
    assert request(tmp_path, attempt, [0]) == 50 + 11
    (attempt / "save_claim").unlink()
    stepped(tmp_path, 0, [1], 1.0, 7.5)  # nothing shows how often
    assert request(tmp_path, attempt, [0]) == 1 + 9


def test_what_a_worker_of_an_earlier_attempt_appends_late_says_nothing_of_the_step(attempt, tmp_path):
    stepped(tmp_path, 0, [7], 10.0, 0.0)
    file = tmp_path / "metrics" / "rank_0.jsonl"
    with file.open("a") as out:
        out.write(json.dumps({"step": 60, "seconds": 0.1, "attempt": "0001-a"}) + "\n")
    os.utime(file, (NOW, NOW))
    assert request(tmp_path, attempt, [0]) == 8


def test_without_a_step_in_this_attempt_there_is_nothing_to_save(attempt, tmp_path):
    assert request(tmp_path, attempt, [0, 1]) is None
    stepped(tmp_path, 0, [7], 1.0, 0.0)
    os.utime(tmp_path / "metrics" / "rank_0.jsonl", (900, 900))  # of the attempt before
    assert request(tmp_path, attempt, [0, 1]) is None and requested(attempt / FILE) is None
    assert request(tmp_path, tmp_path / "nowhere", [0]) is None


def test_the_clock_of_another_host_that_touched_the_request_does_not_matter(attempt, tmp_path):
    stepped(tmp_path, 0, [7], 10.0, 0.0)
    os.utime(attempt / FILE, (4e9, 4e9))  # by a host whose clock is years ahead, on a disk that takes it
    assert request(tmp_path, attempt, [0, 1]) == 8


def test_of_two_nodes_that_ask_one_names_the_step(attempt, tmp_path):
    stepped(tmp_path, 0, [7], 10.0, 0.0)
    first = request(tmp_path, attempt, [0, 1])
    stepped(tmp_path, 0, [7, 8, 9], 10.0, 0.0)
    assert request(tmp_path, attempt, [0, 1]) == first == 8


def test_an_agent_that_dies_while_it_asks_does_not_keep_others_from_asking(tmp_path, disk):
    """Its claim said nothing of the step: no other agent could ask any more, and the run left without a save."""

    def fresh():
        run_dir = Path(tempfile.mkdtemp(dir=tmp_path))
        environment(run_dir / "0000")
        for file in (run_dir / "0000").iterdir():
            os.utime(file, (1000, 1000))
        stepped(run_dir, 0, [7], 10.0, 0.0)
        return run_dir

    def ask(run_dir):
        return request(run_dir, run_dir / "0000", [0])

    asked = 0
    for run_dir, where in deaths(ask, fresh):
        before = requested(run_dir / "0000" / FILE)
        stepped(run_dir, 0, [7, 8], 10.0, 0.0)
        assert ask(run_dir) in ((before,) if before else (8, 9)), where
        assert requested(run_dir / "0000" / FILE) == ask(run_dir), where
        asked += 1
    assert asked > 5


@pytest.mark.parametrize("last", [3, 8])
def test_after_a_save_at_the_last_step_training_ends_by_itself(attempt, last, capsys):
    """The last held-out evaluation was lost: a run that is complete is not started again."""
    (attempt / FILE).write_text('{"step": 3}')
    made = []

    class Monitor:
        use_legacy_format, directory, saved, _append_step_num = False, "/disk", 3, 2
        _config = SimpleNamespace(async_save=False)
        _save_megatron_ckpt_file_format = step_end = lambda self, params: made.append("saved")

        def _seal_finished_save(self):
            made.append("sealed")

    monitor = save_on_request._heeding(Monitor, attempt / FILE, last)()
    context = SimpleNamespace(original_args=lambda: SimpleNamespace(cur_step_num=1))
    with nullcontext() if last == 3 else pytest.raises(SystemExit):
        monitor.step_end(context)
    assert made[-1] == "sealed" and "saved on request: step 3: /disk/iteration_00000003" in capsys.readouterr().err


def test_half_a_request_is_none(attempt):
    (attempt / FILE).write_text('{"ste')
    assert requested(attempt / FILE) is None


class World:
    """Ranks that meet in a collective at the end of each step, and in those of a save."""

    def __init__(self, attempt, ranks, patience):
        self.attempt, self.ranks, self.patience = attempt, ranks, patience
        self.barrier = threading.Barrier(ranks)
        self.did: dict[int, list[str]] = {rank: [] for rank in range(ranks)}

    def train(self, rank, steps, hears_late):
        answered = False
        for step in range(1, steps + 1):
            self.meet(rank, f"step {step}")
            wanted = None if hears_late and step == 3 else requested(self.attempt / FILE)
            if wanted is None or step < wanted or answered:
                continue
            answered = True
            if step == wanted and agree(self.attempt, rank, self.ranks, self.patience):
                self.meet(rank, f"save {step}")
                return

    def meet(self, rank, what):
        self.did[rank].append(what)
        self.barrier.wait(timeout=600)  # a collective with others in another one, or with too few, hangs

    def run(self, steps=5, late=()):
        threads = [threading.Thread(target=self.train, args=(rank, steps, rank in late)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert len({tuple(did) for did in self.did.values()}) == 1, "the ranks did not do the same"
        return self.did[0]


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_all_ranks_save_at_the_step_and_leave(attempt, ranks):
    (attempt / FILE).write_text('{"step": 3}')
    assert World(attempt, ranks, patience=600).run() == ["step 1", "step 2", "step 3", "save 3"]
    assert saved_at(attempt) == 3


@pytest.mark.parametrize("late", [(0,), (2,), (0, 1)])
def test_a_rank_that_hears_too_late_lets_nobody_hang(attempt, late):
    (attempt / FILE).write_text('{"step": 3}')
    done = World(attempt, 4, patience=0.3).run(late=late)
    assert done == [f"step {step}" for step in range(1, 6)]
    assert saved_at(attempt) is None


def test_a_decision_to_save_stays_although_the_patience_is_over(attempt):
    """Rank 0 that saw the last rank come too late by its clock made "go on" of it; some ranks had begun to save."""
    (attempt / FILE).write_text('{"step": 3}')
    assert agree(attempt, 0, 1, patience=-1.0) and saved_at(attempt) == 3
    assert (attempt / FOLDER / DECISION).read_text() == SAVE


def test_nobody_asked(attempt):
    assert World(attempt, 2, patience=1).run(steps=2) == ["step 1", "step 2"] and saved_at(attempt) is None


ON_CORES = """
import json, os, threading
event = threading.Event()
early = threading.Thread(target=event.wait)
early.start()
from launch.workers.cores import stay_on_own_cores
stay_on_own_cores()
late = threading.Thread(target=event.wait)
late.start()
cores = {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
event.set()
print(json.dumps([list(cores.values()), os.environ.get("MSRUN_CPU_LIST")]))
"""
ALL = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(ALL) < 2, reason="one core cannot be divided")


def worker(**environment):
    """(cores of each of its three threads, what MindSpore is told, what it says) of a worker's process."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("TC3_CORES", "MSRUN_CPU_LIST", "MS_ROLE")
    }
    given = {**clean, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", ON_CORES], env=given, capture_output=True, text=True, check=True)
    *said, answer = done.stdout.splitlines()
    return *json.loads(answer), said


@two_cores
@pytest.mark.parametrize("rank", [0, 1])
def test_every_thread_of_a_worker_is_on_its_cores(rank):
    lists = f"{ALL[0]} {ALL[1]}"
    threads, told, said = worker(TC3_CORES=lists, MS_ROLE="MS_WORKER", DEVICE_ID=str(rank))
    assert threads == [[ALL[rank]]] * 3 and told == str([ALL[rank]]) and said == []


@two_cores
@pytest.mark.parametrize("environment", [{"MS_ROLE": "MS_SCHED"}, {}], ids=["the scheduler", "by hand"])
def test_only_a_worker_is_bound(environment):
    assert worker(TC3_CORES=str(ALL[0]), DEVICE_ID="0", **environment) == ([ALL] * 3, None, [])


@pytest.mark.parametrize(
    ("lists", "rank"), [("0-x", "0"), ("0", "1"), ("99999", "0")], ids=["a broken list", "no list", "no such core"]
)
def test_what_cannot_be_bound_goes_on_and_says_so(lists, rank):
    threads, told, said = worker(TC3_CORES=lists, MS_ROLE="MS_WORKER", DEVICE_ID=rank)
    assert threads == [ALL] * 3 and told is None
    assert len(said) == 1 and said[0].startswith(f"note: TC3_CORES={lists}: this worker stays where it was started (")


def test_mindspore_binds_the_main_thread_to_the_same_cores(monkeypatch):
    """MindFormers asks it to bind every worker; left alone it would deal out the whole host's cores."""
    from mindspore.runtime import thread_bind_core

    monkeypatch.setattr(thread_bind_core, "_get_available_cpus", lambda: list(range(8)))
    monkeypatch.setattr(thread_bind_core, "get_local_rank_size", lambda: 2)
    monkeypatch.delenv("MSRUN_CPU_LIST", raising=False)
    assert thread_bind_core._get_cpu_affinity_strategy() == {"main": [0, 1, 2, 3]}, "its own choice"
    monkeypatch.setenv("MSRUN_CPU_LIST", str([6, 7]))
    assert thread_bind_core._get_cpu_affinity_strategy() == {"main": [6, 7]}


def test_the_first_step_is_noted_and_nothing_before_or_behind_it(tmp_path):
    with collectives(1) as (one,):
        one.groups.ranks.rank_in("hccl_world_group")
        first = FirstStep(one, tmp_path / "metrics" / "collectives_rank_0.json")

        def call(count):
            for _ in range(count):
                one.run("AllReduce", attributes([0]), [np.ones(3, np.float32)], [np.ones(3, np.float32)])

        call(1)
        for step in (5, 6):
            first.begin()
            call(2)
            first.end(step)
            call(1)
    assert json.loads(first.file.read_text()) == {
        "step": 5,
        "calls": [["AllReduce", [0], 12, [3], "float32", None, None]] * 2,
        "places": {"hccl_world_group": 0},
    }
    assert [path.name for path in first.file.parent.iterdir()] == [first.file.name]


@pytest.mark.parametrize("sink", [False, True])
def test_the_first_line_tells_what_the_train_step_holds_in_sink_mode_too(tmp_path, monkeypatch, sink):
    monkeypatch.setattr(RecordingLossMonitor.__base__, "print_output_info", lambda *_: None)
    monkeypatch.setattr(RecordingLossMonitor, "run_dir", str(tmp_path))
    step = nn.TrainOneStepCell(nn.Dense(2, 3), nn.Momentum(nn.Dense(2, 3).trainable_params(), 0.1, 0.9))
    monitor = object.__new__(RecordingLossMonitor)
    monitor.learning_rate, monitor.global_batch_size, monitor.began = ms.Tensor(0.1), 4, 1.0
    params = SimpleNamespace(train_network=fetching(step) if sink else step)
    parts = (None, None, None, None)
    monitor.print_output_info(params, 1, 1, 0.0, 1, 10, 2.5, 30.0, False, 1.0, "", 0.1, 0.7, *parts)
    header, line = map(json.loads, metrics_file(tmp_path, 0).read_text().splitlines())
    assert header["held_bytes"]["weight"] >= 36 and line["loss"] == 2.5
    assert header["software"]["mindspore"] == ms.__version__ and header["software"]["python"]


@pytest.mark.parametrize(("dtype", "changed"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_only_float32_is_left_unrounded(dtype, changed):
    cell = of_mindformers(dtype=dtype)
    UnroundedAttention().on_train_begin(SimpleNamespace(original_args=lambda: SimpleNamespace(train_network=cell)))
    assert isinstance(cell.cast, Unrounded) == changed


def test_muon_finds_float32_where_it_names_bfloat16(monkeypatch):
    """And every other type that its module names."""
    monkeypatch.setattr(muon, "mstype", before := muon.mstype)
    UnroundedMuon().on_train_begin(None)
    assert muon.mstype is not before and muon.mstype.bfloat16 is muon.mstype.float32 is before.float32
    named = set(re.findall(r"mstype\.(\w+)", inspect.getsource(muon)))
    assert named == {each for each in named if hasattr(muon.mstype, each)} >= {"bfloat16", "float32"}


@pytest.mark.parametrize(
    ("stages", "micro_steps", "coefficient", "value", "known"),
    [
        (2, 1, 0.0, float("nan"), None),
        (1, 2, 0.0, float("nan"), None),
        (1, 2, 0.0, 0.5, 0.5),
        (1, 1, 0.0, float("nan"), float("nan")),
        (2, 1, 0.1, float("nan"), float("nan")),
    ],
)
def test_a_loss_that_mindformers_divides_by_0_is_not_known(monkeypatch, stages, micro_steps, coefficient, value, known):
    model = {"num_hidden_layers": 2, "moe_aux_loss_coeff": coefficient, "seq_length": 8}
    config = MindFormerConfig(
        output_dir="x",
        model={"model_config": model},
        parallel_config={"pipeline_stage": stages},
        runner_config={"gradient_accumulation_steps": micro_steps},
    )
    for name in ("run_dir", "seq_length", "columns", "undefined"):
        monkeypatch.setattr(RecordingLossMonitor, name, getattr(RecordingLossMonitor, name))
    monkeypatch.setattr(MindFormerRegister, "register_cls", lambda *_, **__: None)
    enable(config)
    monitor = object.__new__(RecordingLossMonitor)
    assert monitor._balancing(ms.Tensor(value)) == pytest.approx(known, nan_ok=True)
