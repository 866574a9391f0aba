"""The forward passes of models with grouped-query attention, as references of converted weights."""

import math

import numpy as np

from plugins.yarn import reference
from plugins.yarn.plan import ROPE_TYPES, Yarn
from tools.accuracy.reference.forward import Forward
from tools.weights.hugging_face_names import Arrays

PLAIN = {
    "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 1, "beta_fast": 32.0, "beta_slow": 1.0
}  # fmt: skip


class Grouped(Forward):
    """A `Grouped` computes the forward pass of Llama or of the dense TeleChat3, in which several query heads share keys
    and values, and RoPE pairs the first half of a head with its second half.
    """

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return the output [B, S, h] of grouped-query attention for an input [B, S, h]."""
        name, shape = f"model.layers.{layer}.self_attn", (*x.shape[:2], -1, self.hf["head_dim"])
        query, key, value = (self.linear(f"{name}.{each}_proj", x).reshape(shape) for each in "qkv")
        shared = query.shape[2] // key.shape[2]
        key, value = (np.repeat(each, shared, axis=2) for each in (self.rotate(key), value))
        return self.linear(f"{name}.o_proj", self.attend(self.rotate(query), key, value))

    def scale(self) -> float:
        """Return the factor of the scores, 1 / sqrt(head size); YaRN's is applied to cos and sin instead."""
        return 1 / math.sqrt(self.hf["head_dim"])

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Return x [B, S, N, D] with RoPE applied, stretched by YaRN."""
        scaling = self.hf["rope_scaling"] or PLAIN
        kinds = {name: kind for kind, name in ROPE_TYPES.items()}
        lengths = scaling["factor"], scaling["original_max_position_embeddings"]
        yarn = Yarn(*lengths, scaling["beta_fast"], scaling["beta_slow"], 1.0, kinds[scaling["rope_type"]])
        return reference.rotate(x.swapaxes(0, 1), yarn, self.hf["rope_theta"]).swapaxes(0, 1)


class TeleChat2(Grouped):
    """A `TeleChat2` computes the forward pass of Tele-AI's TeleChat2, whose weights have other names: one tensor holds
    keys and values, and some linear layers have biases.

    Written after modeling_telechat2.py, whose attention views `key_value` as [S, B, heads, 2 D] and splits it in the
    middle; within the length of training its RoPE is plain.
    """

    def run(self, ids: np.ndarray) -> Arrays:
        """Return {"logits": the logits [B, S, v]} for token ids [B, S], without other modules' outputs."""
        hidden = self.weights["transformer.word_embeddings.weight"][ids]
        for layer in range(self.sizes.layers):
            name = f"transformer.h.{layer}"
            hidden = hidden + self.attention(layer, self.norm(f"{name}.input_layernorm", hidden))
            hidden = hidden + self.swiglu(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", hidden))
        return {"logits": self.linear("lm_head", self.norm("transformer.ln_f", hidden))}

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return the output [B, S, h] of grouped-query attention for an input [B, S, h]."""
        name, heads = f"transformer.h.{layer}.self_attention", self.hf["num_attention_heads"]
        width = self.hf["hidden_size"] // heads
        query = self.linear(f"{name}.query", x).reshape(*x.shape[:2], heads, width)
        both = self.linear(f"{name}.key_value", x).reshape(*x.shape[:2], -1, 2 * width)
        shared = heads // both.shape[2]
        key, value = (np.repeat(each, shared, axis=2) for each in (self.rotate(both[..., :width]), both[..., width:]))
        return self.linear(f"{name}.dense", self.attend(self.rotate(query), key, value))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return the output x @ weight.T of the linear layer called `name`, plus its bias if the layer has one."""
        return super().linear(name, x) + self.weights.get(f"{name}.bias", 0.0)
