"""What the emulation takes from a recipe: sizes of the model and of a step, and the optimizer's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError

MODEL = "model.model_config"


@dataclass(frozen=True)
class Sizes:
    """A model of the family, and a step of it.

    Args:
        batch, length: samples of a step and their tokens; vocabulary, hidden, heads, layers: of the model;
        dense: how many layers at the front have no experts; nope, rope, value: dimensions of a head; q_rank, kv_rank:
            of the latents; ffn, expert_ffn, shared_ffn: inner sizes; scaling: of the routed experts;
        rate, decay, betas, adam_eps, clip: of AdamW and the clipping; devices_per_node: for dispatch.
    """

    batch: int
    length: int
    vocabulary: int
    hidden: int
    heads: int
    layers: int
    dense: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    ffn: int
    experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    scaling: float = 1.0
    norm_eps: float = 1e-5
    theta: float = 10000.0
    rate: float = 1e-3
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    clip: float = 1.0
    devices_per_node: int = 2


# field -> key of the recipe's model_config
_MODEL_KEYS = {
    "length": "seq_length",
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "dense": "first_k_dense_replace",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "ffn": "intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "scaling": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "theta": "rope_theta",
}


def sizes_of(recipe: Mapping[str, Any], batch: int) -> Sizes:
    """The sizes of a flat mini recipe whose step has `batch` samples.

    Raises:
        RecipeError: a key that the emulation needs is missing.
    """
    model, optimizer = recipe["model"]["model_config"], recipe.get("optimizer") or {}
    found: dict[str, Any] = {}
    for field, key in _MODEL_KEYS.items():
        if model.get(key) is None:
            raise RecipeError(f"{MODEL}.{key}: missing; the emulated layers need it")
        found[field] = model[key]
    schedule = recipe.get("lr_schedule") or {}
    wrapper = recipe.get("runner_wrapper") or {}
    shared = model.get("moe_shared_expert_intermediate_size") or model["moe_intermediate_size"]
    return Sizes(
        **found,
        batch=batch,
        shared_ffn=shared * model.get("n_shared_experts", 1),
        rate=schedule.get("learning_rate", Sizes.rate),
        decay=optimizer.get("weight_decay", 0.0),
        betas=tuple(optimizer.get("betas", Sizes.betas)),
        adam_eps=optimizer.get("eps", Sizes.adam_eps),
        clip=wrapper.get("max_grad_norm", Sizes.clip),
        devices_per_node=model.get("npu_nums_per_device") or Sizes.devices_per_node,
    )
