"""Rows by number against loops, and their gradients; shapes, cuts and orders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.kernels.indexing import MASKS, add_rows
from tests.plugins.semi_auto_cpu.kernels.derivative import BFLOAT16, LOW, rounded


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=12), st.integers(0, 2**32 - 1))
def test_every_row_is_added_once_where_it_belongs(size, index, seed):
    index = np.array([place % size for place in index], np.int64)
    rows = np.random.default_rng(seed).integers(-9, 9, (len(index), 2, 3)).astype(np.float32)
    found, expected = np.zeros((size, 2, 3), np.float32), np.zeros((size, 2, 3), np.float32)
    add_rows(found, index, rows)
    for place, row in zip(index, rows, strict=True):
        expected[place] += row
    np.testing.assert_array_equal(found, expected)


def test_embedding_and_its_gradient(rng):
    table, index = rng.normal(size=(5, 3)).astype(np.float32), np.array([[4, 0, 4], [1, 4, 1]], np.int32)
    found = KERNELS["Embedding"]({}, index, table, None, None, 2.0, False)
    assert found.shape == (2, 3, 3)
    np.testing.assert_array_equal(found[1, 1], table[4])
    grad = rng.normal(size=(2, 3, 3)).astype(np.float32)
    expected = np.zeros_like(table)
    for place in np.ndindex(2, 3):
        expected[index[place]] += grad[place]
    gradient = KERNELS["EmbeddingDenseBackward"]({}, grad, index, 5, None, False)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    expected[4] = 0
    np.testing.assert_allclose(KERNELS["EmbeddingDenseBackward"]({}, grad, index, 5, 4, False), expected, rtol=1e-5)


@pytest.mark.parametrize("dim", (0, 1, -1))
@pytest.mark.parametrize("dtype", (np.float32, np.int32, *LOW), ids=str)
def test_index_select_and_its_gradient(rng, dim, dtype):
    x, index = rng.integers(-9, 9, (3, 4, 3)).astype(np.float32).astype(dtype), np.array([2, 0, 2, 2], np.int64)
    found = KERNELS["IndexSelect"]({}, x, dim, index)
    expected = np.stack([np.take(x, place, dim) for place in index], dim)
    np.testing.assert_array_equal(found, expected)
    target = np.ones(x.shape, dtype)
    result = KERNELS["InplaceIndexAddExt"]({}, target, dim, index, found, 1)
    wanted = np.ones(x.shape, np.float32)
    for number, place in enumerate(index):
        np.moveaxis(wanted, dim, 0)[place] += np.take(found, number, dim).astype(np.float32)
    np.testing.assert_array_equal(target, wanted.astype(dtype))
    np.testing.assert_array_equal(result, wanted.astype(dtype))


def test_a_gradient_is_scaled_by_alpha():
    x = np.zeros(3, np.float32)
    KERNELS["InplaceIndexAddExt"]({}, x, 0, np.array([1]), np.ones(1, np.float32), 0.5)
    np.testing.assert_array_equal(x, [0, 0.5, 0])


def test_many_small_gradients_of_one_row_are_summed_in_float32():
    x = np.zeros((1, 2), BFLOAT16)
    KERNELS["InplaceIndexAddExt"]({}, x, 0, np.zeros(1000, np.int64), np.ones((1000, 2), BFLOAT16), 1)
    np.testing.assert_array_equal(x.astype(np.float32), [[1000, 1000]])


@pytest.mark.parametrize("dtype", (np.float32, *LOW), ids=str)
def test_scatter_writes_what_the_index_names(rng, dtype):
    x, index = np.zeros((2, 5), dtype), np.array([[4, 0], [1, 2]], np.int64)
    source = rounded(rng.normal(size=(2, 3)), dtype)
    KERNELS["InplaceScatterSrc"]({}, x, -1, index, source)
    expected = np.zeros((2, 5), dtype)
    for row, column in np.ndindex(2, 2):
        expected[row, index[row, column]] = source[row, column]
    np.testing.assert_array_equal(x, expected)


def test_one_hot():
    x, one, zero = np.array([[1, 3], [0, 9]], np.int32), np.array(1, np.int32), np.array(0, np.int32)
    found = KERNELS["OneHotExt"]({}, x, 4, one, zero, -1)
    np.testing.assert_array_equal(found[0], [[0, 1, 0, 0], [0, 0, 0, 1]])
    np.testing.assert_array_equal(found[1], [[1, 0, 0, 0], [0, 0, 0, 0]])  # 9 is no class
    np.testing.assert_array_equal(KERNELS["OneHotExt"]({}, x, 4, one, zero, 0), np.moveaxis(found, -1, 0))
    assert KERNELS["OneHotExt"]({}, x, -1, one, zero, -1).shape == (2, 2, 10)


def test_what_it_cannot_do_it_refuses():
    x, index = np.zeros((2, 3), np.float32), np.zeros(2, np.int32)
    with pytest.raises(NotImplementedError, match="Embedding: max_norm"):
        KERNELS["Embedding"]({}, index, x, None, 1.0, 2.0, False)
    with pytest.raises(NotImplementedError, match="EmbeddingDenseBackward: scale_grad_by_freq"):
        KERNELS["EmbeddingDenseBackward"]({}, x, index, 3, None, True)


@pytest.mark.parametrize("place", (-1, 3))
def test_an_index_outside_is_refused_rather_than_counted_from_the_end(place):
    x, index = np.zeros((3, 2), np.float32), np.array([0, place])
    calls = {
        "Embedding": (index, x),
        "EmbeddingDenseBackward": (np.zeros((2, 2), np.float32), index, 3),
        "IndexSelect": (x, 0, index),
        "InplaceIndexAddExt": (x, 0, index, np.zeros((2, 2), np.float32)),
        "InplaceScatterSrc": (x, 0, index[:, None], np.zeros((2, 2), np.float32)),
    }
    for name, inputs in calls.items():
        with pytest.raises(ValueError, match=f"{name}: the indices range"):
            KERNELS[name]({}, *inputs)


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
    pieces = run("Chunk", x, 3, 2)
    assert [piece.shape for piece in pieces] == [(2, 3, 2), (2, 3, 2)], "of four columns each part has two"
    np.testing.assert_array_equal(np.concatenate(run("Chunk", x, 2), 0), x)
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
    with pytest.raises(NotImplementedError, match=r"StridedSlice: .*does not support ellipsis_mask 1"):
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


FEW = st.lists(st.integers(-3, 3), min_size=1, max_size=12)  # many ties


@given(FEW, st.booleans())
def test_sort_keeps_the_order_of_equals(values, descending):
    found, order = KERNELS["SortExt"]({}, np.array([values], np.float32), 1, descending, False)
    expected = sorted(range(len(values)), key=lambda place: (-values[place] if descending else values[place], place))
    assert order[0].tolist() == expected
    assert found[0].tolist() == [values[place] for place in expected]


@given(FEW, st.integers(0, 12), st.booleans())
def test_top_k_takes_the_lower_index_among_equals(values, k, largest):
    k = min(k, len(values))
    x = np.array([values, values[::-1]], np.float32)
    found, order = KERNELS["TopkExt"]({}, x, k, -1, largest, True)
    for row, numbers in enumerate(x.tolist()):
        expected = sorted(range(len(numbers)), key=lambda at: (-numbers[at] if largest else numbers[at], at))[:k]
        assert order[row].tolist() == expected
        assert found[row].tolist() == [numbers[place] for place in expected]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=30))
def test_sorting_experts_twice_gives_a_permutation_and_its_inverse(experts):
    """As MindFormers' dispatcher does."""
    _, order = KERNELS["SortExt"]({}, np.array([experts], np.float32), 1, False, False)
    _, back = KERNELS["SortExt"]({}, order.astype(np.float32), -1, False, False)
    assert sorted(order[0].tolist()) == list(range(len(experts)))
    np.testing.assert_array_equal(order[0][back[0]], np.arange(len(experts)))


def test_other_dimensions_and_types():
    x = np.array([[1, 0], [2, 2], [0, 1]], np.int64)
    found, order = KERNELS["TopkExt"]({}, x, 2, 0, True, True)
    assert found.tolist() == [[2, 2], [1, 1]] and order.tolist() == [[1, 1], [0, 2]]
    least = np.array([-128, 127, -128], np.int8)
    assert KERNELS["SortExt"]({}, least, -1, True, False)[1].tolist() == [1, 0, 2]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_sorts_as_float32(dtype):
    x = np.array([1.0, -2.0, 1.0, 0.5], dtype)
    found, order = KERNELS["SortExt"]({}, x, -1, True, False)
    assert found.tolist() == [1, 1, 0.5, -2] and order.tolist() == [0, 2, 3, 1]
