"""Steps and samples of a ramp against the list of all samples, and what its settings refuse.

What MindFormers is given while the batch grows: a rank's batches, and the steps that a schedule counts.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindformers import MindFormerConfig
from mindformers.core.lr import ConstantWarmUpLR
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.dataset import GeneratorDataset

from plugins.batch_ramp import adapter, reference
from plugins.batch_ramp.adapter import BySamples, Stage, Steps
from plugins.batch_ramp.plan import LOADER, Division, Ramp, Settings, check, division_of, ramp_of, scheduled
from plugins.errors import RecipeError


@st.composite
def ramps(draw):
    """A ramp of up to four stages whose batches a drawn number of ranks divides, and that number."""
    ranks = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 6), max_size=4))
    grown = draw(st.lists(st.integers(1, 3), min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    sizes = [ranks * sum(grown[: place + 1]) for place in range(len(grown))]
    return Ramp(tuple(zip(ends, sizes, strict=False)), sizes[-1]), ranks


@given(ramps(), st.integers(0, 200))
def test_steps_train_each_sample_once_and_in_order(drawn, samples):
    ramp, ranks = drawn
    steps = reference.batches(ramp.stages, ramp.full, samples)
    assert ramp.steps_of(samples) == len(steps)
    done = 0
    for number, step in enumerate(steps, 1):
        assert ramp.batch_at(number) == len(step) and ramp.samples_until(number - 1) == done
        hands = [list(ramp.rows_at(number, rank, ranks)) for rank in range(ranks)]
        assert hands == reference.dealt(step, ranks)
        assert len({len(hand) for hand in hands}) == 1, "each rank has equally many"
        done += len(step)
    assert ramp.samples_until(len(steps)) == done <= samples < done + ramp.batch_at(len(steps) + 1)


@given(ramps(), st.integers(1, 200), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=10))
def test_a_killed_run_trains_each_sample_once(drawn, samples, kills):
    """A kill comes some steps after the last save; the next attempt goes on from that save with the same plan."""
    ramp, ranks = drawn
    last, kept, saved = ramp.steps_of(samples), [], 0

    def train(first, until):
        for number in range(first, until + 1):
            hands = [ramp.rows_at(number, rank, ranks) for rank in range(ranks)]
            kept.append([sample for row in zip(*hands, strict=True) for sample in row])

    for more, lost in kills:
        at = min(saved + more, last)
        train(saved + 1, min(at + lost, last))
        del kept[at:]  # what the killed attempt trained after its last save is gone with it
        saved = at
    train(saved + 1, last)
    assert kept == reference.batches(ramp.stages, ramp.full, samples)


@given(ramps(), st.integers(1, 40))
def test_a_schedule_along_samples_counts_steps_of_the_full_batch(drawn, steps):
    ramp, _ = drawn
    stages = [list(stage) for stage in ramp.stages]
    along = {"plugins": {"batch_ramp": {"stages": stages, "learning_rate": "samples"}}}
    if stages:
        counted = math.ceil(reference.full_steps(ramp.stages, ramp.full, steps))
        assert scheduled(along, ramp, steps) == counted
    assert scheduled({"plugins": {"batch_ramp": {"stages": stages}}}, ramp, steps) == steps


@given(ramps(), st.integers(1, 30))
def test_a_stage_ends_before_the_batch_is_another_one(drawn, step):
    ramp, _ = drawn
    end = ramp.end_at(step)
    assert end is None or (step <= end and ramp.batch_at(end) == ramp.batch_at(step) != ramp.batch_at(end + 1))
    assert (end is None) == (ramp.batch_at(step) == ramp.batch_at(1_000))


def test_without_stages_it_is_the_plain_arithmetic():
    ramp = ramp_of({}, 8)
    assert (ramp.steps_of(47), ramp.samples_until(5), ramp.batch_at(1)) == (5, 40, 8)
    assert ramp_of({"plugins": {"batch_ramp": {"stages": [[1, 0]]}}}, 8) == ramp, "what is refused counts as none"


RECIPE = {
    "context": {"mode": 0},
    "use_parallel": True,
    "runner_config": {"batch_size": 2, "sink_mode": False},
    "parallel": {"parallel_mode": 0},
    "parallel_config": {"data_parallel": 4},
    "train_dataset": {"data_loader": {"type": "BlendedMegatronDatasetDataLoader", "sizes": [100, 0, 0]}},
}
SHARDED = {"context": {"mode": 0, "dataset_broadcast_opt_level": 0}, "parallel": {"parallel_mode": 1},
           "runner_config": {"batch_size": 2, "sink_mode": False},
           "parallel_config": {"data_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 6}}  # fmt: skip
TURNED = {**SHARDED, "parallel": {"parallel_mode": 1, "pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}}}
FEW = {**SHARDED, "parallel_config": {**SHARDED["parallel_config"], "micro_batch_num": 2}}


def with_ramp(stages, **changes):
    return {**RECIPE, **changes, "plugins": {"batch_ramp": {"stages": stages}, **changes.get("plugins", {})}}


def test_how_layouts_divide_a_step():
    assert division_of(RECIPE) == Division(4, 2, 1, 1, True)
    assert division_of({**RECIPE, **SHARDED}) == Division(2, 2, 6, 2, False)
    alone = division_of({**RECIPE, "use_parallel": False})
    assert (alone.unit, alone.full) == (1, 2)
    assert check(with_ramp([[2, 4]])) == Settings(((2, 4),), "steps")
    assert check(with_ramp([[2, 8], [4, 16]], **SHARDED)).stages == ((2, 8), (4, 16))


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        ({}, "which this recipe lacks; write 'steps'"),
        (
            {"lr_schedule": {"type": "ConstantWarmUpLR"}, "grouped_lr_schedule": {"default": {}}},
            "not with a schedule for each parameter group",
        ),
        ({"lr_schedule": {"type": "ConstantWarmUpLR"}}, ""),
    ],
)
def test_an_axis_of_samples_needs_one_schedule(schedules, words):
    recipe = with_ramp([[2, 4]], **schedules)
    recipe["plugins"]["batch_ramp"]["learning_rate"] = "samples"
    if not words:
        assert check(recipe).learning_rate == "samples"
        return
    with pytest.raises(RecipeError, match=words) as raised:
        check(recipe)
    assert raised.value.key == "plugins.batch_ramp.learning_rate"


@pytest.mark.parametrize(
    ("stages", "changes", "words"),
    [
        ([[2, 6]], {}, "until step 2 has 6 samples per step, which are not divisible by 4"),
        ([[2, 3]], SHARDED, "(2 data-parallel ranks x 2 samples of a micro-batch); write 8"),
        ([[2, 3]], FEW, "micro-batch); leave the stage out, because the recipe's own batch of 8 is not larger than 8"),
        ([[2, 4]], FEW, "2 stages of the pipeline; leave the stage out, because the recipe's own batch of 8"),
        (
            [[2, 8]],
            {},
            "until step 2, has 8 samples per step, but the recipe's full batch after it has only 8",
        ),
        ([[2, 4]], SHARDED, "make 1 micro-batches, fewer than the 2 stages of the pipeline; write at least 8"),
        ([[2, 8]], TURNED, "2 micro-batches, but zero_bubble_v needs 4 for the 2 stages of the pipeline"),
        ([[2, 4]], {"runner_config": {"batch_size": 2}}, "the queue to the device keeps one batch shape"),
        ([[2, 4]], {"runner_config": {**RECIPE["runner_config"], "epochs": 2}}, "a second epoch has no stages"),
        ([[2, 4]], {"context": {"mode": 1}}, "works only in graph mode"),
        ([[2, 8]], {**SHARDED, "context": {"mode": 0}}, "MindFormers' default lets only some ranks read data"),
        ([[2, 4]], {"train_dataset": {"data_loader": {"type": "HFDataLoader"}}}, "this recipe has 'HFDataLoader'"),
        ([[2, 4]], {"train_dataset": {"data_loader": {"type": LOADER, "shuffle": True}}}, "if the data is shuffled"),
        ([[2, 4]], {"train_dataset": {"data_loader": {"type": LOADER}, "dynamic_batch": True}}, "does not pad samples"),
        ([[2, 4]], {"plugins": {"attention_balance": {}}}, "moves samples within a window"),
        (
            [[2, 8]],
            {**SHARDED, "plugins": {"held_out_loss": {}}},
            "runs the train step with batches of the recipe's own size",
        ),
    ],
)
def test_what_cannot_work_is_refused(stages, changes, words):
    with pytest.raises(RecipeError) as raised:
        check(with_ramp(stages, **changes))
    assert words in str(raised.value)


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
def test_a_schedule_along_samples_counts_steps_of_the_full_batch_of_the_adapter():
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


@pytest.mark.parametrize(("written", "end"), [(None, 12), (-1, 12), (40, 40)])
def test_a_schedule_along_samples_ends_with_the_run_where_no_end_is_written(monkeypatch, written, end):
    """MindFormers would take the 20 steps of the run, and a decay would end far above its last learning rate."""
    recipe = with_ramp([[16, 4]], lr_schedule={"type": "CosineWithWarmUpLR", "total_steps": written})
    recipe["plugins"]["batch_ramp"]["learning_rate"] = "samples"
    recipe["train_dataset"] = {"data_loader": {"sizes": [16 * 4 + 4 * 8, 0, 0]}}
    registered = []
    monkeypatch.setattr(adapter.MindFormerRegister, "register_cls", lambda made, *_, alias: registered.append(alias))
    config = MindFormerConfig(**recipe)
    adapter._count_samples(config, recipe, Ramp(((16, 4),), 8))
    assert config.lr_schedule.total_steps == end and registered == ["CosineWithWarmUpLR"]


@pytest.mark.parametrize(("target", "by_sample"), [("CPU", True), ("Ascend", False)])
@pytest.mark.parametrize("rate", ["steps", "samples"])
def test_enabling_chooses_the_routers_and_the_schedule(monkeypatch, target, by_sample, rate):
    schedule = {"type": "ConstantWarmUpLR", "total_steps": 40}
    recipe = with_ramp([[2, 1]], context={"mode": 0, "device_target": target}, use_parallel=False, lr_schedule=schedule)
    settings, stages, registered = {"stages": [[2, 1]], "learning_rate": rate}, [], []
    monkeypatch.setattr(adapter, "_deal_by_steps", lambda ramp, division: None)
    monkeypatch.setattr(adapter, "_begin_in", lambda stage, ramp: stages.append(stage))
    monkeypatch.setattr(adapter.MindFormerRegister, "register_cls", lambda made, *_, alias: registered.append(alias))
    adapter.enable(MindFormerConfig(**recipe), settings)
    assert [stage.by_sample for stage in stages] == [by_sample]
    assert registered == ["MFLossMonitor", *["ConstantWarmUpLR"] * (rate == "samples")]


def test_routers_of_mindformers_keep_their_groups_in_a_model_that_is_not_split():
    """Their auxiliary loss groups the tokens by rank; with a group for each sample it would be another loss."""
    stage = Stage(Division(ranks=1, micro=8, micro_batches=1, pipeline=1, whole=True), by_sample=False)
    stage.apply(None, 4)  # no cell of the network is looked at
    assert stage.samples == 4


def test_a_later_stage_is_compiled_with_the_weights_that_a_load_leaves_out():
    """After a pipeline is loaded, MindSpore takes the weights of other stages out of the optimizer's lists."""
    from mindformers.wrapper.wrapper import GradAccumulationCellWithMultiOutputs as Accumulation
    from mindspore import ParameterTuple, nn

    step, optimizer = nn.Cell(), nn.Cell()
    step.network, step.optimizer = Accumulation(nn.Dense(2, 2), 8), optimizer
    optimizer.weights = ParameterTuple(step.network.get_parameters())
    stage = Stage(Division(ranks=1, micro=1, micro_batches=8, pipeline=2, whole=False))
    stage.apply(step, 4)
    vars(optimizer)["weights"] = ParameterTuple(optimizer.weights[:1])
    stage.apply(step, 8)
    assert len(optimizer.weights) == 2 and step.micro_size == 8


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
