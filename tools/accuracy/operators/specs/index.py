"""Reading and writing by index: embedding, gather, scatter, one-hot, masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators import accumulation
from tools.accuracy.operators.accumulation import Counts, moved
from tools.accuracy.operators.spec import Array, Spec

FILL = -8192.0  # the same in all types


def _table(rng, rows, width, picks):
    return rng.standard_normal((rows, width), np.float32), rng.integers(0, rows, picks).astype(np.int32)


def _skewed(rng, rows, width, picks):
    # frequent tokens are frequent: the first id is every fourth token
    ids = np.where(rng.random(picks) < 0.25, 0, rng.integers(0, rows, picks)).astype(np.int32)
    return rng.standard_normal((rows, width), np.float32), ids


def scatter_rows(table: Array, index: Array, dout: Array) -> tuple[Array]:
    """Sum `dout` [P, h] into the rows of a zero table by index [P]."""
    grad = np.zeros_like(table)
    np.add.at(grad, index, dout)
    return (grad,)


def _updates(rng, rows, width, picks):
    table, index = _table(rng, rows, width, picks)
    return table, index, rng.standard_normal((picks, width), np.float32)


def _index_add(x, index, y):
    return x + scatter_rows(x, index, y)[0]


def _scatter_inputs(rng, rows, width, picks):
    # no place is written twice: the result would depend on the order
    index = np.argsort(rng.random((rows, width)), -1)[:, :picks].astype(np.int64)
    return rng.standard_normal((rows, width), np.float32), index, rng.standard_normal((rows, picks), np.float32)


def _scatter(x, index, y):
    out = x.copy()
    np.put_along_axis(out, index, y, -1)
    return out


def _scatter_grad(x, index, y, dout):
    grad = dout.copy()
    np.put_along_axis(grad, index, 0, -1)
    return grad, np.take_along_axis(dout, index, -1)


def _gather_d_grad(x, index, dout):
    grad = np.zeros_like(x)
    np.put_along_axis(grad, index, dout, -1)
    return (grad,)


def _one_hot(index, on, off):
    return np.where(index[:, None] == np.arange(64), on, off)


def _masked(rng, rows, width):
    return rng.standard_normal((rows, width), np.float32), rng.random((rows, width)) < 0.3


def _choice(rng, rows, width):
    a, b = rng.standard_normal((2, rows, width)).astype(np.float32)
    return rng.random((rows, width)) < 0.5, a, b


EMBEDDING = Spec(
    name="embedding",
    source="VocabParallelEmbedding: Gather in place of IndexSelect; the gradient sums by token",
    shapes=((128, 32, 1024), (16, 4, 12000)),
    make=_skewed,
    golden=lambda table, ids: table[ids],
    grad=scatter_rows,
    call=lambda ms: lambda table, ids: ms.ops.Gather()(table, ids, 0),
    counts=accumulation.gathered,
)
EMBEDDING_GRADIENT = Spec(
    name="embedding_gradient",
    source="the kernel EmbeddingDenseBackward",
    shapes=((128, 32, 1024), (16, 4, 12000)),
    make=lambda rng, rows, width, picks: (
        rng.standard_normal((picks, width), np.float32),
        _skewed(rng, 128, 1, picks)[1],
    ),
    golden=lambda dout, ids: scatter_rows(np.zeros((128, dout.shape[1]), dout.dtype), ids, dout)[0],
    call=lambda ms: lambda dout, ids: ms.ops.auto_generate.EmbeddingDenseBackward()(dout, ids, 128, None, False),
    counts=lambda dout, ids: Counts(accumulation.busiest(ids)),
)
ONE_HOT = Spec(
    name="one_hot",
    source="loss, expert load: OneHot in place of OneHotExt",
    shapes=((256,),),
    make=lambda rng, n: (rng.integers(0, 64, n).astype(np.int32), *np.eye(2, dtype=np.float32)[:1].T.reshape(2, 1)),
    golden=_one_hot,
    clip=False,
    call=lambda ms: lambda index, on, off: ms.ops.OneHot()(index, 64, on, off),
    counts=moved,
)
INDEX_ADD = Spec(
    name="index_add",
    source="combining experts' results: ops.index_add",
    shapes=((64, 32, 512),),
    make=_updates,
    golden=_index_add,
    grad=lambda x, index, y, dout: (dout, dout[index]),
    wrt=(0, 2),
    call=lambda ms: lambda x, index, y: ms.ops.index_add(x, index, y, 0),
    counts=accumulation.added,
)
INDEX = (
    EMBEDDING,
    replace(
        EMBEDDING,
        name="embedding.index_select",
        source="VocabParallelEmbedding: IndexSelect, tensor_parallel/layers.py",
        call=lambda ms: lambda table, ids: ms.ops.auto_generate.IndexSelect()(table, 0, ids),
    ),
    EMBEDDING_GRADIENT,
    Spec(
        name="gather",
        source="cos and sin of positions: GatherD along the last axis",
        shapes=((32, 64, 16),),
        make=lambda rng, rows, width, picks: _scatter_inputs(rng, rows, width, picks)[:2],
        golden=lambda x, index: np.take_along_axis(x, index, -1),
        grad=_gather_d_grad,
        call=lambda ms: lambda x, index: ms.ops.auto_generate.GatherD()(x, -1, index),
        counts=moved,
    ),
    Spec(
        name="scatter",
        source="routing maps: tensor_scatter_elements",
        shapes=((32, 64, 16),),
        make=_scatter_inputs,
        golden=_scatter,
        grad=_scatter_grad,
        wrt=(0, 2),
        call=lambda ms: lambda x, index, y: ms.ops.tensor_scatter_elements(x, index, y, 1),
        counts=moved,
    ),
    Spec(
        name="scatter_add",
        source="combining copies of a token: tensor_scatter_add",
        shapes=((64, 32, 512),),
        make=_updates,
        golden=_index_add,
        grad=lambda x, index, y, dout: (dout, dout[index]),
        wrt=(0, 2),
        call=lambda ms: lambda x, index, y: ms.ops.tensor_scatter_add(x, ms.ops.expand_dims(index, -1), y),
        counts=accumulation.added,
    ),
    INDEX_ADD,
    ONE_HOT,
    replace(
        ONE_HOT,
        name="one_hot.ext",
        source="loss, expert load: OneHotExt, loss_func.py",
        call=lambda ms: lambda index, on, off: ms.ops.auto_generate.OneHotExt(axis=-1)(index, 64, on, off),
    ),
    Spec(
        name="masked_fill",
        source="attention mask: MaskedFill",
        shapes=((64, 96),),
        make=_masked,
        golden=lambda x, mask: np.where(mask, x.dtype.type(FILL), x),
        grad=lambda x, mask, dout: (np.where(mask, 0, dout),),
        call=lambda ms: lambda x, mask: ms.ops.masked_fill(x, mask, ms.Tensor(FILL, x.dtype)),
        counts=moved,
    ),
    Spec(
        name="where",
        source="masks of the loss and of padding: ops.where",
        shapes=((64, 96),),
        make=_choice,
        golden=np.where,
        grad=lambda mask, a, b, dout: (np.where(mask, dout, 0), np.where(mask, 0, dout)),
        wrt=(1, 2),
        call=lambda ms: ms.ops.where,
        counts=moved,
    ),
)
