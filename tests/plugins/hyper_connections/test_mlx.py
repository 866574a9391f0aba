"""The reference against mlx-lm's own layer of Xing4.0 (ml-explore/mlx-lm at 71a6ec0, `xing4_0.py`), where it is
installed: forward, and backward by MLX's automatic differentiation. MLX computes on Linux's CPU, too (`mlx[cpu]`); the
newest mlx-lm on PyPI (0.32.2) does not have the file yet.
"""

import numpy as np
import pytest

from plugins.hyper_connections import reference
from tests.plugins.hyper_connections.test_reference import EPS, drawn

STREAMS, HIDDEN, TOKENS, ITERATIONS = 4, 8, 5, 20


def test_streams_and_gradients_are_those_of_mlx():
    xing4 = pytest.importorskip("mlx_lm.models.xing4_0", reason="needs mlx[cpu] and mlx-lm with xing4_0.py")
    import mlx.core as mx

    x, weights = drawn(TOKENS, STREAMS, HIDDEN, seed=4)
    dout = np.random.default_rng(5).standard_normal(x.shape)
    sizes = {"hidden_size": HIDDEN, "hc_mult": STREAMS, "hc_sinkhorn_iters": ITERATIONS, "rms_norm_eps": EPS}
    layer = xing4.HyperConnection(xing4.ModelArgs(**sizes))

    def streams(held, fn, base, scale):
        layer.update({"hc_fn": fn, "hc_base": base, "hc_scale": scale})
        post, mix, read = layer(held)
        return post[..., None] * mx.tanh(read)[..., None, :] + mix @ held  # as Xing4_0DecoderLayer

    given = [mx.array(each.astype(np.float32)) for each in (x[None], weights.fn, weights.base, weights.scale)]
    with mx.stream(mx.cpu):
        got = streams(*given)
        by = mx.grad(lambda *each: (streams(*each) * mx.array(dout[None].astype(np.float32))).sum(), (0, 1, 2, 3))
        gradients = [np.array(each) for each in by(*given)]
    want = reference.forward(x, weights, np.tanh, ITERATIONS, EPS)
    np.testing.assert_allclose(np.array(got)[0], want, atol=2e-5)
    slope = reference.backward(x, weights, np.tanh, lambda a, d: d * (1 - np.tanh(a) ** 2), dout, ITERATIONS, EPS)
    wanted = (slope[0][None], slope[1].fn, slope[1].base, slope[1].scale)
    for found, right in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-4 * np.abs(right).max())
