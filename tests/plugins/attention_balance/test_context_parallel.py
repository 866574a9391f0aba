import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
from plugins.attention_balance.context_parallel import balanced, contiguous, head_tail

many = settings(max_examples=60)


@st.composite
def samples(draw):
    """Documents whose tokens divide by 2 * ranks, and the ranks."""
    ranks = draw(st.integers(1, 5))
    segments = draw(st.lists(st.integers(1, 90), min_size=1, max_size=12))
    segments.append(2 * ranks - sum(segments) % (2 * ranks))
    return segments, ranks


@many
@given(samples(), st.sampled_from([1, 2, 8]), st.sampled_from(["contiguous", "head tail", "balanced"]))
def test_tokens_once_and_equal_pairs_as_counted(sample, piece, method):
    segments, ranks = sample
    plan = {
        "contiguous": lambda: contiguous(segments, ranks),
        "head tail": lambda: head_tail(segments, ranks),
        "balanced": lambda: balanced(segments, ranks, piece),
    }[method]()
    tokens, pairs = reference.context_pairs(segments, plan.ranges)
    assert tokens == [sum(segments) // ranks] * ranks
    assert plan.pairs.tolist() == pairs
    covered = np.concatenate([np.arange(*part) for own in plan.ranges for part in own])
    assert sorted(covered) == list(range(sum(segments)))
    for own in plan.ranges:
        assert (own[:, 0] < own[:, 1]).all()
        assert (own[1:, 0] > own[:-1, 1]).all()  # rising, and adjacent ones joined


@many
@given(st.integers(1, 6), st.integers(1, 20))
def test_one_document_is_exact_and_head_tail(ranks, piece):
    plan = balanced([2 * ranks * piece], ranks, 1)
    assert plan.imbalance == 1
    for own, other in zip(plan.ranges, head_tail([2 * ranks * piece], ranks).ranges, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_a_real_mix_is_balanced_where_others_are_not(ranks):
    random = np.random.default_rng(ranks)
    for _ in range(5):
        cuts = np.sort(random.choice(131_072, 40, replace=False))
        segments = np.diff(np.concatenate(([0], cuts, [131_072])))
        segments = segments[segments > 0]
        assert balanced(segments, ranks).imbalance < 1.005
        assert balanced(segments, ranks, 1).imbalance < 1.0002
        assert balanced(segments, ranks).imbalance < head_tail(segments, ranks).imbalance
        assert balanced(segments, ranks).imbalance < contiguous(segments, ranks).imbalance
