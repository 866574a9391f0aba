import mindspore as ms
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mindspore import Tensor, ops
from mindspore.ops.operations._pyfunc_registry import get_pyfunc

from plugins.cpu_backend import attention, host_functions, reference
from plugins.cpu_backend.attention import BLOCK, CoreAttention, DocumentCoreAttention, WithinDocuments, document_blocks
from plugins.errors import RecipeError
from tests.plugins.cpu_backend.gradients import run


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


class Grouped(Config):
    """Grouped-query attention: six query heads, every three of which share a head of keys and values."""

    multi_latent_attention = False
    num_attention_heads, num_query_groups, kv_channels = 6, 2, 10


def document_mask(batch, length, rng):
    """Causal within documents of random length: 1 where forbidden."""
    document = np.cumsum(rng.random((batch, length)) < 0.2, axis=1)
    other = document[:, :, None] != document[:, None, :]
    return (other | np.triu(np.ones((length, length), bool), 1))[:, None].astype(np.uint8)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("config", [Config, Grouped])
@pytest.mark.parametrize("flat", [False, True])
def test_equals_the_oracle_forward_and_backward(flat, config):
    rng = np.random.default_rng(1)
    length, batch, dim, value_dim = 17, 2, 10, 7
    heads, groups = config.num_attention_heads, config.num_query_groups
    query = rng.standard_normal((length, batch, heads, dim)).astype(np.float32)
    key = rng.standard_normal((length, batch, groups, dim)).astype(np.float32)
    value = rng.standard_normal((length, batch, groups, value_dim)).astype(np.float32)
    dout = rng.standard_normal((length, batch, heads * value_dim)).astype(np.float32)
    mask = document_mask(batch, length, rng)
    cell = CoreAttention(config(), layer_number=1)

    inputs = [x.reshape(length, batch, -1) if flat else x for x in (query, key, value)]
    out, got_gradients = run(cell, [*inputs, mask], dout)
    expected, _ = reference.attention(query, key, value, mask, 1 / np.sqrt(10))
    np.testing.assert_allclose(out, expected, atol=2e-6)

    gradients = reference.attention_gradients(query, key, value, mask, 1 / np.sqrt(10), dout)
    for got, want in zip(got_gradients[:3], gradients, strict=True):
        np.testing.assert_allclose(got.reshape(want.shape), want, atol=5e-6)


@pytest.mark.usefixtures("graph_mode")
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


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_dropout", 0.1),
        ("use_attn_mask_compression", True),
        ("use_eod_attn_mask_compression", True),
        ("window_size", (4, 0)),
    ],
)
def test_refuses_what_it_would_compute_wrongly(key, value):
    config = Config()
    setattr(config, key, value)
    with pytest.raises(RecipeError, match=rf"model\.model_config\.{key}:"):
        CoreAttention(config, layer_number=1)


@pytest.mark.usefixtures("graph_mode")
def test_softmax_scale_can_be_given():
    cell = CoreAttention(Config(), layer_number=1, softmax_scale=0.5)
    x = Tensor(np.eye(4, 30, dtype=np.float32).reshape(4, 1, 3, 10))
    free = ops.zeros((1, 1, 4, 4), ms.uint8)
    expected, _ = reference.attention(*(3 * [x.asnumpy()]), np.zeros((1, 1, 4, 4)), 0.5)
    np.testing.assert_allclose(cell(x, x, x, free).asnumpy(), expected, atol=1e-6)


HEADS, DIM, VALUE_DIM = 3, 10, 7


def breaks_of(documents):
    """Document lengths -> int32 [S - 1], 1 where the next token begins a document."""
    breaks = np.zeros(sum(documents), np.int32)
    breaks[np.cumsum(documents) - 1] = 1
    return breaks[:-1]


def tensors(length, batch, dtype, seed=0, heads=HEADS, groups=HEADS):
    """query, key, value and the output's gradient."""
    rng = np.random.default_rng(seed)
    shapes = ((heads, DIM), (groups, DIM), (groups, VALUE_DIM), (heads, VALUE_DIM))
    return [rng.standard_normal((length, batch, *shape)).astype(dtype) for shape in shapes]


def masks(breaks):
    """As `reference.document_mask`, fast enough for long samples."""
    document = np.concatenate((np.zeros((len(breaks), 1), int), np.cumsum(breaks != 0, axis=1)), axis=1)
    position = np.arange(document.shape[1])
    return ((document[:, :, None] != document[:, None]) | (position[:, None] < position))[:, None].astype(np.int32)


def assert_equals_the_oracle(breaks, dtype, tolerance, heads=HEADS, groups=HEADS):
    query, key, value, dout = tensors(breaks.shape[1] + 1, len(breaks), dtype, 0, heads, groups)
    out, log_sum = attention.document_attention(query, key, value, breaks, 0.4)
    expected, _ = reference.attention(query, key, value, masks(breaks), 0.4)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=tolerance)
    gradients = attention.document_gradients(query, key, value, breaks, out, log_sum, dout, 0.4)
    wanted = reference.attention_gradients(query, key, value, masks(breaks), 0.4, dout)
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.one_of(st.integers(1, 6), st.integers(BLOCK - 2, BLOCK + 3)), min_size=1, max_size=4))
@example([1])  # one token
@example([1] * 20)
@example([1, 2 * BLOCK, 1])  # a boundary behind the first and before the last token
@example([BLOCK])
@example([BLOCK + 1])
def test_equals_the_oracle_for_any_documents(documents):
    other = documents[::-1]
    assert_equals_the_oracle(np.stack((breaks_of(documents), breaks_of(other))), np.float64, 1e-12)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_query_heads_share_keys_and_values_in_groups(groups):
    breaks = np.stack((breaks_of([5, BLOCK + 1, 1]), breaks_of([1, BLOCK + 6])))
    assert_equals_the_oracle(breaks, np.float64, 1e-12, heads=6, groups=groups)


def test_is_as_exact_as_single_precision_allows():
    assert_equals_the_oracle(breaks_of([40, 1, 300, 90])[None], np.float32, 5e-6)


@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=6))
def test_every_query_is_in_one_block_with_its_document(documents):
    document = np.repeat(np.arange(len(documents)), documents)
    begins = np.cumsum([0, *documents[:-1]])
    covered = []
    for start, first, end in document_blocks(breaks_of(documents)):
        covered += range(first, end)
        assert len(set(document[first:end])) == 1 and start == begins[document[first]]
    assert covered == list(range(len(document)))


@pytest.fixture
def multiply_adds(monkeypatch):
    """Counts what `np.matmul` does: [multiply-adds]."""
    done, matmul = [0], np.matmul

    def counting(a, b, **kwargs):
        done[0] += int(np.prod(a.shape)) * b.shape[-1]
        return matmul(a, b, **kwargs)

    monkeypatch.setattr(np, "matmul", counting)
    return done


@pytest.mark.parametrize("documents", [[1024], [64] * 16, [1] * 1024, [600, 300, 100, 24], [1, 1022, 1]])
def test_cost_follows_the_documents(documents, multiply_adds):
    """Between the attending pairs and half a block more for each token."""
    breaks = breaks_of(documents)[None]
    query, key, value, dout = tensors(sum(documents), 1, np.float32)
    pairs = sum(n * (n + 1) // 2 for n in documents)
    most = sum(n * (n + min(n, BLOCK)) / 2 for n in documents)

    out, log_sum = attention.document_attention(query, key, value, breaks, 0.4)
    forward = multiply_adds[0] / (HEADS * (DIM + VALUE_DIM))
    assert pairs <= forward <= most
    multiply_adds[0] = 0
    attention.document_gradients(query, key, value, breaks, out, log_sum, dout, 0.4)
    assert multiply_adds[0] / (HEADS * (3 * DIM + 2 * VALUE_DIM)) == forward  # scores again, and four products


@pytest.fixture
def dense_and_by_documents(graph_mode):
    """(query, key, value, mask, dout) -> output and gradients of the dense cell, and of ours; compiled once a shape."""
    return _both_cells(Config())


def _both_cells(config):
    cells = [kind(config, layer_number=1) for kind in (CoreAttention, DocumentCoreAttention)]
    gradients = [ops.GradOperation(get_all=True, sens_param=True)(cell) for cell in cells]

    def run(query, key, value, mask, dout):
        given = [Tensor(x) for x in (query, key, value, mask)]
        sens = Tensor(dout.reshape(*dout.shape[:2], -1))
        for cell, gradient in zip(cells, gradients, strict=True):
            yield [cell(*given).asnumpy(), *(x.asnumpy() for x in gradient(*given, sens)[:3])]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_the_cell_equals_the_dense_one(dense_and_by_documents, flat):
    length = 24
    for documents in ([24], [1] * 24, [1, 23], [23, 1], [7, 1, 9, 7]):
        breaks = np.stack((breaks_of(documents), breaks_of([5, 19])))
        *inputs, dout = tensors(length, 2, np.float32, seed=len(documents))
        inputs = [x.reshape(length, 2, -1) if flat else x for x in inputs]
        dense, ours = dense_and_by_documents(*inputs, reference.document_mask(breaks), dout)
        for got, want in zip(ours, dense, strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.mark.usefixtures("graph_mode")
def test_the_cell_equals_the_dense_one_with_groups():
    breaks = np.stack((breaks_of([7, 1, 9, 7]), breaks_of([5, 19])))
    *inputs, dout = tensors(24, 2, np.float32, 0, Grouped.num_attention_heads, Grouped.num_query_groups)
    dense, ours = _both_cells(Grouped())(*inputs, reference.document_mask(breaks), dout)
    for got, want in zip(ours, dense, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.mark.usefixtures("graph_mode")
def test_a_token_never_reaches_another_document():
    query, key, value, _ = tensors(30, 1, np.float32)
    mask = Tensor(reference.document_mask(breaks_of([12, 18])[None]))
    cell = DocumentCoreAttention(Config(), layer_number=1)
    before = cell(Tensor(query), Tensor(key), Tensor(value), mask).asnumpy()
    for x in (query, key, value):
        x[:12] += 1
    after = cell(Tensor(query), Tensor(key), Tensor(value), mask).asnumpy()
    np.testing.assert_array_equal(after[12:], before[12:])
    assert np.abs(after[:12] - before[:12]).max() > 0.1


def test_the_recipe_decides_which_class_a_model_gets():
    try:
        attention.follow_documents(True)
        assert attention.core_attention() is DocumentCoreAttention
    finally:
        attention.follow_documents(False)
    assert attention.core_attention() is CoreAttention


@pytest.mark.slow
def test_the_mask_is_the_one_of_the_dataset():
    """`reference.document_mask` against MindFormers."""
    from mindformers.dataset.blended_datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    documents = [3, 1, 6, 2]
    tokens = np.ones(sum(documents), np.int64)
    tokens[np.cumsum(documents)[:-1] - 1] = 0
    mask, _, _ = _get_ltor_masks_and_position_ids(tokens, 0, False, True, False, True)
    np.testing.assert_array_equal(mask[None], reference.document_mask(breaks_of(documents)[None]))


@pytest.mark.parametrize("scale", [0.25, 0.5])
@pytest.mark.parametrize("way", ["attend", "gradients"])
def test_its_functions_have_names_by_which_another_process_finds_them(scale, way):
    attributes = getattr(WithinDocuments(np.float32(scale)), way).get_attr_dict()
    name, number = attributes[host_functions.NAME], attributes["fn_id"]
    assert number == host_functions.number_of(name) and name.endswith(f"(scale={scale})")
    assert host_functions.name_of(get_pyfunc(number)) == name
