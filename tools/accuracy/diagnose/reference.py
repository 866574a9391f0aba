"""This module computes, independently of MindFormers, the settings with which the model and the optimizer of a run must
be built, and the outputs of a recorded step by a forward pass in NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zipfile import BadZipFile

import numpy as np

from plugins.errors import TC3Error
from plugins.lora import plan as lora
from plugins.step_record.plan import BIAS, START
from tools.accuracy.align.sides import reference_sizes
from tools.accuracy.diagnose.evidence import Side
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.run import below
from tools.recipe.load import Recipe
from tools.recipe.view import MODEL, View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.hugging_face_names import Arrays, table, to_hugging_face

BIAS_RATE = "moe_router_bias_update_rate"
# fields of MindFormers' TransformerConfig that decide what is computed, whatever the layout
FIELDS = (
    "vocab_size", "hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "num_layers", "num_attention_heads",
    "num_moe_experts", "moe_router_topk", "moe_router_topk_scaling_factor", "norm_topk_prob", "first_k_dense_replace",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "layernorm_epsilon",
    "rotary_base", "rotary_scaling_factor", "mscale", "mscale_all_dim", "mtp_num_layers", "mtp_loss_scaling_factor",
    "moe_aux_loss_coeff", "moe_router_bias_update_rate", "moe_router_score_function", "moe_router_enable_expert_bias",
)  # fmt: skip


def built_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of model and optimizer that a correct run of this recipe records."""
    optimizer: Mapping[str, Any] = recipe.get("optimizer") or {}
    found: dict[str, Any] = {}
    if betas := optimizer.get("betas"):
        found |= {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}
    if eps := optimizer.get("eps"):
        found["optimizer.eps"] = float(eps)
    try:
        fields = convert(View(recipe), load_schema()).fields
    except (TC3Error, KeyError):  # of a model that the schema does not know: then the law says nothing of it
        return found
    fields = {**fields, BIAS_RATE: bias_rate_of(recipe)}
    return found | {f"model.{name}": fields[name] for name in FIELDS if fields.get(name) is not None}


def bias_rate_of(recipe: Recipe) -> float | None:
    """Return the rate of the routers' biases, which is 0 if only LoRA adapters train (plugins.lora)."""
    rate = View(recipe).get((*MODEL, BIAS_RATE))
    return 0.0 if rate and _adapters(recipe) else rate


def _adapters(recipe: Recipe) -> lora.Settings | None:
    written = View(recipe).get(tuple(lora.KEY.split(".")))
    return lora.Settings.look(written)[0] if isinstance(written, Mapping) else None


def _with_adapters(kept: Arrays, recipe: Recipe) -> Arrays:
    """Return the weights by name, with each adapter added to the weight of its layer."""
    settings = _adapters(recipe)
    if settings is None:
        return kept
    weights = dict(kept)
    for name in kept:
        layer = name.removesuffix(lora.WEIGHT)
        if layer + lora.A in kept and layer + lora.B in kept:
            weights[name] = lora.merged(kept[name], kept[layer + lora.A], kept[layer + lora.B], settings.scale)
    return weights


def outputs_of(side: Side, kept_in: str = START) -> tuple[int, Arrays, dict[str, int], str]:
    """Return four values: the number of the step, each module's output (computed in NumPy), for each router the number
    of tokens with tied scores, and "". If the outputs cannot be computed, return (0, {}, {}, reason). The file
    `kept_in` holds the weights and the batch of the first recorded step since the last resume or, if the file is `END`,
    of the last step.
    """
    file = side.folder / kept_in
    if not file.is_file():
        return 0, {}, {}, f"{file} does not exist: weights of one CPU process are kept there if they are small"
    try:
        sizes = reference_sizes(side.recipe)
    except TC3Error as error:
        return 0, {}, {}, str(error)
    try:
        with np.load(file) as stored:
            kept = dict(stored)
        step, ids = int(kept["step"]), kept["batch/input_ids"]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        return 0, {}, {}, f"{file} is damaged ({error}); train again into a new folder"
    entries = {entry.mindformers: entry for entry in table(sizes)}
    held = _with_adapters(below(kept, "weight/"), side.recipe)
    weights = {name: value for name, value in held.items() if name in entries}
    for name, entry in entries.items():
        if name.endswith(BIAS):  # of a model whose routers have none, biases of 0 choose the same experts
            weights.setdefault(name, np.zeros(entry.shape, np.float32))
    try:
        forward = Forward(sizes, to_hugging_face(weights, sizes))
    except TC3Error as error:
        return 0, {}, {}, str(error)
    return step, forward.run(ids), forward.ties, ""
