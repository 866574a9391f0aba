"""The chance of each token against a slow count of it, and draws that follow it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from launch.generate.sampling import Sampling, draw, likeliest, probabilities

# few different values, so that ties are common, and some far apart
values = st.one_of(st.sampled_from([-3.0, 0.0, 0.5, 2.0]), st.floats(-40, 40, width=32))
logits_of = arrays(np.float32, st.integers(1, 24), elements=values)
ways = st.builds(
    Sampling, temperature=st.floats(0.05, 20), top_k=st.integers(0, 30), top_p=st.floats(0.01, 1.0, exclude_min=True)
)


def slow(logits, how):
    """Plain Python, token by token: id -> chance; and how near the sum of likelier tokens came to top_p."""
    scaled = {token: float(logit) / how.temperature for token, logit in enumerate(logits)}
    most = max(scaled.values())
    likely = sorted(scaled, key=lambda token: (-logits[token], token))
    if how.top_k:
        likely = likely[: how.top_k]
    weights = {token: math.exp(scaled[token] - most) for token in likely}
    total = math.fsum(weights.values())
    kept, before, near = [], 0.0, 1.0
    for token in likely:
        near = min(near, abs(before - how.top_p))
        if before >= how.top_p and kept and how.top_p < 1:
            break
        kept.append(token)
        before += weights[token] / total
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}, near


@given(logits_of, ways)
@settings(max_examples=150)
def test_chances_are_those_of_a_slow_count(logits, how):
    want, near = slow(logits, how)
    got = probabilities(logits, how)
    assert got.shape == logits.shape and got.dtype == np.float64
    assert abs(got.sum() - 1) < 1e-12
    if near > 1e-9 or how.top_p == 1:  # else rounding decides whether a token is the last that is needed
        assert {int(token) for token in np.flatnonzero(got)} == {token for token, share in want.items() if share > 0}
        for token, share in want.items():
            assert math.isclose(got[token], share, rel_tol=1e-9, abs_tol=1e-300)


@given(logits_of, ways, st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_a_draw_has_a_chance_and_a_seed_repeats_it(logits, how, seed):
    drawn = draw(logits, how, np.random.default_rng(seed))
    assert probabilities(logits, how)[drawn] > 0
    assert drawn == draw(logits, how, np.random.default_rng(seed))


@given(logits_of, st.floats(0.05, 20))
def test_one_token_to_choose_from_is_the_likeliest(logits, temperature):
    random = np.random.default_rng(0)
    assert draw(logits, Sampling(temperature, top_k=1), random) == likeliest(logits)
    assert draw(logits, Sampling(temperature, top_p=1e-9), random) == likeliest(logits)


def test_of_equal_logits_the_first_is_the_likeliest():
    assert likeliest(np.array([0.0, 2.0, 2.0, 1.0])) == 1


def test_draws_follow_their_chances():
    logits, how = np.log([0.5, 0.3, 0.15, 0.05]), Sampling(top_p=0.9)
    random = np.random.default_rng(3)
    counts = np.bincount([draw(logits, how, random) for _ in range(20_000)], minlength=4) / 20_000
    assert counts == pytest.approx(np.array([0.5, 0.3, 0.15, 0]) / 0.95, abs=0.012)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(temperature=0.5), np.square([0.5, 0.3, 0.15, 0.05]) / 0.365),
        (Sampling(top_k=2, top_p=0.7), [0.625, 0.375, 0, 0]),  # shares of what top-k left
    ],
)
def test_by_hand(how, want):
    assert probabilities(np.log(np.array([0.5, 0.3, 0.15, 0.05])), how) == pytest.approx(want)
