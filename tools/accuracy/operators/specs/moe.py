"""Routing, permutation to experts and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators import accumulation
from tools.accuracy.operators.accumulation import Counts
from tools.accuracy.operators.spec import Array, Spec
from tools.accuracy.operators.specs.activation import sigmoid

TOP_K, SCALING = 4, 2.5


def _chosen(logits, bias):
    scores = sigmoid(logits)
    index = np.argsort(-(scores + bias), -1, kind="stable")[:, :TOP_K]
    return np.take_along_axis(scores, index, -1), index


def router(logits: Array, bias: Array) -> tuple[Array, Array]:
    """Weights and experts [N, k]: the bias chooses, the normalised scores of the chosen weigh."""
    gate, index = _chosen(logits, bias)
    return SCALING * gate / (gate.sum(-1, keepdims=True) + 1e-20), index


def router_grad(logits: Array, bias: Array, dout: Array) -> tuple[Array]:
    """The gradient of the logits; the choice has none."""
    gate, index = _chosen(logits, bias)
    total = gate.sum(-1, keepdims=True)
    dgate = SCALING * (dout - (dout * gate).sum(-1, keepdims=True) / total) / total
    dlogits = np.zeros_like(logits)
    np.put_along_axis(dlogits, index, dgate * gate * (1 - gate), -1)
    return (dlogits,)


def _router_call(topk):
    def make(ms):
        def call(logits, bias):
            scores = ms.ops.sigmoid(logits)
            _, index = topk(ms)(scores + bias, TOP_K)
            gate = ms.ops.gather_d(scores, 1, index)
            total = ms.ops.ReduceSum(keep_dims=True)(gate, 1)
            return SCALING * (gate / (total + 1e-20)), index

        return call

    return make


def _logits(rng, tokens, experts):
    # spaced, so that no rounding changes which experts are chosen
    spaced = (np.arange(experts) - experts / 2) * 8 / experts
    logits = np.stack([rng.permutation(spaced) for _ in range(tokens)]).astype(np.float32)
    return logits, (1e-3 * rng.standard_normal(experts)).astype(np.float32)


def _routed(rng, tokens, experts):
    return np.argsort(rng.random((tokens, experts)), -1)[:, :TOP_K].astype(np.int32)


def sort_maps(experts: Array) -> tuple[Array, Array]:
    """Experts [N, k] -> (copy at each sorted place, sorted place of each copy), [N k]; stable."""
    order = np.argsort(experts.reshape(-1), kind="stable").astype(np.int32)
    return order, np.argsort(order, kind="stable").astype(np.int32)


def _permute_inputs(rng, tokens, hidden, experts):
    order, _ = sort_maps(_routed(rng, tokens, experts))
    return rng.standard_normal((tokens, hidden), np.float32), order // TOP_K


def permute_grad(tokens: Array, source: Array, dout: Array) -> tuple[Array]:
    """Each token sums its copies' gradients."""
    grad = np.zeros_like(tokens)
    np.add.at(grad, source, dout)
    return (grad,)


def _permute_fused_inputs(rng, tokens, hidden, experts):
    return rng.standard_normal((tokens, hidden), np.float32), _routed(rng, tokens, experts)


def _permute_fused(tokens, experts):
    order, place = sort_maps(experts)
    return tokens[order // TOP_K], place


def _unpermute_inputs(rng, tokens, hidden, experts):
    _, place = sort_maps(_routed(rng, tokens, experts))
    probs = rng.random((tokens, TOP_K), np.float32)
    return rng.standard_normal((tokens * TOP_K, hidden), np.float32), place, probs


def unpermute(rows: Array, place: Array, probs: Array) -> Array:
    """Sorted copies [N k, h], their places [N k], weights [N, k] -> [N, h]."""
    return np.einsum("nkh,nk->nh", rows[place].reshape(*probs.shape, -1), probs)


def unpermute_grad(rows: Array, place: Array, probs: Array, dout: Array) -> tuple[Array, Array]:
    """Gradients of the copies and of the weights."""
    grad = np.empty_like(rows)
    grad[place] = (dout[:, None] * probs[..., None]).reshape(rows.shape)
    return grad, np.einsum("nkh,nh->nk", rows[place].reshape(*probs.shape, -1), dout)


def _unpermute_call(ms):
    def call(rows, place, probs):
        copies = ms.ops.gather(rows, place, 0).reshape(*probs.shape, -1)
        return ms.ops.ReduceSum()(copies * ms.ops.expand_dims(probs, -1), 1)

    return call


ROUTER = Spec(
    name="router_topk",
    source="TopKRouter: sigmoid, bias, TopK, normalised, scaled, in float32; moe/router.py",
    shapes=((256, 64),),
    make=_logits,
    golden=router,
    grad=router_grad,
    clip=False,
    call=_router_call(lambda ms: ms.ops.TopK(sorted=True)),
    counts=lambda logits, bias: Counts((TOP_K, 0), TOP_K),
    dtypes=("float32",),
)
PERMUTE = Spec(
    name="permute",
    source="tokens to experts: rows by sorted index, token_dispatcher.py; Gather for IndexSelect",
    shapes=((128, 64, 16),),
    make=_permute_inputs,
    golden=lambda tokens, source: tokens[source],
    grad=permute_grad,
    call=lambda ms: lambda tokens, source: ms.ops.Gather()(tokens, source, 0),
    counts=accumulation.gathered,
)
UNPERMUTE = Spec(
    name="unpermute",
    source="experts' results to tokens, weighted: token_dispatcher.py; Gather for IndexSelect",
    shapes=((128, 64, 16),),
    make=_unpermute_inputs,
    golden=unpermute,
    grad=unpermute_grad,
    wrt=(0, 2),
    call=_unpermute_call,
    counts=lambda rows, place, probs: Counts(TOP_K, (1, rows.shape[1])),
    roundings=2,
)
MOE = (
    ROUTER,
    replace(
        ROUTER,
        name="router_topk.ext",
        source="the same with the kernel TopkExt",
        call=_router_call(lambda ms: ms.ops.auto_generate.TopkExt()),
    ),
    PERMUTE,
    replace(
        PERMUTE,
        name="permute.fused",
        source="the kernel MoeTokenPermute, moe_permute_fusion; second output as torch_npu documents it",
        make=_permute_fused_inputs,
        golden=_permute_fused,
        grad=lambda tokens, experts, dout: permute_grad(tokens, sort_maps(experts)[0] // TOP_K, dout),
        call=lambda ms: lambda tokens, experts: ms.ops.moe_token_permute(tokens, experts),
        counts=lambda tokens, experts: Counts(0, TOP_K),
    ),
    UNPERMUTE,
    replace(
        UNPERMUTE,
        name="unpermute.fused",
        source="the kernel MoeTokenUnpermute, with its weights",
        call=lambda ms: lambda rows, place, probs: ms.ops.moe_token_unpermute(rows, place, probs),
        roundings=1,
    ),
)
