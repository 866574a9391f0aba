import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.accuracy.judge import errors, judge, judge_special, same_bits


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
    assert verdict.detail == "at [1, 2]: 1.5, should be 1"
    assert judge(got, want, 0.5, "float32").passed


def test_a_wrong_shape_fails():
    assert "shape [3, 2], should be [2, 3]" in judge(np.ones((3, 2)), np.ones((2, 3)), 1, "float32").detail


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
