"""This module tests operators that move elements without computing: gathers, scatters, reshapes, slices, casts."""

from __future__ import annotations

import numpy as np

from tools.accuracy.judge import round_bfloat16
from tools.accuracy.operators.spec import (
    Counts,
    Spec,
    added,
    busiest,
    function,
    gathered,
    kernel,
    moved,
    normal,
    place_back,
    scatter_rows,
    variant,
)

FILL = -8192.0  # the same in all types


def _skewed(rng, rows, width, picks):
    # frequent tokens are frequent: the first id is every fourth token
    ids = np.where(rng.random(picks) < 0.25, 0, rng.integers(0, rows, picks)).astype(np.int32)
    return rng.standard_normal((rows, width), np.float32), ids


def _updates(rng, rows, width, picks):
    table, index = rng.standard_normal((rows, width), np.float32), rng.integers(0, rows, picks).astype(np.int32)
    return table, index, rng.standard_normal((picks, width), np.float32)


def _scatter_inputs(rng, rows, width, picks):
    # no place is written twice: the result would depend on the order
    index = np.argsort(rng.random((rows, width)), -1)[:, :picks].astype(np.int64)
    return rng.standard_normal((rows, width), np.float32), index, rng.standard_normal((rows, picks), np.float32)


def _put(x, index, y):
    out = x.copy()
    np.put_along_axis(out, index, y, -1)
    return out


def _choice(rng, rows, width):
    a, b = rng.standard_normal((2, rows, width)).astype(np.float32)
    return rng.random((rows, width)) < 0.5, a, b


EMBEDDING = Spec(
    "embedding", "VocabParallelEmbedding: Gather in place of IndexSelect; the gradient sums by token",
    ((128, 32, 1024), (16, 4, 12000)), _skewed, golden=lambda table, ids: table[ids], grad=scatter_rows,
    call=kernel("Gather", 0), counts=gathered,
)  # fmt: skip
ONE_HOT = Spec(
    "one_hot", "loss, expert load: OneHot in place of OneHotExt", ((256,),),
    lambda rng, n: (rng.integers(0, 64, n).astype(np.int32), *np.eye(2, dtype=np.float32)[:1].T.reshape(2, 1)),
    golden=lambda index, on, off: np.where(index[:, None] == np.arange(64), on, off), clip=False,
    call=lambda ms, index, on, off: ms.ops.OneHot()(index, 64, on, off), counts=moved,
)  # fmt: skip
INDEX_ADD = Spec(
    "index_add", "combining experts' results: ops.index_add", ((64, 32, 512),), _updates,
    golden=lambda x, index, y: x + scatter_rows(x, index, y)[0],
    grad=lambda x, index, y, dout: (dout, dout[index]), wrt=(0, 2),
    call=function("index_add", 0), counts=added,
)  # fmt: skip
INDEX = (
    EMBEDDING,
    variant(
        EMBEDDING, "embedding.index_select", "VocabParallelEmbedding: IndexSelect, tensor_parallel/layers.py",
        lambda ms, table, ids: ms.ops.auto_generate.IndexSelect()(table, 0, ids),
    ),
    Spec(
        "embedding_gradient", "the kernel EmbeddingDenseBackward", EMBEDDING.shapes,
        lambda rng, rows, width, picks: (
            rng.standard_normal((picks, width), np.float32), _skewed(rng, 128, 1, picks)[1],
        ),
        golden=lambda dout, ids: scatter_rows(np.zeros((128, dout.shape[1]), dout.dtype), ids, dout)[0],
        call=kernel("EmbeddingDenseBackward", 128, None, False), counts=lambda dout, ids: Counts(busiest(ids)),
    ),
    Spec(
        "gather", "cos and sin of positions: GatherD along the last axis", ((32, 64, 16),),
        lambda rng, rows, width, picks: _scatter_inputs(rng, rows, width, picks)[:2],
        golden=lambda x, index: np.take_along_axis(x, index, -1), grad=place_back,
        call=lambda ms, x, index: ms.ops.auto_generate.GatherD()(x, -1, index), counts=moved,
    ),
    Spec(
        "scatter", "routing maps: tensor_scatter_elements", ((32, 64, 16),), _scatter_inputs, golden=_put,
        grad=lambda x, index, y, dout: (_put(dout, index, 0), np.take_along_axis(dout, index, -1)), wrt=(0, 2),
        call=function("tensor_scatter_elements", 1), counts=moved,
    ),
    variant(
        INDEX_ADD, "scatter_add", "combining copies of a token: tensor_scatter_add",
        lambda ms, x, index, y: ms.ops.tensor_scatter_add(x, ms.ops.expand_dims(index, -1), y),
    ),
    INDEX_ADD,
    ONE_HOT,
    variant(
        ONE_HOT, "one_hot.ext", "loss, expert load: OneHotExt, loss_func.py",
        lambda ms, index, on, off: ms.ops.auto_generate.OneHotExt(axis=-1)(index, 64, on, off),
    ),
    Spec(
        "masked_fill", "attention mask: MaskedFill", ((64, 96),),
        lambda rng, *shape: (rng.standard_normal(shape, np.float32), rng.random(shape) < 0.3),
        golden=lambda x, mask: np.where(mask, x.dtype.type(FILL), x),
        grad=lambda x, mask, dout: (np.where(mask, 0, dout),),
        call=lambda ms, x, mask: ms.ops.masked_fill(x, mask, ms.Tensor(FILL, x.dtype)), counts=moved,
    ),
    Spec(
        "where", "masks of the loss and of padding: ops.where", ((64, 96),), _choice, golden=np.where,
        grad=lambda mask, a, b, dout: (np.where(mask, dout, 0), np.where(mask, 0, dout)), wrt=(1, 2),
        call=function("where"), counts=moved,
    ),
)  # fmt: skip


LOW, HIGH = -0.75, 1.25


def _layout(name, source, golden, grad, call, shapes=((32, 48),), tensors=1, **settings):
    wrt, settings = tuple(range(tensors)), {"counts": moved, **settings}
    return Spec(name, source, shapes, normal(tensors), golden, call, grad=grad, wrt=wrt, **settings)


def _cast(target, golden):
    """Return the test of a Cast to `target`, whose incoming gradient already has this type."""
    return _layout(
        f"cast.{target}", f"mixed precision: Cast to {target}", golden, lambda x, dout: (golden(dout),),
        lambda ms, x: ms.ops.cast(x, getattr(ms, target)), ((64, 96),), special="each",
    )  # fmt: skip


def _strided_grad(x, dout):
    grad = np.zeros_like(x)
    grad[:, ::2] = dout
    return (grad,)


STACK = _layout(
    "stack", "interleaved RoPE: ops.stack in place of StackExt", lambda a, b: np.stack([a, b], -1),
    lambda a, b, dout: (dout[..., 0], dout[..., 1]), lambda ms, a, b: ms.ops.stack((a, b), -1), tensors=2,
)  # fmt: skip
LAYOUT = (
    _cast("float32", lambda x: x),
    _cast("float16", lambda x: x.astype(np.float16).astype(x.dtype)),
    _cast("bfloat16", lambda x: round_bfloat16(x).astype(x.dtype)),
    _layout(
        "transpose", "heads and sequence: Transpose", lambda x: x.transpose(1, 2, 0),
        lambda x, dout: (dout.transpose(2, 0, 1),), function("transpose", (1, 2, 0)), ((6, 32, 48),),
    ),
    _layout(
        "reshape", "heads: Reshape", lambda x: x.reshape(x.shape[0], -1), lambda x, dout: (dout.reshape(x.shape),),
        lambda ms, x: ms.ops.reshape(x, (x.shape[0], -1)), ((6, 32, 48),),
    ),
    _layout(
        "concat", "MLA's two parts of a head, RoPE: Concat", lambda a, b: np.concatenate([a, b], -1),
        lambda a, b, dout: tuple(np.split(dout, 2, -1)), lambda ms, a, b: ms.ops.concat((a, b), -1), tensors=2,
    ),
    _layout(
        "split", "gate and up, MLA: SplitWithSize", lambda x: tuple(np.split(x, [20], -1)),
        lambda x, first, second: (np.concatenate([first, second], -1),),
        lambda ms, x: ms.ops.auto_generate.SplitWithSize()(x, (20, x.shape[-1] - 20), -1),
    ),
    STACK,
    variant(
        STACK, "stack.ext", "interleaved RoPE: StackExt, rope_utils.py",
        lambda ms, a, b: ms.ops.auto_generate.StackExt(dim=-1)((a, b)),
    ),
    _layout(
        "tile", "shared rotary key for all heads: Tile; its gradient sums the copies", lambda x: np.tile(x, (2, 3)),
        lambda x, dout: (dout.reshape(2, x.shape[0], 3, x.shape[1]).sum((0, 2)),), function("tile", (2, 3)),
        counts=lambda x: Counts(0, 6),
    ),
    _layout(
        "strided_slice", "MLA's even and odd elements of a head: StridedSlice", lambda x: x[:, ::2], _strided_grad,
        lambda ms, x: ms.ops.strided_slice(x, (0, 0), x.shape, (1, 2)),
    ),
    _layout(
        "roll", "shifted labels of MTP: Roll", lambda x: np.roll(x, -1, 0), lambda x, dout: (np.roll(dout, 1, 0),),
        lambda ms, x: ms.ops.auto_generate.Roll(-1, 0)(x),
    ),
    _layout(
        "clip", "clamped activations and masks: ClampScalar", lambda x: np.clip(x, LOW, HIGH),
        lambda x, dout: (np.where((x >= LOW) & (x <= HIGH), dout, 0),), kernel("ClampScalar", LOW, HIGH),
        special="each",
    ),
)  # fmt: skip
