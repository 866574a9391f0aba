"""Arithmetic with constants, activations and updates; norms and rotary positions, with their gradients."""

import math

import numpy as np
import pytest

from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from tests.plugins.semi_auto_cpu.kernels.derivative import BFLOAT16, LOW, numerical, rounded


def run(name, *inputs):
    return (KERNELS | LOW_PRECISION)[name]({}, *inputs)


def test_arithmetic_with_constants():
    x = np.array([-7.5, 0.25, 3.0], np.float32)
    assert run("Muls", x, 0.1).dtype == run("Divs", x, 3).dtype == np.float32
    np.testing.assert_array_equal(run("Muls", x, 0.1), x * np.float32(0.1))
    np.testing.assert_array_equal(run("Divs", x, 3), x / np.float32(3))
    for exponent in (2, 2.0, 3, -1.5):
        power = run("PowTensorScalar", np.abs(x), exponent)
        assert power.dtype == np.float32
        np.testing.assert_allclose(power, [abs(item) ** exponent for item in x], rtol=1e-6)
    np.testing.assert_allclose(run("FmodScalar", x, 2), [math.fmod(item, 2) for item in x])
    np.testing.assert_allclose(run("RemainderTensorScalar", x, 2), [item % 2 for item in x])
    np.testing.assert_array_equal(run("LessScalar", x, 0.25), [True, False, False])


def test_integers_stay_exact_and_are_divided_as_numbers():
    x = np.array([-7, 2**53 + 1], np.int64)
    np.testing.assert_array_equal(run("Muls", x, 1), x)
    np.testing.assert_array_equal(run("FmodScalar", x, 4), [-3, 1])
    np.testing.assert_array_equal(run("RemainderTensorScalar", x, 4), [1, 1])
    np.testing.assert_array_equal(run("Divs", np.array([1], np.int32), 2), [0.5])
    np.testing.assert_array_equal(run("PowTensorScalar", np.array([3], np.int64), 2), [9])
    low, high = np.array(0, np.int64), np.array(9, np.int64)
    np.testing.assert_array_equal(run("ClipByValue", x, low, high), [0, 9])


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, dim):
    a, b = np.split(x, 2, dim)
    return silu(a) * b


def test_silu_and_its_gradient(rng):
    x, dout = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(run("SiLU", x), silu(x), rtol=1e-5)
    np.testing.assert_allclose(run("SiLUGrad", dout, x), numerical(silu, [x], dout)[0], atol=1e-5)


@pytest.mark.parametrize("dim", (-1, 0, 1))
def test_swiglu_and_its_gradient(rng, dim):
    x = rng.normal(size=(2, 4, 6)).astype(np.float32)
    expected = swiglu(x, dim)
    dout = rng.normal(size=expected.shape).astype(np.float32)
    np.testing.assert_allclose(run("Swiglu", x, dim), expected, rtol=1e-5)
    wanted = numerical(lambda y: swiglu(y, dim), [x], dout)[0]
    np.testing.assert_allclose(run("SwigluGrad", dout, x, dim), wanted, atol=1e-5)


def test_activations_of_large_numbers_neither_overflow_nor_warn():
    x = np.array([-1e4, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(run("SiLU", x), [0, 1e4])
        np.testing.assert_array_equal(run("SiLUGrad", np.ones(2, np.float32), x), [0, 1])


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ("SiLU", "Swiglu", "Sub", "AddN", "SiLUGrad", "SwigluGrad"))
def test_low_precision_is_float32_rounded(rng, dtype, name):
    arrays = [rounded(rng.normal(size=(4, 6)), dtype) for _ in range(2)]
    dout = rounded(rng.normal(size=(4, 3)), dtype)
    inputs = {"SiLU": arrays[:1], "Swiglu": arrays[:1], "AddN": [arrays], "SwigluGrad": [dout, arrays[0]]}.get(
        name, arrays
    )
    wide = [[y.astype(np.float32) for y in x] if isinstance(x, list) else x.astype(np.float32) for x in inputs]
    np.testing.assert_array_equal(rounded(run(name, *inputs), dtype), rounded(run(name, *wide), dtype))


def test_gradients_of_bfloat16_accumulate_in_float32():
    total = np.full(2, 256, np.float32)
    for _ in range(3):
        result = run("AssignAdd", total, np.ones(2, BFLOAT16))
    np.testing.assert_array_equal(total, [259, 259])
    np.testing.assert_array_equal(result, [259, 259])
    variable = np.zeros(2, BFLOAT16)
    run("Assign", variable, np.ones(2, BFLOAT16))
    np.testing.assert_array_equal(variable, [1, 1])
    np.testing.assert_array_equal(run("TensorMove", variable), [1, 1])


def test_a_sum_of_tensors_leaves_them_alone():
    x = np.ones(2, np.float32)
    np.testing.assert_array_equal(run("AddN", [x, x, x]), [3, 3])
    np.testing.assert_array_equal(x, [1, 1])


def test_equal_and_square_as_gradients_in_bfloat16_need_them():
    x = np.array([np.inf, np.nan, 3], BFLOAT16)
    np.testing.assert_array_equal(run("Equal", x, x), [True, False, True])
    np.testing.assert_array_equal(run("Square", x[2:]), [9])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_root_in_low_precision_is_that_of_float32(rng, dtype):
    x = rounded(rng.uniform(0.1, 9.0, size=8), dtype)
    np.testing.assert_array_equal(run("Sqrt", x), np.sqrt(x.astype(np.float32)))


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
