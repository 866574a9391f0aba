"""These tests check what counts as a spike, what the guard does about it without a training (with one, see
tests/training), and which samples a run trains without some, held against the list that a person would write.
"""

import json
import math
import threading
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.all_ranks import has_loss, pipeline_of
from plugins.attention_balance.adapter import Reordered
from plugins.batch_ramp.plan import Ramp
from plugins.errors import DataError, RecipeError, StoppedError
from plugins.finite_loss import adapter as finite_loss
from plugins.finite_loss.plan import NORM
from plugins.spike_guard import ledger, reference
from plugins.spike_guard.adapter import Guard, Skipping, _beginning, check_enough, spare_of
from plugins.spike_guard.ledger import (
    Entry,
    continued,
    count,
    ledger_file,
    normal,
    original,
    originals,
    reached,
    read_ledger,
    same_until,
    samples_of,
    write_ledger,
)
from plugins.spike_guard.plan import NO_MORE, Settings, Window, check, good_steps, read, spreads_above, what_follows
from tests.plugins.test_finite_loss import Logging, Training

GOOD = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02, 2.98, 3.0]
FOURS = Ramp((), 4)  # steps of four samples


@given(st.floats(1e-3, 1e3), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_the_distance_is_that_of_the_sorted_lists(value, good):
    assert spreads_above(value, good)[0] == pytest.approx(
        reference.spreads_above(value, good, 0.01), rel=1e-9, abs=1e-9
    )


def window(good=GOOD, threshold=8.0):
    found = Window(len(GOOD), threshold)
    for value in good:
        assert found.see({"loss": value, NORM: None}) is None
    return found


def test_a_value_far_above_the_last_good_ones_is_a_spike_and_one_below_is_none():
    assert window().see({"loss": 0.5, NORM: None}) is None
    words = window().see({"loss": 6.0, NORM: None})
    assert words == "loss 6 is 41 standard deviations above 2.98, which the last 8 good steps led to"
    assert window(threshold=50.0).see({"loss": 6.0, NORM: None}) is None


def test_a_loss_that_falls_is_compared_with_where_it_falls_to_and_one_that_rises_is_not():
    falling = [8.0 * 0.95**step * (1.01 if step % 2 else 0.99) for step in range(8)]
    assert "is 28 standard deviations above 5.307" in window(falling).see({"loss": 8.0, NORM: None})
    assert "is 11 standard deviations above 4.436" in window([4.0 * 1.03**step for step in range(8)]).see(
        {"loss": 12.0, NORM: None}
    )


def test_nothing_is_judged_before_there_are_enough_good_steps():
    assert window(GOOD[:-1]).see({"loss": 1e6, NORM: None}) is None


def test_a_spike_does_not_become_part_of_what_is_good():
    found = window()
    assert all(found.see({"loss": 6.0, NORM: None}) for _ in range(20))


def test_loss_and_norm_are_judged_each_by_its_own_steps():
    found = Window(4, 8.0)
    for value in (1.0, 1.01, 0.99, 1.0):
        assert found.see({"loss": value, NORM: 100 * value}) is None
    assert found.see({"loss": 1.0, NORM: 300.0}).startswith("global norm 300 is")
    assert found.see({"loss": 1.0, NORM: math.nan}) is None, "what is not finite is another one's to judge"
    assert found.see({"loss": 0.0, NORM: 100.0}) is None, "a rank of a pipeline that has no loss"


def test_steps_that_differ_by_less_than_a_percent_are_alike():
    assert window([3.0] * 8).see({"loss": 3.03, NORM: None}) is None


def line(step, loss):
    return json.dumps({"step": step, "loss": loss, "global_norm": 1.0})


def test_the_good_steps_before_a_resume_are_those_of_the_parts_that_count():
    lines = [json.dumps({"total_steps": 9, "start_step": 0}), *(line(step, step) for step in (1, 2, 3, 4, 5))]
    lines += [json.dumps({"total_steps": 9, "start_step": 2}), line(3, 30), line(4, 40), '{"step": 5, "lo']
    found = good_steps(lines, 3, 2, FOURS, 1)
    assert found == [{"loss": 2, NORM: 1.0}, {"loss": 30, NORM: 1.0}]
    assert good_steps([], 3, 2, FOURS, 1) == []


@st.composite
def histories(draw):
    """Starts of the workers, each from a checkpoint at the end of a step that still stands, with a batch that fits."""
    found, ends = [], [0]
    for _ in range(draw(st.integers(1, 6))):
        batch = draw(st.sampled_from([2, 4, 6, 8]))
        begin = draw(st.sampled_from([end for end in ends if end % batch == 0]))
        steps = draw(st.integers(1, 12))
        ends = [end for end in ends if end <= begin] + [begin + batch * n for n in range(1, steps + 1)]
        found.append((begin, batch, steps))
    return found, draw(st.sampled_from([end for end in ends if end % found[-1][1] == 0]))


@given(histories(), st.integers(1, 20))
def test_the_good_steps_are_those_that_trained_the_samples_before(history, window):
    (trainings, done), length = history, 16
    lines = []
    for number, (begin, batch, steps) in enumerate(trainings):
        lines.append({"start_step": begin // batch})
        for index in range(steps):
            value = {"loss": 1.0 + number + index / 100, "global_norm": 1.0}
            lines.append({"step": begin // batch + index + 1, "tokens": batch * length, **value})
    now = Ramp((), trainings[-1][1])
    found = good_steps(map(json.dumps, lines), now.steps_of(done), window, now, length)
    stand = reference.standing_steps(trainings, done)
    losses = [each["loss"] for each in found]
    assert losses == [1.0 + number + index / 100 for number, index in stand][len(stand) - len(found) :]
    larger = [place for place, (number, _) in enumerate(stand) if trainings[number][1] > now.full]
    norms = [place > max(larger, default=-1) for place in range(len(stand))]
    assert [each[NORM] is not None for each in found] == norms[len(stand) - len(found) :], "more samples, less noise"
    assert sum(norms[len(stand) - len(found) :]) >= min(window, sum(norms[-10 * window :]))


@given(st.lists(st.tuples(st.sampled_from([2, 4, 6, 8]), st.integers(1, 40), st.integers(1, 3)), max_size=5), st.data())
def test_earlier_spikes_are_compared_by_their_samples(spikes, data):
    before, sets = [], []
    for batch, step, skip in spikes:
        before.append(what_follows(step, "", [], Settings(skip=skip), Ramp((), batch), ())[0])
        sets.append(set(range((step - 1) * batch, step * batch)))
    batch, step, window = (data.draw(st.sampled_from(each)) for each in ([2, 4, 8, 12], range(1, 60), range(4, 9)))

    def spiked(first, last):
        samples = set(range((first - 1) * batch, last * batch))
        return sum(bool(samples & each) for each in sets)

    entry, words = what_follows(step, "", before, Settings(window=window, rollbacks=3), Ramp((), batch), ())
    assert (entry is None) == (spiked(max(step - window, 1), step + window) >= 3)
    assert ("spiked before" in words) == (spiked(step, step) > 0)


def test_the_same_place_again_is_told_after_a_resume_with_another_batch():
    before = [Entry(12, 12, "", ((44, 48),))]
    _, words = what_follows(6, "", before, Settings(), Ramp((), 8), ((44, 48),))
    assert "; step 6 spiked before (as step 12 of another global batch), with other samples: they are not the" in words
    assert "spiked before" not in what_follows(12, "", before, Settings(), Ramp((), 8), ((44, 48),))[1]
    ramp = Ramp(((12, 2),), 4)
    grown = [what_follows(13, "", [], Settings(skip=2), ramp, ())[0]]
    assert "step 13 spiked before, with" in what_follows(13, "", grown, Settings(), ramp, ((22, 28),))[1]


def test_a_resumed_run_judges_a_step_as_if_it_had_not_been_interrupted():
    """Step 6 had gradients that are not finite, step 7 overflowed under a loss scale: neither is a step to compare."""
    norms = {step: 1.0 + step / 1000 for step in range(1, 10)} | {6: math.inf}
    lines = [
        json.dumps({"step": step, "loss": 2.0, "global_norm": norm, "overflow": step == 7})
        for step, norm in norms.items()
    ]
    went, resumed = Window(4, 8.0), Window(4, 8.0)
    for step, norm in norms.items():
        if step != 7:
            went.see({"loss": 2.0, NORM: norm})
    for readings in good_steps(lines, 9, 4, FOURS, 1):
        resumed.see(readings)
    assert [list(each) for each in resumed.good.values()] == [list(each) for each in went.good.values()]
    assert resumed.see({"loss": 2.0, NORM: 1000.0}) == went.see({"loss": 2.0, NORM: 1000.0}) is not None
    lines = [json.dumps({"step": step, "loss": 2.0, "global_norm": None}) for step in range(1, 10)]
    assert len(good_steps(lines, 9, 4, FOURS, 1)) == 4, (
        "where nothing is clipped, all that is read is what the loss needs"
    )
    rare = [json.dumps({"step": n, "loss": 2.0, "global_norm": 1.0 if n < 4 else None}) for n in range(1, 100)]
    assert len(good_steps(rare, 99, 4, FOURS, 1)) == 40, "not nearly the whole run"


def test_a_spike_leaves_out_the_samples_that_its_step_had():
    entry, words = what_follows(5, "step 5: loss is NaN", [], Settings(), FOURS, ())
    assert entry == Entry(5, 5, "step 5: loss is NaN", ((16, 20),))
    assert words == "spike: step 5: loss is NaN; going back to before step 5, without the samples of step 5"
    second, _ = what_follows(6, "step 6: loss is NaN", [entry], Settings(), FOURS, ((16, 20),))
    assert second.samples == ((24, 28),), "they moved up by a step"
    grown, _ = what_follows(5, "step 5: loss is NaN", [], Settings(skip=2), Ramp(((4, 2),), 4), ())
    assert grown.samples == ((6, 12),), "two samples of step 4 and four of step 5"


def test_with_more_steps_to_skip_those_before_it_are_guilty_too():
    entry, words = what_follows(5, "step 5: loss is NaN", [], Settings(skip=3), FOURS, ((12, 16),))
    assert (entry.first, entry.samples) == (3, ((8, 12), (16, 24)))
    assert words.endswith("going back to before step 3, without the samples of steps 3 to 5")
    assert what_follows(2, "", [], Settings(skip=3), FOURS, ())[0].samples == ((0, 8),)


def test_the_same_step_again_is_told_and_the_run_does_not_go_back_for_ever():
    before = [Entry(5, 5, "", ((16, 20),))]
    entry, words = what_follows(5, "step 5: loss is NaN", before, Settings(), FOURS, ((16, 20),))
    assert entry.samples == ((20, 24),) and "step 5 spiked before, with other samples: they are not the cause" in words
    entry, words = what_follows(5, "step 5: loss is NaN", before, Settings(rollbacks=1), FOURS, ((16, 20),))
    assert entry is None and words.endswith(f"the run has gone back 1 time within 64 steps, and {NO_MORE}")


def test_a_long_run_may_go_back_any_number_of_times_but_not_at_one_place():
    before = [Entry(step, step, "", ((4 * step - 4, 4 * step),)) for step in (5, 500, 510)]
    rare, often = (Settings(window=20, rollbacks=count) for count in (3, 2))
    assert what_follows(520, "", before, rare, FOURS, ())[0] is not None
    assert what_follows(520, "", before, often, FOURS, ())[0] is None
    assert what_follows(900, "", before, often, FOURS, ())[0] is not None


def test_the_ledger_is_read_as_it_was_written(tmp_path):
    entries = [Entry(5, 4, "step 5: loss is NaN", ((12, 20),)), Entry(9, 9, "more", ((3, 4), (20, 21)))]
    assert read_ledger(tmp_path) == []
    write_ledger(tmp_path, entries)
    assert read_ledger(tmp_path) == entries and [path.name for path in tmp_path.iterdir()] == ["skipped.json"]
    assert samples_of(entries) == ((3, 4), (12, 21))
    ledger_file(tmp_path).write_text('{"skipped": [{"step": 1}]}')
    with pytest.raises(DataError, match=r"skipped\.json: .* not a list of .*: the key 'first' is missing; restore"):
        read_ledger(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (True, "spike_guard: write `rollbacks: 3` under it"),
        ({"windw": 8}, r"spike_guard\.windw: no such setting \(did you mean 'window'"),
        ({"window": 3}, r"window: 3 is not allowed; write a number of steps from 4 on"),
        ({"threshold": 0}, r"threshold: 0 is not allowed; write a number of standard deviations above 0"),
        ({"threshold": math.inf}, r"threshold: inf"),
        ({"skip": 0}, r"skip: 0 is not allowed; write a number of steps, 1 for the spike's step only"),
        ({"rollbacks": 0}, r"rollbacks: 0 is not allowed; write how often"),
        ({"skipped": "x"}, r"skipped: 'x' is not a list of ranges; write ranges \[\[first, stop\]"),
        ({"skipped": [[4, 8], [8, 8]]}, r"skipped: \[8, 8\] is not a range; write ranges \[\[first, stop\]"),
        ({"skipped": [[4, 8, 9]]}, r"skipped: \[4, 8, 9\]"),
    ],
)
def test_settings_that_are_wrong(settings, words):
    with pytest.raises(RecipeError, match=words):
        read(settings)


def test_settings_that_are_not_written():
    assert read({}) == Settings() and read({"skipped": [[4, 8], [0, 4]]}).skipped == ((0, 8),)


LOADER = {"type": "BlendedMegatronDatasetDataLoader", "shuffle": False}
SAVED = {"checkpoint": {"save_interleaved_steps": 10},
         "callbacks": [{"type": "CheckpointMonitor", "keep_checkpoint_max": 2}]}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"train_dataset": {"data_loader": {"type": "HFDataLoader"}}}, r"data_loader\.type: .* not of 'HFDataLoader'"),
        ({"train_dataset": {"data_loader": {**LOADER, "shuffle": True}}}, r"data_loader\.shuffle: if the data"),
        ({"context": {"mode": 1}}, r"context\.mode: .* works only in graph mode"),
        ({"runner_config": {"epochs": 2}}, r"runner_config\.epochs: .* the second epoch"),
        ({"runner_config": {"sink_size": 4}}, r"runner_config\.sink_size"),
        ({"plugins": {"spike_guard": {}, "finite_loss": {"stop_after": 3}}}, r"stop_after: .* has no effect"),
        ({"plugins": {"spike_guard": {}, "finite_loss": False}}, None),
        ({"callbacks": [{"type": "MFLossMonitor", "per_print_times": 5}]}, r"MFLossMonitor reports only some steps"),
        ({"plugins": {"spike_guard": {"skip": 21}}, **SAVED}, r"save_max: .* begin at step 1 again; write at least 3,"),
        ({"plugins": {"spike_guard": {"skip": 20}}, **SAVED}, None),
    ],
)
def test_where_it_cannot_work(more, words):
    recipe = {"train_dataset": {"data_loader": LOADER}, "plugins": {"spike_guard": {}}, **more}
    if words is None:
        assert check(recipe) == Settings(**recipe["plugins"]["spike_guard"])
        return
    with pytest.raises(RecipeError, match=words):
        check(recipe)


NAN = float("nan")


class Beginning(Logging):
    global_batch_size = 8

    def on_train_begin(self, run_context):
        pass


class Guarded(Training):
    """A training after four steps whose losses were about 1."""

    def __init__(self, folder, **settings):
        chosen = Settings(**{"window": 4, "rollbacks": 1, **settings})
        self.guard = Guard(chosen, str(folder), (), has_loss=True, length=32)
        super().__init__(self.guard, folder)
        self.monitor = _beginning(finite_loss._watching(Beginning, self.guard, self.guard.end), self.guard)()

    def begin(self, folder, losses=(1.0, 1.02, 0.98, 1.0), batch=8):
        metrics = folder / "metrics" / "rank_0.jsonl"
        metrics.parent.mkdir(exist_ok=True)
        every = {"global_norm": 1.0, "tokens": 32 * batch}
        lines = [{"step": step, "loss": loss, **every} for step, loss in enumerate(losses, 1)]
        metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
        self.monitor.on_train_begin(self)


def test_a_spike_after_a_resume_is_judged_by_the_steps_before_it_and_leaves_a_ledger(tmp_path):
    training = Guarded(tmp_path)
    training.begin(tmp_path)
    training.step(1, norm=1.1)
    with pytest.raises(StoppedError, match=r"^spike: step 7: global norm 9 is .*; going back to before step 7,"):
        training.step(3, norm=9.0)
    (entry,) = read_ledger(tmp_path)
    assert (entry.step, entry.samples) == (7, ((48, 56),))


def test_without_enough_steps_before_it_a_spike_is_none(tmp_path):
    training = Guarded(tmp_path)
    training.begin(tmp_path, losses=(1.0, 1.0))
    training.step(1, norm=9.0)
    training.begin(tmp_path, losses=(8.0,) * 4 + (1.0, 1.02, 0.98, 1.0), batch=4)  # of as many samples as four steps
    with pytest.raises(StoppedError, match=r"loss 5 is .* above 0\.9877, which the last 4 good"):
        training.step(1, loss=5.0)


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


ZERO_BUBBLE_V = {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}}


@pytest.mark.parametrize(
    ("recipe", "ranks", "found"),
    [
        ({}, 1, [0]),
        ({"use_parallel": False, "parallel_config": {"pipeline_stage": 4}}, 1, [0]),  # judged the norm only
        ({"use_parallel": True, "parallel_config": {"pipeline_stage": 2}}, 4, [2, 3]),
        ({"use_parallel": True, "parallel_config": {"pipeline_stage": None}}, 2, [0, 1]),
        ({"use_parallel": True, "parallel_config": {"pipeline_stage": 3}, "parallel": ZERO_BUBBLE_V}, 6, [0, 1]),
    ],
)
def test_the_ranks_that_have_the_loss_are_those_of_one_stage(recipe, ranks, found):
    assert [rank for rank in range(ranks) if has_loss(rank, ranks, *pipeline_of(recipe))] == found


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
    with pytest.raises(DataError, match=r"without the 2 samples that are left out, the data has only 8 of the 9 s"):
        check_enough(plain, ((2, 4),), 9)


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))), max_size=6)
TOTAL = 200


@given(RANGES)
def test_nothing_is_lost_but_what_is_left_out_nothing_comes_twice_and_the_order_stays(ranges):
    skipped = normal(ranges)
    expected = reference.samples(TOTAL, ranges)
    assert [original(each, skipped) for each in range(TOTAL - count(skipped))] == expected
    assert len(expected) == TOTAL - count(skipped)


@given(RANGES)
def test_the_normal_form_is_one_for_the_same_samples(ranges):
    skipped = normal(ranges)
    assert normal(skipped) == skipped == normal(reversed(ranges))
    assert all(one[1] < two[0] for one, two in pairwise(skipped))


@given(RANGES, st.integers(0, 80), st.integers(1, 20))
def test_the_samples_of_a_step_are_those_that_it_gets(ranges, first, size):
    skipped = normal(ranges)
    found = originals(first, first + size, skipped)
    mine = reference.samples(TOTAL, ranges)[first : first + size]
    assert [sample for one, two in found for sample in range(one, two)] == mine
    # leaving them out too, the samples behind them move up, and those before stay where they were
    more = normal([*skipped, *found])
    assert reference.samples(TOTAL, more) == [s for s in reference.samples(TOTAL, ranges) if s not in mine]
    assert same_until(first, skipped, more)


@given(RANGES, RANGES, st.integers(0, 90))
def test_two_runs_have_trained_the_same_when_their_lists_begin_alike(ranges, others, done):
    one, two = normal(ranges), normal(others)
    same = reference.samples(TOTAL, ranges)[:done] == reference.samples(TOTAL, others)[:done]
    assert same_until(done, one, two) == same
    assert reached(done, one) == (reference.samples(TOTAL, ranges)[done - 1] + 1 if done else 0)


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.3], [0.2, 0.5, 0.3], [1 / 3, 1 / 3, 1 / 3]])
def test_a_blend_goes_on_as_mindformers_would_have_made_it_longer(weights):
    from mindformers.dataset.blended_datasets.utils import compile_helpers

    compile_helpers()
    from mindformers.dataset.blended_datasets import helpers

    def blend(size):
        part, item = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(part, item, weights, len(weights), size, False)
        return np.stack([part, item], 1)

    counts = np.bincount(blend(41)[:, 0], minlength=len(weights))
    found = continued(weights, counts.tolist(), [10**6] * len(weights), 30)
    assert np.array_equal(found, blend(71)[41:])
    lengths = [int(each) + 2 for each in counts]
    assert np.array_equal(continued(weights, counts.tolist(), lengths, 30), found[: _until_full(found, lengths)])


def _until_full(items, lengths):
    return next((place for place, (part, item) in enumerate(items) if item >= lengths[part]), len(items))


def test_two_ranks_that_add_other_entries_at_once_both_add_them(tmp_path, monkeypatch):
    """Each read the ledger before the other one wrote it, and one entry was lost."""
    entries = [Entry(step, step, "a spike", ((step, step + 1),)) for step in (3, 4)]
    read, both_have_read = ledger.read_ledger, threading.Barrier(2)

    def reading(run_dir):
        found = read(run_dir)
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait(0.3)
        return found

    monkeypatch.setattr(ledger, "read_ledger", reading)
    ranks = [threading.Thread(target=ledger.add_entry, args=(tmp_path, entry)) for entry in entries]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert sorted(read(tmp_path), key=lambda entry: entry.step) == entries
