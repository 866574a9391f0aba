"""The papers' tables, by simulation: bubbles and activations in flight, for several sizes and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.pipeline.schedules import check_schedule, operations
from tools.pipeline.simulate import Durations, in_flight, simulate


@dataclass(frozen=True)
class Published:
    """A `Published` is one published row: the bubble in seconds for (p, f, b, w, pair), and the most micro-batches
    that a device holds at once for (p).

    Args:
        own: the bubble is that of a stage between its own first and last operation, which is what a step waits only
            where no stage waits for the others (arXiv 2401.10241, section 4).
        exact: False for a paper's "about", of f = b - w = w and many micro-batches.
        pieces: of the model on one device; with 2 there are p / 2 devices, but for dual_pipe, which has two models.
    """

    source: str
    bubble: Callable[[int, float, float, float, float], float]
    held: Callable[[int], int]
    own: bool = False
    exact: bool = True
    pieces: int = 1


_ZERO_BUBBLE, _CONTROLLABLE = "arXiv 2401.10241, section 2", "arXiv 2405.15362, table of its public demonstration"
_DUAL_PIPE = "github.com/deepseek-ai/DualPipe, README"


def _dual_pipe(p: int, f: float, b: float, w: float, pair: float) -> float:
    return (p / 2 - 1) * (pair + b - 3 * w)


def _about(share: float) -> Callable[[int, float, float, float, float], float]:
    """A bubble of `share` micro-batches for each of the p / 2 devices; one is two pieces of f + b."""
    return lambda p, f, b, w, pair: share * p / 2 * 2 * (f + b)


PUBLISHED = {
    "1f1b": Published(_DUAL_PIPE, lambda p, f, b, w, pair: (p - 1) * (f + b), lambda p: p),
    "zb_h1": Published(
        f"{_ZERO_BUBBLE}; ZB1P in {_DUAL_PIPE}", lambda p, f, b, w, pair: (p - 1) * (f + b - 2 * w), lambda p: p
    ),
    "zb_h2": Published(_ZERO_BUBBLE, lambda p, f, b, w, pair: (p - 1) * (f + b - 3 * w), lambda p: 2 * p - 1, own=True),
    # the demonstration counts in micro-batches of a device's two pieces
    "zb_v": Published(_CONTROLLABLE, _about(0), lambda p: p, True, False, 2),
    "v_half": Published(_CONTROLLABLE, _about(1 / 2), lambda p: 2 * ((p // 2 + 2) // 2), True, False, 2),
    "v_min": Published(_CONTROLLABLE, _about(2 / 3), lambda p: 2 * ((p // 2 + 4) // 3), True, False, 2),
    "dual_pipe": Published(_DUAL_PIPE, _dual_pipe, lambda p: p + 1, pieces=2),
    "dual_pipe_v": Published(_DUAL_PIPE, _dual_pipe, lambda p: p + 1, pieces=2),
}


many = settings(max_examples=40)


def waits(found):
    """[stages] idle time between a stage's own first and last operation."""
    return (
        np.array([ends.max() - starts[0] for starts, ends in zip(found.starts, found.ends, strict=True)]) - found.busy
    )


def simulated(name, pieces, rounds, f, b, w, pair=None):
    """(bubble, the most in flight) of a model in so many pieces."""
    row = PUBLISHED[name]
    devices = pieces // row.pieces if name != "dual_pipe" else pieces
    shape = (row.pieces, devices)
    hidden = None if pair is None else np.full((row.pieces, *shape), f + b - pair)
    times = Durations(np.full(shape, f), np.full(shape, b), np.full(shape, w), hidden=hidden)
    found = simulate(name, rounds * pieces, times)
    bubble = (waits(found) if row.own else found.makespan - found.busy).max()
    return bubble, max(in_flight(order, row.pieces).sum(axis=1).max() for order in found.orders)


# zero bubble's figures take an input gradient that is at least a forward, and weight gradients no longer than either
work = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)).map(
    lambda t: (float(t[0] + t[2]), float(2 * t[0] + t[1] + 2 * t[2]), float(t[0]))
)


@many
@given(st.integers(1, 9), st.integers(1, 3), work)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_bubble_and_memory_equal_the_table(name, pieces, rounds, times):
    f, b, w = times
    row = PUBLISHED[name]
    assert simulated(name, pieces, rounds, f, b, w) == (row.bubble(pieces, f, b, w, 0), row.held(pieces))


@pytest.mark.parametrize("pieces", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("times", [(1, 2, 1), (2, 3, 1), (3, 6, 2), (4, 8, 3)])
def test_zb_h2_equals_the_table(pieces, times):
    f, b, w = map(float, times)
    row = PUBLISHED["zb_h2"]
    assert simulated("zb_h2", pieces, 3, f, b, w) == (row.bubble(pieces, f, b, w, 0), row.held(pieces))


def test_zb_h2_has_no_bubble_of_its_own_and_a_step_that_waits_for_all_stages_still_has():
    ones = np.ones((1, 8))
    found = simulate("zb_h2", 24, Durations(ones, 2 * ones, ones))
    assert waits(found).tolist() == [0] * 8
    assert found.makespan - found.busy.max() == 7  # the last stage begins 7 forwards later


@pytest.mark.parametrize("name", ["dual_pipe", "dual_pipe_v"])
@pytest.mark.parametrize("pieces", [2, 4, 8, 12, 16])
@pytest.mark.parametrize("times", [(1, 2, 1, 3), (3, 5, 2, 7), (4, 7, 3, 10), (5, 7, 2, 9)])
def test_dual_pipe_equals_the_table(name, pieces, times):
    """The simulation equals the table of DualPipe if a forward pass takes as long as the input gradients of a backward
    pass; the table does not say which of the two it means.
    """
    f, b, w, pair = map(float, times)
    row = PUBLISHED[name]
    assert simulated(name, pieces, 2, f, b, w, pair) == (row.bubble(pieces, f, b, w, pair), row.held(pieces))


@pytest.mark.parametrize("name", ["dual_pipe", "dual_pipe_v"])
@pytest.mark.parametrize("pieces", [4, 8, 16])
def test_dual_pipe_with_longer_backwards_idles_no_more_than_the_table(name, pieces):
    bubble, held = simulated(name, pieces, 2, 3.0, 6.0, 2.0, 8.0)
    most = PUBLISHED[name].bubble(pieces, 3.0, 6.0, 2.0, 8.0)
    assert 0.75 * most < bubble <= most and held == pieces + 1


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 8, 16])
def test_v_schedules_hold_what_the_paper_says(devices):
    for name in ("zb_v", "v_half", "v_min"):
        bubble, held = simulated(name, 2 * devices, 2, 1.0, 2.0, 1.0)
        row = PUBLISHED[name]
        assert held == row.held(2 * devices), name
        about = row.bubble(2 * devices, 1.0, 2.0, 1.0, 0)
        # one unit for V-ZB; V-Half's and V-Min's ends are not filled here, as they are in the paper
        assert bubble <= (1 if name == "zb_v" else 1.2 * about + 1), name


def test_less_memory_costs_time():
    bubbles, held = zip(*(simulated(name, 32, 2, 1.0, 2.0, 1.0) for name in ("zb_v", "v_half", "v_min")), strict=True)
    assert bubbles[0] < bubbles[1] < bubbles[2] and held[0] > held[1] > held[2]
    assert held == (32, 18, 12)


@many
@given(st.sampled_from(sorted(PUBLISHED)), st.integers(1, 8), st.integers(1, 40))
def test_never_more_in_flight_than_the_table_says(name, devices, micro_batches):
    row = PUBLISHED[name]
    try:
        check_schedule(name, devices, row.pieces, micro_batches)
    except RecipeError:
        return
    pieces = devices * (1 if name == "dual_pipe" else row.pieces)
    for stage in range(devices):
        order = operations(name, stage, devices, row.pieces, micro_batches)
        assert in_flight(order, row.pieces).sum(axis=1).max() <= row.held(pieces)
