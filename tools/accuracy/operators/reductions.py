"""Specs of operators that look at a whole row: sums and maxima, sorting, norms and softmax, losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators import spec
from tools.accuracy.operators.spec import Array, Counts, Spec, kernel, moved, reduced, scanned

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


K = 8


def _sorted(x):
    order = np.argsort(x, -1)
    return np.take_along_axis(x, order, -1), order


def _largest(x):
    order = np.argsort(-x, -1)[:, :K]
    return np.take_along_axis(x, order, -1), order


def place_back(x: Array, order: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of picked elements: each goes back to where it came from."""
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


RMS_EPS, LAYER_EPS = 1e-6, 1e-5
NORMALISED_ROWS = ((24, 64), (16, 2500), (16, 12000))


def softmax(x: Array) -> Array:
    """Over the last axis, shifted by the maximum."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_grad(x: Array, dout: Array) -> Array:
    """y (d - sum(d y))."""
    y = softmax(x)
    return y * (dout - (dout * y).sum(-1, keepdims=True))


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _rms(x):
    return 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + RMS_EPS)


def rms_norm(x: Array, gamma: Array) -> Array:
    """x / sqrt(mean(x^2) + eps) gamma."""
    return x * _rms(x) * gamma


def rms_norm_grad(x: Array, gamma: Array, dout: Array) -> tuple[Array, Array]:
    """Return the gradients of x and gamma."""
    r = _rms(x)
    unit, d = x * r, dout * gamma
    return r * (d - unit * (d * unit).mean(-1, keepdims=True)), (dout * unit).sum(0)


def _unit(x):
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + LAYER_EPS)
    return centred * r, r


def layer_norm(x: Array, gamma: Array, beta: Array) -> Array:
    """(x - mean) / sqrt(var + eps) gamma + beta."""
    return _unit(x)[0] * gamma + beta


def layer_norm_grad(x: Array, gamma: Array, beta: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of x, gamma and beta."""
    unit, r = _unit(x)
    d = dout * gamma
    dx = r * (d - d.mean(-1, keepdims=True) - unit * (d * unit).mean(-1, keepdims=True))
    return dx, (dout * unit).sum(0), dout.sum(0)


def rms_norm_call(epsilon: float):
    """MindFormers' formula: statistics in float32, stored in the input's type (transformer/norm.py)."""

    def make(ms):
        def call(x, gamma):
            y = x.astype(ms.float32)
            mean = ms.ops.auto_generate.MeanExt()(ms.ops.square(y), -1, True)
            return (y * ms.ops.rsqrt(mean + epsilon) * gamma.astype(ms.float32)).astype(x.dtype)

        return call

    return make


def _scaled(rng, rows, n):
    # small rows too, so that epsilon matters
    scale = 10.0 ** rng.uniform(-2, 1, (rows, 1))
    x = rng.standard_normal((rows, n), np.float32) * scale.astype(np.float32)
    return x, rng.standard_normal(n, np.float32) + 1


RMS = Spec(
    name="rms_norm",
    source="before attention and MLP: formula with fused_norm: False, transformer/norm.py",
    shapes=NORMALISED_ROWS,
    make=_scaled,
    golden=rms_norm,
    grad=rms_norm_grad,
    wrt=(0, 1),
    call=rms_norm_call(RMS_EPS),
    counts=spec.normalised,
    special="row",
    clip=False,  # small rows on purpose, and no division by an element
)
NORMALISE = (
    Spec(
        name="softmax",
        source="attention without fusion, softmax routing: Softmax",
        shapes=NORMALISED_ROWS,
        make=_rows,
        golden=softmax,
        grad=lambda x, dout: (softmax_grad(x, dout),),
        call=kernel("Softmax", -1),
        counts=spec.normalised,
        special="row",
    ),
    Spec(
        name="log_softmax",
        source="the loss: LogSoftmax",
        shapes=NORMALISED_ROWS,
        make=_rows,
        golden=log_softmax,
        grad=lambda x, dout: (dout - softmax(x) * dout.sum(-1, keepdims=True),),
        call=kernel("LogSoftmax", -1),
        counts=spec.normalised,
        special="row",
    ),
    RMS,
    replace(
        RMS,
        name="rms_norm.fused",
        source="the kernel RmsNorm, fused_norm: True",
        call=lambda ms: lambda x, gamma: ms.ops.rms_norm(x, gamma, RMS_EPS)[0],
    ),
    Spec(
        name="layer_norm",
        source="where norm is LayerNorm: P.LayerNorm, transformer/norm.py",
        shapes=NORMALISED_ROWS,
        make=lambda rng, rows, n: (*_scaled(rng, rows, n), rng.standard_normal(n, np.float32)),
        golden=layer_norm,
        grad=layer_norm_grad,
        wrt=(0, 1, 2),
        clip=False,
        call=lambda ms: lambda x, gamma, beta: ms.ops.LayerNorm(-1, -1, LAYER_EPS)(x, gamma, beta)[0],
        counts=spec.normalised,
    ),
)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """[N, V], [N] -> [N], not reduced."""
    return -np.take_along_axis(log_softmax(logits), labels[:, None].astype(np.int64), -1)[:, 0]


def cross_entropy_grad(logits: Array, labels: Array, dout: Array) -> tuple[Array]:
    """(softmax - one-hot) d."""
    grad = softmax(logits)
    grad[np.arange(len(labels)), labels] -= 1
    return (grad * dout[:, None],)


def _formula(ms):
    def call(logits, labels):
        x = logits.astype(ms.float32)
        shifted = x - ms.ops.stop_gradient(ms.ops.ReduceMax(keep_dims=True)(x, -1))
        total = ms.ops.log(ms.ops.ReduceSum(keep_dims=True)(ms.ops.exp(shifted), -1))
        hot = ms.ops.OneHot()(labels, x.shape[-1], ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32))
        return ms.ops.ReduceSum()((total - shifted) * hot, -1)

    return call


def _logits(rng, tokens, vocabulary):
    return 3 * rng.standard_normal((tokens, vocabulary), np.float32), rng.integers(0, vocabulary, tokens, np.int32)


def _spec(name, source, call):
    return Spec(
        name=name,
        source=source,
        shapes=((32, 512), (4, 32000)),
        make=_logits,
        golden=cross_entropy,
        grad=cross_entropy_grad,
        call=call,
        counts=lambda logits, labels: Counts(logits.shape[-1], logits.shape[-1]),
    )


LOSS = (
    _spec("cross_entropy", "the formula of _LogSoftmax and _NLLLoss in float32, loss_func.py", _formula),
    _spec(
        "cross_entropy.ops",
        "ops.cross_entropy: the kernels LogSoftmax and NLLLoss",
        lambda ms: lambda logits, labels: ms.ops.cross_entropy(logits, labels, reduction="none"),
    ),
)
