import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tools.accuracy.operators.extremes import clip_lower, flushed, grid, inspect, poke, specials
from tools.accuracy.promotion import DEFAULT

VALUES = arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-100, 100, width=32))


def test_inspect():
    values = np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 1e-5, 1])
    found = inspect(values, "float32", 1e-3)
    assert (found.nan, found.inf, found.zero, found.denormal, found.small) == (1, 2, 2, 1, 4)
    assert inspect(np.float16([3e-5, 1]), "float16", 1e-3).denormal == 1
    assert inspect(np.float32([3e-5, 1]), "bfloat16", 1e-3).denormal == 0


@given(VALUES)
def test_clipping_bounds_magnitudes_and_keeps_signs(values):
    clipped = clip_lower(values, 0.03125)
    assert inspect(clipped, "float16", 0.03125).small == 0
    assert (np.signbit(clipped) == np.signbit(values)).all()
    large = np.abs(values) >= 0.03125
    assert (clipped[large] == values[large]).all()
    assert clipped.dtype == np.float32 and (clip_lower(clipped, 0.03125) == clipped).all()


def test_special_values_survive_their_type():
    for dtype in DEFAULT:
        found = inspect(specials(dtype), dtype, 0)
        assert (found.nan, found.inf, found.zero, found.denormal) == (1, 2, 1, 2)


def test_grid_has_every_pair():
    first, second = grid("float16", 2)
    number = len(specials("float16"))
    assert first.shape == (number**2,)
    pairs = {(a.tobytes(), b.tobytes()) for a, b in zip(first, second, strict=True)}
    assert len(pairs) == number**2


def test_poke_changes_one_element_a_row():
    values = np.ones((20, 5), np.float32)
    poked = poke(values, "float32")
    assert (values == 1).all()
    changed = poked != values
    assert changed.sum() == len(specials("float32")) - 1  # one of the special values is 1
    assert not np.delete(changed, 2, 1).any()


def test_flushed():
    values = np.float32([1e-40, -1e-40, 1, np.inf])
    np.testing.assert_array_equal(flushed(values, "float32", True), np.float32([0, -0.0, 1, np.inf]))
    assert np.signbit(flushed(values, "float32", True)).tolist() == [False, True, False, False]
    assert not np.signbit(flushed(values, "float32", False)).any()
