"""Which samples a run trains without some, held against the list that a person would write."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.spike_guard import reference
from plugins.spike_guard.ledger import continued, count, normal, original, originals, reached, same_until

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
