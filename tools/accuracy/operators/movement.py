"""Specs of operators that move elements without computing: gathers and scatters by indices, reshapes, slices, casts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.judge import round_bfloat16
from tools.accuracy.operators import spec
from tools.accuracy.operators.spec import Array, Counts, Spec, moved, tiled

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
    counts=spec.gathered,
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
    counts=lambda dout, ids: Counts(spec.busiest(ids)),
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
    counts=spec.added,
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
        counts=spec.added,
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


LOW, HIGH = -0.75, 1.25


def _one(rng, *shape):
    return (rng.standard_normal(shape, np.float32),)


def _two(rng, *shape):
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def _float16(x):
    return x.astype(np.float16).astype(x.dtype)


def _bfloat16(x):
    return round_bfloat16(x).astype(x.dtype)


def _cast(target, golden):
    """The gradient that comes in has the target's type already: it is rounded on its way there."""
    return Spec(
        name=f"cast.{target}",
        source=f"mixed precision: Cast to {target}",
        shapes=((64, 96),),
        make=_one,
        golden=golden,
        grad=lambda x, dout: (golden(dout),),
        call=lambda ms: lambda x: ms.ops.cast(x, getattr(ms, target)),
        counts=moved,
        special="each",
    )


def _tile_grad(x, dout):
    rows, width = x.shape
    return (dout.reshape(2, rows, 3, width).sum((0, 2)),)


def _strided_grad(x, dout):
    grad = np.zeros_like(x)
    grad[:, ::2] = dout
    return (grad,)


BASE = Spec(
    name="transpose",
    source="heads and sequence: Transpose",
    shapes=((6, 32, 48),),
    make=_one,
    golden=lambda x: x.transpose(1, 2, 0),
    grad=lambda x, dout: (dout.transpose(2, 0, 1),),
    call=lambda ms: lambda x: ms.ops.transpose(x, (1, 2, 0)),
    counts=moved,
)
PAIR = replace(BASE, shapes=((32, 48),), make=_two, wrt=(0, 1))
FLAT = replace(BASE, shapes=((32, 48),))
LAYOUT = (
    _cast("float32", lambda x: x),
    _cast("float16", _float16),
    _cast("bfloat16", _bfloat16),
    BASE,
    replace(
        BASE,
        name="reshape",
        source="heads: Reshape",
        golden=lambda x: x.reshape(x.shape[0], -1),
        grad=lambda x, dout: (dout.reshape(x.shape),),
        call=lambda ms: lambda x: ms.ops.reshape(x, (x.shape[0], -1)),
    ),
    replace(
        PAIR,
        name="concat",
        source="MLA's two parts of a head, RoPE: Concat",
        golden=lambda a, b: np.concatenate([a, b], -1),
        grad=lambda a, b, dout: tuple(np.split(dout, 2, -1)),
        call=lambda ms: lambda a, b: ms.ops.concat((a, b), -1),
    ),
    replace(
        FLAT,
        name="split",
        source="gate and up, MLA: SplitWithSize",
        golden=lambda x: tuple(np.split(x, [20], -1)),
        grad=lambda x, first, second: (np.concatenate([first, second], -1),),
        call=lambda ms: lambda x: ms.ops.auto_generate.SplitWithSize()(x, (20, x.shape[-1] - 20), -1),
    ),
    replace(
        PAIR,
        name="stack",
        source="interleaved RoPE: ops.stack in place of StackExt",
        golden=lambda a, b: np.stack([a, b], -1),
        grad=lambda a, b, dout: (dout[..., 0], dout[..., 1]),
        call=lambda ms: lambda a, b: ms.ops.stack((a, b), -1),
    ),
    replace(
        PAIR,
        name="stack.ext",
        source="interleaved RoPE: StackExt, rope_utils.py",
        golden=lambda a, b: np.stack([a, b], -1),
        grad=lambda a, b, dout: (dout[..., 0], dout[..., 1]),
        call=lambda ms: lambda a, b: ms.ops.auto_generate.StackExt(dim=-1)((a, b)),
    ),
    replace(
        FLAT,
        name="tile",
        source="shared rotary key for all heads: Tile; its gradient sums the copies",
        golden=lambda x: np.tile(x, (2, 3)),
        grad=_tile_grad,
        call=lambda ms: lambda x: ms.ops.tile(x, (2, 3)),
        counts=tiled(6),
    ),
    replace(
        FLAT,
        name="strided_slice",
        source="MLA's even and odd elements of a head: StridedSlice",
        golden=lambda x: x[:, ::2],
        grad=_strided_grad,
        call=lambda ms: lambda x: ms.ops.strided_slice(x, (0, 0), x.shape, (1, 2)),
    ),
    replace(
        FLAT,
        name="roll",
        source="shifted labels of MTP: Roll",
        golden=lambda x: np.roll(x, -1, 0),
        grad=lambda x, dout: (np.roll(dout, 1, 0),),
        call=lambda ms: lambda x: ms.ops.auto_generate.Roll(-1, 0)(x),
    ),
    replace(
        FLAT,
        name="clip",
        source="clamped activations and masks: ClampScalar",
        golden=lambda x: np.clip(x, LOW, HIGH),
        grad=lambda x, dout: (np.where((x >= LOW) & (x <= HIGH), dout, 0),),
        call=lambda ms: lambda x: ms.ops.auto_generate.ClampScalar()(x, LOW, HIGH),
        special="each",
    ),
)
