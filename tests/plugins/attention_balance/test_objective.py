import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
from plugins.attention_balance.context_parallel import balanced, contiguous, head_tail
from plugins.attention_balance.objective import Objective, best_order, makespan, objective_of
from plugins.errors import RecipeError

many = settings(max_examples=60)

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
        RecipeError, match=rf"parallel_config\.expert_parallel: an EP group of {layout['expert_parallel']} devices"
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
