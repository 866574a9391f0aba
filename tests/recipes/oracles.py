"""This module holds what the recipes are compared with: numbers typed from the papers, and a parameter count from
first principles.
"""

import functools
from pathlib import Path

from tools.recipe.load import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
BASE = RECIPES / "base"

# TeleChat3-MoE report (arXiv 2512.24157), Table 1 and its caption
TELECHAT3_MOE = {
    # folder: layers, hidden, heads, routed experts, expert intermediate, experts per token, shared experts
    "telechat3_105b": (45, 2560, 32, 192, 1536, 4, 1),
    "telechat3_438b": (54, 5120, 128, 256, 2048, 8, 1),
    "telechat3_1119b": (61, 5120, 128, 384, 3072, 8, 1),
}
TELECHAT3_MOE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_shared_experts",
)
VOCABULARY = 131072

# TeleChat2 report (arXiv 2507.18013), Table 1: layers, hidden, FFN, heads, key-value heads
TELECHAT2 = {
    "telechat2_35b": (64, 6144, 20480, 48, 48),
    "telechat2_115b": (96, 8192, 40960, 64, 8),
}
TELECHAT2_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
# the same report, long-context annealing: RoPE base by recipe
ROPE_BASES = {"context_32k.yaml": 1e6, "context_128k.yaml": 8e6, "context_256k.yaml": 4e7}

FAMILY_STAGES = {
    "pretrain_4k.yaml": 4096,
    "context_32k.yaml": 32768,
    "context_128k.yaml": 131072,
    "finetune_4k.yaml": 4096,
}
FAMILY = [f"{folder}/{file}" for folder in TELECHAT3_MOE for file in FAMILY_STAGES]


def all_recipes() -> list[str]:
    """Every recipe, as `folder/file.yaml`: what lies in recipes/ and is neither a fragment nor a card."""
    found = [path for path in RECIPES.glob("*/*.yaml") if path.parent != BASE and path.name != "card.yaml"]
    return sorted(str(path.relative_to(RECIPES)) for path in found)


@functools.cache
def load(name: str) -> Recipe:
    """The flat recipe `folder/file.yaml`, read once: not to be changed."""
    return load_recipe(RECIPES / name)


def count_connections(recipe: dict) -> int:
    """Trainable parameters of several residual streams (docs/hyper-connections.md), from first principles."""
    streams = recipe.get("plugins", {}).get("hyper_connections", {}).get("streams", 1)
    model = recipe["model"]["model_config"]
    gates = streams + streams + streams * streams  # into the sublayer, out of it, and among the streams
    one = gates * streams * model["hidden_size"] + gates + 3  # weights, biases, scales
    return 2 * model["num_hidden_layers"] * one if streams > 1 else 0  # before attention and FFN


def count_parameters(model: dict) -> int:
    """Trainable parameters of a `model_config`, from first principles: no MindFormers, no sharding."""
    hidden = model["hidden_size"]
    layers = model["num_hidden_layers"]
    experts = model.get("n_routed_experts", 0)
    dense_layers = model["first_k_dense_replace"] if experts else layers
    attention = _latent_attention(model) if model.get("multi_latent_attention") else _grouped_attention(model)
    norms = 2 * hidden
    biases = 2 * hidden if model.get("add_bias_linear") else 0  # of outputs only: TeleChat2's
    dense = biases + attention + norms + _feed_forward(hidden, model["intermediate_size"])
    total = 2 * model["vocab_size"] * hidden + hidden  # embedding, output head, last norm
    total += dense_layers * dense
    if experts:
        routed = experts * _feed_forward(hidden, model["moe_intermediate_size"])
        shared = _feed_forward(hidden, model["moe_shared_expert_intermediate_size"])
        sparse = attention + norms + routed + shared + experts * hidden  # the last term is the router
        total += (layers - dense_layers) * sparse
        # an MTP layer shares embedding and head: two input norms, the projection of both, a layer, a norm
        total += model["num_nextn_predict_layers"] * (2 * hidden + 2 * hidden * hidden + sparse + hidden)
    return total


def _feed_forward(hidden: int, inner: int) -> int:
    """SwiGLU: gate, up and down."""
    return 3 * hidden * inner


def _grouped_attention(model: dict) -> int:
    """Grouped-query attention without biases: q and output, k and v."""
    inner = model["num_attention_heads"] * model["head_dim"]
    key_value = model["num_key_value_heads"] * model["head_dim"]
    return 2 * model["hidden_size"] * (inner + key_value)


def _latent_attention(model: dict) -> int:
    """Multi-latent attention: low-rank q and kv with a norm each, one rotary key for all heads, output."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    rank_q, rank_kv = model["q_lora_rank"], model["kv_lora_rank"]
    nope, rope, value = model["qk_nope_head_dim"], model["qk_rope_head_dim"], model["v_head_dim"]
    query = hidden * rank_q + rank_q + rank_q * heads * (nope + rope)
    key_value = hidden * (rank_kv + rope) + rank_kv + rank_kv * heads * (nope + value)
    return query + key_value + heads * value * hidden
