"""Two bounds on the time of a step: no plan of small instances is under either of them.

The bound of whole layers in every chunk is tested on the report's example, too, and that of weighted chains with
transfers and what follows.
"""

import tempfile
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.layout.pipeline_instances import CASE_438B, all_plans, instance, with_passes
from tools.layout import patterns, weighted
from tools.layout.budget import Budget
from tools.layout.fast import place_fast
from tools.layout.ilp import PathModel, path_bound
from tools.layout.instance import read_instance
from tools.layout.patterns import After, pattern_bound
from tools.layout.problem import PlacedInstance
from tools.layout.weighted import weighted_bound
from tools.pipeline.simulate import Durations, simulate

FAR = 1e6  # a goal that every plan is under


@st.composite
def small(draw):
    """An instance whose plans can all be tried; some have rules of the last chunk and of the order of options."""
    stages, chunks = draw(st.sampled_from([(3, 1), (4, 1), (1, 2), (2, 2), (2, 3), (3, 2)]))
    counts = draw(st.sampled_from([(5,), (1, 4), (2, 3), (4, 1)]))
    cap, options = float(draw(st.integers(25, 90))), draw(st.sampled_from([1, 2] if chunks * stages > 4 else [2, 3]))
    micro_batches = stages * draw(st.integers(1, 3))
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"counts": counts, "cap": cap, "micro_batches": micro_batches, "scale": draw(st.sampled_from([1, 3]))}
        made = instance(folder, stages=stages, chunks=chunks, options=options, **numbers)
    if draw(st.booleans()):  # early layers that take longer than late ones
        made = replace(made, types=tuple(replace(k, forward=5 - k.forward) for k in made.types))
    made = with_passes(made, draw(st.sampled_from([0.0, 3.0, 9.0])), draw(st.sampled_from([0.0, 9.0, 14.0])))
    order = tuple(option.name for option in made.types[0].options[::-1])
    last = draw(st.sampled_from(["", order[0]]))
    ruled = replace(made, last_layers=1, last_option=last, order=order)
    return ruled if stages > 1 and draw(st.booleans()) else made


def best_of(made):
    plans = all_plans(made)
    plans = plans[made.well_formed(plans) & made.fits(plans)]
    return made.step_times(plans).min() if len(plans) else np.inf


@settings(max_examples=40, derandomize=True)
@given(small(), st.sampled_from([0.7, 0.95, 1.0001, 1.1]), st.sampled_from([1e-5, 1e-4, 1e-3, 1e-2]))
def test_no_plan_is_under_the_bound_and_the_best_one_is_found(made, share, effort):
    best = best_of(made)
    bound, plan = pattern_bound(made, FAR, Budget(100.0))
    assert bound == pytest.approx(min(best, FAR))
    assert (plan is None) == (best == np.inf)
    if plan is not None:
        assert made.well_formed(plan[None])[0] and made.fits(plan[None])[0]
        assert made.step_times(plan[None])[0] == pytest.approx(best)
        goal = share * best
        closer, plan = pattern_bound(made, goal, Budget(effort))
        assert closer <= min(goal, best) * (1 + 1e-9) and (plan is None or share > 1)
        assert pattern_bound(made, goal, Budget(100.0))[0] == pytest.approx(min(goal, best))


@settings(max_examples=20, derandomize=True)
@given(small())
def test_patterns_that_count_as_one_are_a_bound_too(made):
    best, few = best_of(made), (patterns._WAYS, patterns._FRONT)
    try:
        for patterns._WAYS, patterns._FRONT in ((1, few[1]), (few[0], 1), (3, 1)):
            bound, plan = pattern_bound(made, FAR, Budget(100.0))
            assert bound <= best * (1 + 1e-9)
            assert plan is None or made.step_times(plan[None])[0] == pytest.approx(best)
    finally:
        patterns._WAYS, patterns._FRONT = few


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(small(), st.integers(0, 2**32 - 1))
def test_what_follows_the_pipeline_counts_in_the_bound(made, seed):
    best, layers = best_of(made), 1 + sum(kind.count for kind in made.types)
    table = np.random.default_rng(seed).uniform(0, 3, (made.stages, layers))
    after = After(table.min(), lambda early, late, *_: _of(table, early + late))
    bound, _ = pattern_bound(made, FAR, Budget(100.0), after)
    plans = all_plans(made)
    plans = plans[made.well_formed(plans) & made.fits(plans)]
    held = np.stack([plans.sum(axis=1)[:, made.stage_of == stage].sum(axis=1) for stage in range(made.stages)], axis=1)
    every = made.step_times(plans) + _of(table, held).min(axis=1) if len(plans) else np.array([FAR])
    assert bound == pytest.approx(min(every.min(), FAR))
    same = After(1.0, lambda early, late, *_: np.ones(early.shape))
    assert pattern_bound(made, FAR, Budget(100.0), same)[0] == pytest.approx(min(best + 1, FAR))


def _of(table, layers):
    return table[np.arange(len(table)), layers.astype(int)]


def test_what_is_not_known_is_no_bound(tmp_path):
    other = replace(instance(tmp_path, stages=2, chunks=2, counts=(4,)), schedule="zero_bubble_v")
    assert pattern_bound(other, FAR, Budget(1.0)) == (0.0, None)
    three = instance(tmp_path, stages=2, chunks=2, counts=(2, 2, 2))
    assert pattern_bound(three, FAR, Budget(1.0)) == (0.0, None)
    two = instance(tmp_path, stages=2, chunks=2, counts=(4,))
    assert pattern_bound(two, FAR, Budget(0.0)) == (0.0, None)


def test_it_is_closer_than_divided_layers():
    made, goal = read_instance(CASE_438B), 35_600.0  # the best known is 36,138.5
    assert path_bound(made, PathModel(made), Budget(0.5)) < 0.985 * goal
    assert pattern_bound(made, goal, Budget(2.0)) == (goal, None)


def placed(made, receiving):
    own = {one.name: getattr(made, one.name) for one in fields(made)}
    return PlacedInstance(**own, receiving=receiving)


def plans_of(made):
    plans = all_plans(made)
    return plans[made.well_formed(plans) & made.fits(plans)]


def real_times(made, plans, table):
    """[N] ms of a step with transfers that keep both stages busy, and what the slowest stage adds by its layers."""
    size = made.chunks, made.stages
    received = np.zeros((2, *size))
    received.reshape(2, -1)[:] = made.ends - super(PlacedInstance, made).ends
    found = []
    for plan in plans:
        forward, backward = made.times(plan).reshape(2, *size) - received
        step = simulate(
            made.schedule, made.micro_batches, Durations(forward, backward, None, made.receiving, "none")
        ).makespan
        works = (forward + backward).sum(axis=0)
        layers = plan.sum(axis=0).reshape(size).sum(axis=0)
        slowest = works >= works.max() * (1 - 1e-9)
        found.append(step + np.maximum(0.0, table[slowest, layers[slowest]] - works.max()).min())
    return np.array(found)


def after_of(made, table):
    """Return a function for the time that the slowest stage's layers add, a part of which the work of a micro-batch
    hides.
    """

    def of(early, late, slowest, pipeline):
        work = pipeline[:, None] / made.micro_batches
        return np.maximum(0.0, table[np.arange(len(table)), (early + late).astype(int)] - work)

    return After(0.0, of)


@pytest.mark.slow
@settings(max_examples=30, derandomize=True)
@given(small(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]), st.sampled_from([0.9, 1.05, 1e6]))
def test_no_plan_is_under_the_bound(made, seed, receiving, share):
    made = placed(made, receiving)
    layers = 1 + sum(kind.count for kind in made.types)
    table = np.random.default_rng(seed).uniform(0, 90, (made.stages, layers))
    plans = plans_of(made)
    best = real_times(made, plans, table).min() if len(plans) else FAR
    goal = min(FAR, share * best)
    few = weighted._REACH
    try:
        for weighted._REACH, effort in ((few, 100.0), (few, 1e-3), (1, 100.0)):  # 1: any time in between
            assert weighted_bound(made, goal, Budget(effort), after_of(made, table)) <= min(goal, best) * (1 + 1e-9)
    finally:
        weighted._REACH = few


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(small())
def test_it_is_close_to_the_best_plan(made):
    plans = plans_of(made)
    bound = weighted_bound(made, FAR, Budget(100.0))
    if not len(plans):  # a mixture of plans may keep the memory where no plan does, but not where no layer fits
        assert weighted_bound(replace(made, cap=float(np.max(made.static))), FAR, Budget(100.0)) == FAR
    else:  # few layers, so that a mixture of plans is shorter than any of them
        assert bound >= 0.8 * made.step_times(plans).min()


@pytest.mark.parametrize("cap", [40.0, 60.0])
def test_weighted_chains_are_closer_than_divided_layers(cap, tmp_path):
    made = instance(tmp_path, stages=6, counts=(18,), micro_batches=48, options=3, cap=cap)
    plan, budget = place_fast(made), Budget(2.0)
    best = made.step_times(plan[None])[0]
    assert path_bound(made, PathModel(made), Budget(0.5)) < 0.9 * best
    assert 0.99 * best < weighted_bound(made, 1.01 * best, budget) <= best * (1 + 1e-9)
    assert budget.spent < 0.2


def test_what_is_not_known_is_no_bound_of_weighted_chains(tmp_path):
    made = instance(tmp_path, stages=2, chunks=2, counts=(4,))
    assert weighted_bound(replace(made, schedule="zero_bubble_v"), FAR, Budget(1.0)) == 0.0
    assert weighted_bound(instance(tmp_path, stages=2, chunks=2, counts=(2, 2, 2)), FAR, Budget(1.0)) == 0.0
    assert weighted_bound(made, FAR, Budget(0.0)) == 0.0
    assert weighted_bound(replace(made, cap=1.0), FAR, Budget(1.0)) == pytest.approx(FAR)
