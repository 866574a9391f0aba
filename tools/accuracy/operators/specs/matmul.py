"""Matrix products: linear layers, attention's batched ones, the experts' grouped one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators import accumulation
from tools.accuracy.operators.accumulation import Counts
from tools.accuracy.operators.spec import Array, Spec, kernel

ALL = ("float32", "float16", "bfloat16", "hfloat32")


def _linear(rng, m, k, n):
    return rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)


def _batched(rng, batch, m, k, n):
    return rng.standard_normal((batch, m, k), np.float32), rng.standard_normal((batch, k, n), np.float32)


def grouped(rng, rows, h, width, experts):
    """Rows sorted by expert, a weight each, and each expert's last row; the loads are unequal, one may be idle."""
    cuts = np.sort(rng.integers(0, rows + 1, experts - 1))
    ends = np.append(cuts, rows).astype(np.int64)
    return rng.standard_normal((rows, h), np.float32), rng.standard_normal((experts, h, width), np.float32), ends


def grouped_golden(rows: Array, weight: Array, ends: Array) -> Array:
    """[C, h] x [E, h, H] -> [C, H]: each expert multiplies its own rows."""
    parts = np.split(rows, ends[:-1])
    return np.concatenate([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def grouped_grad(rows, weight, ends, dout):
    """Gradients of rows and weight; an idle expert's is zero."""
    douts, parts = np.split(dout, ends[:-1]), np.split(rows, ends[:-1])
    drows = np.concatenate([d @ matrix.T for d, matrix in zip(douts, weight, strict=True)])
    return drows, np.stack([part.T @ d for part, d in zip(parts, douts, strict=True)])


def _per_expert(ms):
    def call(rows, weight, ends):
        first, outs = 0, []
        for expert, end in enumerate(ends.asnumpy().tolist()):
            if end > first:
                outs.append(ms.ops.matmul(rows[first:end], weight[expert]))
            first = end
        return ms.ops.concat(outs)

    return call


LINEAR = Spec(
    name="matmul",
    source="every linear layer: MatMul(transpose_b=True), tensor_parallel/layers.py",
    shapes=((16, 64, 24), (8, 2500, 8), (4, 20480, 4)),
    make=_linear,
    golden=lambda x, w: x @ w.T,
    grad=lambda x, w, dout: (dout @ w, dout.T @ x),
    wrt=(0, 1),
    call=kernel("MatMul", transpose_b=True),
    counts=lambda x, w: Counts(x.shape[1], (w.shape[0], x.shape[0])),
    dtypes=ALL,
)
BATCHED = Spec(
    name="batch_matmul",
    source="attention without fusion: BatchMatMul",
    shapes=((3, 16, 64, 24), (2, 4, 2500, 4)),
    make=_batched,
    golden=lambda a, b: a @ b,
    grad=lambda a, b, dout: (dout @ b.swapaxes(1, 2), a.swapaxes(1, 2) @ dout),
    wrt=(0, 1),
    call=kernel("BatchMatMul"),
    counts=accumulation.matmul,
    dtypes=ALL,
)
GROUPED = Spec(
    name="grouped_matmul",
    source="experts' FFN: GroupedMatmul(split_item=3, group_type=0), moe/ffn.py",
    shapes=((96, 64, 48, 4), (64, 2500, 4, 3)),
    make=grouped,
    golden=grouped_golden,
    grad=grouped_grad,
    wrt=(0, 1),
    call=lambda ms: (
        lambda rows, weight, ends: ms.ops.auto_generate.GroupedMatmul(split_item=3, group_type=0)(
            [rows], [weight], None, None, None, None, None, ends
        )
    ),
    counts=accumulation.grouped_matmul,
)
MATMUL = (
    LINEAR,
    BATCHED,
    replace(
        BATCHED,
        name="batch_matmul.ext",
        source="absorbed projections of MLA: BatchMatMulExt",
        call=kernel("BatchMatMulExt"),
    ),
    GROUPED,
    replace(
        GROUPED,
        name="grouped_matmul.per_expert",
        source="the same as one MatMul an expert, for devices without the kernel",
        call=_per_expert,
    ),
    Spec(
        name="outer",
        source="RoPE angles: Outer(positions, frequencies), rotary_pos_embedding.py",
        shapes=((128, 32),),
        make=lambda rng, m, n: (rng.standard_normal(m).astype(np.float32), rng.standard_normal(n).astype(np.float32)),
        golden=np.outer,
        grad=lambda a, b, dout: (dout @ b, a @ dout),
        wrt=(0, 1),
        call=kernel("Outer"),
        counts=lambda a, b: Counts(1, (b.size, a.size)),
    ),
)
