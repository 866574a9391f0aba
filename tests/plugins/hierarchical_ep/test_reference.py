import numpy as np
import pytest

from plugins.cpu_backend import reference as token_by_token
from plugins.hierarchical_ep import reference


def layer(seed=0, tokens=11, hidden=4, width=3, experts=6, top_k=3):
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(experts - 1)[:top_k] for _ in range(tokens)])  # the last expert stays empty
    shapes = [(tokens, hidden), (tokens, top_k), (experts, hidden, 2 * width), (experts, width, hidden)]
    x, probs, w1, w2 = (rng.standard_normal(shape) for shape in shapes)
    return x, probs, ids, w1, w2, rng.standard_normal((tokens, hidden))


def test_it_equals_the_computation_pair_by_pair():
    x, probs, ids, w1, w2, d_out = layer()
    ours = (reference.moe(x, probs, ids, w1, w2), *reference.moe_backward(x, probs, ids, w1, w2, d_out))
    theirs = (
        token_by_token.experts(x, probs, ids, w1, w2),
        *token_by_token.experts_gradients(x, probs, ids, w1, w2, d_out),
    )
    for value, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_gradients_are_finite_differences(which):
    *inputs, d_out = layer(seed=which)
    gradients = dict(zip((0, 1, 3, 4), reference.moe_backward(*inputs, d_out), strict=True))
    direction = np.random.default_rng(9).standard_normal(inputs[which].shape)
    ends = []
    for step in (1e-6, -1e-6):
        moved = list(inputs)
        moved[which] = inputs[which] + step * direction
        ends.append((reference.moe(*moved) * d_out).sum())
    assert (gradients[which] * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)
