"""The guard in MindFormers' monitors and loader, driven without a training; with one, see tests/training."""

import json

import numpy as np
import pytest

from plugins.attention_balance.adapter import Reordered
from plugins.errors import DataError, StoppedError
from plugins.finite_loss import adapter as finite_loss
from plugins.spike_guard import reference
from plugins.spike_guard.adapter import Guard, Skipping, _beginning, check_enough, spare_of
from plugins.spike_guard.ledger import read_ledger
from plugins.spike_guard.plan import Settings
from tests.plugins.finite_loss.test_adapter import Logging, Training

NAN = float("nan")


class Beginning(Logging):
    global_batch_size = 8

    def on_train_begin(self, run_context):
        pass


class Guarded(Training):
    """A training after four steps whose losses were about 1."""

    def __init__(self, folder, **settings):
        self.guard = Guard(Settings(**{"window": 4, "rollbacks": 1, **settings}), str(folder), (), has_loss=True)
        super().__init__(self.guard, folder)
        self.monitor = _beginning(finite_loss._watching(Beginning, self.guard, self.guard.end), self.guard)()

    def begin(self, folder, losses=(1.0, 1.02, 0.98, 1.0)):
        metrics = folder / "metrics" / "rank_0.jsonl"
        metrics.parent.mkdir(exist_ok=True)
        lines = [{"step": step, "loss": loss, "global_norm": 1.0} for step, loss in enumerate(losses, 1)]
        metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
        self.monitor.on_train_begin(self)


def test_a_spike_after_a_resume_is_judged_by_the_steps_before_it_and_leaves_a_ledger(tmp_path):
    training = Guarded(tmp_path)
    training.begin(tmp_path)
    training.step(1, norm=1.1)
    with pytest.raises(
        StoppedError, match=r"^spike: step 7: global norm 9 is .*; going back to before step 7, without"
    ):
        training.step(3, norm=9.0)
    (entry,) = read_ledger(tmp_path)
    assert (entry.step, entry.samples) == (7, ((48, 56),))


def test_without_enough_steps_before_it_a_spike_is_none(tmp_path):
    training = Guarded(tmp_path)
    training.begin(tmp_path, losses=(1.0, 1.0))
    training.step(1, norm=9.0)


def test_what_is_not_finite_goes_back_at_once_and_at_last_gives_up_with_the_way_on(tmp_path):
    training = Guarded(tmp_path)
    training.begin(tmp_path, losses=())
    with pytest.raises(StoppedError, match="spike: step 5: lm loss is NaN; going back to before step 5"):
        training.step(1, loss=NAN, parts=(NAN, 1.0, 1.0, 0.0))
    training = Guarded(tmp_path, skipped=((32, 40),))
    training.begin(tmp_path, losses=())
    words = "they are not the cause; the run has gone back 1 time .*; nothing was saved before, so start over with a"
    with pytest.raises(StoppedError, match=words):
        training.step(1, loss=NAN, parts=(NAN, 1.0, 1.0, 0.0))
    assert len(read_ledger(tmp_path)) == 1


def test_a_rank_of_a_pipeline_without_the_loss_judges_the_norm_alone(tmp_path):
    training = Guarded(tmp_path)
    training.guard.has_loss = False
    training.begin(tmp_path)
    training.guard.logged = 50.0
    assert training.guard.see(5, {"loss": 50.0}, 1.0, False, 1.0) is None
    assert "global norm 50" in training.guard.see(6, {"loss": 1.0}, 50.0, False, 1.0)


def test_a_step_that_the_optimizer_skips_for_its_loss_scale_is_not_judged(tmp_path):
    training = Guarded(tmp_path)
    training.begin(tmp_path)
    assert training.guard.see(5, {"loss": 1.0}, 50.0, True, 1024.0) is None


def test_a_run_whose_data_has_no_samples_to_spare_does_not_begin(tmp_path):
    training = Guarded(tmp_path, rollbacks=2, skip=3)
    training.guard.spare = lambda wanted: min(wanted, 47)
    with pytest.raises(DataError, match=r"only 47 samples beyond .* may leave out 48 \(2 rollbacks, 3 steps of 8"):
        training.begin(tmp_path)


class Blend:
    """MindFormers' BlendedDataset: 10 samples of two data sets that have more."""

    weights = (0.5, 0.5)
    datasets = ([f"a{item}" for item in range(9)], [f"b{item}" for item in range(7)])
    dataset_index = np.array([0, 1] * 5, np.int16)

    def __len__(self):
        return 10

    def __getitem__(self, item):
        return self.datasets[self.dataset_index[item]][item // 2]


def test_the_samples_behind_a_blend_fill_its_end_and_it_keeps_its_length():
    everything = [f"{'ab'[item % 2]}{item // 2}" for item in range(14)]
    for source, names in [(Blend(), everything), (Reordered(Blend(), np.arange(10)[::-1]), None)]:
        names = names or everything[:10][::-1] + everything[10:]
        view = Skipping(source, ((2, 4), (7, 8)))
        assert len(view) == 10
        wanted = reference.samples(13, [(2, 4), (7, 8)])
        assert [view[place] for place in range(10)] == [names[sample] for sample in wanted]


def test_data_that_ends_is_told_how_much_is_left():
    assert spare_of(Blend(), ((2, 4),), 10, 100) == 3 and spare_of(Blend(), ((2, 4),), 10, 2) == 2
    plain = [*range(10)]
    assert spare_of(plain, ((2, 4),), 6, 100) == 2 and len(Skipping(plain, ((2, 4),))) == 8
    check_enough(plain, ((2, 4),), 8)
    with pytest.raises(
        DataError, match=r"without the 2 samples that are left out, the data has only 8 of the 9 samples that"
    ):
        check_enough(plain, ((2, 4),), 9)
