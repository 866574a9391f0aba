import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.accuracy.promotion import (
    DEFAULT,
    LARGEST,
    ROUNDOFF,
    SMALLEST,
    golden_dtype,
    promoted,
    round_bfloat16,
    rounded,
)

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


def test_bfloat16_as_the_library_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        want = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(round_bfloat16(values), want)


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
    assert [golden_dtype(dtype) for dtype in ("float16", "bfloat16", "hfloat32")] == [np.float32] * 3
    assert golden_dtype("float32") is np.float64 and golden_dtype("float32", wide=False) is np.float32
    assert promoted(np.float16([1.5]), "float16").dtype == np.float32
    ids = np.arange(3, dtype=np.int32)
    assert promoted(ids, "float32") is ids and rounded(ids, "bfloat16") is ids
