"""The quick placement and its bound: against all plans of small instances, and against the solver on larger ones."""

import itertools
import tempfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.layout.pipeline_instances import CASE_438B, all_plans, instance, with_passes
from tools.layout import fast, stage_costs
from tools.layout.budget import Budget
from tools.layout.fast import place_fast, stage_sizes
from tools.layout.floor import floor_of
from tools.layout.ilp import PathModel, path_bound
from tools.layout.instance import read_instance
from tools.layout.optimise import optimise
from tools.layout.stage_costs import StageCosts, compositions


@st.composite
def small(draw):
    """An instance whose plans can all be tried; some have rules on the last chunk and on the order of options."""
    stages, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    counts = draw(st.sampled_from([(5,), (1, 4), (2, 3)]))
    cap = float(draw(st.integers(25, 90)))
    micro_batches = stages * draw(st.integers(1, 3))
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"counts": counts, "cap": cap, "micro_batches": micro_batches}
        made = instance(folder, stages=stages, chunks=chunks, options=draw(st.sampled_from([2, 3])), **numbers)
    made = with_passes(made, draw(st.sampled_from([0.0, 3.0, 9.0])), draw(st.sampled_from([0.0, 9.0, 14.0])))
    order = tuple(option.name for option in made.types[0].options[::-1])
    last = draw(st.sampled_from(["", order[0]]))
    ruled = replace(made, last_layers=1, last_option=last, order=order)
    return ruled if stages > 1 and draw(st.booleans()) else made


@pytest.mark.slow
@settings(max_examples=60, derandomize=True)
@given(small())
def test_of_small_instances_the_best_plan_is_found_and_none_is_under_the_floor(made):
    plans = all_plans(made)
    plans = plans[made.well_formed(plans) & made.fits(plans)]
    found, (floor, slowest) = place_fast(made), floor_of(made)
    if not len(plans):
        assert found is None
        return
    times = made.step_times(plans)
    assert floor <= times.min() * (1 + 1e-9)
    works = made.times(plans).sum(axis=1).reshape(len(plans), made.chunks, made.stages).sum(axis=1)
    assert slowest <= works.max(axis=1).min() * (1 + 1e-9)
    assert made.well_formed(found[None])[0] and made.fits(found[None])[0]
    assert made.step_times(found[None])[0] <= times.min() * (1 + 1e-9 if made.chunks == 1 else 1.01)


@settings(max_examples=40, derandomize=True)
@given(small(), st.data())
def test_a_stage_recomputes_no_more_than_it_must(made, data):
    """Of all plans that give a stage these layers none is cheaper for it."""
    costs, plans = StageCosts(made), all_plans(made)
    rules = made.well_formed(plans)
    stage = data.draw(st.integers(0, made.stages - 1))
    own = made.stage_of == stage
    kept = made.peak_memory(plans)[:, stage] <= made.cap + 1e-6
    layers = np.stack([plans[:, made.type_columns(t)][:, :, own].sum(axis=1) for t in range(len(made.types))], axis=2)
    works = made.times(plans).sum(axis=1)[:, own].sum(axis=1)
    for wanted in np.unique(layers[rules].reshape(rules.sum(), -1), axis=0):
        same = rules & (layers.reshape(len(plans), -1) == wanted).all(axis=1)
        found = costs.least(stage, tuple(tuple(map(int, row)) for row in wanted.reshape(own.sum(), -1)))
        if not (same & kept).any():
            assert found is None
        else:
            assert found[0] == pytest.approx(works[same & kept].min())


@settings(max_examples=30, derandomize=True)
@given(small())
def test_a_stage_with_too_many_ways_fits_and_recomputes_no_less_than_it_must(made):
    costs, most = StageCosts(made), stage_costs._MOST
    plans = all_plans(made)
    plans = plans[made.well_formed(plans)]
    try:
        for counts in np.unique(plans.sum(axis=1), axis=0):
            stage_costs._MOST = most
            every = StageCosts(made).works(counts)
            stage_costs._MOST = 0
            works = costs.works(counts)
            assert works is None or (made.fits(costs.plan(counts)[None])[0] and (works >= every - 1e-9).all())
    finally:
        stage_costs._MOST = most


def test_stages_are_the_best_of_all_ways_to_share_out_layers(tmp_path):
    made = instance(tmp_path, counts=(1, 8), stages=4, cap=60.0, micro_batches=8)
    costs = StageCosts(made)
    every = [sizes for sizes in itertools.product(range(10), repeat=4) if sum(sizes) == 9 and all(sizes[1:-1])]
    closed = [costs.closed(works) for sizes in every if (works := costs.works(sizes)) is not None]
    assert costs.closed(costs.works(stage_sizes(costs)[0])) == pytest.approx(min(closed))


def test_all_ways_to_give_layers_options():
    for count, options in itertools.product(range(1, 5), range(1, 4)):
        every = {row for row in itertools.product(range(count + 1), repeat=options) if sum(row) == count}
        assert {tuple(map(int, row)) for row in compositions(count, options)} == every


@pytest.mark.slow
def test_on_a_middling_instance_it_is_near_the_solver_and_its_floor_under_it():
    made = read_instance(CASE_438B)
    found, (floor, _) = place_fast(made), floor_of(made)
    time = made.step_times(found[None])[0]
    assert made.fits(found[None])[0] and 36_138.5 < time < 1.02 * 36_138.5  # the best known
    bound = path_bound(made, PathModel(made), Budget(0.5))
    assert 0.95 * 36_138.5 < floor < 36_138.5 and bound < 36_138.5
    solved = optimise(made, Budget(0.3), start=found)
    assert solved.time <= time


def test_the_same_plan_comes_again_and_a_far_goal_saves_work(monkeypatch):
    made = read_instance(CASE_438B)
    found = place_fast(made)
    assert (found == place_fast(made)).all()
    monkeypatch.setattr(fast, "anneal", None)
    monkeypatch.setattr(fast, "moves", None)
    quick = place_fast(made, 20_000.0)  # no stage can be that fast: what is begun with is not improved
    assert made.fits(quick[None])[0] and made.step_times(quick[None])[0] >= made.step_times(found[None])[0]
    assert StageCosts(made).works([54] + [0] * 15) is None  # memory is short


def test_a_short_run_stands_for_a_long_one():
    made = read_instance(CASE_438B)
    plan = place_fast(made)
    assert made.short_times(plan[None])[0] == pytest.approx(made.step_times(plan[None])[0], rel=0.01)


@pytest.mark.slow
def test_more_effort_is_never_worse():
    made = read_instance(CASE_438B)
    times = [optimise(made, Budget(effort)).time for effort in (0.2, 0.7, 1.1)]
    assert times == sorted(times, reverse=True)
