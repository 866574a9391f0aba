"""Orders against Python's sorted; the lower index first among equals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.semi_auto_cpu.kernels import KERNELS
from tests.plugins.semi_auto_cpu.kernels.derivative import LOW

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
