"""The optimiser against all plans of small instances; bounds; caps that no plan keeps; stopping."""

import itertools
import json
import os
import signal
import tempfile
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline_search import judge
from tests.tools.layout.pipeline_instances import CASE_438B, all_plans, instance, with_passes
from tools.layout import optimise as optimising
from tools.layout.anneal import Changes, anneal
from tools.layout.budget import LATE, Budget, interruptible
from tools.layout.fast import place_fast
from tools.layout.ilp import IMPROVEMENT, Incumbent, PathModel, path_bound, search_near, work_bound
from tools.layout.instance import read_instance
from tools.layout.optimise import even_plan, optimise, recompute_less
from tools.layout.weighted import weighted_bound
from tools.pipeline.timetable import critical_path
from tools.search.cli import search

many = settings(max_examples=60)


SMALL = [
    {"counts": (8,), "stages": 4},
    {"counts": (8,), "stages": 4, "cap": 45.0},
    {"counts": (1, 7), "stages": 4, "cap": 50.0},
    {"counts": (8,), "stages": 2, "chunks": 2, "cap": 80.0},
    {"counts": (2, 5), "stages": 2, "chunks": 2, "cap": 60.0, "schedule": "interleaved_1f1b_less_memory"},
    {"counts": (4,), "stages": 2, "chunks": 3, "cap": 60.0, "micro_batches": 6},
    {"counts": (1, 4, 1), "stages": 3, "options": 3, "cap": 40.0, "micro_batches": 2},
    {"counts": (3,), "stages": 1, "cap": 40.0},
    {"counts": (1,), "stages": 4},
    # with restarts HiGHS 1.15.1 called a worse plan the best here, and its bound passed the optimum there
    {"counts": (2, 3), "stages": 4, "cap": 54.0, "scale": 0.3, "micro_batches": 4},
    {"counts": (5,), "stages": 2, "chunks": 2, "cap": 68.0, "scale": 0.3, "micro_batches": 4},
]


def compare(problem, seconds=20.0):
    """Optimise and try all plans; returns the outcome."""
    plans = all_plans(problem)
    fits = problem.fits(plans)
    outcome = optimise(problem, Budget(seconds))
    assert outcome.finished
    if not fits.any():
        assert outcome.plan is None
        least = problem.peak_memory(plans).max(axis=1).min()
        assert f"any plan keeps is {least:g}," in outcome.why
        return outcome
    best = problem.step_times(plans[fits]).min()
    judged = judge(problem, problem.to_solution(outcome.plan))
    assert outcome.time == judged.time and judged.over == {}
    assert best <= outcome.time <= best * (1 + IMPROVEMENT)
    assert outcome.work_bound <= outcome.bound <= best * (1 + 1e-9)
    return outcome


@pytest.mark.parametrize("numbers", SMALL)
def test_no_plan_is_better(tmp_path, numbers):
    assert compare(instance(tmp_path, **numbers)).plan is not None


def test_beside_a_start_neither_the_quick_placement_nor_the_bound_of_weighted_chains_is_computed_again(
    tmp_path, monkeypatch
):
    problem = instance(tmp_path, counts=(3, 30), stages=8, chunks=2, micro_batches=16, cap=90.0, options=3)
    asked, start = [], place_fast(problem)
    for name, result in (("place_fast", start), ("weighted_bound", 0.0)):
        monkeypatch.setattr(optimising, name, lambda *_, name=name, result=result: (asked.append(name), result)[1])
    optimise(problem, Budget(0.02), start=start)
    assert asked == []
    optimise(problem, Budget(0.02))
    assert asked == ["place_fast", "weighted_bound"]


@pytest.mark.slow
def test_without_a_start_the_quick_placement_and_the_bound_of_weighted_chains_come_first(tmp_path):
    problem = instance(tmp_path, counts=(3, 30), stages=8, chunks=2, micro_batches=16, cap=90.0, options=3)
    quick = problem.step_times(place_fast(problem)[None])[0]
    outcome = optimise(problem, Budget(1.5))
    assert not outcome.finished
    assert outcome.time <= quick
    assert weighted_bound(problem, outcome.time, Budget(2.0)) <= outcome.bound * (1 + 1e-9) < outcome.time * (1 + 1e-9)
    # the plain bounds, which are all there is beside a start, are below
    given = optimise(problem, Budget(0.4), start=place_fast(problem))
    assert given.bound < outcome.bound


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_no_plan_is_better_on_random_instances(data):
    stages, chunks = data.draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]))
    counts = data.draw(st.sampled_from([(5,), (1, 4), (2, 3)]))
    cap = data.draw(st.floats(25, 90).map(round))
    scale = data.draw(st.sampled_from([1.0, 0.3, 7.1]))
    micro_batches = stages * data.draw(st.integers(1, 3))
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"counts": counts, "cap": float(cap), "scale": scale, "micro_batches": micro_batches}
        height, update = data.draw(st.sampled_from([0.0, 3.0, 9.0])), data.draw(st.sampled_from([0.0, 9.0, 14.0]))
        compare(with_passes(instance(folder, stages=stages, chunks=chunks, **numbers), height, update))


def test_a_cap_that_no_plan_keeps_says_what_is_missing(tmp_path):
    outcome = compare(instance(tmp_path, counts=(8,), stages=4, cap=20.0))
    assert outcome.plan is None
    assert "no plan keeps memory_cap 20" in outcome.why and "more (stage" in outcome.why


def test_relaxed_bound_is_a_bound_and_better_than_work(tmp_path):
    for numbers in SMALL[:5]:
        problem = instance(tmp_path, **numbers)
        bound = path_bound(problem, PathModel(problem), Budget(5))
        plans = all_plans(problem)
        best = problem.step_times(plans[problem.fits(plans)]).min()
        assert work_bound(problem) < bound <= best * (1 + 1e-9)


def first_plan(problem):
    incumbent = Incumbent(problem)
    incumbent.offer(PathModel(problem).least_excess(Budget(10)).plan)
    return incumbent


@pytest.mark.slow
def test_annealing_alone_and_the_model_alone_find_the_best(tmp_path):
    problem = instance(tmp_path, counts=(8,), stages=2, chunks=2, cap=80.0)
    plans = all_plans(problem)
    best = problem.step_times(plans[problem.fits(plans)]).min()
    by_chance = first_plan(problem)
    assert by_chance.time > best
    anneal(by_chance, by_chance.plan[None], Budget(0.1), np.random.default_rng(0))
    by_model = first_plan(problem)
    search_near(by_model, PathModel(problem), Budget(0.1), np.random.default_rng(0))
    assert by_chance.time == by_model.time == best


@pytest.mark.parametrize("numbers", SMALL)
def test_first_plan(tmp_path, numbers):
    """Even, well formed; after it recomputes less it still fits, where it did, and no layer can do with less."""
    problem = instance(tmp_path, **numbers)
    even = even_plan(problem)
    assert problem.well_formed(even[None])[0]
    inner = even.sum(axis=0)[1:-1]
    assert inner.max(initial=0) - inner.min(initial=9) <= 1
    if not problem.fits(even[None])[0]:
        return
    plan = recompute_less(problem, even)
    assert problem.fits(plan[None])[0] and problem.well_formed(plan[None])[0]
    assert (plan.sum(axis=0) == even.sum(axis=0)).all()
    backward = problem.costs[1]
    for slow, chunk in zip(*np.nonzero(plan), strict=True):
        for fast in np.flatnonzero(backward < backward[slow]):
            if problem.columns[fast][0] == problem.columns[slow][0]:
                tried = plan.copy()
                tried[slow, chunk] -= 1
                tried[fast, chunk] += 1
                assert not problem.fits(tried[None])[0]


@many
@given(st.integers(0, 10**6))
def test_changes_keep_the_layers_of_each_type(seed):
    problem = read_instance(CASE_438B)
    size = problem.chunks * problem.stages
    plan = np.zeros((3, size), int)
    plan[0] = 54 // size
    plan[0, 0] += 54 % size
    changed = Changes(problem, np.random.default_rng(seed))(np.repeat(plan[None], 20, axis=0))
    assert (changed.sum(axis=(1, 2)) == 54).all() and (changed >= 0).all()
    assert (changed != plan).any()


def test_offers_that_break_a_rule_are_not_taken(tmp_path):
    problem = instance(tmp_path, counts=(4,), stages=2, cap=30.0)
    incumbent = first_plan(problem)
    before = incumbent.time
    too_much, missing = np.array([[2, 2], [0, 0]]), np.array([[0, 0], [1, 1]])
    assert not problem.fits(too_much[None])[0]
    assert not incumbent.offer(too_much) and not incumbent.offer(missing)
    assert incumbent.time == before


def test_chains_make_the_model_exact(tmp_path):
    """With the chain of a plan's own simulation the model says the simulated time for it."""
    problem = instance(tmp_path, counts=(8,), stages=4)
    model = PathModel(problem)
    plan = model.least_excess(Budget(5)).plan
    time, visits = critical_path(problem.table, problem.times(plan))
    model.add_chain(visits)
    assert model.best(Budget(5), low=plan, high=plan).value == pytest.approx(time)


@pytest.mark.slow
def test_438b_case_in_seconds_is_near_the_best_known():
    problem = read_instance(CASE_438B)
    outcome = optimise(problem, Budget(2.5))
    assert (outcome.peak <= problem.cap).all()
    # 36138.5 is the best known; a slow machine may not get there in this time
    assert outcome.bound < 36138.5 < outcome.time * 1.05
    assert outcome.time < 1.05 * 36138.5
    assert outcome.bound > 34_000 > outcome.work_bound


@pytest.mark.slow
def test_ctrl_c_gives_the_best_so_far():
    problem = read_instance(CASE_438B)
    budget, heard = Budget(30), []

    def press(incumbent):
        heard.append(incumbent.time)
        if len(heard) == 3:
            signal.raise_signal(signal.SIGINT)

    with interruptible(budget):
        outcome = optimise(problem, budget, report=press)
    assert not outcome.finished and outcome.time == min(heard)
    assert budget.stopped


def test_ctrl_c_reaches_the_solver_and_the_second_one_raises():
    problem, budget = read_instance(CASE_438B), Budget(1e6)  # it ends when it has the best plan, or for Ctrl-C
    model = PathModel(problem)
    path_bound(problem, model, Budget(1.0))
    press = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with interruptible(budget):
        press.start()
        assert not model.best(budget).done
        assert budget.over
        press.join()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def slow():
    """A clock on which every look takes ten seconds."""
    ticks = itertools.count(step=10.0)
    return lambda: next(ticks)


EFFORT = 0.3


def answer(budget):
    outcome = optimise(read_instance(CASE_438B), budget)
    assert not outcome.finished
    return outcome.plan.tolist(), outcome.time, outcome.bound, budget.spent


@pytest.fixture(scope="module")
def quiet():
    return answer(Budget(EFFORT))


@pytest.mark.slow
def test_a_slow_clock_changes_nothing(quiet):
    budget = Budget(EFFORT, 1e9, slow())
    assert answer(budget) == quiet and not budget.cut
    assert budget.elapsed > 1000


@pytest.mark.slow
def test_a_busy_machine_changes_nothing(quiet):
    stop = threading.Event()
    busy = [threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(stop.is_set, True)]) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        assert answer(Budget(EFFORT, 1e9)) == quiet
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_effort_is_spent_and_hardly_more(quiet):
    # the simplex iterations of a run of the solver are counted when it ends
    assert EFFORT <= quiet[3] < EFFORT + 0.2


def test_a_deadline_that_bites_is_noted():
    budget = Budget(1.0, 500, slow())
    outcome = optimise(read_instance(CASE_438B), budget)
    assert outcome.cut and budget.cut and budget.spent < 1.0 and outcome.plan is not None


def test_a_part_is_cut_alone_but_the_whole_says_so():
    clock = [0.0]
    budget = Budget(10, 100, lambda: clock[0])
    part = budget.part(0.3, 20)
    part.spend(1)
    clock[0] = 30.0
    assert part.over and budget.cut and budget.left == 9
    assert budget.part(0.3).left == 3


def test_spent_effort_is_not_cut():
    clock = [0.0]
    budget = Budget(2, 100, lambda: clock[0])
    budget.spend(2)
    clock[0] = 200.0
    assert budget.over and not budget.cut


@pytest.mark.slow
def test_the_command_says_it(tmp_path):
    words = ["pipeline", str(CASE_438B), "--json", "--out", str(tmp_path / "o.json")]
    late = CliRunner().invoke(search, [*words, "--effort", "high", "--time-limit", "0.6"], catch_exceptions=False)
    assert late.exit_code == 0 and LATE in late.stderr
    assert json.loads(late.stdout)["ended_by_time_limit"]
    whole = CliRunner().invoke(search, [*words, "--effort", "1", "--force"], catch_exceptions=False)
    assert LATE not in whole.stderr and not json.loads(whole.stdout)["ended_by_time_limit"]


@pytest.mark.parametrize("effort", ["0", "nan", "much", "-1"])
def test_an_effort_that_is_none(tmp_path, effort):
    result = CliRunner().invoke(search, ["pipeline", str(CASE_438B), "--out", "o.json", "--effort", effort])
    assert result.exit_code == 2 and "low (3)" in result.stderr
