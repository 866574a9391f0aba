import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.accuracy.promotion import ROUNDOFF
from tools.accuracy.tolerance import lower_bound, tolerance

# Table 2 of the report, by hand
TABLE = {
    "float32": [(1999, 1e-4), (2000, 2e-4), (10000, 4e-4), (20000, 8e-4), (200000, 8e-3)],
    "float16": [(1999, 4e-3), (2000, 7e-2), (10000, 0.1), (20000, 0.1), (200000, 0.2)],
}


@pytest.mark.parametrize("dtype", TABLE)
def test_the_rows_of_the_report(dtype):
    assert [tolerance(dtype, count) for count, _ in TABLE[dtype]] == [value for _, value in TABLE[dtype]]


def test_between_rows_the_stricter_one():
    assert tolerance("float32", 1) == tolerance("float32", 1000) == 1e-4
    assert tolerance("float32", 9999) == 2e-4
    assert tolerance("float32", 10**9) == 8e-3


def test_half_precision_types_share_a_column():
    for count in (1, 2000, 199999):
        assert tolerance("bfloat16", count) == tolerance("hfloat32", count) == tolerance("float16", count)


def test_a_correctly_rounded_result_is_within_tolerance():
    for dtype, roundoff in ROUNDOFF.items():
        assert roundoff < tolerance(dtype, 1)


def test_each_further_rounding_adds_a_roundoff():
    assert tolerance("bfloat16", 5, 3) == 0.004 + 2 * 2**-8
    assert tolerance("float16", 0, 3) == 0  # moved values are not rounded


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(sorted(ROUNDOFF)))
def test_more_terms_never_tighten(first, second, dtype):
    low, high = sorted((first, second))
    assert tolerance(dtype, low) <= tolerance(dtype, high)


def test_the_lower_bound_keeps_the_gradient_of_a_quotient_finite():
    x = np.float16(lower_bound())
    assert float(x) == lower_bound()  # the same in all types
    assert 16 / float(x) ** 2 < np.finfo(np.float16).max
