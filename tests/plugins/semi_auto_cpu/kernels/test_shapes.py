"""What moves, sums and multiplies, against NumPy and MindSpore's own CPU kernels in float32."""

import numpy as np
import pytest

from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.kernels.shapes import MASKS
from tests.plugins.semi_auto_cpu.kernels.derivative import BFLOAT16, LOW, rounded

ALL = KERNELS | LOW_PRECISION


def run(name, *inputs, **attributes):
    return ALL[name](attributes, *inputs)


def masks_of(numbers):
    """As the attributes of a gradient."""
    return dict(zip(MASKS, map(str, numbers), strict=False))


def test_parts_and_dimensions():
    x = np.arange(24).reshape(2, 3, 4).astype(BFLOAT16)
    first, second = run("SplitWithSize", x, (1, 3), -1)
    np.testing.assert_array_equal(first, x[..., :1])
    np.testing.assert_array_equal(second, x[..., 1:])
    np.testing.assert_array_equal(run("TransposeExtView", x, 0, -1), x.swapaxes(0, 2))
    np.testing.assert_array_equal(run("Transpose", x, (2, 0, 1)), x.transpose(2, 0, 1))
    np.testing.assert_array_equal(run("ExpandDims", x, 1), x[:, None])
    np.testing.assert_array_equal(run("Tile", x, (2, 1, 1)), np.concatenate([x, x]))
    np.testing.assert_array_equal(run("BroadcastTo", x[:, :1], (5, -1, 3, -1)), np.broadcast_to(x[:, :1], (5, 2, 3, 4)))
    np.testing.assert_array_equal(run("ExpandAs", x[:, :1], x), np.broadcast_to(x[:, :1], x.shape))
    assert run("Reshape", x, (24,)) is x and run("Squeeze", x, ()) is x
    assert all(run(name, x, *more).dtype == BFLOAT16 for name, more in (("Tile", ((1, 1, 1),)), ("ExpandDims", (0,))))
    with pytest.raises(ValueError, match="SplitWithSize: sizes"):
        run("SplitWithSize", x, (1, 2), -1)


@pytest.mark.parametrize("masks", ((), (0, 0, 0, 0, 0), (1, 2, 0, 0, 0), (3, 3, 0, 0, 0)))
def test_cuts_and_their_gradient(rng, masks):
    x = rounded(rng.normal(size=(4, 5)), BFLOAT16)
    begin, end, strides = (1, 0), (3, 4), (1, 2)
    rows = slice(None if masks and masks[0] & 1 else 1, None if masks and masks[1] & 1 else 3)
    columns = slice(0, None if masks and masks[1] & 2 else 4, 2)
    found = run("StridedSlice", x, begin, end, strides, *masks)
    np.testing.assert_array_equal(found, x[rows, columns])
    gradient = run("StridedSliceGrad", found, (4, 5), begin, end, strides, **masks_of(masks))
    expected = np.zeros_like(x)
    expected[rows, columns] = found
    np.testing.assert_array_equal(gradient, expected)


def test_a_cut_may_name_fewer_dimensions(rng):
    x = rng.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run("StridedSlice", x, (1,), (3,), (1,), 0, 0, 0, 0, 0), x[1:])
    to_the_end = run("StridedSliceGrad", x[1:], (3, 4), (1,), (0,), (1,), end_mask="1")  # as of `x[1:]` in a graph
    np.testing.assert_array_equal(to_the_end, np.concatenate([np.zeros((1, 4)), x[1:]]))


def test_a_cut_of_one_index_drops_its_dimension(rng):
    x = rng.normal(size=(3, 4, 2)).astype(np.float32)
    cut, masks = ((1, 2, 0), (2, 4, 2), (1, 1, 1)), (0, 0, 0, 0, 0b001)
    found = run("StridedSlice", x, *cut, *masks)
    np.testing.assert_array_equal(found, x[1, 2:4])
    expected = np.zeros_like(x)
    expected[1, 2:4] = found
    np.testing.assert_array_equal(run("StridedSliceGrad", found, x.shape, *cut, **masks_of(masks)), expected)


def test_masks_of_a_cut_that_nobody_needs_are_refused():
    with pytest.raises(NotImplementedError, match=r"StridedSlice: ellipsis_mask 1"):
        run("StridedSlice", np.zeros((2, 2)), (0, 0), (1, 1), (1, 1), 0, 0, 1, 0, 0)


@pytest.mark.parametrize("name", ("SumExt", "MeanExt", "ReduceSum"))
@pytest.mark.parametrize("dims", ((), (0,), (0, -1), (1,)))
@pytest.mark.parametrize("keep", (False, True))
def test_sums_and_means(rng, name, dims, keep):
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    function = np.mean if name == "MeanExt" else np.sum
    expected = function(x, dims or None, keepdims=keep)
    np.testing.assert_allclose(run(name, x, dims, keep), expected, rtol=1e-6)


def test_no_dimensions_may_mean_all_or_none():
    x = np.ones((2, 3), np.float32)
    assert run("SumExt", x, None, False, None) == 6
    assert run("SumExt", np.ones(300, np.int8), None, False, None) == 300
    assert run("ReduceSum", x, (), False, True) is x
    np.testing.assert_array_equal(run("CumsumExt", x, 1, None), [[1, 2, 3]] * 2)


@pytest.mark.parametrize("ta", (False, True))
@pytest.mark.parametrize("tb", (False, True))
def test_products(rng, ta, tb):
    a, b = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(2, 4, 5)).astype(np.float32)
    left, right = a.swapaxes(1, 2) if ta else a, b.swapaxes(1, 2) if tb else b
    expected = np.einsum("bij,bjk->bik", a, b)
    np.testing.assert_allclose(run("BatchMatMul", left, right, ta, tb), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run("MatMul", left[0], right[0], ta, tb), expected[0], rtol=1e-5, atol=1e-6)


def test_other_products(rng):
    a, b = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    expected = np.einsum("bij,kj->bik", a, b)
    np.testing.assert_allclose(run("Dense", a, b, None), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run("Dense", a, b, b[:, 0]), expected + b[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run("MatMulExt", a, b.T), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run("Outer", b[:, 0], a[0, 0]), b[:, :1] * a[0, 0])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_long_sums_of_low_precision_are_taken_in_float32(dtype):
    x = np.ones((1, 1025), dtype)
    assert run("ReduceSum", x, (), False) == run("SumExt", x) == run("MatMul", x, x, False, True)[0, 0] == 1025
    assert run("CumsumExt", x, 1)[0, -1] == 1025


def test_no_flag_is_ever_up():
    assert not run("NPUGetFloatStatusV2", np.ones(8, np.int32)).any()
    assert not run("NPUClearFloatStatusV2", np.ones(8, np.int32)).any()
