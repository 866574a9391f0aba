"""Self-attention with grouped queries, from hidden states to hidden states, against NumPy, forward and backward."""

import copy

import numpy as np
import pytest
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindformers.parallel_core.utils.spec_utils import build_module
from mindspore import Tensor, nn

from plugins.cpu_backend import attention, reference
from tests.plugins.cpu_backend.gradients import run

pytestmark = pytest.mark.usefixtures("graph_mode")
LENGTH, BATCH, HIDDEN, HEADS, GROUPS, DIM = 9, 2, 12, 6, 2, 4
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
        num_layers=1, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM, hidden_size=HIDDEN,
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


@pytest.mark.parametrize("contiguous", [False, True])
def test_equals_numpy_in_the_type_that_the_model_computes_in(contiguous):
    cell, qkv, proj = built(contiguous)
    rng = np.random.default_rng(4)
    # as small as gradients of a mini are: float16 would turn most of them into zeros
    hidden, dout = rng.standard_normal((LENGTH, BATCH, HIDDEN)), 1e-7 * rng.standard_normal((LENGTH, BATCH, HIDDEN))
    out, (dhidden,) = run(Attending(cell), [hidden.astype(np.float32)], dout.astype(np.float32))

    parts = [qkv[rows] for rows in cuts(contiguous)]
    query, key, value = (
        (hidden @ part.T).reshape(LENGTH, BATCH, heads, DIM)
        for part, heads in zip(parts, (HEADS, GROUPS, GROUPS), strict=True)
    )
    mask = np.triu(np.ones((BATCH, 1, LENGTH, LENGTH)), 1)
    given = turned(query), turned(key), value, mask, DIM**-0.5
    mixed, _ = reference.attention(*given)
    np.testing.assert_allclose(out, mixed @ proj.T, atol=1e-4 * np.abs(out).max())

    dquery, dkey, dvalue = reference.attention_gradients(*given, dout @ proj)
    backward = zip((turned(dquery, -1), turned(dkey, -1), dvalue), parts, strict=True)
    wanted = sum(gradient.reshape(LENGTH, BATCH, -1) @ part for gradient, part in backward)
    np.testing.assert_allclose(dhidden, wanted, atol=1e-4 * np.abs(wanted).max())
