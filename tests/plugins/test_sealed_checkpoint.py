"""Seals, what is kept and removed, saves in the background, and the count of steps that a resume loads."""

import json
import os
import random
import shutil
import threading

import mindspore as ms
import pytest
from mindformers.core.optim import AdamW
from mindformers.trainer import base_trainer
from mindspore import nn
from mindspore.train import serialization
from safetensors.numpy import load_file

from plugins import enable_plugins
from plugins.errors import CheckpointError
from plugins.lines import ATTEMPT
from plugins.sealed_checkpoint import adapter, plan
from plugins.spike_guard import adapter as spike_guard
from tests.plugins.sealed_checkpoint.test_deaths import Run


@pytest.fixture
def checkpoint(tmp_path):
    """Two ranks' files, sealed by both."""
    for rank in (0, 1):
        for kind in ("model", "opt"):
            name = f"mini-{kind}-{rank:07d}-0000002.safetensors"
            (tmp_path / name).write_bytes(bytes(range(256)) * 40 * (rank + 1))
    (tmp_path / "common.json").write_text("{}")
    (tmp_path / "metadata.json").write_text("{}")
    for rank in (0, 1):
        plan.write_seal(tmp_path, rank, world_size=2, step=7)
    return tmp_path


def test_complete(checkpoint):
    assert plan.fault(checkpoint) is None
    assert plan.step_of(checkpoint) == 7


def test_every_file_is_sealed_exactly_once(checkpoint):
    sealed = [name for rank in (0, 1) for name in json.loads(plan.seal_file(checkpoint, rank).read_text())["files"]]
    assert sorted(sealed) == sorted(p.name for p in checkpoint.iterdir() if not p.name.startswith("seal_"))


@pytest.mark.parametrize("name", ["mini-model-0000001-0000002.safetensors", "common.json", "metadata.json"])
def test_a_missing_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    assert plan.fault(checkpoint) == f"{name} is missing"


def test_a_missing_seal_means_the_save_did_not_finish(checkpoint):
    plan.seal_file(checkpoint, 1).unlink()
    assert plan.fault(checkpoint) == "seal_rank_1.json is missing: the save did not finish"
    plan.seal_file(checkpoint, 0).unlink()
    assert "seal_rank_0.json is missing" in plan.fault(checkpoint)


def test_truncation_and_one_flipped_bit_are_named(checkpoint):
    victim = checkpoint / "mini-opt-0000000-0000002.safetensors"
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    assert plan.fault(checkpoint) == f"{victim.name} does not match its checksum: corrupted"
    victim.write_bytes(data[:-1])
    assert plan.fault(checkpoint).startswith(f"{victim.name} has {len(data) - 1} bytes instead of {len(data)}")


def test_what_cannot_be_read_is_named(checkpoint, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(plan, "checksum", refused)
    with pytest.raises(
        CheckpointError, match=r"0000000-0000002.safetensors: this path cannot be read \(Permission denied\)"
    ):
        plan.fault(checkpoint)
    plan.seal_file(checkpoint, 0).unlink()
    plan.seal_file(checkpoint, 0).mkdir()
    with pytest.raises(CheckpointError, match=r"seal_rank_0.json: this path cannot be read \(Is a directory\)"):
        plan.fault(checkpoint)


def test_a_seal_is_for_whoever_the_umask_allows(checkpoint):
    before = os.umask(0o027)
    try:
        seal = plan.write_seal(checkpoint, 1, world_size=2, step=7)
    finally:
        os.umask(before)
    assert seal.stat().st_mode & 0o777 == 0o640


def test_a_broken_seal_is_a_fault_not_a_crash(checkpoint):
    plan.seal_file(checkpoint, 0).write_text('{"world_size": ')
    assert "unreadable" in plan.fault(checkpoint)
    plan.seal_file(checkpoint, 0).write_text("[]")
    assert "unreadable" in plan.fault(checkpoint)


def test_nothing_to_seal_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="rank 0 of 1"):
        plan.write_seal(tmp_path, 0, world_size=1, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "world_size", "optimizer", "names"),
    [
        (0, 1, True, ["x-model-0000000-0000001.safetensors", "x-opt-0000000-0000001.safetensors", "common.json"]),
        (0, 1, False, ["x-model-0000000-0000001.safetensors", "common.json"]),
        (0, 16, False, ["x-model-0000000-0000016.safetensors", "common.json", "metadata.json"]),
        (11, 16, True, ["x-model-0000011-0000016.safetensors", "x-opt-0000011-0000016.safetensors"]),
    ],
)
def test_nothing_is_sealed_unless_all_is_there(tmp_path, rank, world_size, optimizer, names):
    assert plan.expected_files("x", rank, world_size, optimizer) == names
    for absent in names:
        for name in names:
            (tmp_path / name).write_text(name)
        (tmp_path / absent).rename(tmp_path / f"{absent}.tmp")
        with pytest.raises(CheckpointError, match=f"MindFormers did not write {absent}"):
            plan.write_seal(tmp_path, rank, world_size, 3, names)
        assert not plan.seal_file(tmp_path, rank).exists()
    (tmp_path / absent).write_text("")
    seal = plan.write_seal(tmp_path, rank, world_size, 3, names)
    assert sorted(json.loads(seal.read_text())["files"]) == sorted(names)


def test_nothing_is_removed_while_a_rank_has_not_sealed_the_newest(checkpoint, tmp_path):
    root = tmp_path.with_name("root")
    old, new = root / "iteration_00000004", root / "iteration_00000007"
    shutil.copytree(checkpoint, old)
    shutil.copytree(checkpoint, new)
    plan.seal_file(new, 1).rename(tmp_path / "later")
    assert plan.remove_old(root, new, keep=1) == [] and old.exists()
    (tmp_path / "later").rename(plan.seal_file(new, 1))
    assert plan.remove_old(root, new, keep=2) == [] and old.exists()
    assert plan.remove_old(root, new, keep=1) == [old] and not old.exists()
    assert plan.fault(new) is None and [path.name for path in root.iterdir()] == [new.name]


def test_a_checkpoint_that_one_rank_has_refused_is_none_of_those_that_are_kept(checkpoint, tmp_path):
    root = tmp_path.with_name("refusing")
    old, refused, new = [shutil.copytree(checkpoint, root / f"iteration_{step:08d}") for step in (4, 7, 9)]
    plan.write_refusal(refused, 1, "a weight is NaN")
    assert plan.remove_old(root, new, keep=2) == [refused] and plan.fault(old) is None
    plan.write_refusal(shutil.copytree(checkpoint, refused), 1, "a weight is NaN")
    plan.write_seal(refused, 1, world_size=2, step=7)
    assert plan.remove_old(root, new, keep=2) == [old], "the same step was saved again, and is whole"


def saved(root, step, attempt=None, ranks=(0, 1), **more):
    """A checkpoint as an attempt saves it, in its own folder until `publish`."""
    folder = plan.saving_folder(root, attempt) / f"iteration_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "common.json").write_text("{}")
    for rank in (0, 1):
        (folder / f"mini-model-{rank:07d}-0000002.safetensors").write_text(f"{attempt} {step}")
    for rank in ranks:
        plan.write_seal(folder, rank, 2, step, made={"attempt": attempt, **more} if attempt else {})
    return folder


def kept(root):
    return [plan.iteration(folder) for folder in reversed(plan.iterations(root))]


def test_as_many_are_kept_however_many_attempts_have_saved_them(tmp_path):
    """Six attempts, each of which saves twice and dies in its third save; some before attempts had names."""
    for number, attempt in enumerate([None, None, "0002-a", "0003-b", "0010-c", "0011-d"]):
        for step in (10 * number + 1, 10 * number + 2):
            newest = plan.publish(saved(tmp_path, step, attempt), tmp_path)
            plan.remove_old(tmp_path, newest, 1, attempt)
            assert kept(tmp_path) == [step]
        saved(tmp_path, 10 * number + 3, attempt, ranks=[1])  # the kill comes before the other rank has sealed
    assert kept(tmp_path) == [52] and len(plan.unfinished(tmp_path)) == 1, "only of the last attempt"
    for attempt in ("0012-e", "0013-f"):
        plan.publish(saved(tmp_path, 60 + plan.number_of(attempt), attempt), tmp_path)
    plan.remove_old(tmp_path, tmp_path / "iteration_00000073", 2, "0013-f")
    assert kept(tmp_path) == [72, 73] and not plan.unfinished(tmp_path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("keep", "skip"), [(2, 11), (3, 11), (3, 21), (3, 1)])
def test_a_spike_after_any_save_finds_a_checkpoint_from_before_it(tmp_path, keep, skip, seed):
    """Saves on request pushed out the only checkpoint that was old enough, and the run began at step 1 again."""
    draw, step, steps = random.Random(seed), 0, []
    for _ in range(30):
        step += 10 if draw.random() < 0.5 else draw.randint(1, 9)  # of a save on request, after which the run goes on
        steps.append(step)
        plan.remove_old(tmp_path, plan.publish(saved(tmp_path, step, "0001-a"), tmp_path), keep, "0001-a", skip)
        left = kept(tmp_path)
        assert len(left) == min(keep, len(steps)) and left[-1] == step
        assert step + 1 - skip < steps[0] or left[0] <= step + 1 - skip
        assert skip > 1 or left == steps[-keep:]


@pytest.mark.parametrize(
    ("skip", "every", "left"),
    [(11, 10, [10, 23]), (1, 10, [20, 23]), (12, 10, [20, 23])],
    ids=["needed", "no guard", "too few are kept in any case"],
)
def test_the_monitor_keeps_what_the_spike_guard_needs(tmp_path, monkeypatch, skip, every, left):
    monkeypatch.setattr(adapter.SealingCheckpointMonitor, "skip", skip)
    run = Run(tmp_path, keep_checkpoint_max=2, save_checkpoint_steps=every)
    for step in (10, 20):
        run.step(step)
    run.params.cur_step_num = 23
    run.monitor._save_megatron_ckpt_file_format(run.params)
    assert kept(tmp_path) == left


@pytest.mark.parametrize(("guard", "skip"), [({"skip": 7}, 7), ({}, 1), (False, 1)])
def test_the_monitor_is_told_what_the_spike_guard_leaves_out(monkeypatch, guard, skip):
    for name in ("run_dir", "skip", "skipped"):
        monkeypatch.setattr(adapter.SealingCheckpointMonitor, name, None)
    monkeypatch.setattr(spike_guard, "enable", lambda config, settings: None)
    enable_plugins({"plugins": {"finite_loss": False, "spike_guard": guard}})
    assert adapter.SealingCheckpointMonitor.skip == skip


def test_regular_saves_keep_the_newest_also_for_a_spike_guard(tmp_path):
    for step in range(10, 80, 10):
        plan.remove_old(tmp_path, plan.publish(saved(tmp_path, step, "0001-a"), tmp_path), 3, "0001-a", 21)
        assert kept(tmp_path) == list(range(max(step - 20, 10), step + 1, 10))


def test_what_nobody_sealed_is_put_aside_or_newer_is_not_removed(tmp_path):
    (tmp_path / "iteration_00000001").mkdir()
    aside = saved(tmp_path, 2).rename(tmp_path / "set_aside_iteration_00000002")
    newer = saved(tmp_path, 9)
    plan.remove_old(tmp_path, plan.publish(saved(tmp_path, 5, "0004-a"), tmp_path), 1, "0004-a")
    assert kept(tmp_path) == [1, 5, 9] and aside.exists() and newer.exists()


def test_a_late_rank_removes_and_replaces_nothing_of_the_attempts_that_followed_its_own(tmp_path):
    """Attempt 1 was held up at its save of step 8; attempt 2 began again at step 4, for a spike, and goes on."""
    late = saved(tmp_path, 8, "0001-a")
    plan.publish(saved(tmp_path, 6, "0002-b"), tmp_path)
    plan.publish(saved(tmp_path, 8, "0002-b"), tmp_path)
    assert plan.publish(late, tmp_path) is None
    assert plan.remove_old(tmp_path, tmp_path / "iteration_00000008", 1, "0001-a") == []
    assert kept(tmp_path) == [6, 8] and plan.made(tmp_path / "iteration_00000008") == {"attempt": "0002-b"}
    saved(tmp_path, 10, "0002-b", ranks=[0])
    plan.remove_old(tmp_path, plan.publish(saved(tmp_path, 9, "0001-c"), tmp_path), 1, "0001-c")
    assert "saving_0002-b" in [folder.parent.name for folder in plan.unfinished(tmp_path)]


def test_parts_of_two_attempts_are_no_whole_checkpoint(tmp_path):
    folder = saved(tmp_path, 8, "0001-a")
    assert plan.fault(folder) is None
    plan.write_seal(folder, 1, 2, 8, made={"attempt": "0002-b"})
    mixed = "its parts are of several attempts of the run (0001-a, 0002-b)"
    assert plan.fault(folder) == plan.fault(folder, (1, 2)) == mixed
    plan.write_seal(folder, 1, 2, 8)  # by a rank of before attempts had names
    assert plan.fault(folder) == "its parts are of several attempts of the run (0001-a, None)"


def test_seals_without_an_attempt_are_as_good_as_ever(tmp_path):
    folder = saved(tmp_path, 8)
    assert plan.fault(folder) is None and plan.made(folder) == {} and plan.step_of(folder) == 8


def test_a_save_that_its_attempt_could_not_put_in_its_place_is_not_lost(tmp_path):
    """The kill came after the last seal; what stands there is half of an attempt before."""
    saved(tmp_path, 8, ranks=[0])
    whole = saved(tmp_path, 8, "0001-a")
    saved(tmp_path, 12, "0001-a", ranks=[0])
    assert plan.adopt(tmp_path) == [tmp_path / "iteration_00000008"] and not whole.exists()
    assert plan.fault(tmp_path / "iteration_00000008") is None and kept(tmp_path) == [8]


def test_no_other_checkpoint_takes_the_place_of_one_that_cannot_be_read(tmp_path, monkeypatch):
    """It may be whole, and was deleted."""
    place, check = saved(tmp_path, 8, "0001-a"), plan._file_fault
    place, later = plan.publish(place, tmp_path), saved(tmp_path, 8, "0002-b")

    def failing(path, *more):
        if path.parent == place:
            raise OSError(5, "Input/output error", str(path))
        return check(path, *more)

    monkeypatch.setattr(plan, "_file_fault", failing)
    assert plan.adopt(tmp_path) == [] and later.exists() and plan.made(place) == {"attempt": "0001-a"}
    assert (tmp_path / plan.TRACKER).read_text() == "8"
    again = saved(tmp_path, 8, "0000-b")
    assert plan.adopt(tmp_path) == [] and again.exists(), "what is whole stays"


def test_a_checkpoint_with_a_truncated_file_is_neither_put_in_its_place_nor_kept_there(tmp_path):
    """By the names of its files it was complete: it took the place of what a resume could have used, or kept it."""
    name = "mini-model-0000001-0000002.safetensors"
    (saved(tmp_path, 8) / name).write_text("")
    whole = saved(tmp_path, 8, "0001-a")
    cut = saved(tmp_path, 12, "0001-a")
    (cut / name).write_text("")
    assert plan.adopt(tmp_path) == [tmp_path / "iteration_00000008"] and not whole.exists() and cut.exists()
    assert plan.fault(tmp_path / "iteration_00000008") is None and kept(tmp_path) == [8]


def test_a_rank_that_refuses_says_why(checkpoint):
    plan.write_refusal(checkpoint, 1, "w is not finite")
    assert plan.fault(checkpoint) == "w is not finite"
    assert plan.newest_of_rank(checkpoint.parent, 0) is None, "no iteration's name"


def test_the_newest_of_a_rank_is_one_that_it_has_sealed(tmp_path):
    for step in (4, 8, 12, 16):
        folder = tmp_path / f"iteration_{step:08d}"
        folder.mkdir()
        (folder / "mini-model-0000000-0000001.safetensors").touch()
        if step < 12:
            plan.write_seal(folder, 0, world_size=1, step=step)
    plan.write_refusal(tmp_path / "iteration_00000012", 0, "w is not finite")
    assert plan.newest_of_rank(tmp_path, 0) == tmp_path / "iteration_00000008"
    for broken in ("", "5", "null", "[]"):
        plan.seal_file(tmp_path / "iteration_00000012", 0).write_text(broken)
        assert plan.newest_of_rank(tmp_path, 0) == tmp_path / "iteration_00000008"


WRITE = serialization._exec_save
WAIT = 300  # seconds, for what takes milliseconds


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("redundant", [True, False])
@pytest.mark.parametrize("optimizer", [True, False])
def test_every_save_of_one_worker_is_whole(tmp_path, background, redundant, optimizer):
    run = Run(tmp_path, async_save=background, remove_redundancy=not redundant, save_optimizer=optimizer)
    run.step(1)
    run.step(2)
    run.end()
    assert [run.fault(1), run.fault(2)] == [None, None]
    assert (tmp_path / "iteration_00000001" / "mini-opt-0000000-0000001.safetensors").exists() == optimizer


def test_a_save_slower_than_the_interval_is_sealed_before_the_next(tmp_path, monkeypatch):
    go = threading.Event()

    def held_up(name, *rest):
        if "iteration_00000001" in name:
            assert go.wait(WAIT)
        WRITE(name, *rest)

    monkeypatch.setattr(serialization, "_exec_save", held_up)
    run = Run(tmp_path, async_save=True, save_optimizer=False)
    run.step(1)
    run.monitor.on_train_step_begin(run)
    assert "did not finish" in run.fault(1)
    threading.Timer(0.3, go.set).start()
    run.params.cur_step_num = 2
    run.monitor.step_end(run)
    assert run.fault(1) is None
    run.end()
    assert run.fault(2) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_background_save_that_failed_stops_the_training(tmp_path, monkeypatch):
    def disk_full(name, *rest):
        if "-opt-" in name:
            raise OSError(28, "No space left on device", name)
        WRITE(name, *rest)

    monkeypatch.setattr(serialization, "_exec_save", disk_full)
    run = Run(tmp_path, async_save=True)
    run.step(1)
    with pytest.raises(CheckpointError, match=r"did not write mini-opt-0000000-0000001\.safetensors"):
        run.end()
    assert "did not finish" in run.fault(1)


@pytest.mark.parametrize("background", [False, True])
def test_the_last_checkpoint_goes_only_when_the_next_is_sealed(tmp_path, monkeypatch, background):
    """With `save_max: 1` MindFormers leaves none that is whole, from the end of a save to its seal."""
    run = Run(tmp_path, async_save=background, keep_checkpoint_max=1)
    seen = []

    def looking(folder, *rest, **more):
        seen.append([run.fault(step) for step in range(1, len(seen) + 1)][-1:])
        return write_seal(folder, *rest, **more)

    write_seal = adapter.write_seal
    monkeypatch.setattr(adapter, "write_seal", looking)
    run.step(1)
    run.step(2)
    run.step(3)
    run.end()
    assert seen == [[], [None], [None]], "each time the one before is whole"
    assert [path.name for path in sorted(tmp_path.glob("iteration_*"))] == ["iteration_00000003"]


def test_no_more_are_kept_than_asked_for(tmp_path):
    run = Run(tmp_path, keep_checkpoint_max=2)
    for step in range(1, 5):
        run.step(step)
    run.end()
    assert [path.name[-1] for path in sorted(tmp_path.glob("iteration_*"))] == ["3", "4"]


def test_no_more_are_kept_after_any_number_of_attempts(tmp_path, monkeypatch):
    for attempt in range(3):
        monkeypatch.setenv(ATTEMPT, f"{attempt:04d}-a")
        run = Run(tmp_path, keep_checkpoint_max=2)
        run.monitor._append_step_num = 2 * attempt
        run.step(1)
        run.step(2)
        run.end()
    assert [path.name[-1] for path in sorted(tmp_path.glob("iteration_*"))] == ["5", "6"]
    assert (tmp_path / plan.TRACKER).read_text() == "6" and not list(tmp_path.glob("saving_*"))


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_wakes_in_the_middle_of_its_save_spoils_nothing_of_the_next_attempt(
    tmp_path, monkeypatch, background
):
    """It was held up between its two files; the attempt that followed has saved the same step meanwhile."""
    go, held = threading.Event(), threading.Event()

    def held_up(name, *rest):
        if threading.current_thread() is late and "-opt-" in name:
            held.set()
            assert go.wait(WAIT)
        WRITE(name, *rest)

    monkeypatch.setattr(serialization, "_exec_save", held_up)
    monkeypatch.setenv(ATTEMPT, "0001-old")
    old = Run(tmp_path)
    late = threading.Thread(target=lambda: old.step(3), daemon=True)
    late.start()
    assert held.wait(WAIT)
    monkeypatch.setenv(ATTEMPT, "0002-new")
    new = Run(tmp_path, async_save=background)
    writing = adapter.write_seal

    def wakes(folder, *rest, **more):  # the new attempt has written, and not sealed yet
        go.set()
        late.join(WAIT)
        return writing(folder, *rest, **more)

    monkeypatch.setattr(adapter, "write_seal", lambda *rest, **more: (writing if go.is_set() else wakes)(*rest, **more))
    moment = new.params.network.optimizer.moments1[0]
    moment.set_data(moment + 100)
    new.step(3)
    new.end()
    folder = tmp_path / "iteration_00000003"
    assert new.fault(3) is None
    assert (load_file(folder / "mini-opt-0000000-0000001.safetensors")[moment.name] > 50).all()


def test_an_attempt_that_another_one_has_followed_puts_nothing_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter.SealingCheckpointMonitor, "run_dir", str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "0001-old")
    run = Run(tmp_path / "checkpoint")
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    run.step(1)
    (tmp_path / "attempts" / "0002").mkdir()
    run.step(2)
    assert [path.name[-1] for path in sorted(tmp_path.glob("checkpoint/iteration_*"))] == ["1"]
    assert [path.name for path in plan.adopt(tmp_path / "checkpoint")] == ["iteration_00000002"]


PREFIX = "mini-{}-0000000-0000001.safetensors"


class Step(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ms.ops.ones((2, 2)), name="weight")


@pytest.fixture
def saved_folder(tmp_path):
    """Return the folder of a checkpoint that one process saved at step 4."""
    network = Step()
    optimizer = AdamW(network.trainable_params())
    optimizer.global_step.set_data(ms.Tensor([4], ms.int32))
    optimizer.exp_avg[0].set_data(ms.ops.full((2, 2), 7.0))
    ms.save_checkpoint(network, str(tmp_path / PREFIX.format("model")), format="safetensors")
    others = {"choice_func": lambda name: name != "weight", "format": "safetensors"}
    ms.save_checkpoint(optimizer, str(tmp_path / PREFIX.format("opt")), **others)
    return tmp_path


@pytest.mark.parametrize(("given", "loaded"), [(8, 8), (4, 4), (None, 4)])
def test_the_count_that_the_trainer_computed_is_loaded_with_the_moments(saved_folder, given, loaded):
    adapter.load_scaled_step()
    network = Step()
    optimizer = AdamW(network.trainable_params())
    optimizer.global_step.sliced = True  # as in a sharded graph, whose checkpoints have no other parameters
    base_trainer.load_checkpoint(checkpoint=str(saved_folder), network=network, optimizer=optimizer, global_step=given)
    assert int(optimizer.global_step) == loaded and optimizer.global_step.sliced
    assert (optimizer.exp_avg[0].asnumpy() == 7.0).all()
