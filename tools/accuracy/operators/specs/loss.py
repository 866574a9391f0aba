"""The language-model loss."""

from __future__ import annotations

import numpy as np

from tools.accuracy.operators.accumulation import Counts
from tools.accuracy.operators.spec import Array, Spec
from tools.accuracy.operators.specs.normalise import log_softmax, softmax


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
