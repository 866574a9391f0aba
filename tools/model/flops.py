"""Model FLOPs: what a token's forward and backward multiply, nothing recomputed. Integers, exact.

A weight that multiplies costs 2 FLOPs per token forward and twice that backward. Attention costs, per layer and head,
2 (d_qk + d_v) FLOPs forward for each pair of tokens that attend, and twice that backward; causal attention over a
sequence has seq / 2 such pairs a token.
"""

from __future__ import annotations

from tools.model.architecture import Model
from tools.model.weights import Weight, weights

PASSES = 3  # forward, and backward at twice its cost
FORMULA = "6 x (weights that multiply a token) + 3 x seq x heads x (d_qk + d_v) x (layers + MTP layers)"


def multiplied(model: Model) -> dict[str, int]:
    """Weights that multiply one token, by module: "attention", "mlp", "experts", "router", "mtp" and "head".

    Of the routed experts the top-k. An MTP layer counts as "mtp" but for its prediction, which is another head.
    """
    found = dict.fromkeys(("attention", "mlp", "experts", "router", "mtp", "head"), 0)
    for kind in model.pattern:
        for weight in weights(model, kind):
            found[_module(weight)] += _used(model, weight)
    found["mtp"] = model.mtp * sum(_used(model, weight) for weight in weights(model, "mtp"))
    found["head"] = (1 + model.mtp) * model.vocab * model.hidden
    return found


def linear_flops(model: Model) -> int:
    """FLOPs of one token, forward and backward, without attention itself."""
    return 2 * PASSES * sum(multiplied(model).values())


def pair_flops(model: Model) -> int:
    """FLOPs for each pair of tokens that attend, forward and backward, in all layers."""
    return 2 * PASSES * model.heads * (model.qk_dim + model.v_dim) * (model.layers + model.mtp)


def flops_per_token(model: Model, sequence: int, masked: bool = False) -> int:
    """FLOPs of one token of a sequence, forward and backward.

    Args:
        masked: attention counts the masked half, too, as Megatron-LM's published numbers do.
    """
    seen = sequence if masked else sequence / 2
    if model.window:  # every other layer sees it alone
        seen = (seen + min(seen, model.window)) / 2
    return linear_flops(model) + int(pair_flops(model) * seen)


def _used(model: Model, weight: Weight) -> int:
    if not weight.multiplies:
        return 0
    return weight.size // model.experts * model.top_k if weight.split == "experts" else weight.size


def _module(weight: Weight) -> str:
    if weight.split == "experts":
        return "experts"
    if weight.name in ("router", "shared_gate"):
        return "router"
    return "mlp" if weight.name.startswith(("mlp_", "shared_")) else "attention"
