"""What the emulation takes from a recipe: sizes of the model and of a step, and the optimizer's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.model.architecture import DENSE, model_of
from tools.model.weights import parameters
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

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


def sizes_of(recipe: Mapping[str, Any], batch: int) -> Sizes:
    """The sizes of a flat mini recipe whose step has `batch` samples.

    Raises:
        RecipeError: it makes no model, or one of another family than the emulation's.
    """
    fields = convert(View(Recipe(recipe)), load_schema()).fields
    try:
        model = model_of(fields)
        parameters(model)  # wants every size
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{MODEL}: its sizes make no model ({error}); `tc3 check` says more") from None
    dense, latent = model.pattern.count(DENSE), model.latent
    if latent is None or not latent.query_rank or not model.shared_ffn or DENSE in model.pattern[dense:]:
        raise RecipeError(
            f"{MODEL}: the emulated layers have multi-latent attention with q_lora_rank, and experts with a shared one "
            "behind dense layers; this model has not"
        )
    schedule, optimizer = recipe.get("lr_schedule") or {}, recipe.get("optimizer") or {}
    wrapper = recipe.get("runner_wrapper") or {}
    return Sizes(
        batch=batch,
        length=fields["seq_length"],
        vocabulary=model.vocab,
        hidden=model.hidden,
        heads=model.heads,
        layers=model.layers,
        dense=dense,
        q_rank=latent.query_rank,
        kv_rank=latent.kv_rank,
        nope=latent.nope,
        rope=latent.rope,
        value=latent.value,
        ffn=model.ffn,
        experts=model.experts,
        top_k=model.top_k,
        expert_ffn=model.expert_ffn,
        shared_ffn=model.shared_ffn,
        scaling=fields["moe_router_topk_scaling_factor"],
        norm_eps=fields["layernorm_epsilon"],
        theta=fields["rotary_base"],
        rate=schedule.get("learning_rate", Sizes.rate),
        decay=optimizer.get("weight_decay", 0.0),
        betas=tuple(optimizer.get("betas", Sizes.betas)),
        adam_eps=optimizer.get("eps", Sizes.adam_eps),
        clip=wrapper.get("max_grad_norm", Sizes.clip),
        devices_per_node=fields.get("npu_nums_per_device") or Sizes.devices_per_node,
    )
