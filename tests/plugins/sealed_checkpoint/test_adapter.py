import threading

import pytest
from mindspore.train import serialization

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint import adapter
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
    with pytest.raises(CheckpointError, match=r"mini-opt-0000000-0000001\.safetensors not written"):
        run.end()
    assert "did not finish" in run.fault(1)


@pytest.mark.parametrize("background", [False, True])
def test_the_last_checkpoint_goes_only_when_the_next_is_sealed(tmp_path, monkeypatch, background):
    """With `save_max: 1` MindFormers leaves none that is whole, from the end of a save to its seal."""
    run = Run(tmp_path, async_save=background, keep_checkpoint_max=1)
    seen = []

    def looking(folder, *rest):
        seen.append([run.fault(step) for step in range(1, len(seen) + 1)][-1:])
        return write_seal(folder, *rest)

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
