"""What MindFormers is given while the batch grows: a rank's batches, and the steps that a schedule counts."""

import numpy as np
import pytest
from mindformers.core.lr import ConstantWarmUpLR
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.dataset import GeneratorDataset

from plugins.batch_ramp import reference
from plugins.batch_ramp.adapter import BySamples, Stage, Steps
from plugins.batch_ramp.plan import Division, Ramp

RAMP = Ramp(((2, 2), (4, 4)), 6)


class Samples:
    """Each sample is two columns that hold its number."""

    def __len__(self):
        return 30

    def __getitem__(self, item):
        return np.full(3, item, np.int32), np.array([item, item + 1], np.int32)


def batches(rank, ranks, done=0):
    """First column, first element of each row, of the batches that MindSpore delivers to a rank after `done` steps."""
    data = GeneratorDataset(Steps(Samples(), RAMP, rank, ranks, 30), column_names=["a", "b"], shuffle=False)
    assert data.get_dataset_size() == len(reference.batches(RAMP.stages, RAMP.full, 30)) == 7
    if done:
        data.set_init_step(done)
    read = list(data.create_tuple_iterator(num_epochs=1, output_numpy=True))
    assert all(a.shape == (len(b), 3) and b.shape[1] == 2 for a, b in read)
    assert all((b[:, 0] == a[:, 0]).all() and (b[:, 1] == a[:, 0] + 1).all() for a, b in read)
    return [a[:, 0].tolist() for a, _ in read]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_is_dealt_its_samples_of_each_step(ranks):
    plan = reference.batches(RAMP.stages, RAMP.full, 30)
    for rank in range(ranks):
        assert batches(rank, ranks) == [reference.dealt(step, ranks)[rank] for step in plan]


@pytest.mark.parametrize("done", [1, 2, 3, 5])
def test_a_resume_goes_on_with_the_next_step_of_its_stage(done):
    assert batches(0, 1, done) == reference.batches(RAMP.stages, RAMP.full, 30)[done:]


def test_columns_are_joined_as_mindformers_joins_them():
    def join(samples, columns):
        assert samples == 2 * len(columns[0]), "of both ranks"
        return [columns[0], [column + 100 for column in columns[1]]]

    first, second = Steps(Samples(), RAMP, 1, 2, 30, join)[3]
    assert first[:, 0].tolist() == [9, 11] and second[:, 0].tolist() == [109, 111]


@pytest.mark.usefixtures("graph_mode")
def test_a_schedule_along_samples_counts_steps_of_the_full_batch():
    schedule = ConstantWarmUpLR(learning_rate=1.0, warmup_steps=4, total_steps=8)

    class Rate(nn.Cell):
        def __init__(self):
            super().__init__()
            self.rate = BySamples(schedule, RAMP)

        def construct(self, step):
            return self.rate(step)

    rate = Rate()
    got = [float(rate(Tensor([step], mstype.int32)).asnumpy().reshape(-1)[0]) for step in range(10)]
    along = [reference.full_steps(RAMP.stages, RAMP.full, step) for step in range(10)]
    np.testing.assert_allclose(got, np.minimum(np.array(along) / 4, 1.0), rtol=1e-6)
    assert along[4] == 2.0 and got[4] == pytest.approx(0.5)


def test_callbacks_divide_by_the_micro_batches_of_the_stage():
    from mindformers.core.callback.callback import MFLossMonitor, TopkBiasBalanceCallback

    losses = MFLossMonitor(micro_batch_num=6, global_batch_size=24)
    losses.mf_calculated = True
    loads = TopkBiasBalanceCallback()
    stage = Stage(Division(ranks=2, micro=2, micro_batches=6, pipeline=2, whole=False))
    stage.samples = 12
    stage.tell([losses, loads, object()])
    assert (losses.global_batch_size, losses.mirco_size, losses.gradient_accumulation_steps) == (12, 3, 1)
    assert losses.mf_calculated is False and loads.gradient_accumulation_steps == 0.5
    accumulated = Stage(Division(ranks=1, micro=2, micro_batches=6, pipeline=1, whole=False))
    accumulated.samples = 8
    accumulated.tell([losses, loads])
    assert (losses.global_batch_size, losses.gradient_accumulation_steps) == (8, 4)
    assert loads.gradient_accumulation_steps == 4
