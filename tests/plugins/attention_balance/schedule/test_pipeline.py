import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
from plugins.attention_balance.schedule.pipeline import best_order, makespan

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
