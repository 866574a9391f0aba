"""This module tests operators that compute over a whole axis: sums and maxima, sorting, norms, softmax, losses."""

from __future__ import annotations

import numpy as np

from tools.accuracy.operators.spec import (
    Array,
    Spec,
    function,
    kernel,
    moved,
    normal,
    normalised,
    place_back,
    reduced,
    scanned,
    variant,
)

ROWS = ((24, 64), (16, 2500), (4, 12000), (4, 20480), (2, 200704))


def _spread(x, dout):
    return np.broadcast_to(dout[..., None], x.shape)


def _distinct(rng, rows, n):
    # integers up to 256 are distinct in every type, so that the extreme element is one
    return (np.stack([rng.permutation(n) + 1 for _ in range(rows)]).astype(np.float32),)


def prod_grad(x: Array, dout: Array) -> tuple[Array]:
    """Return dout times the product of all other elements, without dividing by x, which may be tiny."""
    others = np.stack([np.delete(x, i, -1).prod(-1) for i in range(x.shape[-1])], -1)
    return (dout[..., None] * others,)


SUM = Spec(
    "sum", "loss, router, global norm: SumExt", ROWS, normal(), golden=lambda x: x.sum(-1),
    grad=lambda x, dout: (_spread(x, dout),), call=kernel("SumExt", -1, False), counts=reduced, special="row",
)  # fmt: skip
CUMSUM = Spec(
    "cumsum", "expert boundaries: CumSum in place of CumsumExt", ((8, 64), (4, 2500)), normal(),
    golden=lambda x: np.cumsum(x, -1), grad=lambda x, dout: (np.flip(np.cumsum(np.flip(dout, -1), -1), -1),),
    call=kernel("CumSum", -1), counts=scanned,
)  # fmt: skip


def _extreme(name, source, primitive, golden, pick):
    return Spec(
        name, source, ((24, 200),), _distinct, golden,
        grad=lambda x, dout: ((np.arange(x.shape[-1]) == pick(x, -1)[:, None]) * dout[:, None],),
        call=kernel(primitive, -1), counts=moved, special="row",
    )  # fmt: skip


REDUCE = (
    SUM,
    variant(SUM, "sum.reduce", "ReduceSum", kernel("ReduceSum", -1)),
    variant(
        SUM, "mean", "RMSNorm, auxiliary loss: MeanExt",
        kernel("MeanExt", -1, False), golden=lambda x: x.mean(-1),
        grad=lambda x, dout: (_spread(x, dout) / x.shape[-1],),
    ),
    _extreme("max", "stable softmax, loss: ReduceMax", "ReduceMax", lambda x: x.max(-1), np.argmax),
    _extreme("min", "ReduceMin", "ReduceMin", lambda x: x.min(-1), np.argmin),
    Spec(
        "prod", "report section 3.1 (3): its gradient divides by the inputs; ops.prod", ((32, 16),),
        lambda rng, rows, n: (rng.uniform(0.6, 1.6, (rows, n)).astype(np.float32),), golden=lambda x: x.prod(-1),
        grad=prod_grad, call=function("prod", -1), counts=scanned,
    ),
    CUMSUM,
    variant(CUMSUM, "cumsum.ext", "expert boundaries: CumsumExt, token_dispatcher.py", kernel("CumsumExt", -1)),
)  # fmt: skip


K = 8


def _ordered(name, source, call, golden, order):
    return Spec(
        name, source, ((16, 200),), _distinct, golden, call=call, counts=moved,
        grad=order and (lambda x, dout: place_back(x, order(x), dout)),
    )  # fmt: skip


def _order(x):
    return np.argsort(x, -1)


def _largest(x):
    return np.argsort(-x, -1)[:, :K]


def _picked(order):
    return lambda x: (np.take_along_axis(x, order(x), -1), order(x))


ORDER = (
    _ordered("sort", "tokens by expert: ops.sort in place of SortExt", function("sort"), _picked(_order), _order),
    _ordered(
        "sort.ext", "tokens by expert: SortExt, token_dispatcher.py", kernel("SortExt", 1), _picked(_order), _order,
    ),
    _ordered("argsort", "order of tokens: ops.argsort", function("argsort"), _order, None),
    _ordered(
        "topk", "router: TopK in place of TopkExt", kernel("TopK", K, sorted=True), _picked(_largest), _largest,
    ),
    _ordered("topk.ext", "router: TopkExt, moe/router.py", kernel("TopkExt", K), _picked(_largest), _largest),
)  # fmt: skip


RMS_EPS, LAYER_EPS = 1e-6, 1e-5
NORMALISED_ROWS = ((24, 64), (16, 2500), (16, 12000))


def softmax(x: Array) -> Array:
    """Return the softmax over the last axis, with the maximum subtracted first so that no exponential overflows."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_grad(x: Array, dout: Array) -> Array:
    """Return the gradient of the softmax y for an incoming gradient d: y (d - sum(d y))."""
    y = softmax(x)
    return y * (dout - (dout * y).sum(-1, keepdims=True))


def log_softmax(x: Array) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _rms(x):
    return 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + RMS_EPS)


def rms_norm(x: Array, gamma: Array) -> Array:
    """Return the RMS norm of x over the last axis: x / sqrt(mean(x^2) + eps) gamma."""
    return x * _rms(x) * gamma


def rms_norm_grad(x: Array, gamma: Array, dout: Array) -> tuple[Array, Array]:
    """Return the gradients of the RMS norm with respect to x and gamma."""
    r = _rms(x)
    unit, d = x * r, dout * gamma
    return r * (d - unit * (d * unit).mean(-1, keepdims=True)), (dout * unit).sum(0)


def _unit(x):
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + LAYER_EPS)
    return centred * r, r


def layer_norm(x: Array, gamma: Array, beta: Array) -> Array:
    """Return the layer norm of x over the last axis: (x - mean) / sqrt(var + eps) gamma + beta."""
    return _unit(x)[0] * gamma + beta


def layer_norm_grad(x: Array, gamma: Array, beta: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of the layer norm with respect to x, gamma and beta."""
    unit, r = _unit(x)
    d = dout * gamma
    dx = r * (d - d.mean(-1, keepdims=True) - unit * (d * unit).mean(-1, keepdims=True))
    return dx, (dout * unit).sum(0), dout.sum(0)


def rms_norm_call(epsilon: float):
    """Return the RMS norm as MindFormers computes it (transformer/norm.py): the statistics in float32."""

    def call(ms, x, gamma):
        y = x.astype(ms.float32)
        mean = ms.ops.auto_generate.MeanExt()(ms.ops.square(y), -1, True)
        return (y * ms.ops.rsqrt(mean + epsilon) * gamma.astype(ms.float32)).astype(x.dtype)

    return call


def _scaled(rng, rows, n):
    # small rows too, so that epsilon matters
    scale = 10.0 ** rng.uniform(-2, 1, (rows, 1))
    x = rng.standard_normal((rows, n), np.float32) * scale.astype(np.float32)
    return x, rng.standard_normal(n, np.float32) + 1


RMS = Spec(
    "rms_norm", "before attention and MLP: formula with fused_norm: False, transformer/norm.py", NORMALISED_ROWS,
    _scaled, golden=rms_norm, grad=rms_norm_grad, wrt=(0, 1), call=rms_norm_call(RMS_EPS), counts=normalised,
    special="row",
    clip=False,  # small rows on purpose, and no division by an element
)  # fmt: skip
SOFTMAX = Spec(
    "softmax", "attention without fusion, softmax routing: Softmax", NORMALISED_ROWS, normal(), golden=softmax,
    grad=lambda x, dout: (softmax_grad(x, dout),), call=kernel("Softmax", axis=-1), counts=normalised, special="row",
)  # fmt: skip
NORMALISE = (
    SOFTMAX,
    variant(
        SOFTMAX, "log_softmax", "the loss: LogSoftmax",
        kernel("LogSoftmax", axis=-1), golden=log_softmax,
        grad=lambda x, dout: (dout - softmax(x) * dout.sum(-1, keepdims=True),),
    ),
    RMS,
    variant(
        RMS, "rms_norm.fused", "the kernel RmsNorm, fused_norm: True",
        lambda ms, x, gamma: ms.ops.rms_norm(x, gamma, RMS_EPS)[0],
    ),
    Spec(
        "layer_norm", "where norm is LayerNorm: P.LayerNorm, transformer/norm.py", NORMALISED_ROWS,
        lambda rng, rows, n: (*_scaled(rng, rows, n), rng.standard_normal(n, np.float32)),
        golden=layer_norm, grad=layer_norm_grad, wrt=(0, 1, 2), clip=False, counts=normalised,
        call=lambda ms, x, gamma, beta: ms.ops.LayerNorm(-1, -1, LAYER_EPS)(x, gamma, beta)[0],
    ),
)  # fmt: skip


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the cross-entropy of each row, [N], for logits [N, V] and labels [N]; the rows are not averaged."""
    return -np.take_along_axis(log_softmax(logits), labels[:, None].astype(np.int64), -1)[:, 0]


def cross_entropy_grad(logits: Array, labels: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of the cross-entropy for an incoming gradient d: (softmax - one-hot) d."""
    grad = softmax(logits)
    grad[np.arange(len(labels)), labels] -= 1
    return (grad * dout[:, None],)


def _formula(ms, logits, labels):
    x = logits.astype(ms.float32)
    shifted = x - ms.ops.stop_gradient(ms.ops.ReduceMax(keep_dims=True)(x, -1))
    total = ms.ops.log(ms.ops.ReduceSum(keep_dims=True)(ms.ops.exp(shifted), -1))
    hot = ms.ops.OneHot()(labels, x.shape[-1], ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32))
    return ms.ops.ReduceSum()((total - shifted) * hot, -1)


def _logits(rng, tokens, vocabulary):
    return 3 * rng.standard_normal((tokens, vocabulary), np.float32), rng.integers(0, vocabulary, tokens, np.int32)


CROSS_ENTROPY = Spec(
    "cross_entropy", "the formula of _LogSoftmax and _NLLLoss in float32, loss_func.py", ((32, 512), (4, 32000)),
    _logits, golden=cross_entropy, grad=cross_entropy_grad, call=_formula, counts=scanned,
)  # fmt: skip
LOSS = (
    CROSS_ENTROPY,
    variant(
        CROSS_ENTROPY,
        "cross_entropy.ops",
        "ops.cross_entropy: the kernels LogSoftmax and NLLLoss",
        function("cross_entropy", reduction="none"),
    ),
)
