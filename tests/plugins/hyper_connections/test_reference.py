"""The reference: Sinkhorn's sums, and gradients against finite differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from plugins.hyper_connections import reference
from plugins.hyper_connections.plan import CLIP, gates
from plugins.hyper_connections.reference import Weights

EPS = 1e-6


def drawn(tokens, streams, hidden, seed=0, scale=1.0):
    """(streams [T, n, h], weights)."""
    rng = np.random.default_rng(seed)
    count = gates(streams)
    weights = Weights(
        rng.standard_normal((count, streams * hidden)) / np.sqrt(streams * hidden),
        rng.standard_normal(count),
        rng.uniform(0.5, 1.5, 3) * scale,
    )
    return rng.standard_normal((tokens, streams, hidden)), weights


@given(
    st.integers(1, 6).flatmap(
        lambda n: arrays.arrays(np.float64, (n, n), elements=st.floats(-3, 3, allow_subnormal=False))
    )
)
def test_rows_and_columns_sum_to_one(logits):
    found, _ = reference.sinkhorn(np.exp(logits - logits.max(1, keepdims=True)), 100)
    assert (found > 0).all()
    np.testing.assert_allclose(found.sum(0), 1, atol=1e-5)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-3)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_mixing_keeps_the_mean_of_the_streams(streams, seed):
    """Columns are divided last, so that their sums are 1 to epsilon after any number of iterations."""
    x, weights = drawn(2, streams, 3, seed)
    for token in x:
        _, _, residual, _ = reference.gates_of(token, weights, 2, EPS)
        np.testing.assert_allclose((residual @ token).mean(0), token.mean(0), atol=1e-4)


def test_a_permutation_stays_what_it_is():
    found, _ = reference.sinkhorn(np.eye(4)[[2, 0, 3, 1]], 20)
    np.testing.assert_allclose(found, np.eye(4)[[2, 0, 3, 1]], atol=1e-5)


def test_logits_beyond_the_clip_have_no_gradient():
    x, weights = drawn(1, 2, 3)
    weights.base[-1] = 10 * CLIP
    dout = np.ones_like(x)
    _, found = reference.backward(x, weights, np.tanh, lambda x, d: d * (1 - np.tanh(x) ** 2), dout, 3, EPS)
    assert found.base[-1] == 0 and found.base[-2] != 0


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_gradients_equal_finite_differences(streams):
    x, weights = drawn(3, streams, 5)
    matrix = np.random.default_rng(1).standard_normal((5, 5))
    sublayer = lambda read: np.tanh(read @ matrix)  # noqa: E731
    behind = lambda read, d: (d * (1 - np.tanh(read @ matrix) ** 2)) @ matrix.T  # noqa: E731
    dout = np.random.default_rng(2).standard_normal(x.shape)
    dx, dw = reference.backward(x, weights, sublayer, behind, dout, 4, EPS)
    for array, gradient in ((x, dx), (weights.fn, dw.fn), (weights.base, dw.base), (weights.scale, dw.scale)):
        for place in list(np.ndindex(array.shape))[:: max(1, array.size // 12)]:
            kept, step = array[place], 1e-5
            values = []
            for moved in (kept + step, kept - step):
                array[place] = moved
                values.append((reference.forward(x, weights, sublayer, 4, EPS) * dout).sum())
            array[place] = kept
            assert gradient[place] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=2e-5)
