import threading
from types import SimpleNamespace

import pytest
from mindspore import nn
from mindspore.train import serialization

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint import plan
from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor

WRITE = serialization._exec_save
WAIT = 60  # seconds, for what takes milliseconds


class Run:
    """What MindSpore hands to the monitor, step after step."""

    def __init__(self, folder, **settings):
        network = nn.Dense(3, 2)
        network = nn.TrainOneStepCell(network, nn.AdamWeightDecay(network.trainable_params()))
        self.params = SimpleNamespace(
            cur_step_num=0, cur_epoch_num=1, batch_num=100, network=network, train_network=network, net_outputs=None
        )
        self.folder = folder
        self.monitor = SealingCheckpointMonitor(
            prefix="mini", directory=str(folder), use_legacy_format=False, **settings
        )

    def original_args(self):
        return self.params

    def step(self, number):
        self.params.cur_step_num = number
        self.monitor.on_train_step_begin(self)
        self.monitor.step_end(self)

    def end(self):
        self.monitor.on_train_end(self)

    def fault(self, step):
        return plan.fault(self.folder / f"iteration_{step:08d}")


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
    with pytest.raises(CheckpointError, match=r"mini-opt-0000000-0000001\.safetensors not written"):
        run.end()
    assert "did not finish" in run.fault(1)
