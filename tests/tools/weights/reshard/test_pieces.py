"""Every number of a tensor goes to its one place, whatever the cuts of either side."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.weights.reshard.run import overlap, pieces


@st.composite
def cut_twice(draw):
    """(shape, old cuts, new cuts) of up to three axes."""
    axes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), max_size=3))
    cuts = [[draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0])) for length in axes]
            for _ in range(2)]  # fmt: skip
    return tuple(axes), *map(tuple, cuts)


def slices_of(whole, cuts):
    """Slow and obvious: NumPy splits one axis after the other."""
    parts = [whole]
    for axis, count in enumerate(cuts):
        parts = [piece for part in parts for piece in np.split(part, count, axis=axis)]
    return parts


def box(start, size):
    return tuple(slice(low, low + length) for low, length in zip(start, size, strict=True))


@settings(max_examples=60)
@given(cut_twice())
def test_each_element_is_read_once_and_written_once(case):
    shape, old, new = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    stored, wanted = slices_of(whole, old), slices_of(whole, new)
    read = [np.zeros(part.shape, int) for part in stored]
    for place, expected in enumerate(wanted):
        found, written = np.full(expected.shape, -1), np.zeros(expected.shape, int)
        for piece in pieces(shape, old, new, place):
            found[box(piece.target, piece.size)] = stored[piece.place][box(piece.source, piece.size)]
            written[box(piece.target, piece.size)] += 1
            read[piece.place][box(piece.source, piece.size)] += 1
        assert (found == expected).all() and (written == 1).all()
    assert all((count == 1).all() for count in read)


@settings(max_examples=60)
@given(cut_twice())
def test_what_two_slices_have_in_common_is_counted(case):
    shape, old, new = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    for place, after in enumerate(slices_of(whole, new)):
        for number, before in enumerate(slices_of(whole, old)):
            assert overlap(shape, old, new, number, place) == len(np.intersect1d(after, before))


def test_a_slice_that_stays_is_one_piece():
    (piece,) = pieces((8, 6), (2, 3), (2, 3), 4)
    assert (piece.place, piece.source, piece.target, piece.size) == (4, (0, 0), (0, 0), (4, 2))
