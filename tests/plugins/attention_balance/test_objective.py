import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
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
