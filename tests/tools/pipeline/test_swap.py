"""Swapping: the closed price against a link that moves layer by layer, what is free, what it frees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.pipeline.swap import free_seconds, swapped

many = settings(max_examples=80)


LAYERS = 4


def by_layers(seconds, forward, backward, both_ways=True, prefetch=1, passes=40):
    """Seconds that a forward and a backward of LAYERS layers last beyond their computation, in the long run.

    A link takes its transfers in the order in which they are asked for: a layer's bytes are to leave when its forward
    ends, and to come back when the operation starts that is `prefetch` before its backward.
    """
    now, starts, done, outs, marks = 0.0, [0.0] * prefetch, [], [], []
    free = {"out": 0.0, "in": 0.0}
    for _ in range(passes):
        for index in range(2 * LAYERS):
            if index >= LAYERS:
                asked = starts[-prefetch]
                for end in [end for end in outs if end <= asked]:  # asked for before this fetch
                    outs.remove(end)
                    free["out"] = max(free["out"], end) + seconds
                link = free["in"] if both_ways else max(free["in"], free["out"])
                free["in"] = max(link, asked) + seconds
                if not both_ways:
                    free["out"] = free["in"]
                now = max(now, free["in"])
            starts.append(now)
            now += forward if index < LAYERS else backward
            if index < LAYERS:
                outs.append(now)
        marks.append(now)
    half = passes // 2
    done = (marks[-1] - marks[half - 1]) / (passes - half)
    return done - LAYERS * (forward + backward)


@many
@given(st.integers(0, 12), st.integers(1, 8), st.integers(1, 8))
def test_price_against_a_link_that_moves_layer_by_layer(seconds, forward, backward):
    """A backward's first layer is fetched behind a forward, the others behind a backward."""
    got = LAYERS * swapped(20, 20, seconds, forward, backward).extra_backward
    simulated = by_layers(seconds, forward, backward)
    assert abs(got - simulated) <= abs(forward - backward) + 1e-9
    assert by_layers(seconds, forward, backward, prefetch=2) <= simulated + 1e-9


@many
@given(st.integers(0, 12), st.integers(1, 8), st.integers(1, 8))
def test_price_of_a_link_for_one_direction_is_at_least_its_capacity(seconds, forward, backward):
    got = LAYERS * swapped(20, 20, seconds, forward, backward, both_ways=False).extra_backward
    simulated = by_layers(seconds, forward, backward, both_ways=False)
    assert simulated >= got - abs(forward - backward) - 1e-9


@many
@given(st.integers(0, 9), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_what_is_free_costs_nothing_and_more_does(seconds, forward, backward, both_ways):
    most = free_seconds(forward, backward, both_ways)
    assert swapped(1000, 1000, most, forward, backward, both_ways).extra_backward == 0
    assert swapped(1000, 1000, most + 1 + seconds, forward, backward, both_ways).extra_backward >= 1


def test_by_hand():
    """400 MB of 1 GB at 25 GB/s: 16 ms each way; a backward of 12 ms leaves 4 ms exposed."""
    found = swapped(1e9, 0.4e9, 0.016, 0.006, 0.012)
    assert (found.extra_backward, found.activation, found.once) == pytest.approx((0.004, 0.6e9, 0.8e9))
    # one direction at a time: 32 ms in 18
    assert swapped(1e9, 0.4e9, 0.016, 0.006, 0.012, both_ways=False).extra_backward == pytest.approx(0.014)


@pytest.mark.parametrize(
    ("moved", "one_way", "prefetch", "want"),
    [(9, 1, 1, "9 bytes of 8"), (1, -1, 1, "-1 seconds"), (1, 1, 0, "at least 1")],
)
def test_refusals(moved, one_way, prefetch, want):
    with pytest.raises(RecipeError, match=want):
        swapped(8, moved, one_way, 1, 2, prefetch=prefetch)
