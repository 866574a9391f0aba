import threading

import mindspore as ms
import pytest
from mindformers.core.optim import AdamW
from mindformers.trainer import base_trainer
from mindspore import nn
from mindspore.train import serialization
from safetensors.numpy import load_file

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint import adapter, plan
from plugins.sealed_checkpoint.plan import ATTEMPT, TRACKER
from tests.plugins.sealed_checkpoint.saving import Run

WRITE = serialization._exec_save
WAIT = 60  # seconds, for what takes milliseconds


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
    assert (tmp_path / TRACKER).read_text() == "6" and not list(tmp_path.glob("saving_*"))


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
def saved(tmp_path):
    """One process saved it at step 4."""
    network = Step()
    optimizer = AdamW(network.trainable_params())
    optimizer.global_step.set_data(ms.Tensor([4], ms.int32))
    optimizer.exp_avg[0].set_data(ms.ops.full((2, 2), 7.0))
    ms.save_checkpoint(network, str(tmp_path / PREFIX.format("model")), format="safetensors")
    others = {"choice_func": lambda name: name != "weight", "format": "safetensors"}
    ms.save_checkpoint(optimizer, str(tmp_path / PREFIX.format("opt")), **others)
    return tmp_path


@pytest.mark.parametrize(("given", "loaded"), [(8, 8), (4, 4), (None, 4)])
def test_the_count_that_the_trainer_computed_is_loaded_with_the_moments(saved, given, loaded):
    adapter.load_scaled_step()
    network = Step()
    optimizer = AdamW(network.trainable_params())
    optimizer.global_step.sliced = True  # as in a sharded graph, whose checkpoints have no other parameters
    base_trainer.load_checkpoint(checkpoint=str(saved), network=network, optimizer=optimizer, global_step=given)
    assert int(optimizer.global_step) == loaded and optimizer.global_step.sliced
    assert (optimizer.exp_avg[0].asnumpy() == 7.0).all()
