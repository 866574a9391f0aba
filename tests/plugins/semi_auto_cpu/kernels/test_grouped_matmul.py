"""GroupedMatmul against a loop over rows, and as MindFormers' experts use it for gradients."""

import numpy as np
import pytest

from plugins.semi_auto_cpu.kernels import KERNELS
from tests.plugins.semi_auto_cpu.kernels.derivative import numerical

ENDS = np.array([2, 2, 5], np.int64)  # an expert without rows
EXPERT = [0, 0, 2, 2, 2]


def call(x, weight, ends, group_type, ta=False, tb=False, split_item=3):
    return KERNELS["GroupedMatmul"]({}, [x], [weight], *[None] * 5, ends, split_item, group_type, ta, tb)


def slow(x, weight):
    return np.stack([row @ weight[expert] for row, expert in zip(x, EXPERT, strict=True)])


@pytest.mark.parametrize("ta", (False, True))
@pytest.mark.parametrize("tb", (False, True))
def test_rows_meet_their_experts_matrix(rng, ta, tb):
    x, weight = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(3, 3, 4)).astype(np.float32)
    given = np.ascontiguousarray(x.T) if ta else x, np.ascontiguousarray(weight.swapaxes(1, 2)) if tb else weight
    np.testing.assert_allclose(call(*given, ENDS, 0, ta, tb), slow(x, weight), rtol=1e-5)


def test_gradients_are_its_two_group_types(rng):
    x, weight = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(3, 3, 4)).astype(np.float32)
    dout = rng.normal(size=(5, 4)).astype(np.float32)
    dx, dweight = numerical(slow, (x, weight), dout)
    np.testing.assert_allclose(call(dout, weight.swapaxes(1, 2), ENDS, 0), dx, atol=1e-5)
    np.testing.assert_allclose(call(np.ascontiguousarray(x.T), dout, ENDS, 2), dweight, atol=1e-5)
    np.testing.assert_allclose(call(x, dout, ENDS, 2, ta=True), dweight, atol=1e-5)
    np.testing.assert_allclose(call(x.T, dout.T, ENDS, 2, tb=True), dweight, atol=1e-5)


@pytest.mark.parametrize("flat", (False, True))
def test_gradients_are_added_in_place(rng, flat):
    x, dout = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    before = rng.normal(size=(9, 4) if flat else (3, 3, 4)).astype(np.float32)
    out = before.copy()
    KERNELS["InplaceGroupedMatmulAdd"]({}, x, dout, ENDS, out)
    gradient = call(np.ascontiguousarray(x.T), dout, ENDS, 2)
    np.testing.assert_allclose(out - before, gradient.reshape(out.shape), atol=1e-5)
    with pytest.raises(ValueError, match="group_list"):
        KERNELS["InplaceGroupedMatmulAdd"]({}, x, dout, ENDS - 1, out)


def test_no_rows_at_all():
    none = np.zeros(3, np.int64)
    assert call(np.zeros((0, 3), np.float32), np.ones((3, 3, 4), np.float32), none, 0).shape == (0, 4)
    assert not call(np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32), none, 2).any()


def test_what_it_cannot_do_it_refuses():
    x, weight = np.zeros((5, 3), np.float32), np.zeros((3, 3, 4), np.float32)
    for ends in (ENDS - 1, ENDS[::-1], ENDS[:0], None):
        with pytest.raises(ValueError, match="GroupedMatmul: group_list"):
            call(x, weight, ends, 0)
    with pytest.raises(ValueError, match="3 groups, 2 matrices"):
        call(x, weight[:2], ENDS, 0)
    with pytest.raises(NotImplementedError, match="split_item 0"):
        call(x, weight, ENDS, 0, split_item=0)
    with pytest.raises(NotImplementedError, match="group_type -1"):
        call(x, weight, ENDS, -1)
    with pytest.raises(NotImplementedError, match="bias is not None"):
        KERNELS["GroupedMatmul"]({}, [x], [weight], [x], *[None] * 4, ENDS, 3, 0, False, False)
