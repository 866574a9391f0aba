"""The routed experts against a NumPy loop over single (token, expert) pairs, and operators without a kernel."""

import mindspore as ms
import numpy as np
import pytest
from mindformers.parallel_core.training_graph.transformer.moe import token_dispatcher
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import Tensor, nn
from mindspore.ops import operations as P

from plugins.cpu_backend.layers import EmbeddingLookup, GroupedExperts, Outer, TokenDispatcher, TopK
from plugins.hierarchical_ep import reference
from tests.plugins.cpu_backend.gradients import run

pytestmark = pytest.mark.usefixtures("graph_mode")
EXPERTS, HIDDEN, FFN, TOPK, TOKENS = 6, 8, 5, 2, 33


# graph mode parses source: these are functions, not lambdas
def sort_ext(x, dim=-1):
    return P.Sort(axis=-1)(x)


def index_select(x, axis, index):
    return P.Gather()(x, index, axis)


def cumsum_ext(x, dim):
    return P.CumSum()(x, dim)


def fmod_scalar(x, n):
    return x - (x // n) * n


def stay_on_host(x, *args):
    return x


def new_sort():
    return sort_ext


def new_index_select():
    return index_select


def new_cumsum():
    return cumsum_ext


def new_fmod():
    return fmod_scalar


KERNELS = {"SortExt": new_sort, "IndexSelect": new_index_select, "CumsumExt": new_cumsum, "FmodScalar": new_fmod}


def config():
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN,
        moe_router_topk=TOPK,
        seq_length=TOKENS,
        add_bias_linear=False,
        gated_linear_unit=True,
        hidden_act="swiglu",
        compute_dtype="float32",
        params_dtype="float32",
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        use_pad_tokens=False,
        batch_size=1,
    )


def routing(kind, rng):
    """Chosen experts [1, TOKENS, TOPK], different for each choice of a token."""
    if kind == "random":
        chosen = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOPK]
    elif kind == "skewed":  # expert 0 gets most, expert 5 nothing
        chosen = np.stack([np.zeros(TOKENS, int), rng.integers(1, EXPERTS - 1, TOKENS)], 1)
    else:  # all to one pair
        chosen = np.tile([3, 1], (TOKENS, 1))
    return chosen[None].astype(np.int32)


def inputs(kind):
    rng = np.random.default_rng(3)
    tokens = rng.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    probs = rng.random((1, TOKENS, TOPK)).astype(np.float32)
    w1 = rng.standard_normal((EXPERTS * HIDDEN, 2 * FFN)).astype(np.float32)
    w2 = rng.standard_normal((EXPERTS * FFN, HIDDEN)).astype(np.float32)
    dout = rng.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    return tokens, probs, routing(kind, rng), w1, w2, dout


class Forward(nn.Cell):
    """The morphed part of the expert layer with weights as inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, tokens, probs, chosen, w1, w2):
        return self.layer.forward_func(tokens, probs, chosen, w1, w2)


@pytest.mark.parametrize("kind", ["random", "skewed", "one"])
def test_equals_the_loop_forward_and_backward(kind):
    tokens, probs, chosen, w1, w2, dout = inputs(kind)
    out, gradients = run(Forward(GroupedExperts(config())), [tokens, probs, chosen, w1, w2], dout)

    plain = (tokens[0], probs[0], chosen[0], w1.reshape(EXPERTS, HIDDEN, -1), w2.reshape(EXPERTS, FFN, -1))
    np.testing.assert_allclose(out[0], reference.moe(*plain), atol=2e-5)
    expected = reference.moe_backward(*plain, dout[0])
    for index, want in zip((0, 1, 3, 4), expected, strict=True):
        np.testing.assert_allclose(gradients[index].reshape(want.shape), want, atol=2e-4, err_msg=f"input {index}")


def test_dispatch_keeps_every_pair_once_and_combine_inverts_it():
    tokens, probs, chosen, *_ = inputs("random")
    dispatcher = TokenDispatcher(config())
    rows, ends, context = dispatcher.token_permutation(ms.Tensor(tokens), ms.Tensor(probs), ms.Tensor(chosen))
    counts = np.bincount(chosen.reshape(-1), minlength=EXPERTS)
    np.testing.assert_array_equal(ends.asnumpy(), np.cumsum(counts))
    for expert, part in enumerate(np.split(rows.asnumpy(), ends.asnumpy()[:-1])):
        np.testing.assert_array_equal(part, tokens[0][(chosen[0] == expert).any(1)], err_msg=f"expert {expert}")
    back = dispatcher.token_unpermutation(rows, context).asnumpy()
    np.testing.assert_allclose(back, tokens * probs.sum(-1, keepdims=True), atol=1e-6)


def test_equals_mindformers_own_dispatcher(monkeypatch):
    """MindFormers' dispatcher itself, with CPU kernels under the names of the operators it uses."""
    tokens, probs, chosen, w1, w2, dout = inputs("random")
    stock = GroupedExperts(config())
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(token_dispatcher, name, kernel)
    stock.token_dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher(config())
    stock.token_dispatcher.d2h = stay_on_host
    arguments = [tokens, probs, chosen, w1, w2]
    out, gradients = run(Forward(GroupedExperts(config())), arguments, dout)
    stock_out, stock_gradients = run(Forward(stock), arguments, dout)
    pairs = [(out, stock_out), *((gradients[index], stock_gradients[index]) for index in (0, 1, 3, 4))]
    for place, (ours, theirs) in enumerate(pairs):
        # float32 sums whose order differs by processor: their rounding follows the largest terms, not the sum
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max(), err_msg=f"pair {place}")


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
