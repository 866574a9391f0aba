"""This module computes a model's forward pass in NumPy and float64, as a slow reference for MindFormers and for Hugging
Face, without cache, fusion or batching of experts. Outputs have the same names as in the records of trainings. The
equations are those of the DeepSeek-V3 technical report, section 2.1; YaRN is that of Peng et al., section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from plugins.hyper_connections import reference as hyper_connections
from plugins.hyper_connections.plan import WEIGHTS as HYPER_WEIGHTS
from tools.weights.hugging_face_names import Arrays
from tools.weights.hugging_face_sizes import Sizes

TIE = 1e-5  # of two scores; float32 has errors of 1e-7 to 1e-6 in them


class Forward:
    """A `Forward` is the forward pass of a model with multi-head latent attention (MLA), from Hugging Face's weights.
    Tests override its methods to insert faults.
    """

    def __init__(self, sizes: Sizes, weights: Arrays):
        self.sizes, self.hf = sizes, sizes.hf
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.trace: Arrays = {}
        self.ties: dict[str, int] = {}  # router -> tokens whose choice of experts rounding may decide

    def run(self, ids: np.ndarray) -> Arrays:
        """Return the output of each module by name for token ids [B, S]; `logits` are [B, S, v]."""
        self.trace = {}
        hidden = self._note("embedding", self.weights["model.embed_tokens.weight"][ids])
        if self.sizes.streams > 1:
            hidden = np.repeat(hidden[:, :, None], self.sizes.streams, axis=2)
        for layer in range(self.sizes.layers):
            hidden = self.layer(layer, hidden)
        if self.sizes.streams > 1:
            hidden = hidden.mean(axis=2)
        hidden = self._note("final_norm", self.norm("model.norm", hidden))
        self._note("logits", self.linear("lm_head", hidden))
        for number in range(self.sizes.layers, self.sizes.layers + self.sizes.mtp_layers):
            ids = np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], axis=1)
            hidden = self.mtp(number, ids, hidden)
        return self.trace

    def layer(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Return a layer's output for an input [B, S, h], or [B, S, n, h] of n residual streams."""
        name, where = f"model.layers.{layer}", f"layers.{layer}"
        if hidden.ndim == 4:
            hidden = self.connected(f"{name}.attn_hc", hidden, lambda read: self.read(layer, read))
            return self.connected(f"{name}.ffn_hc", hidden, lambda read: self.transform(layer, read))
        hidden = hidden + self.read(layer, hidden)
        return self._note(f"{where}.output", hidden + self.transform(layer, hidden))

    def read(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return the output of the attention sublayer (norm, then attention) for x [B, S, h]."""
        where = f"layers.{layer}"
        normed = self._note(f"{where}.input_norm", self.norm(f"model.{where}.input_layernorm", x))
        return self._note(f"{where}.attention", self.attention(layer, normed))

    def transform(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return the output of the feed-forward sublayer (norm, then MLP or experts) for x [B, S, h]."""
        where = f"layers.{layer}"
        normed = self._note(f"{where}.post_norm", self.norm(f"model.{where}.post_attention_layernorm", x))
        mlp = self.experts if self.sizes.is_moe(layer) else self.dense
        return self._note(f"{where}.mlp", mlp(layer, normed))

    def connected(self, name: str, x: np.ndarray, sublayer: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the streams [B, S, n, h] after `sublayer` ([B, S, h]), connected by the hyper-connections `name`."""
        weights = hyper_connections.Weights(*(self.weights[f"{name}.{each}"] for each in HYPER_WEIGHTS))
        one = lambda read: sublayer(read.reshape(*x.shape[:2], -1)).reshape(read.shape)  # noqa: E731
        iterations, eps = self.hf["hc_sinkhorn_iters"], self.hf["rms_norm_eps"]
        return hyper_connections.forward(x.reshape(-1, *x.shape[2:]), weights, one, iterations, eps).reshape(x.shape)

    def mtp(self, number: int, ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Return the output [B, S, h] of an MTP layer, from the next tokens' ids [B, S] and the output of the layer
        before.
        """
        name = f"model.layers.{number}"
        embedded = self.norm(f"{name}.enorm", self.weights["model.embed_tokens.weight"][ids])
        joined = np.concatenate([embedded, self.norm(f"{name}.hnorm", hidden)], axis=-1)
        return self.norm(f"{name}.shared_head.norm", self.layer(number, self.linear(f"{name}.eh_proj", joined)))

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return multi-head latent attention of x [B, S, h]."""
        name, where, hf = f"model.layers.{layer}.self_attn", f"layers.{layer}", self.hf
        heads, nope, rope = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
        rank, shape, latent = hf["kv_lora_rank"], (*x.shape[:2], heads, -1), self.sizes.latent_eps
        if hf["q_lora_rank"] is None:
            query = self.linear(f"{name}.q_proj", x)
        else:
            down = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x), latent)
            query = self.linear(f"{name}.q_b_proj", down)
        query = query.reshape(shape)
        down = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        up = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", down[..., :rank], latent))
        up = up.reshape(shape)
        rotated = self.rotate(down[..., None, rank:])  # one for all heads
        key = np.concatenate([up[..., :nope], np.broadcast_to(rotated, (*x.shape[:2], heads, rope))], axis=-1)
        query = np.concatenate([query[..., :nope], self.rotate(query[..., nope:])], axis=-1)
        for label, tensor in (("query", query), ("key", key), ("value", up[..., nope:])):
            self._note(f"{where}.{label}", tensor)
        context = self._note(f"{where}.context", self.attend(query, key, up[..., nope:]))
        return self.linear(f"{name}.o_proj", context)

    def attend(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Return causal softmax attention [B, S, N * Dv] of queries and keys [B, S, N, D] and values [B, S, N, Dv]."""
        scores = np.einsum("bqnd,bknd->bnqk", query, key) * self.scale()
        scores = np.where(np.tri(query.shape[1], dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return np.einsum("bnqk,bknd->bqnd", shares, value).reshape(*query.shape[:2], -1)

    def scale(self) -> float:
        """Return the factor of the attention scores: 1 / sqrt(head size), times the square of YaRN's mscale."""
        scale = 1 / math.sqrt(self.hf["qk_nope_head_dim"] + self.hf["qk_rope_head_dim"])
        scaling = self.hf["rope_scaling"]
        if not scaling or scaling["factor"] <= 1:
            return scale
        return scale * (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Return x [B, S, N, D] after RoPE has rotated each pair of neighbouring elements; the result holds the first
        elements of all pairs, followed by the second elements.
        """
        angles = np.outer(self.positions(x.shape[1]), self.frequencies())[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)

    def positions(self, length: int) -> np.ndarray:
        """Return the positions of the tokens in a sample of `length` tokens."""
        return np.arange(length)

    def frequencies(self) -> np.ndarray:
        """Return RoPE's angle of each pair of dimensions, [D / 2], in radians per position, with YaRN."""
        size, base, scaling = self.hf["qk_rope_head_dim"], self.hf["rope_theta"], self.hf["rope_scaling"]
        plain = base ** -(np.arange(0, size, 2) / size)
        if not scaling:
            return plain

        def dimension(turns: float) -> float:
            length = scaling["original_max_position_embeddings"]
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(scaling["beta_fast"])), 0)
        high = min(math.ceil(dimension(scaling["beta_slow"])), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low if high != low else 0.001), 0, 1)
        return plain / scaling["factor"] * ramp + plain * (1 - ramp)

    def dense(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return a dense layer's feed-forward network of x."""
        return self.swiglu(f"model.layers.{layer}.mlp", x)

    def experts(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return for each token the weighted sum of its experts, plus the shared expert."""
        name = f"model.layers.{layer}.mlp"
        weights = self._note(f"layers.{layer}.router", self.route(layer, x))
        shared = self._note(f"layers.{layer}.shared_expert", self.swiglu(f"{name}.shared_experts", x))
        out = np.zeros_like(x)
        for expert in range(self.hf["n_routed_experts"]):
            chosen = weights[..., expert] > 0
            out[chosen] += weights[chosen, expert, None] * self.swiglu(f"{name}.experts.{expert}", x[chosen])
        return out + shared

    def route(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return the weights of the experts [B, S, E]: normalised sigmoid scores of the top k by score plus bias."""
        name, topk, groups = f"model.layers.{layer}.mlp.gate", self.hf["num_experts_per_tok"], self.hf["n_group"]
        scores = 1 / (1 + np.exp(-self.linear(name, x)))
        choice = scores + self.weights[f"{name}.e_score_correction_bias"]
        if groups > 1:
            members = np.sort(choice.reshape(*choice.shape[:2], groups, -1), axis=-1)[..., -2:].sum(-1)
            kept = members >= np.sort(members, axis=-1)[..., -self.hf["topk_group"], None]
            choice = np.where(np.repeat(kept, choice.shape[-1] // groups, axis=-1), choice, 0.0)
        best = np.sort(choice, axis=-1)[..., -topk - 1 :]
        left_out = best[..., 0] if topk < choice.shape[-1] else -np.inf  # the best that is not chosen, if there is one
        self.ties[f"layers.{layer}.router"] = int(np.sum(best[..., -topk] - left_out < TIE))
        chosen = np.zeros_like(scores)
        np.put_along_axis(chosen, np.argsort(-choice, axis=-1, kind="stable")[..., :topk], 1.0, axis=-1)
        weights = scores * chosen
        if self.hf["norm_topk_prob"]:
            weights /= weights.sum(-1, keepdims=True)
        return weights * self.hf["routed_scaling_factor"]

    def swiglu(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return down(silu(gate(x)) * up(x)) with the weights whose names begin with `name`."""
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{name}.up_proj", x))

    def norm(self, name: str, x: np.ndarray, eps: float | None = None) -> np.ndarray:
        """Return the RMSNorm of x over its last axis."""
        eps = self.hf["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return the output x @ weight.T of the linear layer called `name`."""
        return x @ self.weights[f"{name}.weight"].T

    def _note(self, name: str, value: np.ndarray) -> np.ndarray:
        self.trace[name] = value
        return value
