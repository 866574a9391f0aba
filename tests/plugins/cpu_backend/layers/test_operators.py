import numpy as np
import pytest
from mindspore import Tensor, nn

from plugins.cpu_backend.layers.operators import EmbeddingLookup, Outer, TopK
from tests.plugins.cpu_backend.gradients import run

pytestmark = pytest.mark.usefixtures("graph_mode")
rng = np.random.default_rng(0)


def test_topk_values_and_indices():
    x = rng.permutation(60).reshape(3, 20).astype(np.float32)
    values, indices = (out.asnumpy() for out in TopK()(Tensor(x), 4))
    np.testing.assert_array_equal(indices, np.argsort(-x, axis=1)[:, :4])
    np.testing.assert_array_equal(values, np.take_along_axis(x, indices, 1))


class Values(nn.Cell):
    def __init__(self):
        super().__init__()
        self.topk = TopK()

    def construct(self, x):
        return self.topk(x, 4)[0]


def test_topk_sends_the_gradient_to_the_chosen_only():
    x = rng.permutation(60).reshape(3, 20).astype(np.float32)
    dout = rng.standard_normal((3, 4)).astype(np.float32)
    _, (dx,) = run(Values(), [x], dout)
    expected = np.zeros_like(x)
    np.put_along_axis(expected, np.argsort(-x, axis=1)[:, :4], dout, 1)
    np.testing.assert_array_equal(dx, expected)


def test_outer():
    a, b, dout = (rng.standard_normal(shape).astype(np.float32) for shape in (5, 7, (5, 7)))
    out, (da, db) = run(Outer(), [a, b], dout)
    np.testing.assert_allclose(out, np.outer(a, b), atol=1e-7)
    np.testing.assert_allclose(da, dout @ b, atol=2e-6)
    np.testing.assert_allclose(db, dout.T @ a, atol=2e-6)


def test_embedding_sums_the_gradients_of_repeated_tokens():
    weight = rng.standard_normal((6, 4)).astype(np.float32)
    tokens = np.array([[0, 5, 5], [2, 5, 0]], np.int32)
    dout = rng.standard_normal((2, 3, 4)).astype(np.float32)
    out, (_, dweight) = run(EmbeddingLookup(), [tokens, weight], dout)
    np.testing.assert_array_equal(out, weight[tokens])
    expected = np.zeros_like(weight)
    np.add.at(expected, tokens, dout)
    np.testing.assert_allclose(dweight, expected, atol=1e-6)
