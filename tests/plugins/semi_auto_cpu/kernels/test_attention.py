"""FlashAttentionScore and its gradient against a direct formula and its numerical derivative."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.semi_auto_cpu.kernels import KERNELS, attention
from tests.plugins.semi_auto_cpu.kernels.derivative import LOW, numerical, rounded

COMPRESSED = np.triu(np.ones((2048, 2048), np.uint8), 1)
LAYOUTS = ("BSH", "BNSD", "SBH", "BSND")
FAR = 2147483647


def formula(q, k, v, scale, seen):
    """softmax(scale q k^T) v over what is seen [B, N, S1, S2]; all [B, N, S, D], in the inputs' precision."""
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scores = np.where(seen, scale * np.einsum("bnid,bnjd->bnij", q, k), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnij,bnjd->bnid", weights / weights.sum(-1, keepdims=True), v)


def laid(x, layout):
    """[B, N, S, D] in a layout."""
    b, n, s, d = x.shape
    shapes = {
        "BNSD": lambda: x,
        "BSND": lambda: x.transpose(0, 2, 1, 3),
        "BSH": lambda: x.transpose(0, 2, 1, 3).reshape(b, s, n * d),
        "SBH": lambda: x.transpose(2, 0, 1, 3).reshape(s, b, n * d),
        "TND": lambda: x[0].transpose(1, 0, 2),
    }
    return np.ascontiguousarray(shapes[layout]())


def forward(q, k, v, layout, sparse, *, mask=None, ends=(None, None), scale=0.3, before=FAR, behind=0, **other):
    inputs = [laid(x, layout) for x in (q, k, v)]
    keep = other.get("keep_prob", 1.0)
    extra = [other.get(name) for name in ("real_shift", "drop_mask", "padding_mask")]
    tail = (q.shape[1], keep, scale, before, behind, 0, layout, sparse)
    return KERNELS["FlashAttentionScore"]({}, *inputs, *extra, mask, other.get("prefix"), *ends, *tail)


def backward(q, k, v, dy, layout, sparse, *, mask=None, ends=(None, None), scale=0.3, before=FAR, behind=0):
    top, total, _, out = forward(
        q, k, v, layout, sparse, mask=mask, ends=ends, scale=scale, before=before, behind=behind
    )
    inputs = [laid(x, layout) for x in (q, k, v, dy)]
    tail = (q.shape[1], 1.0, scale, before, behind, 0, layout, sparse)
    kernel = KERNELS["FlashAttentionScoreGrad"]
    return kernel({}, *inputs, None, None, None, mask, top, total, None, out, None, *ends, *tail)


def tensors(rng, batch=2, heads=4, key_heads=4, rows=5, columns=5, size=4, value_size=4):
    shapes = [(batch, heads, rows, size), (batch, key_heads, columns, size), (batch, key_heads, columns, value_size)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def check(q, k, v, layout, sparse, sees, **arguments):
    """Forward and backward against the formula and its differences; sees(b, n, i, j)."""
    seen = np.zeros((*q.shape[:3], k.shape[2]), bool)
    for place in np.ndindex(*seen.shape):
        seen[place] = sees(*place)
    out = forward(q, k, v, layout, sparse, **arguments)[3]
    expected = formula(*(x.astype(np.float64) for x in (q, k, v)), 0.3, seen)
    np.testing.assert_allclose(out, laid(expected, layout), atol=2e-6)
    dy = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    found = backward(q, k, v, dy, layout, sparse, **arguments)
    wanted = numerical(lambda *x: formula(*x, 0.3, seen), (q, k, v), dy)
    for gradient, other in zip(found, wanted, strict=False):
        np.testing.assert_allclose(gradient, laid(other, layout), atol=2e-5)
    assert found[3] is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("key_heads", "value_size"), [(4, 4), (2, 4), (1, 6), (4, 2)])
def test_no_mask_in_every_layout_with_shared_heads_and_other_value_sizes(rng, layout, key_heads, value_size):
    q, k, v = tensors(rng, key_heads=key_heads, value_size=value_size, rows=3, columns=4)
    check(q, k, v, layout, 0, lambda b, n, i, j: True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicit_masks_hide_what_they_mark(rng, layout):
    q, k, v = tensors(rng, rows=3, columns=3)
    whole = (rng.random((2, 4, 3, 3)) < 0.4) & ~np.eye(3, dtype=bool)
    for mask in (whole, whole[:, :1], whole[0, 0]):
        spread = np.broadcast_to(mask, whole.shape)
        for sparse, dtype in itertools.product((0, 1), (bool, np.uint8)):
            check(q, k, v, layout, sparse, lambda *at, m=spread: not m[at], mask=mask.astype(dtype), behind=FAR)


@pytest.mark.parametrize("rows", [3, 5])
def test_the_compressed_mask_is_causal_from_the_first_place(rng, monkeypatch, rows):
    monkeypatch.setattr(attention, "_ROWS", 2)  # several blocks
    q, k, v = tensors(rng, rows=rows, columns=5, batch=1, heads=2, key_heads=1)
    check(q, k, v, "SBH", 2, lambda b, n, i, j: j <= i, mask=COMPRESSED)


def test_mode_3_counts_from_the_last_place(rng, monkeypatch):
    monkeypatch.setattr(attention, "_ROWS", 2)
    q, k, v = tensors(rng, rows=3, columns=5, batch=1, heads=2, key_heads=2)
    check(q, k, v, "BSND", 3, lambda b, n, i, j: j <= i + 2, mask=COMPRESSED)


def test_mode_4_is_a_band_from_the_last_place(rng, monkeypatch):
    monkeypatch.setattr(attention, "_ROWS", 2)
    q, k, v = tensors(rng, rows=4, columns=6, batch=1, heads=2, key_heads=2)
    arguments = {"mask": COMPRESSED, "before": 2, "behind": 1}
    check(q, k, v, "BNSD", 4, lambda b, n, i, j: -2 <= j - (i + 2) <= 1, **arguments)


def test_mode_0_keeps_a_mask_between_pre_and_next_tokens(rng):
    q, k, v = tensors(rng, rows=4, columns=4, batch=1)
    nothing = np.zeros((4, 4), np.uint8)
    check(q, k, v, "BSH", 0, lambda b, n, i, j: -1 <= j - i <= 0, mask=nothing, before=1, behind=0)


def sees_documents(query_ends, key_ends):
    """Token i sees token j of its own document up to its place counted from the document's end."""

    def sees(b, n, i, j):
        mine = np.searchsorted(query_ends, i, side="right")
        start = key_ends[mine - 1] if mine else 0
        return start <= j and key_ends[mine] - 1 - j >= query_ends[mine] - 1 - i

    return sees


def test_documents_see_only_themselves(rng, monkeypatch):
    monkeypatch.setattr(attention, "_ROWS", 2)
    q, k, v = tensors(rng, batch=1, rows=7, columns=7, key_heads=2)
    ends = (2, 3, 3, 7, 7)  # one empty; padded by repeating the last
    check(q, k, v, "TND", 3, sees_documents(ends, ends), mask=COMPRESSED, ends=(ends, np.array(ends)))
    assert sees_documents(ends, ends)(0, 0, 3, 3) and not sees_documents(ends, ends)(0, 0, 3, 2)
    one = forward(q, k, v, "TND", 3, mask=COMPRESSED, ends=((7,), (7,)))[3]
    several = forward(q, k, v, "TND", 3, mask=COMPRESSED, ends=(ends, ends))[3]
    assert np.abs(one[2:] - several[2:]).max() > 1e-2, "the mask changes nothing"
    np.testing.assert_array_equal(one[:2], several[:2])


def test_part_of_the_queries_with_keys_that_nobody_sees(rng):
    """As a rank under context parallelism has them: its own queries, all keys."""
    q, k, v = tensors(rng, batch=1, rows=3, columns=8, heads=2, key_heads=2)
    query_ends, key_ends = (0, 2, 3, 3), (3, 6, 7, 7)  # tokens 4, 5 of a document 3..5 and token 6
    check(q, k, v, "TND", 3, sees_documents(query_ends, key_ends), mask=COMPRESSED, ends=(query_ends, key_ends))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4).filter(sum), st.integers(0, 2**32 - 1))
def test_a_query_sees_exactly_the_earlier_tokens_of_its_document(sizes, seed):
    """Weights read off by values that are unit vectors."""
    total = sum(sizes)
    ends = tuple(np.cumsum(sizes).tolist())
    q, k = (np.random.default_rng(seed).normal(size=(1, 1, total, 2)).astype(np.float32) for _ in range(2))
    v = np.eye(total, dtype=np.float32)[None, None]
    weights = forward(q, k, v, "TND", 3, mask=COMPRESSED, ends=(ends, ends))[3][:, 0]
    document = np.repeat(np.arange(len(sizes)), sizes)
    seen = (document[:, None] == document) & np.tri(total, dtype=bool)
    np.testing.assert_array_equal(weights > 0, seen)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)


def test_statistics_are_the_largest_score_and_the_sum_eight_times(rng):
    q, k, v = tensors(rng, batch=1, heads=2, key_heads=2)
    top, total, nothing, _ = forward(q, k, v, "BNSD", 0)
    scores = 0.3 * q @ k.swapaxes(-1, -2)
    assert top.shape == total.shape == (1, 2, 5, 8) and nothing is None
    np.testing.assert_allclose(top, np.repeat(scores.max(-1, keepdims=True), 8, -1), rtol=1e-4)
    np.testing.assert_allclose(total[..., :1], np.exp(scores - top[..., :1]).sum(-1, keepdims=True), rtol=1e-5)
    ends = ((5,), (5,))
    assert forward(q, k, v, "TND", 3, mask=COMPRESSED, ends=ends)[0].shape == (5, 2, 8)


def test_a_row_that_is_hidden_altogether_weighs_all_keys_alike(rng):
    q, k, v = tensors(rng, batch=1, rows=2, columns=3)
    mask = np.array([[1, 1, 1], [0, 0, 1]], np.uint8)
    out = forward(q, k, v, "BNSD", 1, mask=mask)[3]
    np.testing.assert_allclose(out[:, :, 0], v.mean(2), rtol=1e-5)
    dq, dk, _, _ = backward(q, k, v, np.ones_like(out), "BNSD", 1, mask=mask)
    assert not dq[:, :, 0].any() and np.isfinite(dk).all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("layout", ("BSH", "TND"))
def test_low_precision_is_float32_rounded(rng, dtype, layout):
    q, k, v = (rounded(x, dtype) for x in tensors(rng, batch=1))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    more = {"mask": COMPRESSED, "ends": ((5,), (5,))} if layout == "TND" else {}
    sparse = 3 if layout == "TND" else 0
    for found, expected in zip(
        forward(q, k, v, layout, sparse, **more), forward(*wide, layout, sparse, **more), strict=True
    ):
        if expected is not None:
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keep_prob": 0.9}, NotImplementedError, "keep_prob must be 1, not 0.9"),
        ({"real_shift": np.zeros(1)}, NotImplementedError, "real_shift"),
        ({"drop_mask": np.zeros(1)}, NotImplementedError, "drop_mask"),
        ({"padding_mask": np.zeros(1)}, NotImplementedError, "padding_mask"),
        ({"prefix": (1,)}, NotImplementedError, "prefix"),
        ({"sparse": 5}, NotImplementedError, "sparse_mode 5"),
        ({"ends": ((5,), (5,))}, NotImplementedError, "actual_seq_qlen"),
        ({"mask": "ValueAny"}, ValueError, "attn_mask must be .* but is 'ValueAny'"),
        ({"mask": np.zeros((5, 5), np.float32)}, ValueError, "float32"),
        ({"mask": np.zeros((5, 4), bool)}, ValueError, r"attn_mask \(5, 4\)"),
        ({"sparse": 1}, ValueError, "needs an attn_mask"),
        ({"sparse": 2}, ValueError, "needs an attn_mask"),
        ({"sparse": 2, "mask": np.zeros((5, 5), bool)}, ValueError, "needs an attn_mask"),
        ({"sparse": 2, "mask": 1 - COMPRESSED}, ValueError, "above the diagonal"),
        ({"sparse": 4, "mask": COMPRESSED, "behind": -9}, ValueError, "a query attends to no key"),
        (
            {"layout": "TND", "sparse": 3, "mask": COMPRESSED},
            ValueError,
            "actual_seq_qlen must be a list .* but is None",
        ),
        ({"layout": "TND", "sparse": 3, "mask": COMPRESSED, "ends": ("ValueAny", (5,))}, ValueError, "'ValueAny'"),
        (
            {"layout": "TND", "sparse": 3, "mask": COMPRESSED, "ends": ((4,), (5,))},
            ValueError,
            "must rise and end at 5",
        ),
        ({"layout": "TND", "sparse": 3, "mask": COMPRESSED, "ends": ((5, 4, 5), (5, 4, 5))}, ValueError, "must rise"),
        (
            {"layout": "TND", "sparse": 3, "mask": COMPRESSED, "ends": ((5,), (9,))},
            ValueError,
            "must rise and end at 5, the number of keys",
        ),
        (
            {"layout": "TND", "sparse": 0, "ends": ((5,), (5,))},
            NotImplementedError,
            "sparse_mode 0 is not supported .* in layout TND",
        ),
    ],
)
def test_what_it_cannot_do_it_refuses(rng, arguments, error, message):
    q, k, v = tensors(rng, batch=1)
    arguments = {"layout": "BNSD", "sparse": 0} | arguments
    with pytest.raises(error, match=f"FlashAttentionScore: .*{message}"):
        forward(q, k, v, **arguments)


def test_unknown_layouts_and_odd_heads_are_refused(rng):
    q, k, v = tensors(rng, batch=1, heads=4, key_heads=3)
    with pytest.raises(ValueError, match="not a multiple of the 3 heads"):
        forward(q, k, v, "BNSD", 0)
    tail = (4, 1.0, 0.3, FAR, 0, 0, 5, 0)
    with pytest.raises(NotImplementedError, match="input_layout TH"):
        KERNELS["FlashAttentionScore"]({}, q, k, v, *[None] * 7, *tail)
