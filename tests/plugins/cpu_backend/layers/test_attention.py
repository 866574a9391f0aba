import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from plugins.cpu_backend import reference
from plugins.cpu_backend.layers.attention import CoreAttention
from plugins.errors import RecipeError
from tests.plugins.cpu_backend.gradients import run

pytestmark = pytest.mark.usefixtures("graph_mode")


class Config:
    """The keys of a TransformerConfig that core attention reads."""

    num_attention_heads = 3
    kv_channels = 8
    multi_latent_attention = True
    qk_head_dim, qk_pos_emb_head_dim = 6, 4
    attention_dropout = 0.0
    use_eod_attn_mask_compression = use_attn_mask_compression = False
    window_size = None
    num_query_groups = 3


def document_mask(batch, length, rng):
    """Causal within documents of random length: 1 where forbidden."""
    document = np.cumsum(rng.random((batch, length)) < 0.2, axis=1)
    other = document[:, :, None] != document[:, None, :]
    return (other | np.triu(np.ones((length, length), bool), 1))[:, None].astype(np.uint8)


@pytest.mark.parametrize("flat", [False, True])
def test_equals_the_oracle_forward_and_backward(flat):
    rng = np.random.default_rng(1)
    length, batch, heads, dim, value_dim = 17, 2, 3, 10, 7
    query, key = rng.standard_normal((2, length, batch, heads, dim)).astype(np.float32)
    value = rng.standard_normal((length, batch, heads, value_dim)).astype(np.float32)
    dout = rng.standard_normal((length, batch, heads * value_dim)).astype(np.float32)
    mask = document_mask(batch, length, rng)
    cell = CoreAttention(Config(), layer_number=1)

    inputs = [x.reshape(length, batch, -1) if flat else x for x in (query, key, value)]
    out, got_gradients = run(cell, [*inputs, mask], dout)
    expected, _ = reference.attention(query, key, value, mask, 1 / np.sqrt(10))
    np.testing.assert_allclose(out, expected, atol=2e-6)

    gradients = reference.attention_gradients(query, key, value, mask, 1 / np.sqrt(10), dout)
    for got, want in zip(got_gradients[:3], gradients, strict=True):
        np.testing.assert_allclose(got.reshape(want.shape), want, atol=5e-6)


def test_a_later_token_never_reaches_an_earlier_one():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((12, 1, 3, 10)).astype(np.float32)
    changed = x.copy()
    changed[8:] += 1
    mask = Tensor(np.triu(np.ones((1, 1, 12, 12), np.uint8), 1))
    cell = CoreAttention(Config(), layer_number=1)
    out, other = (cell(Tensor(y), Tensor(y), Tensor(y), mask).asnumpy() for y in (x, changed))
    np.testing.assert_array_equal(out[:8], other[:8])
    assert np.abs(out[8:] - other[8:]).max() > 0.1


@pytest.mark.parametrize(
    ("key", "value"), [("attention_dropout", 0.1), ("use_attn_mask_compression", True), ("window_size", (4, 0))]
)
def test_refuses_what_it_would_compute_wrongly(key, value):
    config = Config()
    setattr(config, key, value)
    with pytest.raises(RecipeError, match=r"model\.model_config"):
        CoreAttention(config, layer_number=1)


def test_softmax_scale_can_be_given():
    cell = CoreAttention(Config(), layer_number=1, softmax_scale=0.5)
    x = Tensor(np.eye(4, 30, dtype=np.float32).reshape(4, 1, 3, 10))
    free = ops.zeros((1, 1, 4, 4), ms.uint8)
    expected, _ = reference.attention(*(3 * [x.asnumpy()]), np.zeros((1, 1, 4, 4)), 0.5)
    np.testing.assert_allclose(cell(x, x, x, free).asnumpy(), expected, atol=1e-6)
