"""Reductions and scans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators.accumulation import Counts, moved, reduced, scanned
from tools.accuracy.operators.spec import Array, Spec

ROWS = ((24, 64), (16, 2500), (4, 12000), (4, 20480), (2, 200704))


def _rows(rng, rows, n):
    return (rng.standard_normal((rows, n), np.float32),)


def _spread(x, dout):
    return np.broadcast_to(dout[..., None], x.shape)


def _distinct(rng, rows, n):
    # integers up to 256 are distinct in every type, so that the extreme element is one
    return (np.stack([rng.permutation(n) + 1 for _ in range(rows)]).astype(np.float32),)


def _factors(rng, rows, n):
    return (rng.uniform(0.6, 1.6, (rows, n)).astype(np.float32),)


def prod_grad(x: Array, dout: Array) -> tuple[Array]:
    """dout times the product of the others: without dividing by x, which magnifies errors where x is tiny."""
    others = np.stack([np.delete(x, i, -1).prod(-1) for i in range(x.shape[-1])], -1)
    return (dout[..., None] * others,)


SUM = Spec(
    name="sum",
    source="loss, router, global norm: SumExt",
    shapes=ROWS,
    make=_rows,
    golden=lambda x: x.sum(-1),
    grad=lambda x, dout: (_spread(x, dout),),
    call=lambda ms: lambda x: ms.ops.auto_generate.SumExt()(x, -1, False),
    counts=reduced(-1),
    special="row",
)
CUMSUM = Spec(
    name="cumsum",
    source="expert boundaries: CumSum in place of CumsumExt",
    shapes=((8, 64), (4, 2500)),
    make=_rows,
    golden=lambda x: np.cumsum(x, -1),
    grad=lambda x, dout: (np.flip(np.cumsum(np.flip(dout, -1), -1), -1),),
    call=lambda ms: lambda x: ms.ops.CumSum()(x, -1),
    counts=scanned(-1),
)


def _extreme(name, source, primitive, golden, pick):
    return Spec(
        name=name,
        source=source,
        shapes=((24, 200),),
        make=_distinct,
        golden=golden,
        grad=lambda x, dout: ((np.arange(x.shape[-1]) == pick(x, -1)[:, None]) * dout[:, None],),
        call=lambda ms: lambda x: getattr(ms.ops, primitive)()(x, -1),
        counts=moved,
        special="row",
    )


REDUCE = (
    SUM,
    replace(SUM, name="sum.reduce", source="ReduceSum", call=lambda ms: lambda x: ms.ops.ReduceSum()(x, -1)),
    Spec(
        name="mean",
        source="RMSNorm, auxiliary loss: MeanExt",
        shapes=ROWS,
        make=_rows,
        golden=lambda x: x.mean(-1),
        grad=lambda x, dout: (_spread(x, dout) / x.shape[-1],),
        call=lambda ms: lambda x: ms.ops.auto_generate.MeanExt()(x, -1, False),
        counts=reduced(-1),
        special="row",
    ),
    _extreme("max", "stable softmax, loss: ReduceMax", "ReduceMax", lambda x: x.max(-1), np.argmax),
    _extreme("min", "ReduceMin", "ReduceMin", lambda x: x.min(-1), np.argmin),
    Spec(
        name="prod",
        source="report section 3.1 (3): its gradient divides by the inputs; ops.prod",
        shapes=((32, 16),),
        make=_factors,
        golden=lambda x: x.prod(-1),
        grad=prod_grad,
        call=lambda ms: lambda x: ms.ops.prod(x, -1),
        counts=lambda x: Counts(x.shape[-1], x.shape[-1]),
    ),
    CUMSUM,
    replace(
        CUMSUM,
        name="cumsum.ext",
        source="expert boundaries: CumsumExt, token_dispatcher.py",
        call=lambda ms: lambda x: ms.ops.auto_generate.CumsumExt()(x, -1),
    ),
)
