"""Sorting and selection. Inputs are distinct in every type, so that the order is unique."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators.accumulation import moved
from tools.accuracy.operators.spec import Array, Spec

K = 8


def _distinct(rng, rows, n):
    return (np.stack([rng.permutation(n) + 1 for _ in range(rows)]).astype(np.float32),)


def _sorted(x):
    order = np.argsort(x, -1)
    return np.take_along_axis(x, order, -1), order


def _largest(x):
    order = np.argsort(-x, -1)[:, :K]
    return np.take_along_axis(x, order, -1), order


def place_back(x: Array, order: Array, dout: Array) -> tuple[Array]:
    """The gradient of picked elements: each goes back to where it came from."""
    grad = np.zeros_like(x)
    np.put_along_axis(grad, order, dout, -1)
    return (grad,)


SORT = Spec(
    name="sort",
    source="tokens by expert: ops.sort in place of SortExt",
    shapes=((16, 200),),
    make=_distinct,
    golden=_sorted,
    grad=lambda x, dout: place_back(x, np.argsort(x, -1), dout),
    call=lambda ms: lambda x: ms.ops.sort(x),
    counts=moved,
)
TOPK = Spec(
    name="topk",
    source="router: TopK in place of TopkExt",
    shapes=((16, 200),),
    make=_distinct,
    golden=_largest,
    grad=lambda x, dout: place_back(x, _largest(x)[1], dout),
    call=lambda ms: lambda x: ms.ops.TopK(sorted=True)(x, K),
    counts=moved,
)
ORDER = (
    SORT,
    replace(
        SORT,
        name="sort.ext",
        source="tokens by expert: SortExt, token_dispatcher.py",
        call=lambda ms: lambda x: ms.ops.auto_generate.SortExt()(x, 1),
    ),
    Spec(
        name="argsort",
        source="order of tokens: ops.argsort",
        shapes=((16, 200),),
        make=_distinct,
        golden=lambda x: np.argsort(x, -1),
        call=lambda ms: lambda x: ms.ops.argsort(x),
        counts=moved,
    ),
    TOPK,
    replace(
        TOPK,
        name="topk.ext",
        source="router: TopkExt, moe/router.py",
        call=lambda ms: lambda x: ms.ops.auto_generate.TopkExt()(x, K),
    ),
)
