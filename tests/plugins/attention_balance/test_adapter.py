"""MindFormers' real loader in one process, one shard after the other, with the plan and without.

The last test asks MindSpore's own compiler which rows a rank computes, which `delivery_order(gathered=...)` stands on.
"""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance.objective import Objective
from plugins.attention_balance.plan import LOADER, OWN_BATCHES, Layout, Schedule, delivery_order, epoch_plan
from plugins.attention_balance.reference import segments_of_tokens
from plugins.attention_balance.samples import Cost, segments_of
from plugins.errors import DataError, RecipeError
from plugins.spike_guard.adapter import Skipping
from tools.data.index import write_corpus
from tools.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[3]
LENGTH, EOD, SAMPLES = 32, 7, 50
COST = Cost(1.0, 0.0)
LAYOUTS = [
    Layout(2, 1, 3, Objective(1)),
    Layout(2, 3, 2, Objective(2)),
    Layout(4, 2, 1, Objective(4), window=3),
    Layout(1, 4, 1, Objective(1, 4)),
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two prefixes."""
    folder = tmp_path_factory.mktemp("corpora")
    prefixes = [str(folder / name) for name in ("first", "second")]
    for seed, prefix in enumerate(prefixes):
        lengths = np.random.default_rng(seed).lognormal(2.3, 0.9, 150).astype(np.int32) + 2
        write_corpus(Path(prefix), lengths, 100, EOD, seed)
    return prefixes


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """The plugin's module; what it registers is undone."""
    monkeypatch.setenv("LOG_MF_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # MindSpore drops log folders where it stands
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from plugins.attention_balance import adapter

    loaders = MindFormerRegister.registry[MindFormerModuleType.DATASET_LOADER]
    monkeypatch.setitem(loaders, LOADER, adapter.BalancedMegatronDataLoader)
    return adapter


def build(data_path, rank=0, ranks=1, schedule=None, **config):
    """The loader of one rank, as MindFormers' dataset builds it."""
    from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader

    mask = "actual_seq_len" if config.get("create_compressed_eod_mask") else "attention_mask"
    data = {"seed": 3, "split": "1, 0, 0", "seq_length": LENGTH, "eod": EOD, "pad": -1, "data_path": data_path}
    data.update(reset_position_ids=True, reset_attention_mask=True, create_attention_mask=True, eod_mask_loss=False)
    section = {"type": LOADER, "datasets_type": "GPTDataset", "sizes": [SAMPLES, 0, 0], "config": {**data, **config}}
    if schedule is not None:
        section["schedule"] = schedule
    names = ["input_ids", "labels", "loss_mask", "position_ids", mask]
    return build_dataset_loader(section, default_args={"column_names": names, "num_shards": ranks, "shard_id": rank})


def rows(loader, size, steps, skipped=0):
    """input_ids [steps, size, tokens] of one rank, through the same stages as in training."""
    batches = loader.batch(size, drop_remainder=True).take(steps).skip(skipped)
    return np.array([batch[0] for batch in batches.create_tuple_iterator(num_epochs=1, output_numpy=True)])


def of_all_ranks(data_path, layout, schedule=None, skipped=0):
    """input_ids [steps, ranks, samples of a rank, tokens]."""
    size, steps = layout.micro_batches * layout.slots, layout.steps(SAMPLES)
    loaders = [build(data_path, rank, layout.ranks, schedule) for rank in range(layout.ranks)]
    return np.stack([rows(loader, size, steps, skipped) for loader in loaders], 1)


def computed(delivered, layout, gathered):
    """[steps, ranks, micro-batches, slots, ...] that the graph computes of [steps, ranks, samples, ...] delivered."""
    steps, ranks, size = delivered.shape[:3]
    shape = (layout.micro_batches, layout.slots)
    if not gathered:
        return delivered.reshape(steps, ranks, *shape, *delivered.shape[3:])
    out = np.empty((steps, ranks, *shape, *delivered.shape[3:]), delivered.dtype)
    for micro_batch, rank, slot in np.ndindex(shape[0], ranks, shape[1]):
        row = (micro_batch * ranks + rank) * shape[1] + slot
        out[:, rank, micro_batch, slot] = delivered[:, row // size, row % size]
    return out


def as_sets(delivered):
    """The samples of each step, whoever gets them."""
    return [sorted(map(bytes, step.reshape(-1, LENGTH))) for step in delivered]


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_each_device_computes_what_the_plan_says(ranks, micro_batches, slots, gathered):
    layout = Layout(ranks, micro_batches, slots, Objective(ranks))
    plan = epoch_plan(np.random.default_rng(ranks).lognormal(0, 1, 3 * layout.batch), layout)
    order = delivery_order(plan, gathered)
    delivered = order.reshape(3, micro_batches * slots, ranks).transpose(0, 2, 1)  # position p goes to p % ranks
    np.testing.assert_array_equal(computed(delivered, layout, gathered), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "weights"),
    [*((layout, ["1"]) for layout in LAYOUTS), (LAYOUTS[1], ["0.3", "0.7"]), (LAYOUTS[1], None)],
)
def test_the_loader_delivers_the_plan(adapter, corpora, layout, weights):
    paths = corpora[:1] if weights is None else [*chain(*zip(weights, corpora, strict=False))]
    schedule = Schedule(layout, COST, layout.micro_batches > 1, None)
    stock, ours = of_all_ranks(paths, layout), of_all_ranks(paths, layout, schedule)
    assert ours.shape == stock.shape
    assert not np.array_equal(ours, stock)
    if layout.window == 1:
        assert as_sets(ours) == as_sets(stock)
    assert sorted(chain(*as_sets(ours))) == sorted(chain(*as_sets(stock)))

    source = build(paths).source
    tokens = np.stack([source[item][0] for item in range(layout.steps(SAMPLES) * layout.batch)])
    # the cost of a sample, from its tokens
    ends = [np.flatnonzero(np.append(sample[:-1] == EOD, True)) for sample in tokens]
    lengths = [np.diff(end, prepend=-1) for end in ends]
    costs = np.array([float((length * (length + 1) // 2).sum()) for length in lengths])
    plan = epoch_plan(costs, layout)
    np.testing.assert_array_equal(computed(ours, layout, schedule.gathered), tokens[plan])


@pytest.mark.slow
def test_skipping_leaves_the_rest_of_an_uninterrupted_run(adapter, corpora):
    layout = LAYOUTS[1]
    schedule = Schedule(layout, COST, True, None)
    whole = of_all_ranks(["1", corpora[0]], layout, schedule)
    np.testing.assert_array_equal(of_all_ranks(["1", corpora[0]], layout, schedule, skipped=2), whole[2:])


@pytest.mark.slow
def test_another_number_of_ranks_trains_the_same_steps(adapter, corpora):
    two, four = Layout(2, 3, 2, Objective(2)), Layout(4, 3, 1, Objective(4))
    found = [of_all_ranks(["1", corpora[0]], layout, Schedule(layout, COST, True, None)) for layout in (two, four)]
    assert as_sets(found[0]) == as_sets(found[1])


def test_data_that_is_not_trained_on_keeps_its_order(adapter, corpora):
    from mindformers.dataset.dataloader.blended_megatron_dataloader import BlendedMegatronDatasetDataLoader

    ours = build(["1", corpora[0]])
    assert type(ours.source).__name__ == "BlendedDataset"
    assert issubclass(adapter.BalancedMegatronDataLoader, BlendedMegatronDatasetDataLoader)
    np.testing.assert_array_equal(rows(ours, 5, 4).reshape(-1, LENGTH), [ours.source[item][0] for item in range(20)])


def test_a_rank_that_reads_no_data_plans_nothing(adapter, corpora, monkeypatch):
    from mindformers.dataset.dataloader import blended_megatron_dataloader as module

    for name, value in {
        "get_real_group_size": 4, "get_real_rank": 1, "is_dataset_built_on_rank": False, "is_compile_runtime": False,
        "get_dp_from_dataset_strategy": 2, "skip_barrier_controller": None, "get_context": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, answer=value, **__: answer)
    monkeypatch.setattr(adapter, "order_of", lambda *_: pytest.fail("planned"))
    loader = build(["1", corpora[0]], 0, 2, Schedule(LAYOUTS[0], COST, False, None))
    assert (rows(loader, 3, 2) == 1).all()


def test_data_dealt_to_other_ranks_than_planned_is_refused(adapter, corpora):
    with pytest.raises(RecipeError, match=r"the data is divided among 3 ranks.*data_parallel is 2"):
        build(["1", corpora[0]], 0, 3, Schedule(LAYOUTS[0], COST, False, None))


@pytest.mark.slow
def test_the_compressed_mask_and_its_overflow(adapter, corpora):
    """MindFormers writes the ends of documents into the compressed mask; if the mask is one entry too short, the
    plugin refuses the recipe, because MindFormers does not notice.
    """
    layout = Layout(2, 2, 2, Objective(1))
    source = build(["1", corpora[0]], create_compressed_eod_mask=True, eod_pad_length=LENGTH).source
    segments = segments_of(adapter.index_of(source.datasets[0]), 0, SAMPLES)
    item_of = source.dataset_sample_index
    for item in range(SAMPLES):
        ends = np.cumsum(segments[item_of[item]])
        np.testing.assert_array_equal(source[item][4], np.append(ends, [LENGTH] * (LENGTH - len(ends))))

    trained = segments.counts()[item_of[: layout.steps(SAMPLES) * layout.batch]]
    most, first = int(trained.max()), int(trained.argmax())
    schedule = Schedule(layout, COST, True, most)
    compressed = {"create_compressed_eod_mask": True}
    build(["1", corpora[0]], 0, 2, schedule, **compressed, eod_pad_length=most)
    with pytest.raises(
        RecipeError, match=rf"not enough for the {most} documents of sample {first} .*write {most} or more"
    ):
        build(["1", corpora[0]], 0, 2, replace(schedule, eod_pad_length=most - 1), **compressed)

    source = build(["1", corpora[0]], **compressed, eod_pad_length=most - 1).source
    assert source[first][4][-1] < LENGTH, "MindFormers now notices: the check can go"


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
def test_the_compressed_mask_has_to_hold_the_samples_that_are_trained(adapter, corpora, layout):
    """The guard leaves samples out; others, from behind the last step, take their places. Each draw is held against the
    tokens of all samples that are then delivered.
    """
    source, random, seen = build(["1", corpora[0]]).source, np.random.default_rng(0), set()
    trained, schedule = layout.steps(30) * layout.batch, Schedule(layout, COST, layout.micro_batches > 1, None)
    balanced = adapter.Reordered(source, adapter.order_of(source, 30, schedule))
    for _ in range(40):
        first, size = int(random.integers(0, trained)), int(random.integers(1, 20))
        schedule = replace(schedule, skipped=((first, first + size),))
        view = Skipping(balanced, schedule.skipped)
        documents = [len(segments_of_tokens(view[place][0].tolist(), EOD)) for place in range(trained)]
        most = max(documents)
        adapter.order_of(source, 30, replace(schedule, eod_pad_length=most))
        step = documents.index(most) // layout.batch + 1
        with pytest.raises(RecipeError, match=rf"for the {most} documents of sample \d+ \(step {step}\)"):
            adapter.order_of(source, 30, replace(schedule, eod_pad_length=most - 1))
        seen.add(most == max(len(segments_of_tokens(source[item][0].tolist(), EOD)) for item in range(trained)))
    assert seen == {True, False}, "some draws tell it from a count of the first samples"


def test_an_item_behind_the_trained_ones_that_the_data_set_lacks_stops_no_run(adapter, corpora):
    """MindFormers blends 0.5 % more samples than are trained, and may take one more of a data set than that has."""
    source, layout = build(["1", corpora[0]]).source, LAYOUTS[0]
    most = int(segments_of(adapter.index_of(source.datasets[0]), 0, SAMPLES).counts().max())
    schedule = Schedule(layout, COST, False, most + 1)
    order = adapter.order_of(source, 30, schedule)
    source.dataset_sample_index = np.append(source.dataset_sample_index[:-1], len(source.datasets[0]))
    np.testing.assert_array_equal(adapter.order_of(source, 30, schedule), order)
    adapter.order_of(source, 30, replace(schedule, skipped=((0, 2),)))


def test_less_than_one_step_keeps_the_order_of_the_data(adapter, corpora):
    source, layout = build(["1", corpora[0]]).source, LAYOUTS[1]
    order = adapter.order_of(source, layout.batch - 1, Schedule(layout, COST, True, LENGTH))
    np.testing.assert_array_equal(order, np.arange(len(source)))


def test_another_end_of_document_token_is_refused(adapter, corpora):
    with pytest.raises(DataError, match=r"config\.eod: documents of .*first do not end with token 8.*token 7"):
        build(["1", corpora[0]], 0, 2, Schedule(LAYOUTS[0], COST, False, None), eod=8)


def test_enable_marks_the_training_data_alone(adapter):
    from mindformers import MindFormerConfig

    config = MindFormerConfig(**load_recipe(ROOT / "recipes/telechat3_105b/context_128k.yaml"))
    config.plugins["spike_guard"] = {"skipped": [[64, 96]]}
    adapter.enable(config, {"window": 2, "per_pair": 3, "per_token": 4, "unit": "FLOP"})
    schedule = config.train_dataset.data_loader.schedule
    assert schedule.layout == Layout(1, 32, 1, schedule.layout.objective, window=2)
    assert schedule.skipped == ((64, 96),)
    assert schedule.eod_pad_length == 1024 and schedule.cost == Cost(3.0, 4.0, "FLOP")
    with pytest.raises(
        RecipeError, match=r"attention_balance\.per_pair: the cost of a sample \(per_pair and per_token\) is missing"
    ):
        adapter.enable(config, {"window": 2})
    with pytest.raises(RecipeError, match=r"plugins\.attention_balance\.windows"):
        adapter.enable(config, {"windows": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own", "rows"),
    [
        ("pipeline", "0", [[1], [3], [5], [7]]),
        ("pipeline", "1", [[4], [5], [6], [7]]),
        ("accumulation", "1", [[1], [3], [5], [7]]),
    ],
)
def test_rows_that_rank_1_of_2_computes(forks, tmp_path, kind, own, rows):
    worker = "tests.plugins.attention_balance.micro_batches_worker"
    done = forks.python("-m", worker, kind, 1, cwd=tmp_path, **{OWN_BATCHES: own})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == rows
