"""This module computes core attention on CPU: the result of `FlashAttentionScore`, computed with operators that have a
CPU kernel.

`CoreAttention` is the dense form: it multiplies S x S scores and masks most of them. `DocumentCoreAttention` is for
data whose masks keep documents apart. In this form a document's queries are computed in blocks of at most `BLOCK`
queries, each against the keys from its document's start to the block's end (`document_attention`, `document_gradients`:
NumPy, as host functions in the graph). A document of n tokens costs about n * (n + BLOCK) / 2 scores, which follows the
attending pairs n * (n + 1) / 2 that `plugins/attention_balance` counts, and memory grows with BLOCK * n instead of S *
S. The backward pass computes the scores again from the log-sum-exp of each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.transformer.attention import Attention
from mindspore import Tensor, nn, ops
from mindspore.ops import operations as P

from plugins.cpu_backend import host_functions
from plugins.cpu_backend.grouped_query import from_keys, to_keys, with_keys
from plugins.cpu_backend.layers import PrimitiveLike
from plugins.errors import RecipeError
from plugins.private_hooks import relies_on

BLOCK = 128  # queries; smaller ones waste fewer masked scores, larger ones make better matmuls

_LATER = np.triu(np.ones((BLOCK, BLOCK), bool), 1)
_follows_documents = False


def document_blocks(breaks: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (start of the document, first query, end of the queries) for each block of queries of one sample.

    breaks: [S - 1]; entry i is not 0 where token i + 1 begins a document.
    """
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(breaks) + 1], strict=True):
        for first in range(start, end, BLOCK):
            yield start, first, min(first + BLOCK, end)


def document_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, breaks: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return causal softmax(Q K^T * scale) V within each document, and the log-sum-exp of the scores.

    Args:
        query: [S, B, N, D].
        key: [S, B, G, D].
        value: [S, B, G, Dv], N heads in G groups (`grouped_query`).
        breaks: [B, S - 1], see `document_blocks`.

    Returns:
        [S, B, N, Dv], and the log-sum-exp of each row's scores [B, N, S].
    """
    length, batch, heads, _ = query.shape
    out = np.empty((length, batch, heads, value.shape[-1]), value.dtype)
    log_sum = np.empty((batch, heads, length), query.dtype)
    for sample in range(batch):
        q, k, v, o = (_heads_first(x, sample) for x in (query, key, value, out))
        for start, first, end in document_blocks(breaks[sample]):
            scores = _scores(q, k, start, first, end, scale)
            top = scores.max(-1, keepdims=True)
            scores -= top
            np.exp(scores, out=scores)
            total = scores.sum(-1, keepdims=True)
            o[:, first:end] = from_keys(scores, v[:, start:end]) / total
            log_sum[sample, :, first:end] = (top + np.log(total))[..., 0]
    return out, log_sum


def document_gradients(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    breaks: np.ndarray,
    out: np.ndarray,
    log_sum: np.ndarray,
    dout: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of query, key and value; `out` and `log_sum` come from `document_attention`, and `dout` has
    the shape of `out`.
    """
    gradients = np.empty(query.shape, query.dtype), np.zeros(key.shape, key.dtype), np.zeros(value.shape, value.dtype)
    inner = (out * dout).sum(-1).transpose(1, 2, 0)[..., None]  # [B, N, S, 1]
    for sample in range(len(breaks)):
        q, k, v, do, dq, dk, dv = (_heads_first(x, sample) for x in (query, key, value, dout, *gradients))
        for start, first, end in document_blocks(breaks[sample]):
            rows, keys = np.s_[:, first:end], np.s_[:, start:end]
            weights = _scores(q, k, start, first, end, scale)
            weights -= log_sum[sample][rows][..., None]
            np.exp(weights, out=weights)
            dv[keys] += to_keys(weights, do[rows], len(v))
            dscores = with_keys(do[rows], v[keys])
            dscores -= inner[sample][rows]
            dscores *= weights
            dscores *= scale
            dq[rows] = from_keys(dscores, k[keys])
            dk[keys] += to_keys(dscores, q[rows], len(k))
    return gradients


def _heads_first(x: np.ndarray, sample: int) -> np.ndarray:
    """Return a view of one sample: [S, B, N, D] -> [N, S, D]; BLAS takes its strides as they are."""
    return x[:, sample].transpose(1, 0, 2)


def _scores(q: np.ndarray, k: np.ndarray, start: int, first: int, end: int, scale: float) -> np.ndarray:
    """Return scores [N, queries, keys] of one block, -inf where a key comes after its query: only in the last
    square.
    """
    scores = with_keys(q[:, first:end], k[:, start:end])
    scores *= scale
    size = end - first
    scores[:, :, first - start :][:, _LATER[:size, :size]] = -np.inf
    return scores


def follow_documents(follows: bool) -> None:
    """Set whether models that are built later compute attention document by document; this is correct only for data
    with `reset_attention_mask`.
    """
    global _follows_documents
    _follows_documents = follows


def core_attention():
    """Return the class of the core attention for the spec of a layer (the entry `core_attention`)."""
    return DocumentCoreAttention if _follows_documents else CoreAttention


relies_on(Attention.construct, "query = self.cast(query, mstype.float16)")


class Unrounded(PrimitiveLike):
    """An `Unrounded` replaces MindSpore's operator `Cast`, and leaves out casts to float16."""

    def __init__(self, cast):
        super().__init__()
        self.cast = cast

    def construct(self, x, dtype):
        """Return x, of any shape, in the new type; if the new type is float16, return x unchanged."""
        return x if dtype == ms.float16 else self.cast(x, dtype)


def compute_unrounded(network):
    """Let attention layers without latent compression compute in float32 if the model's `compute_dtype` is float32;
    this changes the built model in place.

    MindFormers rounds queries, keys and values, and so their gradients, to float16 for its kernel on Ascend. Most
    gradients of a mini recipe are too small for that type.
    """
    for _, cell in network.cells_and_names():
        if isinstance(cell, Attention) and cell.compute_dtype == ms.float32:
            cell.cast = Unrounded(cell.cast)


class CoreAttention(nn.Cell):
    """A `CoreAttention` replaces `training_graph.transformer.flash_attention.FlashAttention` as the submodule
    `core_attention`. Softmax runs in float32. The memory of this attention grows with the square of the sequence length
    S, so it is meant for mini recipes (small versions for CPU).

        Inputs:
            query: [S, B, N, D] or [S, B, N * D].
            key: [S, B, G, D] or [S, B, G * D]; G is N, or `num_query_groups` of grouped-query attention.
            value: as key, but with Dv instead of D.
            attention_mask: 1 where attention is forbidden, [B, 1, S, S] or [S, S].

        Outputs:
            [S, B, N * Dv] in the value's type.

        Raises:
            RecipeError: this cell does not compute the requested variant of attention.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type=None,
        attention_type=None,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
    ):
        super().__init__()
        _refuse_unsupported(config, attention_dropout)
        self.layer_number = layer_number
        self.heads = config.num_attention_heads
        self.groups, head_dim = config.num_query_groups, config.kv_channels
        if config.multi_latent_attention:
            self.groups, head_dim = self.heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        self.scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.scores = P.BatchMatMul(transpose_b=True)
        self.context = P.BatchMatMul()
        self.softmax = P.Softmax(-1)
        self.masked_score = Tensor(-1e9, ms.float32)

    def construct(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
        alibi_mask=None,
        prefix=None,
        padding_mask=None,
        actual_seq_qlen=None,
        actual_seq_kvlen=None,
    ):
        """Return the attention output; the class's docstring gives the shapes of arguments and result."""
        return self.attend(query, key, value, attention_mask)

    def attend(self, query, key, value, attention_mask):
        """Return the attention output [S, B, N * Dv]; the class's docstring gives the shapes of the arguments."""
        length, batch = query.shape[0], query.shape[1]
        query = self._heads_first(query, self.heads)
        key = self._heads_first(key, self.groups)
        value = self._heads_first(value, self.groups)
        scores = ops.cast(self._by_groups(self.scores, query, key), ms.float32) * self.scale
        scores = scores + ops.cast(attention_mask, ms.float32) * self.masked_score
        weights = ops.cast(self.softmax(scores), value.dtype)
        out = ops.transpose(self._by_groups(self.context, weights, value), (2, 0, 1, 3))
        return ops.reshape(out, (length, batch, -1))

    def _heads_first(self, x, heads):
        """Return [S, B, heads * D] or [S, B, heads, D] -> [B, heads, S, D]."""
        x = ops.reshape(x, (x.shape[0], x.shape[1], heads, -1))
        return ops.transpose(x, (1, 2, 0, 3))

    def _by_groups(self, product, x, y):
        """Multiply [B, N, S, n] and [B, G, ...] to [B, N, S, m]: as `grouped_query` does."""
        if self.groups == self.heads:
            return product(x, y)
        batch, _, length, width = x.shape
        rows = ops.reshape(x, (batch, self.groups, -1, width))
        return ops.reshape(product(rows, y), (batch, self.heads, length, -1))


class DocumentCoreAttention(CoreAttention):
    """This is `CoreAttention` for masks of `reset_attention_mask`: tokens attend only within their document, and only
    the scores within a document are computed.

    The dataset delivers a dense mask; the entries just below its diagonal say whether a token attends to the token
    before it, and therefore where documents begin. Nothing else of the mask is read. Memory does not grow with S
    squared, except for the mask.
    """

    def __init__(self, config, layer_number, **kwargs):
        super().__init__(config, layer_number, **kwargs)
        self.within_documents = WithinDocuments(self.scale)

    def attend(self, query, key, value, attention_mask):
        """Compute the attention within documents, with the arguments and result of `CoreAttention.attend`;
        attention_mask is [B, 1, S, S].
        """
        length, batch = query.shape[0], query.shape[1]
        # the entries (i + 1, i), behind each other at a stride of S + 1
        flat = ops.reshape(attention_mask, (batch, length * length))
        breaks = ops.cast(flat[:, length :: length + 1], ms.int32)
        out, _ = self.within_documents(
            ops.reshape(query, (length, batch, self.heads, -1)),
            ops.reshape(key, (length, batch, self.groups, -1)),
            ops.reshape(value, (length, batch, self.groups, -1)),
            breaks,
        )
        return ops.reshape(out, (length, batch, -1))


class WithinDocuments(nn.Cell):
    """This operator makes a graph compute `document_attention` and its gradients by calls of Python functions.

    Inputs: query [S, B, N, D]; key [S, B, G, D]; value [S, B, G, Dv]; breaks int32 [B, S - 1]. Outputs: [S, B, N, Dv],
    and the log-sum-exp of the rows [B, N, S], which only the backward pass uses: no gradient passes through it.
    """

    def __init__(self, scale):
        super().__init__(auto_prefix=False)
        self.attend, self.gradients = _operators(scale)

    def construct(self, query, key, value, breaks):
        """Return the attention output; the class's docstring gives the shapes of arguments and result."""
        return self.attend(query, key, value, breaks)

    def bprop(self, query, key, value, breaks, out, dout):
        """Return the gradients of the attention, which `document_gradients` computes."""
        gradients = self.gradients(query, key, value, breaks, out[0], out[1], dout[0])
        return gradients[0], gradients[1], gradients[2], ops.zeros_like(breaks)


def _operators(scale):
    scale = float(scale)

    def forward(query, key, value, breaks):
        return document_attention(query, key, value, breaks, scale)

    def forward_shapes(query, key, value, breaks):
        return [*query[:3], value[3]], [query[1], query[2], query[0]]

    def forward_types(query, key, value, breaks):
        return value, query

    def backward(query, key, value, breaks, out, log_sum, dout):
        return document_gradients(query, key, value, breaks, out, log_sum, dout, scale)

    def first_three(query, key, value, breaks, out, log_sum, dout):
        return query, key, value

    return (
        host_functions.operator(forward, forward_shapes, forward_types),
        host_functions.operator(backward, first_three, first_three),
    )


def _refuse_unsupported(config, attention_dropout):
    """Raise RecipeError for settings that CPU attention would silently compute wrongly."""
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    where = "model.model_config"
    if dropout:
        raise RecipeError(f"{where}.attention_dropout: on CPU only 0.0 is supported, not {dropout}")
    for name in ("use_eod_attn_mask_compression", "use_attn_mask_compression"):
        if getattr(config, name):
            raise RecipeError(f"{where}.{name}: on CPU the value must be False, because attention reads the full mask")
    if config.window_size:
        raise RecipeError(
            f"{where}.window_size: on CPU, attention with sliding windows is not supported; leave the key out"
        )
