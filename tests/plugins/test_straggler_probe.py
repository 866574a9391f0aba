"""These tests check which ranks are named as slow and which are not: against the slow reference, and under changes
that must not matter.

The form of a rank's probes, written and read.

What a rank notes of its steps, by a clock of the test, from the callback that tells it, and of slowed workers.
"""

import json
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from plugins import processor_time
from plugins.errors import DataError, RecipeError
from plugins.straggler_probe import plan, reference, watch
from plugins.straggler_probe.plan import Settings, above_others, by_stage, slow_ranks
from plugins.straggler_probe.record import append, probe_file, read, read_run
from tests.plugins.straggler_probe import workers
from tests.plugins.straggler_probe.histories import history

KINDS = [("device", 0.06), ("data", 0.10), ("host", 0.20), ("limit", 0.20)]


def named(verdict):
    return {(one.rank, one.host, one.kind) for one in verdict.slow}


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize(("kind", "by"), KINDS)
def test_a_slow_rank_is_named_with_what_when_and_how_much(ranks, kind, by):
    verdict = slow_ranks(history(np.random.default_rng(0), ranks, slow={1: (kind, by, 20)}))
    (one,) = verdict.slow
    assert (one.rank, one.host, one.kind, one.until) == (1, "node0", kind, None)
    assert abs(one.since - 105) <= 10  # probes are every 5 steps, from step 5 on: the 21st
    assert one.slower == pytest.approx(by, abs=0.012)
    assert str(one.since) in one.seen
    assert (verdict.unknown, verdict.compared) == ([], ranks)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_the_slow_reference_names(seed):
    rng = np.random.default_rng(seed)
    kind, by = KINDS[seed % 4]
    ranks = int(rng.integers(2, 12))
    slow = {int(rng.integers(ranks)): (kind, by * rng.choice([0.3, 0.6, 1.0]), int(rng.integers(30)))}
    records = history(rng, ranks, device=str(rng.choice(["CPU", "Ascend"])), slow=slow)
    records = [record for record in records if rng.random() > 0.1]  # some were not written
    groups = {rank: int(rank >= ranks // 2 and ranks > 3) for rank in range(ranks)}
    assert named(slow_ranks(records, groups)) == reference.slow_ranks(records, groups)


def test_the_reference_agrees_with_some_that_are_slow_and_some_that_are_not():
    """So that the test above does not compare nothing with nothing."""
    found = []
    for by in (0.0, 0.05):
        records = history(np.random.default_rng(7), 9, slow={4: ("device", by, 10)})
        found.append(reference.slow_ranks(records, dict.fromkeys(range(9), 0)))
    assert found == [set(), {(4, "node0", "device")}]


def test_nobody_is_named_for_the_number_of_his_rank():
    records = history(np.random.default_rng(1), 12, slow={3: ("device", 0.05, 10), 9: ("data", 0.1, 15)})
    places = np.random.default_rng(2).permutation(12)
    moved = [replace(record, rank=int(places[record.rank])) for record in records]
    before, after = slow_ranks(records), slow_ranks(moved)
    assert {(int(places[one.rank]), one.kind, one.since, one.slower) for one in before.slow} == {
        (one.rank, one.kind, one.since, one.slower) for one in after.slow
    }
    assert len(before.slow) == 2


def test_a_machine_that_is_slower_as_a_whole_changes_nothing():
    records = history(np.random.default_rng(1), 6, slow={3: ("device", 0.05, 10), 5: ("host", 0.2, 15)})
    times = ("probe", "seconds", "data", "cpu", "waited", "stopped")
    slower = [replace(record, **{name: 7.3 * getattr(record, name) for name in times}) for record in records]
    before, after = slow_ranks(records), slow_ranks(slower)
    assert [(one.rank, one.kind, one.since) for one in before.slow] == [
        (one.rank, one.kind, one.since) for one in after.slow
    ]
    assert [one.slower for one in before.slow] == pytest.approx([one.slower for one in after.slow])


def test_what_all_have_in_common_names_nobody():
    records = history(np.random.default_rng(3), 8)
    late = [replace(record, probe=record.probe * (3 if record.step > 100 else 1)) for record in records]
    assert slow_ranks(late).slow == []


def test_a_stage_that_has_more_to_do_is_not_slow_but_one_of_its_ranks_is():
    records = history(np.random.default_rng(4), 16, slow={13: ("data", 0.1, 10)})
    records = [replace(one, data=one.data + 2.0) if one.rank >= 12 else one for one in records]
    assert [one.rank for one in slow_ranks(records, by_stage(16, 4)).slow] == [13]
    assert {one.rank for one in slow_ranks(records).slow} == {12, 13, 14, 15}  # without stages they all are


def test_stages_are_successive_ranks():
    assert by_stage(8, 4) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}


def test_who_has_no_peers_is_unknown_and_never_sound():
    records = history(np.random.default_rng(5), 3, slow={2: ("device", 1.0, 5)})
    verdict = slow_ranks(records, {0: "a", 1: "a", 2: "b"})
    assert (verdict.slow, verdict.compared) == ([], 2)
    assert [(one.kind, one.ranks, one.why) for one in verdict.unknown] == [
        (kind, (2,), "no other rank does the same work") for kind in ("device", "data", "host", "limit")
    ]
    other = [replace(one, device="CPU") if one.rank == 1 else one for one in records if one.rank < 2]
    assert {one.ranks for one in slow_ranks(other).unknown} == {(0, 1)}
    assert {one.ranks for one in slow_ranks(records, {0: "a"}).unknown} == {(0, 1, 2)}


@pytest.mark.parametrize(("ranks", "least"), [(2, 2), (3, 2), (6, 3), (12, 3), (1024, 4)])
def test_too_few_probes_name_nobody_and_are_not_sound(ranks, least):
    """The number is the first from which a rank that is three times as slow is named."""
    history_of = {probes: history(np.random.default_rng(5), ranks, probes, slow={1: ("device", 2.0, 0)})
                  for probes in (least - 1, least)}  # fmt: skip
    early, first = (slow_ranks(records) for records in history_of.values())
    assert (early.slow, early.compared) == ([], 0)
    assert {(one.ranks, one.why.startswith(f"fewer than {least} probes")) for one in early.unknown} == {
        (tuple(range(ranks)), True)
    }
    assert ({one.rank for one in first.slow}, first.compared, first.unknown) == ({1}, ranks, [])


def test_ranks_that_were_never_probed_at_one_step_are_not_sound():
    records = history(np.random.default_rng(5), 2, slow={1: ("device", 2.0, 0)})
    apart = [replace(one, step=one.step + one.rank) for one in records]
    assert slow_ranks(apart).compared == 0
    assert {one.ranks for one in slow_ranks(apart).unknown} == {(0, 1)}


def test_the_probes_of_another_rank_are_refused(tmp_path):
    for record in history(np.random.default_rng(5), 1):
        append(probe_file(tmp_path, 1), record)
    with pytest.raises(DataError, match=r"probe_1\.jsonl: the file holds probes of rank 0, but must hold"):
        read_run(tmp_path)


def test_waits_that_the_host_does_not_see_are_unknown():
    verdict = slow_ranks(history(np.random.default_rng(5), 4, data=None))
    assert [(one.kind, one.ranks) for one in verdict.unknown] == [("data", (0, 1, 2, 3))]
    assert "does not see" in verdict.unknown[0].why


def test_waits_that_the_kernel_does_not_count_are_unknown():
    """Without the kernel's counters, as in some containers, no rank was said to wait for its cores."""
    records = history(np.random.default_rng(5), 4)
    verdict = slow_ranks([replace(one, cpu=0.0, waited=0.0) if one.rank < 2 else one for one in records])
    assert [(one.kind, one.ranks) for one in verdict.unknown] == [("host", (0, 1))]
    assert "the kernel does not count" in verdict.unknown[0].why


@pytest.mark.slow
@pytest.mark.parametrize("late", [lambda one: one.rank == 3, lambda one: one.rank < 4])
def test_ranks_that_are_probed_at_other_steps_leave_the_noise_of_the_others(late):
    """The noise counted as 0 if no rank had probes at two successive steps, so that healthy ranks were named."""
    records = history(np.random.default_rng(5), 8, 80, jitter=0.03)
    moved = [replace(one, step=one.step + 1) if late(one) else one for one in records]
    assert slow_ranks(moved).slow == []
    assert reference.slow_ranks(moved, dict.fromkeys(range(8), 0)) == set()


def test_no_records_say_nothing():
    assert slow_ranks([]) == ([], [], 0)


def test_who_is_slow_from_the_first_probe_on_is_named():
    (one,) = slow_ranks(history(np.random.default_rng(6), 16, slow={5: ("device", 0.08, 0)})).slow
    assert (one.rank, one.since) == (5, 5)


def test_who_has_recovered_is_named_with_when():
    records = history(np.random.default_rng(6), 8, probes=60, slow={5: ("device", 0.08, 10)})
    healthy = [replace(one, probe=one.probe / 1.08) if one.rank == 5 and one.step > 200 else one for one in records]
    (one,) = slow_ranks(healthy).slow
    assert (one.since, one.until) == (55, 200)
    assert "from step 55 to 200" in one.seen


def test_a_rank_that_moved_to_another_host_leaves_its_slowness_behind():
    records = history(np.random.default_rng(6), 8, probes=60, slow={5: ("device", 0.08, 10)})
    moved = [
        replace(one, host="spare", probe=one.probe / 1.08) if one.rank == 5 and one.step > 200 else one
        for one in records
    ]
    assert [(one.rank, one.host, one.since) for one in slow_ranks(moved).slow] == [(5, "node0", 55)]


def test_what_was_seen_is_said():
    words = {
        ("device", 1.0): "a fixed piece of work takes [12].[09]. times as long as on its peers, since step",
        ("data", 0.4): "waits 40% of its time more for its batches than its peers, since step",
        ("host", 0.6): "is ready, but others have its cores, for 54% of its time more than its peers, since step",
        ("limit", 0.4): "is stopped by a limit of its control group for 40% of its time more than its peers",
    }
    for what, says in words.items():
        records = history(np.random.default_rng(8), 4, lasting=0.0, device="CPU", slow={2: (*what, 0)})
        (one,) = slow_ranks(records).slow
        assert (one.rank, one.kind) == (2, what[0]) and re.match(says, one.seen), one.seen


def test_idle_cores_of_a_virtual_machine_may_differ_by_what_they_do():
    records = history(np.random.default_rng(9), 4, device="CPU", slow={1: ("device", 0.57, 5)})
    assert slow_ranks(records).slow == []
    twice = history(np.random.default_rng(9), 4, device="CPU", slow={1: ("device", 1.0, 5)})
    assert [one.rank for one in slow_ranks(twice).slow] == [1]


def test_the_median_of_the_others():
    rng = np.random.default_rng(0)
    for ranks in range(1, 8):
        values = rng.integers(0, 5, (20, ranks)).astype(float)
        values[rng.random(values.shape) < 0.2] = np.nan
        for row, got in zip(values, above_others(values), strict=True):
            for i in range(ranks):
                others = [x for j, x in enumerate(row) if j != i and not np.isnan(x)]
                right = row[i] - np.median(others) if others else np.nan
                assert got[i] == pytest.approx(right, nan_ok=True)


@pytest.mark.slow
def test_healthy_runs_name_somebody_as_rarely_as_is_said():
    """Of 60 runs 3 are allowed in the mean; the chance of more than 8 is below 1 in 200."""
    rng = np.random.default_rng(0)
    alarms = sum(bool(slow_ranks(history(rng, 16, probes=100)).slow) for _ in range(60))
    assert alarms <= 60 * plan.ALARM * 8 / 3


def write(run, records):
    for record in records:
        append(probe_file(run, record.rank), record)


def test_what_was_written_is_read(tmp_path):
    records = sorted(history(np.random.default_rng(0), 12, probes=3), key=lambda one: (one.rank, one.step))
    write(tmp_path, records)
    got = read_run(tmp_path)
    assert [(one.rank, one.step, one.host) for one in got] == [(one.rank, one.step, one.host) for one in records]
    assert [one.probe for one in got] == pytest.approx([one.probe for one in records], abs=1e-7)


def test_a_run_without_probes_has_none(tmp_path):
    assert read_run(tmp_path) == []


def test_a_resumed_run_replaces_what_it_repeats_and_half_a_line_is_left_out(tmp_path):
    records = history(np.random.default_rng(0), 1, probes=4)
    write(tmp_path, records)
    with probe_file(tmp_path, 0).open("a") as file:
        file.write('{"step": 25, "ra')
    write(tmp_path, records[2:3])
    assert [one.step for one in read(probe_file(tmp_path, 0))] == [5, 10, 15]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("probe", 0.0),
        ("probe", float("nan")),
        ("seconds", -1.0),
        ("step", 1.5),
        ("host", None),
        ("cpu", "x"),
        ("cpu", 10**400),
        ("data", {}),
        ("data", False),
    ],
)
def test_what_no_run_writes_is_refused_with_its_line(tmp_path, name, value):
    (record,) = history(np.random.default_rng(0), 1, probes=1)
    write(tmp_path, [record])
    path = probe_file(tmp_path, 0)
    path.write_text(path.read_text() + json.dumps({**json.loads(path.read_text()), name: value}) + "\n")
    with pytest.raises(DataError, match=r"probe_0\.jsonl:2: this is not a record of a probe"):
        read(path)


def test_a_line_of_something_else_is_refused(tmp_path):
    path = tmp_path / "probe_0.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="not a record of a probe"):
        read(path)


def test_settings_have_defaults_and_say_what_is_wrong():
    assert watch.Settings.read({}) == watch.Settings(every=5, work=1)
    assert watch.Settings.read({"every": 20, "work": 3}) == watch.Settings(20, 3)
    for wrong, says in (
        ({"every": 0}, "straggler_probe.every: 0"),
        ({"work": 0.5}, "straggler_probe.work: 0.5"),
        ({"evry": 5}, "did you mean 'every'"),
        (True, "straggler_probe: write every, work"),
    ):
        with pytest.raises(RecipeError, match=says):
            watch.Settings.read(wrong)


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
def test_two_workers_are_compared(tmp_path):
    """Whether one of them is named depends on what else this machine does."""
    workers.train(tmp_path, 100)
    verdict = slow_ranks(read_run(tmp_path))
    assert (verdict.unknown, verdict.compared) == ([], 2)
    assert len(read_run(tmp_path)) == 2 * 50


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a core each")
@pytest.mark.skipif(not workers.can_limit(), reason="making a control group with a limit needs root")
def test_a_worker_that_a_limit_stops_is_named_with_the_limit(tmp_path):
    with ExitStack() as held:
        workers.train(tmp_path, 50, lambda pids: held.enter_context(workers.limit(pids[1:], 0.05)))
    (one,) = [one for one in slow_ranks(read_run(tmp_path)).slow if (one.kind, one.rank) == ("limit", 1)]
    assert one.until is None and one.since <= 10
