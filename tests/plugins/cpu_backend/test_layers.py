"""The routed experts against a NumPy loop over single (token, expert) pairs, and operators without a kernel.

Self-attention with grouped queries, from hidden states to hidden states, against NumPy, forward and backward.
"""

import copy

import mindspore as ms
import numpy as np
import pytest
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from mindformers.parallel_core.training_graph.transformer.moe import token_dispatcher
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindformers.parallel_core.utils.spec_utils import build_module
from mindspore import Tensor, nn
from mindspore.ops import operations as P

from plugins.cpu_backend import attention
from plugins.cpu_backend import reference as cpu_reference
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


@pytest.mark.slow
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


LENGTH, BATCH, WIDTH, HEADS, GROUPS, DIM = 9, 2, 12, 6, 2, 4
SHARED = HEADS // GROUPS


class Attending(nn.Cell):
    """A self-attention whose positions and mask are those of causal samples."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.mask = Tensor(np.triu(np.ones((BATCH, 1, LENGTH, LENGTH), np.uint8), 1))
        self.angles = Tensor(angles().astype(np.float32).reshape(LENGTH, 1, 1, DIM))

    def construct(self, hidden):
        return self.cell(hidden, self.mask, rotary_pos_emb=(self.angles, 1.0))[0]


def angles():
    """RoPE's angle of each position and dimension: [S, D], the halves alike."""
    turns = 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    return np.tile(np.arange(LENGTH)[:, None] * turns, (1, 2))


def turned(x, sign=1):
    """RoPE of [S, B, N, D]; with sign -1 its gradient, which turns back."""
    cos, sin = (f(angles())[:, None, None] for f in (np.cos, np.sin))
    first, second = np.split(x, 2, -1)
    return x * cos + sign * np.concatenate((-second, first), -1) * sin


def of_mindformers(contiguous=False, dtype="float32"):
    """MindFormers' self-attention around the core for CPU."""
    config = TransformerConfig(
        num_layers=1, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM, hidden_size=WIDTH,
        ffn_hidden_size=16, seq_length=LENGTH, compute_dtype=dtype, params_dtype="float32", attention_dropout=0.0,
        add_bias_linear=False, fused_norm=False, hidden_act="swiglu", gated_linear_unit=True,
        use_contiguous_weight_layout_attention=contiguous,
    )  # fmt: skip
    spec = copy.deepcopy(get_gpt_decoder_block_spec(config).layer_specs[0].submodules.self_attention)
    spec.submodules.core_attention = attention.CoreAttention
    return build_module(spec, config=config, layer_number=1)


def built(contiguous):
    """The cell of the CPU backend, and its two weights, out x in."""
    cell = of_mindformers(contiguous)
    attention.compute_unrounded(cell)
    rng = np.random.default_rng(3)
    weights = []
    for linear in (cell.linear_qkv, cell.linear_proj):
        weights.append(rng.standard_normal(linear.weight.shape))
        linear.weight.set_data(Tensor(weights[-1].astype(np.float32)))
    return cell, *weights


def cuts(contiguous):
    """Rows of the projection's weight that make queries, keys and values."""
    rows = np.arange((HEADS + 2 * GROUPS) * DIM)
    if contiguous:
        return np.split(rows, [HEADS * DIM, (HEADS + GROUPS) * DIM])
    by_group = rows.reshape(GROUPS, SHARED + 2, DIM)
    return by_group[:, :SHARED].ravel(), by_group[:, SHARED].ravel(), by_group[:, SHARED + 1].ravel()


@pytest.mark.slow
@pytest.mark.parametrize("contiguous", [False, True])
def test_equals_numpy_in_the_type_that_the_model_computes_in(contiguous):
    cell, qkv, proj = built(contiguous)
    rng = np.random.default_rng(4)
    # as small as gradients of a mini are: float16 would turn most of them into zeros
    hidden, dout = rng.standard_normal((LENGTH, BATCH, WIDTH)), 1e-7 * rng.standard_normal((LENGTH, BATCH, WIDTH))
    out, (dhidden,) = run(Attending(cell), [hidden.astype(np.float32)], dout.astype(np.float32))

    parts = [qkv[rows] for rows in cuts(contiguous)]
    query, key, value = (
        (hidden @ part.T).reshape(LENGTH, BATCH, heads, DIM)
        for part, heads in zip(parts, (HEADS, GROUPS, GROUPS), strict=True)
    )
    mask = np.triu(np.ones((BATCH, 1, LENGTH, LENGTH)), 1)
    given = turned(query), turned(key), value, mask, DIM**-0.5
    mixed, _ = cpu_reference.attention(*given)
    np.testing.assert_allclose(out, mixed @ proj.T, atol=1e-4 * np.abs(out).max())

    dquery, dkey, dvalue = cpu_reference.attention_gradients(*given, dout @ proj)
    backward = zip((turned(dquery, -1), turned(dkey, -1), dvalue), parts, strict=True)
    wanted = sum(gradient.reshape(LENGTH, BATCH, -1) @ part for gradient, part in backward)
    np.testing.assert_allclose(dhidden, wanted, atol=1e-4 * np.abs(wanted).max())
