"""Which samples go to which rank, beside all assignments of small problems, and the objective that this lowers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
from plugins.attention_balance.assign import assign, falling_order, loads_of, partition, unscheduled
from plugins.attention_balance.context_parallel import balanced, contiguous, head_tail
from plugins.attention_balance.objective import Objective, best_order, lower_bound, makespan, objective_of
from plugins.attention_balance.reference import BASELINES
from plugins.errors import RecipeError

many = settings(max_examples=60)

ROUNDING = 1 + 1e-8  # plans are made of costs rounded to 32 bits


@st.composite
def problems(draw, largest=4, most_groups=4, most_slots=3):
    """Costs [rows, batch] on purpose unbalanced, the shape, the objective."""
    groups, together = draw(st.integers(1, most_groups)), draw(st.integers(1, largest))
    shape = (groups * together, draw(st.integers(1, largest)), draw(st.integers(1, most_slots)))
    objective = Objective(together, draw(st.sampled_from([1, 1, 2, 4])))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    rows, size = draw(st.integers(1, 3)), int(np.prod(shape))
    kind = draw(st.sampled_from(["log-normal", "one giant", "few values", "all equal", "zero"]))
    costs = {
        "log-normal": random.lognormal(0, 1.5, (rows, size)),
        "one giant": np.where(np.arange(size) == size // 2, 1e6, random.random((rows, size))),
        "few values": random.integers(0, 3, (rows, size)).astype(float),
        "all equal": np.full((rows, size), 0.7),
        "zero": np.zeros((rows, size)),
    }[kind]
    return costs, shape, objective


@many
@given(problems())
def test_every_sample_once_never_slower_and_above_the_bound(problem):
    costs, shape, objective = problem
    plan = assign(costs, *shape, objective)
    assert plan.shape == (len(costs), *shape)
    assert (np.sort(plan.reshape(len(costs), -1), axis=1) == np.arange(costs.shape[1])).all()
    time = objective.step_time(loads_of(costs, plan))
    natural = np.broadcast_to(unscheduled(*shape), plan.shape)
    assert (time <= objective.step_time(loads_of(costs, natural)) * ROUNDING).all()
    bound = lower_bound(costs, *shape, objective)
    assert (bound <= time * ROUNDING).all()
    if objective.stages == 1:
        assert (objective.even_time(costs.sum(1), *shape[:2]) <= bound * ROUNDING).all()


@many
@given(problems())
def test_a_batch_is_planned_alone_as_among_others(problem):
    costs, shape, objective = problem
    together = assign(costs, *shape, objective)
    for row, plan in zip(costs, together, strict=True):
        np.testing.assert_array_equal(assign(row, *shape, objective), plan)


@many
@given(problems(largest=6, most_groups=1, most_slots=1))
def test_one_sample_a_slot_and_one_barrier_reach_the_bound(problem):
    costs, shape, objective = problem
    objective = Objective(objective.ranks_per_barrier)
    time = objective.step_time(loads_of(costs, assign(costs, *shape, objective)))
    np.testing.assert_allclose(time, lower_bound(costs, *shape, objective), rtol=1e-8)


SMALL = [
    # ranks, micro-batches, slots, ranks in a barrier, stages, how far above the optimum at most
    (2, 3, 1, 2, 1, 1.0),
    (3, 2, 1, 3, 1, 1.0),
    (2, 3, 1, 1, 1, 1.03),
    (3, 2, 1, 1, 1, 1.0),
    (4, 2, 1, 2, 1, 1.0),
    (2, 2, 2, 2, 1, 1.12),
    (2, 2, 2, 1, 1, 1.05),
    (2, 3, 1, 2, 3, 1.04),
    (2, 3, 1, 1, 3, 1.08),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL)
def test_against_every_assignment(case):
    *shape, together, stages, most = case
    objective = Objective(together, stages)
    random = np.random.default_rng(5)
    for _ in range(2 if np.prod(shape) > 6 else 5):
        costs = random.lognormal(0, 1, int(np.prod(shape)))
        best = reference.shortest_step(costs, *shape, objective)
        time = objective.step_time(costs[assign(costs, *shape, objective)].sum(-1))
        assert best <= time * ROUNDING <= most * best * ROUNDING**2
        assert lower_bound(costs, *shape, objective) <= best * ROUNDING


@many
@given(problems())
def test_baselines_are_permutations(problem):
    costs, shape, _ = problem
    for scheduler in BASELINES.values():
        plan = scheduler(costs[0], *shape)
        assert plan.shape == shape
        assert sorted(plan.ravel()) == list(range(len(costs[0])))


@pytest.mark.parametrize(
    ("together", "slots", "most"), [(1, 1, 1), (4, 1, 1), (32, 1, 1), (1, 2, 1), (4, 2, 1), (32, 2, 1.01)]
)
def test_no_baseline_is_better(together, slots, most):
    costs = np.random.default_rng(together).lognormal(0, 1.2, 32 * 8 * slots)
    objective = Objective(together)
    ours = objective.step_time(costs[assign(costs, 32, 8, slots, objective)].sum(-1))
    for name, scheduler in BASELINES.items():
        theirs = objective.step_time(costs[scheduler(costs, 32, 8, slots)].sum(-1))
        assert ours <= theirs * most * ROUNDING, name


def test_equal_costs_keep_the_order_of_the_dataset():
    plan = assign(np.ones(24), 4, 3, 2, Objective(4))
    np.testing.assert_array_equal(plan, unscheduled(4, 3, 2))
    assert plan[1].tolist() == [[1, 5], [9, 13], [17, 21]]


@many
@given(st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=1, max_size=3), st.booleans())
def test_falling_order_is_the_stable_sort(rows, wide):
    weights = np.array(rows, np.int64) << (60 if wide and max(map(max, rows)) < 4 else 0)
    np.testing.assert_array_equal(falling_order(weights), np.argsort(-weights, axis=1, kind="stable"))


@many
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_partition_is_a_partition_and_swaps_only_help(parts, size, rows, seed):
    weights = np.random.default_rng(seed).integers(0, 1 << 32, (rows, parts * size))
    loads = []
    for swap in (False, True):
        chosen = partition(weights, parts, swap=swap)
        assert chosen.shape == (rows, parts, size)
        assert (np.sort(chosen.reshape(rows, -1), axis=1) == np.arange(parts * size)).all()
        loads.append(np.take_along_axis(weights, chosen.reshape(rows, -1), 1).reshape(chosen.shape).sum(-1).max(-1))
    assert (loads[1] <= loads[0]).all()


def test_partition_in_chunks_of_rows_is_the_same():
    weights = np.random.default_rng(0).integers(0, 1 << 56, (4, 24))
    together = partition(weights, 4)
    for row, chosen in zip(weights, together, strict=True):
        np.testing.assert_array_equal(partition(row[None], 4)[0], chosen)


TIMES = st.lists(st.floats(0, 10), min_size=1, max_size=9)


@many
@given(TIMES, st.integers(1, 5), st.sampled_from([0.25, 1 / 3, 0.5]))
def test_makespan_is_that_of_running_the_operations(times, stages, share):
    assert makespan(np.array(times), stages, share) == pytest.approx(reference.makespan(times, stages, share))


def test_equal_micro_batches_have_the_known_bubble():
    assert makespan(np.ones(16), 4, 1 / 3) == pytest.approx(16 + 3)
    assert makespan(np.ones((2, 5, 3)), 4, 0.25).shape == (2, 5)


@many
@given(st.lists(TIMES.filter(lambda x: len(x) == 9), min_size=1, max_size=3).map(np.array), st.integers(2, 5))
def test_the_best_order_is_an_order_and_never_longer(times, stages):
    order = best_order(times, stages, 1 / 3)
    assert (np.sort(order, axis=1) == np.arange(9)).all()
    ordered = makespan(np.take_along_axis(times, order, 1), stages, 1 / 3)
    assert (ordered <= makespan(times, stages, 1 / 3)).all()


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_best_order_is_close_to_the_optimum(stages):
    random = np.random.default_rng(stages)
    for _ in range(4):
        times = random.lognormal(0, 1, 6)
        order = best_order(times[None], stages, 1 / 3)[0]
        best = reference.shortest_pipeline(times.tolist(), stages, 1 / 3)
        assert best <= makespan(times[order], stages, 1 / 3) * (1 + 1e-12) <= 1.04 * best


@pytest.mark.parametrize(
    ("layout", "together"),
    [
        ({"data_parallel": 256, "expert_parallel": 256}, 256),
        ({"data_parallel": 256, "expert_parallel": 16}, 16),
        ({"data_parallel": 64}, 1),
        # an EP group inside the devices of one data-parallel rank couples no two samples
        ({"data_parallel": 4, "expert_parallel": 8, "tensor_parallel": 8}, 1),
        ({"data_parallel": 4, "expert_parallel": 4, "tensor_parallel": 8}, 1),
        ({"data_parallel": 16, "expert_parallel": 32, "tensor_parallel": 8}, 4),
        ({"data_parallel": 8, "expert_parallel": 128, "tensor_parallel": 8, "context_parallel": 8}, 2),
    ],
)
def test_an_ep_group_spans_ranks(layout, together):
    assert objective_of(**layout) == Objective(together)


def test_pipeline_and_recompute():
    assert objective_of(data_parallel=2, pipeline_stages=8, recomputed=1.0) == Objective(1, 8, 0.25)


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel": 8, "expert_parallel": 12, "tensor_parallel": 8},
        {"data_parallel": 8, "expert_parallel": 3},
        {"data_parallel": 2, "expert_parallel": 32, "tensor_parallel": 8},
    ],
)
def test_groups_of_broken_ranks_are_refused(layout):
    with pytest.raises(
        RecipeError, match=rf"parallel_config\.expert_parallel: .* but {layout['expert_parallel']} devices are neither"
    ):
        objective_of(**layout)


@many
@given(st.data())
def test_step_time_is_that_of_the_reference(data):
    groups, together = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    micro_batches, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    objective = Objective(together, data.draw(st.integers(1, 4)), 0.25)
    shape = (groups * together, micro_batches, slots)
    costs = np.array(data.draw(st.lists(st.floats(0, 9), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    plan = np.random.default_rng(0).permutation(len(costs)).reshape(shape)
    ours = objective.step_time(costs[plan].sum(-1))
    assert ours == pytest.approx(reference.step_time(costs, plan, objective))


def test_an_even_step_takes_the_even_time():
    for objective in (Objective(4), Objective(1), Objective(2, 4)):
        time = objective.step_time(np.full((4, 8), 3.0))
        assert time == pytest.approx(objective.even_time(np.array(96.0), 4, 8))


@st.composite
def samples(draw):
    """Documents whose tokens divide by 2 * ranks, and the ranks."""
    ranks = draw(st.integers(1, 5))
    segments = draw(st.lists(st.integers(1, 90), min_size=1, max_size=12))
    segments.append(2 * ranks - sum(segments) % (2 * ranks))
    return segments, ranks


@many
@given(samples(), st.sampled_from([1, 2, 8]), st.sampled_from(["contiguous", "head tail", "balanced"]))
def test_tokens_once_and_equal_pairs_as_counted(sample, piece, method):
    segments, ranks = sample
    plan = {
        "contiguous": lambda: contiguous(segments, ranks),
        "head tail": lambda: head_tail(segments, ranks),
        "balanced": lambda: balanced(segments, ranks, piece),
    }[method]()
    tokens, pairs = reference.context_pairs(segments, plan.ranges)
    assert tokens == [sum(segments) // ranks] * ranks
    assert plan.pairs.tolist() == pairs
    covered = np.concatenate([np.arange(*part) for own in plan.ranges for part in own])
    assert sorted(covered) == list(range(sum(segments)))
    for own in plan.ranges:
        assert (own[:, 0] < own[:, 1]).all()
        assert (own[1:, 0] > own[:-1, 1]).all()  # rising, and adjacent ones joined


@many
@given(st.integers(1, 6), st.integers(1, 20))
def test_one_document_is_exact_and_head_tail(ranks, piece):
    plan = balanced([2 * ranks * piece], ranks, 1)
    assert plan.imbalance == 1
    for own, other in zip(plan.ranges, head_tail([2 * ranks * piece], ranks).ranges, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_a_real_mix_is_balanced_where_others_are_not(ranks):
    random = np.random.default_rng(ranks)
    for _ in range(5):
        cuts = np.sort(random.choice(131_072, 40, replace=False))
        segments = np.diff(np.concatenate(([0], cuts, [131_072])))
        segments = segments[segments > 0]
        assert balanced(segments, ranks).imbalance < 1.005
        assert balanced(segments, ranks, 1).imbalance < 1.0002
        assert balanced(segments, ranks).imbalance < head_tail(segments, ranks).imbalance
        assert balanced(segments, ranks).imbalance < contiguous(segments, ranks).imbalance
