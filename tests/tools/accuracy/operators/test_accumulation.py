"""Counts against the obvious: with inputs and incoming gradients of ones, a sum is the number of its terms."""

import numpy as np
import pytest

from tools.accuracy.operators import golden
from tools.accuracy.operators.specs.table import SPECS

LINEAR = [
    "matmul",
    "batch_matmul",
    "grouped_matmul",
    "outer",
    "sum",
    "cumsum",
    "embedding",
    "permute",
    "index_add",
    "scatter_add",
    "tile",
]


def ones(values):
    return np.ones_like(values) if golden.is_float(values) else values


@pytest.mark.parametrize("name", LINEAR)
def test_ones_count_terms(name):
    spec = SPECS[name]
    for shape in spec.shapes:
        made = tuple(map(ones, spec.make(golden.generator(spec, shape, 0), *shape)))
        counts = spec.counts(*made)
        outs = golden.forward(spec, made, "float32")
        for number, out in enumerate(outs):
            assert out.max() == (counts.of("forward", number) or 1)  # moved: one term, nothing computed
        grads = golden.backward(spec, made, tuple(map(np.ones_like, outs)), "float32")
        for number, grad in enumerate(grads):
            assert grad.max() == (counts.of("backward", number) or 1)


def test_normalisations_count_the_axis_and_the_rows():
    spec = SPECS["layer_norm"]
    counts = spec.counts(np.ones((3, 5, 7)), np.ones(7), np.ones(7))
    assert counts.of("forward", 0) == 7
    assert [counts.of("backward", number) for number in range(3)] == [7, 15, 15]


def test_the_norm_counts_every_gradient():
    assert SPECS["global_norm_clip"].counts(np.ones((150, 100)), np.ones(100)).of("forward", 2) == 15100


def test_table_2_is_reached_in_every_column():
    """Some case of some operator falls into each row of the table."""
    reached = set()
    for spec in SPECS.values():
        for shape in spec.shapes:
            counts = spec.counts(*spec.make(golden.generator(spec, shape, 0), *shape))
            forward = counts.forward if isinstance(counts.forward, tuple) else (counts.forward,)
            reached |= {sum(count >= row for row in (1, 2000, 10000, 20000, 200000)) for count in forward}
    assert reached == {0, 1, 2, 3, 4, 5}
