"""RmsNorm and RotaryPositionEmbedding against their formulas, gradients by differences."""

import numpy as np
import pytest

from plugins.semi_auto_cpu.kernels import KERNELS
from tests.plugins.semi_auto_cpu.kernels.derivative import LOW, numerical, rounded


def rms_norm(x, gamma):
    axes = tuple(range(x.ndim - gamma.ndim, x.ndim))
    return x / np.sqrt(np.mean(x**2, axes, keepdims=True) + 1e-3) * gamma


@pytest.mark.parametrize("shape", ((4,), (3, 4)))
def test_rms_norm_and_its_gradient(rng, shape):
    x, gamma, dy = (rng.normal(size=size).astype(np.float32) for size in ((2, 3, 4), shape, (2, 3, 4)))
    y, rstd = KERNELS["RmsNorm"]({}, x, gamma, 1e-3)
    np.testing.assert_allclose(y, rms_norm(x, gamma), rtol=1e-5)
    assert rstd.shape == (*x.shape[: x.ndim - gamma.ndim], *[1] * gamma.ndim)
    dx, dgamma = KERNELS["RmsNormGrad"]({}, dy, x, rstd, gamma)
    for found, expected in zip((dx, dgamma), numerical(rms_norm, (x, gamma), dy), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rms_norm_in_low_precision_is_float32_rounded(rng, dtype):
    x, gamma = rounded(rng.normal(size=(3, 8)), dtype), rounded(rng.normal(size=8), dtype)
    found = KERNELS["RmsNorm"]({}, x, gamma, 1e-6)
    expected = KERNELS["RmsNorm"]({}, x.astype(np.float32), gamma.astype(np.float32), 1e-6)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def rotated(x, cos, sin, mode):
    """Plane by plane: (a, b) -> (a cos - b sin, b cos + a sin), each with its own cos and sin."""
    out, half = np.zeros_like(x), x.shape[-1] // 2
    cos, sin = np.broadcast_to(cos, x.shape), np.broadcast_to(sin, x.shape)
    for plane in range(half):
        a, b = (plane, plane + half) if mode == 0 else (2 * plane, 2 * plane + 1)
        out[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        out[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return out


@pytest.mark.parametrize("mode", (0, 1))
@pytest.mark.parametrize("shape", ((1, 1, 3, 4), (2, 1, 3, 4), (2, 2, 3, 4)))
def test_rotary_and_its_gradient(rng, mode, shape):
    x, cos, sin, dy = (rng.normal(size=size).astype(np.float32) for size in ((2, 2, 3, 4), shape, shape, (2, 2, 3, 4)))
    found = KERNELS["RotaryPositionEmbedding"]({}, x, cos, sin, mode)
    np.testing.assert_allclose(found, rotated(x, cos, sin, mode), atol=1e-6)
    gradients = KERNELS["RotaryPositionEmbeddingGrad"]({}, dy, cos, sin, x, mode)
    for gradient, expected in zip(gradients, numerical(lambda *y: rotated(*y, mode), (x, cos, sin), dy), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-5)
    without = KERNELS["RotaryPositionEmbeddingGrad"]({}, dy, cos, sin, None, mode)
    np.testing.assert_array_equal(without[0], gradients[0])
    assert without[1:] == (None, None)


def test_other_modes_are_refused():
    x = np.zeros((1, 1, 1, 4), np.float32)
    with pytest.raises(NotImplementedError, match="RotaryPositionEmbedding: mode 2"):
        KERNELS["RotaryPositionEmbedding"]({}, x, x, x, 2)
