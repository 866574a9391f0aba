"""The simulator against a step-by-step one, closed forms, published bubbles, and what must hold for all times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tests.tools.pipeline.reference_simulator import random_orders, reference
from tools.pipeline.critical_path import critical_path
from tools.pipeline.schedules import SCHEDULES, Op, is_v_shaped, operations
from tools.pipeline.simulate import OVERLAPS, Durations, makespans, simulate, simulate_timetable
from tools.pipeline.timetable import lay_out, timetable

many = settings(max_examples=60, deadline=None)

CHUNKED = [name for name in SCHEDULES if name != "1f1b"]


def durations(seed, chunks, stages, overlap="full", transfer=0.0):
    """Whole and unequal, now and then 0: sums are exact."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 5, (chunks, stages))
    backward = weight + rng.integers(0, 9, (chunks, stages))
    return Durations(rng.integers(0, 9, (chunks, stages)), backward, weight, transfer, overlap)


def equal(chunks, stages, forward=1.0, backward=2.0, **more):
    return Durations(np.full((chunks, stages), forward), np.full((chunks, stages), backward), **more)


def check_against_reference(orders, chunks, times, v_shaped):
    simulation = simulate_timetable(lay_out(orders, chunks, v_shaped), times)
    when = reference(
        orders, chunks, times.forward, times.backward, times.weight, times.transfer, times.overlap, v_shaped
    )
    for stage, order in enumerate(orders):
        want = [when[stage, op] for op in order]
        got = zip(simulation.starts[stage], simulation.ends[stage], strict=True)
        assert list(got) == want
    assert simulation.makespan == max(end for _, end in when.values())


@many
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(OVERLAPS),
    st.sampled_from([0.0, 1.0, 3.0]),
)
def test_random_orders_equal_the_reference(seed, stages, chunks, micro_batches, v_shaped, overlap, transfer):
    orders = random_orders(seed, stages, chunks, micro_batches, v_shaped, split=0.3)
    check_against_reference(orders, chunks, durations(seed, chunks, stages, overlap, transfer), v_shaped)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_schedules_equal_the_reference(schedule, overlap):
    chunks = 1 if schedule == "1f1b" else 2
    orders = [operations(schedule, stage, 4, chunks, 9) for stage in range(4)]
    check_against_reference(orders, chunks, durations(5, chunks, 4, overlap, 2.0), is_v_shaped(schedule))


@many
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_bubble_of_1f1b_and_gpipe(stages, chunks, rounds):
    """(p-1)/m, divided by v when interleaved; gpipe with chunks one after the other as well."""
    micro_batches = stages * rounds
    plain = (stages - 1) / micro_batches
    assert simulate("1f1b", micro_batches, equal(1, stages)).bubble_ratio == pytest.approx(plain, abs=1e-12)
    assert simulate("gpipe", micro_batches, equal(1, stages)).bubble_ratio == pytest.approx(plain, abs=1e-12)
    interleaved = simulate("interleaved_1f1b", micro_batches, equal(chunks, stages))
    assert interleaved.bubble_ratio == pytest.approx(plain / chunks, abs=1e-12)


def test_bubbles_published_for_pangu_ultra_moe():
    """16 stages, 64 micro-batches: 18.98 % of all time without, 10.49 % with two chunks a stage (their paper's numbers;
    that they are these shares of these sizes is our reading)."""
    assert simulate("1f1b", 64, equal(1, 16)).idle_share == pytest.approx(0.1898, abs=1e-4)
    assert simulate("interleaved_1f1b", 64, equal(2, 16)).idle_share == pytest.approx(0.1049, abs=1e-4)


def test_zero_bubble_v_idles_less_than_interleaved():
    times = equal(2, 8, forward=1, backward=2, weight=np.ones((2, 8)))
    zero, plain = (simulate(name, 32, times).idle_share for name in ("zero_bubble_v", "interleaved_1f1b"))
    assert 0 < zero < plain


@many
@given(st.integers(0, 10**6), st.sampled_from(CHUNKED), st.integers(0, 3), st.integers(0, 1))
def test_longer_work_never_makes_a_shorter_step(seed, schedule, stage, chunk):
    times = durations(seed, 2, 4, "1f1b", 1.0)
    before = simulate(schedule, 8, times).makespan
    for part in (times.forward, times.backward):
        part[chunk, stage] += 3
        after = simulate(schedule, 8, times).makespan
        assert before <= after <= before + 8 * 3 * 4
        before = after


@many
@given(st.integers(0, 10**6), st.sampled_from(CHUNKED))
def test_overlap_never_costs(seed, schedule):
    none, some, full = (simulate(schedule, 8, durations(seed, 2, 4, how, 2.0)).makespan for how in OVERLAPS)
    free = simulate(schedule, 8, durations(seed, 2, 4)).makespan
    assert none >= some >= full >= free
    assert free >= simulate(schedule, 8, durations(seed, 2, 4)).busy.max()


@many
@given(st.integers(0, 10**6))
def test_many_plans_at_once_equal_one_by_one(seed):
    rng = np.random.default_rng(seed)
    table = timetable("interleaved_1f1b", 4, 2, 8)
    forward, backward = rng.random((2, 5, 2, 4))
    alone = [simulate_timetable(table, Durations(f, b)).makespan for f, b in zip(forward, backward, strict=True)]
    assert makespans(table, forward, backward).tolist() == alone


@many
@given(st.integers(0, 10**6), st.sampled_from(["gpipe", "interleaved_1f1b", "interleaved_1f1b_less_memory"]))
def test_the_longest_chain_is_the_step_and_bounds_all_others(seed, schedule):
    rng = np.random.default_rng(seed)
    table = timetable(schedule, 4, 2, 8)
    mine, other = rng.random((2, 2, 8))
    time, visits = critical_path(table, mine)
    assert time == pytest.approx((visits * mine).sum())
    assert time == pytest.approx(makespans(table, *mine.reshape(2, 1, 2, 4))[0])
    assert (visits * other).sum() <= critical_path(table, other)[0] * (1 + 1e-12)


def test_orders_that_wait_for_each_other_are_named():
    first = [Op("B", 0, 0), Op("F", 0, 0)]
    with pytest.raises(RecipeError, match=r"stage 0 at \('B', 0, 0\); stage 1 at \('F', 0, 0\)"):
        lay_out([first, [Op("F", 0, 0), Op("B", 0, 0)]], 1)


def test_unknown_overlap():
    with pytest.raises(RecipeError, match="did you mean '1f1b'"):
        simulate("1f1b", 4, equal(1, 2, overlap="1f1"))
