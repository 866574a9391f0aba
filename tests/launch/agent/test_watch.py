"""Who is quiet for how long: only from changes that were seen, whatever clocks do."""

from hypothesis import given
from hypothesis import strategies as st

from launch.agent.watch import Watch

LOOKS = st.lists(st.tuples(st.integers(0, 3), st.floats(-1e4, 1e4)), max_size=40)  # a mark, seconds since the last look


def test_quiet_for_as_long_as_nothing_changed():
    watch = Watch(2.0)
    assert [watch.unchanged("a", 1, time) for time in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    assert watch.unchanged("b", 1, 13.0) == 0.0
    assert watch.unchanged("a", 2, 13.0) == 0.0


@given(looks=LOOKS)
def test_never_more_than_the_looks_since_the_last_change_allow(looks):
    watch, now, before, since, passed = Watch(2.0), 0.0, None, 0, 0.0
    for mark, seconds in looks:
        now += seconds
        since, passed = (since + 1, passed + max(seconds, 0.0)) if mark == before else (0, 0.0)
        quiet = watch.unchanged("a", mark, now)
        assert 0.0 <= quiet <= min(2.0 * since, passed) + 1e-6
        before = mark


@given(start=st.floats(-1e9, 1e9), period=st.floats(0.1, 2.0))
def test_who_never_changes_is_found_whatever_the_clock_says(start, period):
    watch = Watch(2.0)
    quiet = [watch.unchanged("a", None, start + look * period) for look in range(50)]
    assert next(look for look, seconds in enumerate(quiet) if seconds >= 4.0 - 1e-3) <= 4.0 / period + 1
