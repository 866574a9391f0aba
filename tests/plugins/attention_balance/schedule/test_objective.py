import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
from plugins.attention_balance.schedule.objective import Objective, objective_of
from plugins.errors import RecipeError

many = settings(max_examples=60)


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
        RecipeError, match=rf"parallel_config\.expert_parallel: {layout['expert_parallel']} devices are"
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
