"""Bounds of the space against every candidate placed; what is placed because its bound leaves it a chance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.search.space.test_candidates import MODEL, request
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.model.architecture import pattern_of
from tools.placement.budget import Budget
from tools.placement.place import least_seconds, place
from tools.search.ranking import place_best
from tools.search.ranking.chances import Chances
from tools.search.ranking.rank import rank
from tools.search.ranking.run import search
from tools.search.space.candidates import configuration
from tools.search.space.limits import PLANNED

SMALL = replace(MODEL, pattern=pattern_of(5, 8, 1), experts=8)


def planned(asked):
    ranking = rank(asked)
    found = [(ranking.at(index), ranking.bounds[index]) for index in range(len(ranking.seconds))]
    return ranking, [(one, bound) for one, bound in found if one.candidate.recompute == PLANNED]


@given(
    st.sampled_from([{}, {"mtp": 1}, {"pattern": pattern_of(5), "experts": 0, "top_k": 0, "shared_ffn": 0}]),
    st.sampled_from([0.6, 0.9, 50]),
    st.integers(0, 10**6),
)
@settings(max_examples=6, derandomize=True)
def test_no_placement_is_under_its_bounds(changes, cap, draw):
    """Of both bounds, whatever is placed: also where memory is tight."""
    asked = request(4, 8, limits=["pp>1", "cp=1"], model=replace(SMALL, **changes), cap=cap * GIB)
    times, (_, every) = TimeModel(asked.hardware), planned(asked)
    if not every:
        return
    for index in np.random.default_rng(draw).integers(len(every), size=3):
        one, plain = every[index]
        config = configuration(asked, one.candidate)
        found = place(config, times, asked.room, Budget(1))
        closer = least_seconds(config, times, asked.room, Budget(0.5))
        assert plain <= found.step_s * (1 + 1e-9)
        assert closer <= found.step_s * (1 + 1e-6)
        assert found.least_s <= found.step_s


def test_the_bound_of_a_space_is_under_all_its_placements(monkeypatch):
    """Everything placed: none is under the bound that a search of two placements tells, and it is not far away."""
    monkeypatch.setattr(place_best, "processes", lambda: 1)
    asked = request(4, 8, limits=["pp=2", "cp=1", "shard=optimizer", "mode=global"], model=SMALL, cap=0.9 * GIB)
    times, (_, every) = TimeModel(asked.hardware), planned(asked)
    best = min(place(configuration(asked, one.candidate), times, asked.room, Budget(1)).step_s for one, _ in every)
    found = search(asked, 2, Budget(1), times, lambda *_: None)
    assert 2 <= found.placed < len(every)
    assert 0.5 * best < found.least <= best <= found.entries[0].seconds
    assert not found.cut and found.effort == 1


def chances(best):
    asked = request(8, 16, limits=["pp>1"], model=SMALL)
    ranking = rank(asked)
    return ranking, Chances(ranking, best)


def test_only_candidates_under_the_best_are_open():
    ranking, some = chances(np.inf)
    best = float(np.median(ranking.bounds))
    _, few = chances(best)
    assert 0 < len(few.open) < len(some.open)
    assert all(few.bound(one.candidate) < best for one in few.open)
    assert few.least == min(few.bound(one.candidate) for one in few.open)


def test_closer_bounds_close_the_space_and_choose_what_is_placed():
    _, found = chances(np.inf)
    first, second, third = found.next(3)
    found.learn([first, second], [1e6, 2e6])
    assert found.next(1) == [third] and found.bound(first.candidate) == 1e6
    found.best = 1.5e6
    assert found.promising([], 5) == [first]  # the second's is over the best, the third has none
    assert found.promising([first.candidate], 5) == []
    found.learn(found.open, [2e6] * len(found.open))
    assert found.least == found.best and not found.left


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_plain_bound_is_near_for_equal_stages(chunks):
    """Within what the pipeline's filling and draining may be."""
    asked = request(8, 64, limits=["pp=2", f"vpp={chunks}", "cp=1"], model=replace(SMALL, pattern=pattern_of(6, 8)))
    _, every = planned(asked)
    assert every
    for one, bound in every:
        assert 0.5 * one.seconds < bound < one.seconds
