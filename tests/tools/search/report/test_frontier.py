import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tools.search.report.frontier import frontier

POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30)


@given(POINTS)
def test_frontier_is_what_nobody_beats(points):
    seconds, peaks = np.array(points, float).T
    found = {(seconds[index], peaks[index]) for index in frontier(seconds, peaks)}
    expected = {(s, p) for s, p in points if not any((t <= s and q <= p) and (t, q) != (s, p) for t, q in points)}
    assert found == expected
    assert list(peaks[frontier(seconds, peaks)]) == sorted(p for _, p in expected)
