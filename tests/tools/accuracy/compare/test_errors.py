import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tools.accuracy import judge
from tools.accuracy.compare.errors import measure
from tools.accuracy.compare.statistics import statistics_error
from tools.accuracy.dumps import npy
from tools.accuracy.dumps.debugger import statistics
from tools.accuracy.dumps.read_items import Item
from tools.accuracy.promotion import SMALLEST

TINY = SMALLEST["float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays")


def files(folder, *values):
    paths = [folder / f"{number}.npy" for number in range(len(values))]
    for path, array in zip(paths, values, strict=True):
        np.save(path, array)
    return paths


@st.composite
def pairs(draw):
    """An array and a neighbour of it, of any float type, with whatever floats there are."""
    shape = draw(arrays.array_shapes(max_dims=3, max_side=6))
    types = [draw(st.sampled_from([np.float32, np.float16, np.float64])) for _ in range(2)]
    special = draw(st.booleans())
    want = draw(arrays.arrays(types[0], shape, elements=st.floats(width=16, allow_nan=special, allow_infinity=special)))
    noise = draw(arrays.arrays(np.float64, shape, elements=st.floats(-1e-3, 1e-3)))
    with np.errstate(all="ignore"):
        got = (want.astype(np.float64) * (1 + noise)).astype(types[1])
    return want, got


@settings(max_examples=150)
@given(pairs(), st.sampled_from([0.0, 1e-4, 4e-3]))
def test_errors_are_those_of_judge(folder, pair, tolerance):
    want, got = pair
    found = measure(*files(folder, want, got), tolerance, TINY)
    reference = judge.errors(got, want, TINY)
    assert found.error == pytest.approx(float(reference.max()), rel=1e-4, abs=1e-12)
    near = np.isclose(reference, tolerance, rtol=1e-4)  # float32 may fall on either side
    assert abs(found.outside - int((reference > tolerance).sum())) <= int(near.sum())
    if want.dtype == got.dtype and np.array_equal(want, got):
        assert found.nans == 0 and found.error == 0
    else:
        assert found.nans == int(np.isnan(got).sum())


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e-16, 1e15, 1e25])
def test_values_whose_squares_float32_cannot_hold(folder, size):
    """Next to zero an error is relative to the root mean square, whatever that is."""
    rng = np.random.default_rng(0)
    want = (size * rng.normal(size=500)).astype(np.float32)
    want[::10] *= np.float32(1e-3)
    got = want + (1e-5 * size * rng.normal(size=500)).astype(np.float32)
    found = measure(*files(folder, want, got), 1e-4, TINY)
    assert found.error == pytest.approx(float(judge.errors(got, want, TINY).max()), rel=1e-4)


def test_many_chunks(folder, monkeypatch):
    """The worst value is found in whatever chunk it is, and the scale is that of the whole tensor."""
    monkeypatch.setattr(npy, "CHUNK", 100)
    rng = np.random.default_rng(0)
    want = rng.normal(size=1050).astype(np.float32)
    for place in (0, 99, 100, 555, 1049):
        got = want.copy()
        got[place] += 0.25
        found = measure(*files(folder, want, got), 1e-4, TINY)
        assert (found.where, found.outside) == (place, 1)
        assert found.error == pytest.approx(float(judge.errors(got, want, TINY).max()), rel=1e-4)
        integers = np.arange(1050)
        other = integers + (integers == place)
        found = measure(*files(folder, integers, other), 0.0, TINY)
        assert (found.where, found.outside, found.error) == (place, 1, math.inf)


@settings(max_examples=150)
@given(
    arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(-100, 100)),
    st.integers(0, 2**32 - 1),
    st.floats(1e-5, 1e-2),
)
def test_what_passes_by_value_passes_by_statistics(want, seed, tolerance):
    assume(np.any(np.abs(want) > 1e-3))
    scale = np.maximum(np.abs(want), math.sqrt(np.mean(np.square(want))))
    got = want + tolerance * scale * np.random.default_rng(seed).uniform(-1, 1, want.shape)
    first, second = (Item("output.0", "output", "float32", x.shape, statistics(x)) for x in (want, got))
    assert statistics_error(first, second, TINY) <= tolerance * (1 + 1e-6)


def test_statistics_see_a_scaled_tensor():
    want = np.random.default_rng(0).normal(size=100)
    first, second = (Item("output.0", "output", "float32", x.shape, statistics(x)) for x in (want, 1.01 * want))
    assert statistics_error(first, second, TINY) > 5e-3
