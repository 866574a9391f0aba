"""GroupedMatmul against a loop over rows, as MindFormers' experts use it for gradients; permuted tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.semi_auto_cpu.kernels import KERNELS
from tests.plugins.semi_auto_cpu.kernels.derivative import LOW, numerical

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
    with pytest.raises(ValueError, match="group_list has 3 groups, but weight has 2 matrices"):
        call(x, weight[:2], ENDS, 0)
    with pytest.raises(NotImplementedError, match="split_item 0"):
        call(x, weight, ENDS, 0, split_item=0)
    with pytest.raises(NotImplementedError, match="group_type -1"):
        call(x, weight, ENDS, -1)
    with pytest.raises(NotImplementedError, match="bias is given"):
        KERNELS["GroupedMatmul"]({}, [x], [weight], [x], *[None] * 4, ENDS, 3, 0, False, False)


ROUTES = st.integers(1, 3).flatmap(
    lambda topk: st.lists(st.lists(st.integers(0, 4), min_size=topk, max_size=topk), min_size=1, max_size=9)
)


@given(ROUTES)
def test_permuting_groups_by_expert_and_unpermuting_restores(routes):
    experts = np.array(routes, np.int32)
    tokens = np.arange(len(routes) * 2, dtype=np.float32).reshape(-1, 2)
    permuted, rows = KERNELS["MoeTokenPermute"]({}, tokens, experts)
    copies = sorted(
        (expert, token, place) for token, choice in enumerate(routes) for place, expert in enumerate(choice)
    )
    np.testing.assert_array_equal(permuted, tokens[[token for _, token, _ in copies]])
    assert rows.dtype == np.int32 and sorted(rows.tolist()) == list(range(experts.size))
    each = KERNELS["MoeTokenUnpermute"]({}, permuted, rows)
    np.testing.assert_array_equal(each, np.repeat(tokens, experts.shape[1], 0))
    np.testing.assert_array_equal(KERNELS["InnerMoeTokenUnpermute"]({}, permuted, rows, None, False, None), each)
    even = np.full(experts.shape, 1 / experts.shape[1], np.float32)
    np.testing.assert_allclose(KERNELS["MoeTokenUnpermute"]({}, permuted, rows, even), tokens, atol=1e-5)


def test_the_example_of_the_documentation():
    tokens = np.array([1, 7, 2, 1, 2, 3], np.float32)[:, None]
    permuted, rows = KERNELS["MoeTokenPermute"]({}, tokens, np.array([5, 0, 3, 1, 2, 4], np.int32))
    assert permuted[:, 0].tolist() == [7, 1, 2, 2, 3, 1] and rows.tolist() == [5, 0, 3, 1, 2, 4]


@pytest.mark.parametrize("kept", (None, 4, -2))
def test_gradients(rng, kept):
    tokens, probs = rng.normal(size=(3, 2)).astype(np.float32), rng.random((3, 2)).astype(np.float32)
    experts = np.array([[2, 0], [1, 2], [0, 1]], np.int32)
    permuted, rows = KERNELS["MoeTokenPermute"]({}, tokens, experts, kept)
    assert len(permuted) == (6 if kept is None else 4)
    order = np.argsort(rows)[: len(permuted)]

    def permute(x):
        return x[order // 2]

    def unpermute(x, weights):
        out = np.zeros((3, 2))
        for row, copy in enumerate(order):
            out[copy // 2] += weights[copy // 2, copy % 2] * x[row]
        return out

    np.testing.assert_array_equal(permuted, permute(tokens))
    np.testing.assert_allclose(
        KERNELS["MoeTokenUnpermute"]({}, permuted, rows, probs), unpermute(permuted, probs), rtol=1e-5, atol=1e-6
    )
    dout = rng.normal(size=permuted.shape).astype(np.float32)
    found = KERNELS["MoeTokenPermuteGrad"]({}, dout, rows, 2)
    np.testing.assert_allclose(found, numerical(permute, [tokens], dout)[0], atol=1e-5)
    dout = rng.normal(size=(3, 2)).astype(np.float32)
    found = KERNELS["MoeTokenUnpermuteGrad"]({}, permuted, dout, rows, probs)
    for gradient, expected in zip(found, numerical(unpermute, [permuted, probs], dout), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_gradient_without_probabilities_goes_back_to_each_copy(rng):
    grad = rng.normal(size=(4, 3)).astype(np.float32)
    rows = np.array([2, 0, 3, 1], np.int32)
    found, nothing = KERNELS["MoeTokenUnpermuteGrad"]({}, np.zeros((4, 3), np.float32), grad, rows)
    np.testing.assert_array_equal(found[rows], grad)
    assert nothing is None


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_sums_in_float32(dtype):
    permuted, rows = np.ones((512, 1), dtype), np.arange(512, dtype=np.int32)
    weights = np.ones((1, 512), dtype)
    np.testing.assert_array_equal(KERNELS["MoeTokenUnpermute"]({}, permuted, rows, weights), [[512]])
    np.testing.assert_array_equal(KERNELS["MoeTokenPermuteGrad"]({}, permuted, rows, 512), [[512]])
    assert KERNELS["MoeTokenPermute"]({}, permuted, rows)[0].dtype == dtype


def test_padded_mode_is_refused():
    x, rows = np.zeros((2, 2), np.float32), np.arange(2, dtype=np.int32)
    calls = {"MoeTokenPermute": (x, rows, None, True), "MoeTokenPermuteGrad": (x, rows, 1, True)}
    calls |= {"MoeTokenUnpermute": (x, rows, None, True), "MoeTokenUnpermuteGrad": (x, x, rows, None, True)}
    for name, inputs in calls.items():
        with pytest.raises(NotImplementedError, match=f"{name}: padded_mode"):
            KERNELS[name]({}, *inputs)
