"""Data types, tolerances by Table 2, and the judgement of a result by them."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.accuracy.judge import (
    DEFAULT,
    LARGEST,
    ROUNDOFF,
    SMALLEST,
    Verdict,
    errors,
    fills,
    judge,
    judge_special,
    lower_bound,
    powers,
    promoted,
    round_bfloat16,
    rounded,
    same_bits,
    tolerance,
)


def test_errors_are_relative_where_large_and_to_the_scale_where_small():
    want = np.array([100.0, 1.0, 0.0, -100.0])
    rms = np.sqrt(20001 / 4)
    got = want + np.array([1, 0.5, 0.5, -1])
    np.testing.assert_allclose(errors(got, want, 0), [0.01, 0.5 / rms, 0.5 / rms, 0.01])


def test_a_tensor_of_zeros_must_be_zero():
    assert judge(np.zeros(2), np.zeros(2), 0, "float32").passed
    assert not judge(np.array([0.0, 1e-30]), np.zeros(2), 0.2, "float32").passed


def test_nothing_finer_than_denormals_is_asked_for():
    want = np.full(3, 4.4375e-6)
    assert judge(want.astype(np.float16), want, 0.004, "float16").passed
    assert not judge(want.astype(np.float16), want, 0.004, "float32").passed
    assert not judge(np.zeros(3), want, 0.004, "float16").passed


@pytest.mark.parametrize(("got", "want"), [(np.nan, 1), (np.inf, 1), (1, np.nan), (1, np.inf), (-np.inf, np.inf)])
def test_what_is_not_finite_must_match(got, want):
    assert not judge(np.array([got, 1.0]), np.array([want, 1.0]), 1e9, "float32").passed
    assert judge(np.array([want, 1.0]), np.array([want, 1.0]), 0, "float32").passed


def test_the_verdict_names_the_worst_element():
    want = np.ones((2, 3))
    got = want.copy()
    got[1, 2], got[0, 1] = 1.5, 1.2
    verdict = judge(got, want, 0.1, "float32")
    assert (verdict.passed, verdict.outside, verdict.error) == (False, 2, 0.5)
    assert verdict.detail == "at [1, 2] the value is 1.5, but must be 1"
    assert judge(got, want, 0.5, "float32").passed


def test_a_wrong_shape_fails():
    assert "the shape is [3, 2], but must be [2, 3]" in judge(np.ones((3, 2)), np.ones((2, 3)), 1, "float32").detail


@given(st.floats(1e-30, 1e30), st.integers(0, 2**32))
def test_errors_do_not_depend_on_the_scale(scale, seed):
    rng = np.random.default_rng(seed)
    want, noise = rng.standard_normal((2, 8))
    np.testing.assert_allclose(
        errors((want + noise) * scale, want * scale, 0), errors(want + noise, want, 0), rtol=1e-6
    )


def test_special_values_must_be_where_they_belong():
    want = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0])
    assert judge_special(want, [want], 1e-4, "float32").passed
    for number in range(5):
        got = want.copy()
        got[number] = 7
        assert judge_special(got, [want], 1e-4, "float32").outside == 1


def test_overflow_and_flushed_denormals():
    # 1e5 is infinite in float16; a denormal may become zero, and then its reciprocal infinite
    assert judge_special(np.float16([np.inf]), [np.array([1e5])], 0.004, "float16").passed
    assert not judge_special(np.float16([65504]), [np.array([1e5])], 0.004, "float16").passed
    assert judge_special(np.float32([0]), [np.array([1e-40])], 1e-4, "float32").passed
    kept, flushed = np.array([1e38]), np.array([np.inf])
    assert judge_special(np.float32([np.inf]), [kept, flushed], 1e-4, "float32").passed
    assert not judge_special(np.float32([np.nan]), [kept, flushed], 1e-4, "float32").passed


def test_a_floor_forgives_cancellation():
    got, want = np.float32([1e-6]), [np.array([0.0])]
    assert not judge_special(got, want, 1e-4, "float32").passed
    assert judge_special(got, want, 1e-4, "float32", floor=1.0).passed


def test_same_bits():
    a = np.float32([0.0, 1.0, np.nan])
    assert same_bits(a, a.copy()) == 0
    assert same_bits(a, np.float32([-0.0, np.nextafter(np.float32(1), np.float32(2)), np.nan])) == 2
    assert same_bits(np.array([True, False]), np.array([True, True])) == 1
    assert same_bits(np.float16(1).reshape(()), np.float16(2).reshape(())) == 1


def test_a_tensor_without_elements_passes():
    empty = np.zeros((0, 3), np.float32)
    assert judge(empty, empty, 1e-4, "float32") == Verdict(True, 0.0, 0, "")
    assert not judge(empty, np.zeros((3, 0), np.float32), 1e-4, "float32").passed


FLOATS = st.floats(width=32)


def bfloat16_reference(value):
    """The nearest of the two neighbours that keep 16 bits; a tie goes to the even one."""
    bits = int(np.float32(value).view(np.uint32))
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    left = bits - below
    if left > 0x8000 or (left == 0x8000 and below >> 16 & 1):
        below = above
    return np.uint32(below & 0xFFFFFFFF).view(np.float32)


@given(FLOATS)
def test_bfloat16_is_the_nearest(value):
    got = round_bfloat16(np.float32([value]))[0]
    if np.isnan(value):
        assert np.isnan(got)
    else:
        assert got == bfloat16_reference(value)


def test_bfloat16_by_hand():
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, np.inf, -np.inf, -0.0, 0.1])
    want = np.float32([1, 1 + 2**-6, 1 + 2**-7, np.inf, np.inf, -np.inf, -0.0, 0.10009765625])
    np.testing.assert_array_equal(round_bfloat16(values), want)
    assert np.isnan(round_bfloat16(np.uint32([0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32))).all()


@given(FLOATS, st.sampled_from(DEFAULT))
def test_rounding_twice_changes_nothing(value, dtype):
    once = rounded(np.float32([value]), dtype)
    np.testing.assert_array_equal(rounded(once, dtype), once)


@pytest.mark.parametrize("dtype", DEFAULT)
def test_limits(dtype):
    largest, smallest, one = (rounded(np.array([v]), dtype) for v in (LARGEST[dtype], SMALLEST[dtype], 1.0))
    assert (largest[0], smallest[0]) == (LARGEST[dtype], SMALLEST[dtype])
    above = rounded(np.array([1 + 2.001 * ROUNDOFF[dtype]]), dtype)
    assert above > one and rounded(np.array([1 + 0.999 * ROUNDOFF[dtype]]), dtype) == one


def test_the_rules_of_the_report():
    for dtype in ("float16", "bfloat16", "hfloat32"):
        assert promoted(np.float16([1.5]), dtype).dtype == np.float32
    assert promoted(np.float32([1.5]), "float32").dtype == np.float64
    assert promoted(np.float32([1.5]), "float32", wide=False).dtype == np.float32
    ids = np.arange(3, dtype=np.int32)
    assert promoted(ids, "float32") is ids and rounded(ids, "bfloat16") is ids


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


@pytest.mark.parametrize(
    "want",
    [
        np.array([1e6, 3e4, -2e4, 1.0], np.float32),  # not narrow
        np.array([1e5, 1e5, 900.0], np.float32),  # no gap
        np.array([8000.0, 8000.0, 1.0], np.float32),  # not huge
        np.full(4, -1e30, np.float32),  # nothing else
    ],
)
def test_not_every_large_value_is_a_fill(want):
    assert fills(powers(want, want)) == (math.inf, math.inf)


@pytest.mark.parametrize("dtype", DEFAULT)
def test_constants_are_those_of_the_types(dtype):
    found = ml_dtypes.finfo(dtype)
    assert (SMALLEST[dtype], LARGEST[dtype]) == (float(found.smallest_normal), float(found.max))
    assert ROUNDOFF[dtype] == float(found.eps) / 2


@pytest.mark.parametrize(
    ("powers_of_two", "found"),
    [((5, 13, 14, 15), 2.0**13), ((6, 13, 14, 15), math.inf), ((5, 13, 16), math.inf)],
    ids=["fills", "too near to the rest", "too far apart"],
)
def test_fills_lie_within_a_factor_of_8_and_far_above_the_rest(powers_of_two, found):
    want = 2.0 ** np.array(powers_of_two)
    assert fills(powers(want, want)) == (found, found)


def test_a_mask_over_a_mask_is_taken_off_in_turn():
    want = np.array([-1e30, -1e30, -1e4, -1e4, 0.5, 0.0], np.float32)
    got = np.array([-1e30, -1e30, -1e4, -10001, 0.5, 0.0], np.float32)
    assert fills(powers(want, want)) == (2.0**13, 2.0**13)
    sure, maybe = fills(powers(got, want))
    assert 1e29 < sure < 1e30 and maybe == 2.0**13
    bare = np.array([0.0, 0.0, -1e4], np.float32)
    assert fills(powers(bare, bare)) == (math.inf, 2.0**13), "errors have no scale beside zeros"
