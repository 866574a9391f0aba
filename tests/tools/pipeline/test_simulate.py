"""The simulator against a step-by-step one, closed forms, published bubbles, and what must hold for all times."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tests.tools.pipeline.reference_simulator import random_orders, reference, together, with_pairs
from tools.files.figure import new_figure
from tools.pipeline.orders import BOTH_WAYS, LOOP, Op, V, as_table
from tools.pipeline.schedules import PAPER_SCHEDULES, SCHEDULES, check_schedule, operations, shape_of
from tools.pipeline.simulate import (
    OVERLAPS,
    Durations,
    draw_timeline,
    in_flight,
    makespans,
    memory_over_time,
    peak_vectors,
    simulate,
    simulate_timetable,
)
from tools.pipeline.timetable import critical_path, lay_out, timetable

many = settings(max_examples=60)


def laid(orders, chunks, times=None, shape=LOOP):
    """Own orders, simulated."""
    return simulate_timetable(lay_out([as_table(order) for order in orders], chunks, shape), times)


CHUNKED = [name for name in SCHEDULES if name != "1f1b"]


def durations(seed, chunks, stages, overlap="full", transfer=0.0, parts=0):
    """Whole and unequal, now and then 0: sums are exact. Of so many parts each, or 0: whole sequences."""
    rng = np.random.default_rng(seed)
    shape = (parts, chunks, stages) if parts else (chunks, stages)
    weight = rng.integers(0, 5, shape)
    backward = weight + rng.integers(0, 9, shape)
    hidden = None if parts else rng.integers(0, 3, (chunks, chunks, stages))
    return Durations(rng.integers(2, 9, shape), backward, weight, transfer, overlap, hidden)


def equal(chunks, stages, forward=1.0, backward=2.0, **more):
    return Durations(np.full((chunks, stages), forward), np.full((chunks, stages), backward), **more)


def check_against_reference(orders, chunks, times, shape, simulation):
    when = reference(orders, chunks, times, shape)
    for stage, order in enumerate(orders):
        want = [when[stage, op] for item in order for op in together(item)]
        assert list(zip(simulation.starts[stage], simulation.ends[stage], strict=True)) == want
    assert simulation.makespan == max(end for _, end in when.values())


@many
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([LOOP, V, BOTH_WAYS]),
    st.sampled_from(OVERLAPS),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([0.0, 0.7]),
)
def test_random_orders_equal_the_reference(seed, stages, chunks, micro_batches, shape, overlap, transfer, pair):
    orders = random_orders(seed, stages, chunks, micro_batches, shape, split=0.3, pair=pair)
    times = durations(seed, chunks, stages, overlap, transfer)
    check_against_reference(orders, chunks, times, shape, laid(orders, chunks, times, shape))


@pytest.mark.parametrize("schedule", (*SCHEDULES, *PAPER_SCHEDULES))
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("parts", [1, 2])
def test_schedules_equal_the_reference(schedule, overlap, parts):
    chunks = 1 if schedule in ("1f1b", "zb_h1", "zb_h2") else 2
    try:
        check_schedule(schedule, 4, chunks, 10, parts)
    except RecipeError:
        assert parts > 1
        return
    times = durations(5, chunks, 4, overlap, 2.0, parts if parts > 1 else 0)
    simulation = simulate(schedule, 10, times, parts)
    orders = with_pairs(simulation.orders, simulation.table.tables)
    check_against_reference(orders, chunks, times, shape_of(schedule), simulation)


@many
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_bubble_of_1f1b_and_gpipe(stages, chunks, rounds):
    """(p-1)/m, divided by v when interleaved; gpipe with chunks one after the other as well."""
    micro_batches = stages * rounds
    for schedule, v in (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", chunks)):
        idle = simulate(schedule, micro_batches, equal(v, stages)).idle_share
        assert idle / (1 - idle) == pytest.approx((stages - 1) / micro_batches / v, abs=1e-12)


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


@settings(max_examples=10)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_v", "zb_v", "dual_pipe_v", "dual_pipe"])
def test_many_plans_at_once_equal_one_by_one(schedule, seed):
    rng = np.random.default_rng(seed)
    table = timetable(schedule, 4, 2, 8)
    forward, backward, weight = rng.integers(1, 9, (3, 5, 2, 4)).astype(float)
    backward, hidden = backward + weight, rng.integers(0, 2, (5, 2, 2, 4)).astype(float)
    plans = zip(forward, backward, weight, hidden, strict=True)
    alone = [simulate_timetable(table, Durations(f, b, w, hidden=h)).makespan for f, b, w, h in plans]
    assert makespans(table, forward, backward, weight, hidden).tolist() == alone


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


@many
@given(
    st.integers(0, 10**6), st.sampled_from(["zero_bubble_v", "zb_v", "v_min", "dual_pipe_v", "interleaved_1f1b_pairs"])
)
def test_the_longest_chain_goes_through_split_backwards_and_pairs(seed, schedule):
    rng = np.random.default_rng(seed)
    table = timetable(schedule, 4, 2, 8)
    mine, other = rng.random((2, 3, 8))
    mine[1], other[1] = mine[1] + mine[2], other[1] + other[2]
    time, visits = critical_path(table, mine)
    assert time == pytest.approx((visits * mine).sum())
    assert time == pytest.approx(makespans(table, *mine.reshape(3, 1, 2, 4))[0])
    assert (visits * other).sum() <= critical_path(table, other)[0] * (1 + 1e-12)


@many
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "interleaved_1f1b"]), st.integers(1, 9))
def test_sending_counts_in_a_chain_that_stays_on_its_stage(seed, schedule, transfer):
    rng = np.random.default_rng(seed)
    chunks = 1 if schedule == "1f1b" else 2
    table, times = timetable(schedule, 4, chunks, 8), rng.integers(1, 9, (2, 4 * chunks)).astype(float)
    received = np.full(times.shape, float(transfer))
    received[0, 0] = received[1, -1] = 0
    step = simulate(schedule, 8, Durations(*times.reshape(2, chunks, 4), None, transfer, "none")).makespan
    time, visits = critical_path(table, times + received, transfer)
    assert time == pytest.approx(step)
    other = rng.integers(1, 9, times.shape)  # what is sent does not change with the times
    sent = time - (visits * (times + received)).sum()
    assert sent >= -1e-9
    assert (visits * (other + received)).sum() + sent <= critical_path(table, other + received, transfer)[0] + 1e-9


def test_orders_that_wait_for_each_other_are_named():
    first = [Op("B", 0, 0), Op("F", 0, 0)]
    at = "stage 0 at the backward pass of micro-batch 0 in chunk 0; stage 1 at the forward pass of micro-batch 0 in "
    with pytest.raises(RecipeError, match=rf"{at}chunk 0$"):
        laid([first, [Op("F", 0, 0), Op("B", 0, 0)]], 1)
    parts = [Op("F", 0, 0), Op("W", 0, 0, 1), Op("F", 0, 0, 1), Op("B", 0, 0, 1), Op("B", 0, 0), Op("W", 0, 0)]
    with pytest.raises(RecipeError, match=r"the weight gradients of micro-batch 0 in chunk 0, part 1 of the sequence$"):
        laid([parts], 1)


def test_unknown_overlap():
    with pytest.raises(RecipeError, match="did you mean '1f1b'"):
        simulate("1f1b", 4, equal(1, 2, overlap="1f1"))


def test_1f1b_holds_one_micro_batch_for_each_stage_after_it():
    for stage in range(4):
        assert peak_vectors(operations("1f1b", stage, 4, 1, 8), 1).tolist() == [[4 - stage]]


def test_fewer_micro_batches_than_the_warm_up():
    assert peak_vectors(operations("1f1b", 0, 8, 1, 3), 1).tolist() == [[3]]


@many
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_peak_is_at_one_of_the_vectors_and_equals_the_curve(seed, stages, chunks, micro_batches):
    rng = np.random.default_rng(seed)
    orders = random_orders(seed, stages, chunks, micro_batches, split=0.3)
    activation = rng.integers(1, 9, chunks)
    times = Durations(
        rng.integers(1, 9, (chunks, stages)), rng.integers(3, 9, (chunks, stages)), np.full((chunks, stages), 2)
    )
    simulation = laid(orders, chunks, times)
    for stage, order in enumerate(orders):
        peak = (in_flight(order, chunks) @ activation).max()
        assert (peak_vectors(order, chunks) @ activation).max() == peak
        moments, memory = memory_over_time(simulation, stage, 100, activation)
        assert memory.max() == 100 + peak
        assert memory[0] == memory[-1] == 100
        assert (np.diff(moments) >= 0).all()


@many
@given(st.integers(0, 10**6))
def test_no_vector_exceeds_another(seed):
    vectors = peak_vectors(random_orders(seed, 2, 3, 3)[0], 3)
    for index, one in enumerate(vectors):
        for other in np.delete(vectors, index, axis=0):
            assert (one > other).any()


DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dual_pipe_v", "interleaved_1f1b_pairs"])
def test_each_operation_is_drawn_once(schedule):
    chunks = 1 if schedule in ("1f1b", "zb_h1") else 2
    ones = np.ones((chunks, 4))
    found = simulate(schedule, 8, Durations(ones, 2 * ones, ones, hidden=np.full((chunks, chunks, 4), 0.5)))
    axes = new_figure(8, 2).subplots()
    draw_timeline(axes, found)
    boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    pairs = sum(int(table[:, -1].sum()) for table in found.table.tables)
    # a pair is two halves of a row, and a frame around both
    assert len(boxes) == sum(map(len, found.orders)) + pairs
    heights = np.array([box.height for box in boxes])
    assert np.isclose(heights, heights.max() / 2).sum() == 2 * pairs
    drawn = sum(box.width * box.height for box in boxes) / heights.max()
    assert drawn == pytest.approx(found.busy.sum() + _framed(found))


def _framed(found):
    """Time of all pairs, whose frames cover them once more."""
    return sum(
        float((ends - starts)[table[:, -1] > 0].sum())
        for starts, ends, table in zip(found.starts, found.ends, found.table.tables, strict=True)
    )


def test_the_page_shows_every_schedule_that_only_papers_have():
    drawn = runpy.run_path(str(DOCS / "pictures" / "schedules.py"))["DRAWN"]
    assert set(PAPER_SCHEDULES) <= set(drawn)
    page = (DOCS / "schedules.md").read_text("utf-8")
    for schedule in drawn:
        assert f"(pictures/schedules/{schedule}.png)" in page
        assert (DOCS / "pictures" / "schedules" / f"{schedule}.png").is_file()


def test_micro_batches_may_take_unlike_times():
    one = Durations(np.array([[1.0, 2.0]]), np.array([[2.0, 3.0]]))
    alike = [one] * 4
    assert simulate("1f1b", 4, alike).makespan == simulate("1f1b", 4, one).makespan
    last = Durations(one.forward, one.backward + 10)
    # the last micro-batch's backward runs last on both stages, one after the other
    assert simulate("1f1b", 4, [*alike[:3], last]).makespan == simulate("1f1b", 4, one).makespan + 20
