"""Rows by number against loops, and their gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.semi_auto_cpu.kernels import KERNELS
from plugins.semi_auto_cpu.kernels.indexing import add_rows
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
        with pytest.raises(ValueError, match=f"{name}: indices"):
            KERNELS[name]({}, *inputs)
