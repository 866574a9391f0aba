"""Operators that move values: nothing is computed, so results must be bit-identical. And casts, which round once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators.accumulation import moved, tiled
from tools.accuracy.operators.spec import Spec
from tools.accuracy.promotion import round_bfloat16

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
