"""The bound of weighted chains: no plan of small instances is under it, with transfers and what follows."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.layout.pipeline_instances import all_plans, instance
from tests.tools.layout.test_patterns import FAR, small
from tools.layout import weighted
from tools.layout.budget import Budget
from tools.layout.fast import place_fast
from tools.layout.ilp import PathModel, path_bound
from tools.layout.patterns import After
from tools.layout.problem import PlacedInstance
from tools.layout.weighted import weighted_bound
from tools.pipeline.simulate import Durations, simulate


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


@settings(max_examples=20, derandomize=True)
@given(small())
def test_it_is_close_to_the_best_plan(made):
    plans = plans_of(made)
    bound = weighted_bound(made, FAR, Budget(100.0))
    if not len(plans):
        assert bound == FAR
    else:  # few layers, so that a mixture of plans is shorter than any of them
        assert bound >= 0.8 * made.step_times(plans).min()


@pytest.mark.parametrize("cap", [40.0, 60.0])
def test_it_is_closer_than_divided_layers(cap, tmp_path):
    made = instance(tmp_path, stages=6, counts=(18,), micro_batches=48, options=3, cap=cap)
    plan, budget = place_fast(made), Budget(2.0)
    best = made.step_times(plan[None])[0]
    assert path_bound(made, PathModel(made), Budget(0.5)) < 0.9 * best
    assert 0.99 * best < weighted_bound(made, 1.01 * best, budget) <= best * (1 + 1e-9)
    assert budget.spent < 0.2


def test_what_is_not_known_is_no_bound(tmp_path):
    made = instance(tmp_path, stages=2, chunks=2, counts=(4,))
    assert weighted_bound(replace(made, schedule="zero_bubble_v"), FAR, Budget(1.0)) == 0.0
    assert weighted_bound(instance(tmp_path, stages=2, chunks=2, counts=(2, 2, 2)), FAR, Budget(1.0)) == 0.0
    assert weighted_bound(made, FAR, Budget(0.0)) == 0.0
    assert weighted_bound(replace(made, cap=1.0), FAR, Budget(1.0)) == pytest.approx(FAR)
