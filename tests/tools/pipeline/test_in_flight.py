"""Memory: in-flight micro-batches, their maximal moments, and the curve over time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.pipeline.reference_simulator import random_orders
from tools.pipeline.in_flight import in_flight, memory_over_time, peak_vectors
from tools.pipeline.schedules import operations
from tools.pipeline.simulate import Durations, simulate_timetable
from tools.pipeline.timetable import lay_out

many = settings(max_examples=60)


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
    simulation = simulate_timetable(lay_out(orders, chunks), times)
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
