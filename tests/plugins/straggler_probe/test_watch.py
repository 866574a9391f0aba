"""What a rank notes of its steps, by a clock of the test, from the callback that tells it, and of slowed workers."""

import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from plugins import processor_time
from plugins.straggler_probe import watch
from plugins.straggler_probe.plan import Settings, slow_ranks
from plugins.straggler_probe.record import probe_file, read, read_run
from tests.plugins.straggler_probe import workers


@pytest.fixture
def clock(monkeypatch):
    """Of each second of the wall's clock the worker runs 0.5, waits 0.25 and is stopped for 0.125."""
    now = SimpleNamespace(wall=100.0)
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(watch, "scheduled", lambda: (0.5 * now.wall, 0.25 * now.wall))
    monkeypatch.setattr(watch, "throttled", lambda read: 0.125 * now.wall)
    monkeypatch.setattr(watch, "seconds_of", lambda work, pieces: work() * pieces)
    return now


def run(clock, file, steps, sees_data=True, first=1):
    """Steps of 1 s after a wait of 0.25 s for the batch; the first takes 60 s."""
    own = watch.Watch(Settings(every=4, work=2), file, 3, "node1", "Ascend", lambda: 0.01, sees_data)
    for step in range(first, first + steps):
        clock.wall += 0.25
        own.begin()
        clock.wall += 60 if step == first else 1
        own.end(step)
    return read(file) if file.exists() else []


def test_a_line_a_probe_without_the_first_step_which_compiles(clock, tmp_path):
    one, other = run(clock, tmp_path / "probe_3.jsonl", 9)
    assert (one.step, one.steps, other.step, other.steps) == (4, 3, 8, 4)
    assert (one.rank, one.host, one.device, one.work) == (3, "node1", "Ascend", 2)
    assert (one.seconds, one.data, one.cpu, one.waited, one.stopped) == (3.75, 0.75, 1.875, 0.9375, 0.46875)
    assert (other.seconds, other.data, other.probe) == (5.0, 1.0, 0.02)


def test_a_resumed_part_counts_on_and_leaves_its_own_first_step_out(clock, tmp_path):
    (one,) = run(clock, tmp_path / "probe_3.jsonl", 3, first=7)
    assert (one.step, one.steps) == (8, 1)


def test_a_step_that_both_compiles_and_is_due_is_not_probed(clock, tmp_path):
    assert run(clock, tmp_path / "probe_3.jsonl", 4, first=8) == []


def test_waits_for_batches_that_the_device_reads_itself_are_not_known(clock, tmp_path):
    assert run(clock, tmp_path / "probe_3.jsonl", 4, sees_data=False)[0].data is None


def test_a_pause_and_the_cores_of_others_do_not_count_as_time_of_the_work(monkeypatch):
    """Five rounds of 10 ms: in one 50 ms more pass, and in each others have the core for 5 ms more."""
    now, done = {"wall": 0.0, "waited": 0.0}, []
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(watch, "thread_waited", lambda: now["waited"])

    def piece():
        done.append(1)
        now["wall"] += 0.015 + 0.05 * (len(done) == 2)
        now["waited"] += 0.005
        return 1.0

    assert watch.seconds_of(piece, 1) == pytest.approx(0.01)
    assert watch.seconds_of(piece, 3) == pytest.approx(0.03)


def test_the_work_is_the_same_every_time():
    one = watch.of_device("CPU")
    assert one() == one() > 0
    assert 0 < watch.seconds_of(one, 1) < watch.seconds_of(one, 30)


def test_the_kernel_counts_what_a_thread_waits():
    assert processor_time.thread_waited() >= 0
    assert processor_time.scheduled()[0] > 0
    assert processor_time.text_of("/proc/self/none") is None


def test_the_callback_follows_the_steps_of_a_resumed_run(tmp_path):
    from mindformers.core.callback.callback import CheckpointMonitor, MFLossMonitor
    from mindformers.trainer.base_trainer import BaseTrainer

    from plugins.straggler_probe.adapter import StragglerProbe, enable

    config = SimpleNamespace(callbacks=[], context=SimpleNamespace(device_target="CPU"), output_dir=str(tmp_path))
    enable(config, {"every": 2})
    (section,) = config.callbacks
    assert section.pop("type") == "StragglerProbe"
    probe, losses = StragglerProbe(**section), object.__new__(MFLossMonitor)
    losses.initial_step = 6
    params = SimpleNamespace(list_callback=[losses], dataset_sink_mode=False, cur_step_num=0)
    context = SimpleNamespace(original_args=lambda: params)
    probe.on_train_begin(context)
    for params.cur_step_num in (1, 2, 3, 4):
        probe.on_train_step_begin(context)
        probe.on_train_step_end(context)
    assert [(one.step, one.rank, one.steps) for one in read(probe_file(tmp_path, 0))] == [(8, 0, 1), (10, 0, 2)]
    order = BaseTrainer.sort_callbacks([probe, object.__new__(CheckpointMonitor), losses])
    assert [type(each) for each in order] == [MFLossMonitor, CheckpointMonitor, StragglerProbe]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a core each")
def test_nobody_is_named_where_nobody_is_slowed(tmp_path):
    """Where this machine does other work as well, a worker may be named for that; it is true then."""
    workers.train(tmp_path, 100)
    verdict = slow_ranks(read_run(tmp_path))
    own = [one for one in verdict.slow if "others have its cores" not in one.seen]
    assert (own, verdict.unknown, verdict.compared) == ([], [], 2)
    assert len(read_run(tmp_path)) == 2 * 50


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a core each")
@pytest.mark.skipif(not workers.can_limit(), reason="making a control group with a limit needs root")
def test_a_worker_that_a_limit_stops_is_named_with_the_limit(tmp_path):
    with ExitStack() as held:
        workers.train(tmp_path, 50, lambda pids: held.enter_context(workers.limit(pids[1:], 0.05)))
    one = next(one for one in slow_ranks(read_run(tmp_path)).slow if one.kind == "limit")
    assert (one.rank, one.until) == (1, None) and one.since <= 10
