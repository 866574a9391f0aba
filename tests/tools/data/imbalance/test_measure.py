from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpora import CORPORA, document_lengths
from plugins.attention_balance import reference
from plugins.attention_balance.objective import Objective
from plugins.attention_balance.plan import Layout, epoch_plan, layout_of
from plugins.attention_balance.samples import build_gpt_index, causal_pairs, segments_of
from plugins.errors import DataError, RecipeError
from plugins.spike_guard import reference as spike_guard_reference
from tests.tools.data.data_helpers import REPOSITORY, write_index
from tools.data.imbalance import measure
from tools.data.imbalance.measure import Counter, count_lengths, documents_of_samples, imbalance
from tools.data.imbalance.recipe import SHARES, equal_costs, measure_steps, setting_of
from tools.data.index import BrokenIndexError, IndexReader, map_lengths, write_corpus
from tools.data.outputs import write_json
from tools.process.waiting import Reporter
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides

CONFIG = "train_dataset.data_loader.config"
TWO_WORKERS = REPOSITORY / "recipes" / "mini" / "pretrain_dp2.yaml"
LARGE = REPOSITORY / "recipes" / "telechat3_438b" / "context_128k.yaml"
APART = f"{CONFIG}.reset_attention_mask=True"


def recipe_of(path: Path, *overrides: str) -> Recipe:
    return apply_overrides(load_recipe(path), overrides)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    lengths = np.random.default_rng(1).lognormal(4, 1.2, 4000).astype(np.int32) + 1
    write_index(tmp_path / "corpus", lengths)
    return str(tmp_path / "corpus")


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1 << 20, 1 << 22)), min_size=1, max_size=30))
def test_a_distribution_says_what_sorting_would(values: list[int]) -> None:
    counter = Counter()
    for value in values:
        counter.add(np.array([value], np.int32))
    found, ordered = counter.result(), np.sort(np.array(values, np.int64))
    assert (found.count, found.total) == (len(values), sum(values))
    for share in (0.01, 0.5, 0.9, 1.0):
        assert found.quantile(share) == ordered[math.ceil(share * len(values)) - 1]
        at = next(i for i in range(len(values)) if ordered[: i + 1].sum() >= share * sum(values) * (1 - 1e-9))
        assert found.weighted_quantile(share) == ordered[at]
    octaves = list(found.octaves())
    for start, below, count, total in octaves:
        inside = ordered[(ordered >= start) & (ordered < below)]
        assert (len(inside), inside.sum()) == (count, total)
    assert sum(count for _, _, count, _ in octaves) == len(values)


def test_a_document_without_tokens_is_named() -> None:
    lengths = np.full((1 << 20) + 10, 3, np.int32)
    lengths[(1 << 20) + 5] = 0
    with pytest.raises(DataError, match=r"c\.idx: document 1,048,581 has 0 tokens"):
        count_lengths(lengths, "c.idx", Reporter())


def test_lengths_are_mapped_without_the_tokens(tmp_path: Path) -> None:
    lengths = document_lengths(50_000, CORPORA[4_096], 5)[:40]
    write_corpus(tmp_path / "corpus", lengths, 300, 7, seed=1)
    np.testing.assert_array_equal(map_lengths(tmp_path / "corpus"), IndexReader(tmp_path / "corpus").lengths)
    (tmp_path / "corpus.bin").unlink()
    mapped = map_lengths(tmp_path / "corpus")
    np.testing.assert_array_equal(mapped, lengths)
    assert isinstance(mapped, np.memmap) and not mapped.flags.writeable


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.idx"
    with pytest.raises(
        DataError, match=r"corpus\.idx: there is no such file; give PREFIX, which is the path without \.bin or \.idx"
    ):
        map_lengths(tmp_path / "corpus")
    write_index(tmp_path / "corpus", np.zeros(0, np.int32))
    with pytest.raises(BrokenIndexError, match="holds no documents"):
        map_lengths(tmp_path / "corpus")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BrokenIndexError, match="by the counts in its header"):
        map_lengths(tmp_path / "corpus")


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=30),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_documents_of_samples_are_those_of_their_segments(
    lengths: list[int], sequence_length: int, samples: int, seed: int
) -> None:
    if sum(lengths) <= sequence_length:
        lengths.append(sequence_length)
    index = build_gpt_index(np.array(lengths, np.int32), sequence_length, samples, seed)
    counts = segments_of(index, 0, samples).counts()
    np.testing.assert_array_equal(documents_of_samples(index, samples, Reporter()), counts)


def test_every_step_equals_the_obvious_computation(prefix: str) -> None:
    """Costs token by token, step times with the plugin's reference; the plan is the one that training uses."""
    recipe = recipe_of(TWO_WORKERS, APART, "train_dataset.data_loader.sizes.0=80")
    result = imbalance(prefix, recipe, steps=10).result
    assert result is not None and result.steps.numbers.tolist() == list(range(10))
    setting, layout = result.setting, result.setting.layout
    assert (layout.ranks, layout.micro_batches, layout.slots, layout.window) == (2, 1, 4, 1)

    lengths = map_lengths(prefix)
    index = build_gpt_index(lengths, 128, math.ceil(80 * 1.005), 1234)
    documents = [[1] * (length - 1) + [0] for length in lengths.tolist()]
    pairs = np.array([
        reference.pairs_of_tokens(reference.sample_tokens(index, documents, item), 0) for item in range(80)
    ])  # fmt: skip
    attention = setting.cost.per_pair * pairs
    model = attention + 128 * setting.cost.per_token
    plan = epoch_plan(setting.cost.of_dataset(index)[:80], layout)
    natural = np.arange(80).reshape(10, 1, 4, 2).transpose(0, 3, 1, 2)
    for costs, found in ((attention, result.steps.attention), (model, result.steps.model)):
        even = costs.reshape(10, 8).sum(1) / 2
        for order, times in ((natural, found.before), (plan, found.after)):
            expected = [reference.step_time(costs, own, layout.objective) for own in order]
            np.testing.assert_allclose(times, expected / even)
    times = [sum(reference.step_time(model, own, layout.objective) for own in order) for order in (natural, plan)]
    assert result.steps.speed_up == pytest.approx(times[0] / times[1])
    assert result.steps.attention_share == pytest.approx(attention.sum() / model.sum())
    assert result.steps.of_one_document == pytest.approx(pairs.sum() / (80 * 128 * 129 / 2))
    loads = attention[natural].sum(3) / attention[natural].sum(3).mean((1, 2), keepdims=True)
    expected_quantiles = [np.quantile(own, SHARES) for own in loads]
    np.testing.assert_allclose(result.steps.micro_batch_loads[0], np.mean(expected_quantiles, 0))
    np.testing.assert_array_equal(result.steps.one_step.before, loads[5])


def test_sampled_windows_are_those_of_the_whole_run(prefix: str) -> None:
    recipe = recipe_of(TWO_WORKERS, APART, "train_dataset.data_loader.sizes.0=160")
    setting = setting_of(recipe, prefix, window=3)
    index = build_gpt_index(map_lengths(prefix), 128, setting.wanted, setting.seed)
    costs = setting.cost.of_dataset(index)[: setting.steps * setting.layout.batch]
    whole = setting.layout.objective.step_time(costs[epoch_plan(costs, setting.layout)].sum(-1))
    found = measure_steps(index, setting, np.array([6, 15]), Reporter())
    assert found.numbers.tolist() == [6, 7, 8, 15, 16, 17]
    even = costs[epoch_plan(costs, setting.layout)].sum((1, 2, 3))[found.numbers] / 2
    np.testing.assert_allclose(found.model.after * even, whole[found.numbers])


GUARD = "plugins.spike_guard={skipped: [[8, 16], [24, 32]]}"


@pytest.mark.parametrize("ranges", [[[8, 16], [24, 32]], [[3, 5], [40, 41], [70, 90]], [[0, 8]]])
def test_samples_that_the_spike_guard_leaves_out_are_not_measured(prefix: str, ranges: list[list[int]]) -> None:
    """Later steps were measured with the samples that another step trains."""
    sizes = "train_dataset.data_loader.sizes.0=80"
    guard = f"plugins.spike_guard={{skipped: {ranges}}}"
    result = imbalance(prefix, recipe_of(TWO_WORKERS, APART, sizes, guard), steps=10).result
    assert result is not None and result.setting.skipped == tuple(map(tuple, ranges))
    index = build_gpt_index(map_lengths(prefix), 128, result.setting.wanted, 1234)
    items = spike_guard_reference.samples(len(index), ranges)[:80]
    pairs = causal_pairs(segments_of(index, 0, len(index)))[items]
    expected = reference_balance(pairs * result.setting.cost.per_pair, result.setting.layout)
    np.testing.assert_allclose(result.steps.attention.before, expected)
    counts = segments_of(index, 0, len(index)).counts()[items]
    assert (result.samples.count, result.samples.total) == (80, counts.sum())


@pytest.mark.parametrize("overrides", [[], [GUARD]])
def test_the_index_is_copied_only_if_samples_are_left_out(
    prefix: str, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    """The index of a large corpus takes gigabytes."""
    built, measured = [], []
    real = measure.measure_steps
    monkeypatch.setattr(measure, "build_gpt_index", lambda *given: built.append(build_gpt_index(*given)) or built[0])
    monkeypatch.setattr(measure, "measure_steps", lambda *given: measured.append(given[0]) or real(*given))
    imbalance(prefix, recipe_of(TWO_WORKERS, APART, "train_dataset.data_loader.sizes.0=80", *overrides), steps=2)
    assert (measured[0] is built[0]) == (not overrides) and len(measured) == len(built) == 1
    shared = [
        np.shares_memory(measured[0].shuffle_index, built[0].shuffle_index),
        measured[0].sample_index is built[0].sample_index,
    ]
    assert shared == [not overrides, True], "of the whole index only the order is copied"


def reference_balance(costs: np.ndarray, layout: Layout) -> list[float]:
    """Step time over that of an even step, without the plugin: each sample goes to the ranks in turn."""
    steps = costs.reshape(-1, layout.batch)
    return [max(step[0::2].sum(), step[1::2].sum()) / (step.sum() / 2) for step in steps]


def test_whole_steps_that_are_left_out_leave_the_other_steps_as_they_were(prefix: str) -> None:
    """Also the plans of plugins.attention_balance, which are made for the samples of a step."""
    sizes = "train_dataset.data_loader.sizes.0={}".format
    whole = imbalance(prefix, recipe_of(TWO_WORKERS, APART, sizes(96)), steps=12).result
    found = imbalance(prefix, recipe_of(TWO_WORKERS, APART, sizes(80), GUARD), steps=10).result
    assert whole is not None and found is not None
    stay = [step for step in range(12) if step not in (1, 3)]
    for side in ("attention", "model"):
        for name in ("before", "after", "bound"):
            got, want = (getattr(getattr(each.steps, side), name) for each in (found, whole))
            np.testing.assert_allclose(got, want[stay])


def test_a_run_that_has_too_few_samples_without_those_left_out_is_refused(prefix: str) -> None:
    available = len(build_gpt_index(map_lengths(prefix), 128, 80, 1234))
    guard = f"plugins.spike_guard={{skipped: [[0, {available - 70}]]}}"
    with pytest.raises(DataError, match=r"spike_guard\.skipped: .* lacks 10 of the 80 samples"):
        imbalance(prefix, recipe_of(TWO_WORKERS, APART, "train_dataset.data_loader.sizes.0=80", guard))


def test_a_sample_that_has_too_many_documents_and_is_left_out_refuses_nothing(prefix: str) -> None:
    masks = [f"{CONFIG}.create_compressed_eod_mask=True", f"{CONFIG}.reset_position_ids=True"]
    index = build_gpt_index(map_lengths(prefix), 128, 2412, 1234)
    counts = segments_of(index, 0, len(index)).counts()
    most = int(counts[:2400].max())
    over = np.flatnonzero(counts[: 2400 + 64] >= most).tolist()
    recipe = recipe_of(TWO_WORKERS, *masks, f"{CONFIG}.eod_pad_length={most - 1}")
    recipe["plugins"]["spike_guard"] = {"skipped": [[item, item + 1] for item in over]}
    assert imbalance(prefix, recipe, steps=1).result is not None
    recipe["plugins"]["spike_guard"] = {"skipped": [[0, 1], *([item, item + 1] for item in over[1:])]}
    with pytest.raises(RecipeError, match=f"documents of sample {over[0]} "):
        imbalance(prefix, recipe, steps=1)


def test_steps_are_spread_over_the_run(prefix: str) -> None:
    recipe = recipe_of(TWO_WORKERS, APART)

    def numbers(steps: int | None, window: int | None = None) -> list[int]:
        result = imbalance(prefix, recipe, steps, window).result
        assert result is not None
        return result.steps.numbers.tolist()

    assert numbers(4) == [0, 100, 199, 299]
    assert numbers(1) == [0]
    assert numbers(1000) == list(range(300))
    assert numbers(5, window=4) == [0, 1, 2, 3, 296, 297, 298, 299]
    assert len(numbers(None)) == 200


def test_the_plugin_s_own_settings_are_read(prefix: str) -> None:
    recipe = recipe_of(TWO_WORKERS, APART)
    recipe["plugins"]["attention_balance"] = {"window": 5, "per_pair": 2.0, "per_token": 3.0}
    setting = setting_of(recipe, prefix, None)
    assert (setting.layout.window, setting.cost.per_pair, setting.cost.unit) == (5, 2.0, "s")
    assert setting_of(recipe, prefix, 2).layout.window == 2
    recipe["plugins"]["attention_balance"] = False
    assert setting_of(recipe, prefix, None).layout == layout_of(recipe)


def test_a_large_recipe_s_layout(prefix: str) -> None:
    setting = setting_of(recipe_of(LARGE), prefix, None)
    assert setting.layout == Layout(8, 64, 1, Objective(1, 8, 1 / (3 + 1)))
    assert (setting.steps, setting.room, setting.context_parallel) == (750, 1024 - 1, 8)
    assert setting.wanted == 385_920  # 0.5 % more than 384,000: the recipe's data_path has a weight
    assert any("1F1B" in note for note in setting.notes)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([f"{CONFIG}.reset_attention_mask=False"], "every sample costs the same"),
        ([APART, f"{CONFIG}.create_attention_mask=False"], "keep documents apart"),
        ([APART], ""),
    ],
)
def test_why_costs_are_equal(overrides: list[str], why: str) -> None:
    found = equal_costs(recipe_of(TWO_WORKERS, *overrides))
    assert why in found and bool(found) == bool(why)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (
            [f"{CONFIG}.create_compressed_eod_mask=True", f"{CONFIG}.reset_position_ids=False"],
            "fails at the second sample",
        ),
        ([f"{CONFIG}.data_path=['1', a, '3', b]"], "2 corpora (25 % of the samples from a, 75 % of"),
        ([f"{CONFIG}.data_path=[a, b, c]"], "blends 3 corpora; these"),
        (["context.device_target=Ascend"], "up to the attention kernel"),
        ([GUARD], "the 16 samples in plugins.spike_guard.skipped are left out, as in training"),
        (["plugins.spike_guard={skipped: [[3, 9]]}"], "leaves out places of the planned order"),
        (["plugins.batch_ramp={stages: [[10, 4]]}"], "assume that every step trains on the full 8 samples"),
    ],
)
def test_notes(prefix: str, overrides: list[str], word: str) -> None:
    reset = [] if "second" in word else [APART]
    assert any(word in note for note in setting_of(recipe_of(TWO_WORKERS, *reset, *overrides), prefix, None).notes)
    assert not any(word in note for note in setting_of(recipe_of(TWO_WORKERS, APART), prefix, None).notes)


def test_another_end_of_document_id_is_noted(tmp_path: Path) -> None:
    recipe, prefix = recipe_of(TWO_WORKERS, APART), tmp_path / "corpus"
    for eod, notes in ((0, 0), (3, 1)):
        write_json(Path(f"{prefix}.json"), {"format": "tc3-data-1", "eod_id": eod})
        assert len(setting_of(recipe, prefix, None).notes) == notes
    assert "eod is 0, but documents of" in setting_of(recipe, prefix, None).notes[0]


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["train_dataset.data_loader.sizes=[7, 0, 0]"], r"sizes: 7 samples fill no step of 8"),
        (["train_dataset.data_loader.sizes=[]"], r"sizes: \[\] gives no number of samples; write"),
        ([f"{CONFIG}.seq_length=0"], r"seq_length: 0 is out of range"),
        ([f'{CONFIG}.split="0, 1"'], r"split: this value leaves no document for training"),
        ([f'{CONFIG}.split="1.2.3"'], r"split: this value leaves no document for training"),
        (["train_dataset.data_loader.type=HFDataLoader"], r"type: 'HFDataLoader' reads no Megatron corpus"),
    ],
)
def test_recipes_that_cannot_be_computed_are_refused(prefix: str, overrides: list[str], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        imbalance(prefix, recipe_of(TWO_WORKERS, APART, *overrides))


def test_samples_of_another_length_than_the_model_reads_or_ranks_divide_are_refused(prefix: str) -> None:
    recipe = recipe_of(TWO_WORKERS, APART)
    recipe["model"]["model_config"]["seq_length"] = 256
    with pytest.raises(RecipeError, match=r"seq_length: the samples have 128 tokens, but the model reads 256"):
        imbalance(prefix, recipe)
    recipe = recipe_of(TWO_WORKERS, APART, "parallel.parallel_mode=1")
    recipe["parallel_config"]["context_parallel"] = 3
    with pytest.raises(RecipeError, match=r"context_parallel: 3 does not divide seq_length 128"):
        imbalance(prefix, recipe)


def test_a_split_that_rounds_to_no_document_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "few", np.full(3, 2000, np.int32), 1000, 0, 1)
    with pytest.raises(DataError, match=r"split is rounded to 0 of the 3 documents"):
        imbalance(tmp_path / "few", recipe_of(TWO_WORKERS, APART, f'{CONFIG}.split="0.15, 0.85, 0"'))


def test_a_window_longer_than_the_run_is_refused(prefix: str) -> None:
    with pytest.raises(RecipeError, match=r"--window 301: the window is longer than the run, which has 300 steps"):
        imbalance(prefix, recipe_of(TWO_WORKERS, APART), window=301)


def test_a_sample_with_too_many_documents_is_named(prefix: str) -> None:
    masks = [f"{CONFIG}.create_compressed_eod_mask=True", f"{CONFIG}.reset_position_ids=True"]
    index = build_gpt_index(map_lengths(prefix), 128, 2412, 1234)
    counts = segments_of(index, 0, 2400).counts()
    most = int(counts.max())
    enough = recipe_of(TWO_WORKERS, *masks, f"{CONFIG}.eod_pad_length={most}")
    result = imbalance(prefix, enough, steps=1).result
    assert result is not None and result.samples.values[-1] == most
    first = int((counts == most).argmax())
    with pytest.raises(RecipeError, match=rf"eod_pad_length: {most - 1} .* {most} documents of sample {first} "):
        imbalance(prefix, recipe_of(TWO_WORKERS, *masks, f"{CONFIG}.eod_pad_length={most - 1}"))
    shared = setting_of(
        recipe_of(TWO_WORKERS.with_name("pretrain_cp2.yaml"), *masks, f"{CONFIG}.eod_pad_length={most}"), prefix, None
    )
    assert shared.room == most - 1 and shared.padding == 1, "ranks share the queries, and the last entry stays padding"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [[], [f'{CONFIG}.split="3, 1, 0"'], ["train_dataset.data_loader.sizes.0=9000"], ["data_path"]],
)
def test_the_index_is_the_one_that_the_recipe_s_loader_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    """Seed, split, samples and epochs, through MindFormers' own reading of the section."""
    monkeypatch.chdir(tmp_path)
    from mindformers.dataset.blended_datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset
    from mindformers.dataset.dataloader.blended_megatron_dataloader import MegatronDatasetBuilder, compile_helpers

    compile_helpers()
    lengths = np.random.default_rng(2).integers(2, 300, 3000).astype(np.int32)
    write_corpus(tmp_path / "corpus", lengths, 300, 7, seed=1)
    paths = f"['{tmp_path / 'corpus'}']" if overrides == ["data_path"] else f"['1', '{tmp_path / 'corpus'}']"
    others = [override for override in overrides if "=" in override]
    recipe = recipe_of(TWO_WORKERS, APART, f"{CONFIG}.data_path={paths}", *others)
    section = recipe["train_dataset"]["data_loader"]
    config = MegatronDatasetBuilder("GPTDataset", section["config"]).init_gpt_dataset_config()
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, section["sizes"], lambda: True, config).build()[0]
    theirs = getattr(theirs, "datasets", [theirs])[0]

    setting = setting_of(recipe, tmp_path / "corpus", None)
    used = map_lengths(tmp_path / "corpus")[: round(setting.training_share * len(lengths))]
    ours = build_gpt_index(used, setting.sequence_length, setting.wanted, setting.seed)
    for name in ("document_index", "sample_index", "shuffle_index"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
