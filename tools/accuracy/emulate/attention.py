"""Multi-head latent attention on ranks: heads over tp, the context over cp."""

from __future__ import annotations

import numpy as np

from tools.accuracy.emulate.context import Module
from tools.accuracy.emulate.kernels import (
    linear,
    linear_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    softmax_backward,
)
from tools.accuracy.emulate.world import Parts, each, each_pair


class Attention(Module):
    """q_down and kv_down with their norms on a rank's own tokens; heads in the tensor-parallel region.

    Weights: q_down [h, q], q_norm [q], q_up [q, n, nope + rope], kv_down [h, kv + rope], kv_norm [kv],
    kv_up [kv, n, nope + v], out [n, v, h].
    """

    def forward(self, x: Parts) -> Parts:
        """[B, S, h] -> the same."""
        context, sizes, kept = self.context, self.context.sizes, self.kept
        kept["x"] = x
        kept["q_latent"] = each(linear, x, self.weight("q_down"))
        kv = each(linear, x, self.weight("kv_down"))
        kept["kv_latent"] = [part[..., : sizes.kv_rank] for part in kv]
        q_normed = each(lambda x, g: rms_norm(x, g, sizes.norm_eps), kept["q_latent"], self.weight("q_norm"))
        kv_normed = each(lambda x, g: rms_norm(x, g, sizes.norm_eps), kept["kv_latent"], self.weight("kv_norm"))
        self.record("query latent", q_normed, context.tokens(), sizes.hidden)
        self.record("key-value latent", kv_normed, context.tokens(), sizes.hidden)
        kept["q_normed"] = context.enter(q_normed, f"{self.name}.q_up.in")
        kept["kv_normed"] = context.enter(kv_normed, f"{self.name}.kv_up.in")
        key_rope = context.enter([part[..., sizes.kv_rank :] for part in kv], f"{self.name}.key_rope.in")
        query, key, value = self._heads(key_rope)
        merged = self._core(query, key, value)
        kept["merged"] = merged
        flat = [part.reshape(*part.shape[:2], -1) for part in merged]
        out = context.leave(
            each(linear, flat, [w.reshape(-1, sizes.hidden) for w in self.weight("out")]), f"{self.name}.out"
        )
        self.record("out", out, context.tokens(), sizes.heads * sizes.value)
        return out

    def _positions(self, length: int) -> Parts:
        """Position of each token of a rank's part of the sequence."""
        cp, tp = self.context.strategy.cp, self.context.strategy.tp
        ranks = range(self.context.world.ranks)
        return [np.arange(length) + self.context.kernels.first_position(rank // tp % cp, length) for rank in ranks]

    def _heads(self, key_rope: Parts) -> tuple[Parts, Parts, Parts]:
        """Query [B, S, n, nope + rope], key (the same), value [B, S, n, v] of each rank's heads."""
        context, sizes = self.context, self.context.sizes
        query = each(linear, self.kept["q_normed"], self.weight("q_up"))
        key_value = each(linear, self.kept["kv_normed"], self.weight("kv_up"))
        self.kept["positions"] = positions = self._positions(query[0].shape[1])
        nope = sizes.nope
        query = each(
            lambda q, at: np.concatenate([q[..., :nope], rope(q[..., nope:], at, sizes.theta)], -1), query, positions
        )
        turned = each(lambda k, at: rope(k[:, :, None], at, sizes.theta), key_rope, positions)
        self.record("rope of keys", turned, context.inside(), 1)
        self.record("query", query, context.inside(tp=2), sizes.q_rank)
        key = each(lambda kv, k: np.concatenate([kv[..., :nope], _to_heads(k, kv)], -1), key_value, turned)
        self.record("key", key, context.inside(tp=2), sizes.kv_rank)
        return query, key, [part[..., nope:] for part in key_value]

    def _core(self, query: Parts, key: Parts, value: Parts) -> Parts:
        """softmax(Q K^T) V with the keys and values of the whole context, [B, S, n, v]."""
        context, kept = self.context, self.kept
        kept["query"] = query
        kept["key"] = key = context.world.all_gather(key, "cp", 1, f"{self.name}.key")
        kept["value"] = value = context.world.all_gather(value, "cp", 1, f"{self.name}.value")
        weights = []
        for rank, (q, k, at) in enumerate(zip(query, key, kept["positions"], strict=True)):
            # where a token stands in the sequence is the cp rank's place, whatever its rotary angles are
            first = rank // context.strategy.tp % context.strategy.cp * q.shape[1]
            hidden = np.arange(k.shape[1])[None] > (first + np.arange(len(at)))[:, None]
            scores = np.where(hidden, -np.inf, _scores(q, k) * self.scale())
            weights.append(context.kernels.softmax(rank, scores))
        kept["weights"] = weights
        self.record("softmax", weights, context.inside(cp=2, tp=1), context.sizes.length)
        out = each(lambda p, v: (p @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), weights, value)
        self.record("context of heads", out, context.inside(tp=2), context.sizes.length)
        return out

    def scale(self) -> float:
        """Of the scores."""
        return float((self.context.sizes.nope + self.context.sizes.rope) ** -0.5)

    def backward(self, d_out: Parts) -> Parts:
        """Gradient of the input."""
        context, sizes, kept = self.context, self.context.sizes, self.kept
        tokens = sizes.batch * sizes.length
        d_out = context.leave_backward(d_out, f"{self.name}.out")
        d_merged, d_weight = each_pair(_out_backward, kept["merged"], self.weight("out"), d_out)
        self.give("out", d_weight, tokens)
        d_query, d_key, d_value = self._core_backward(d_merged)
        d_q_normed, d_kv_normed, d_key_rope = self._heads_backward(d_query, d_key, d_value)
        d_q = self._norm_backward("q", context.enter_backward(d_q_normed, f"{self.name}.q_up.in"))
        d_kv = self._norm_backward("kv", context.enter_backward(d_kv_normed, f"{self.name}.kv_up.in"))
        d_key_rope = context.enter_backward(d_key_rope, f"{self.name}.key_rope.in")
        d_kv = each(lambda latent, turned: np.concatenate([latent, turned], -1), d_kv, d_key_rope)
        d_x, d_weight = each_pair(linear_backward, kept["x"], self.weight("q_down"), d_q)
        self.give("q_down", d_weight, tokens)
        d_more, d_weight = each_pair(linear_backward, kept["x"], self.weight("kv_down"), d_kv)
        self.give("kv_down", d_weight, tokens)
        d_x = each(np.add, d_x, d_more)
        self.record("gradient of the input", d_x, context.tokens(), sizes.q_rank + sizes.kv_rank + sizes.rope)
        return d_x

    def _core_backward(self, d_merged: Parts) -> tuple[Parts, Parts, Parts]:
        """Gradients of each rank's own query, key and value."""
        context, kept = self.context, self.kept
        d_weights = each(lambda d, v: d.transpose(0, 2, 1, 3) @ v.transpose(0, 2, 3, 1), d_merged, kept["value"])
        d_value = each(
            lambda p, d: (p.swapaxes(2, 3) @ d.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), kept["weights"], d_merged
        )
        d_scores = each(lambda p, d: softmax_backward(p, d) * self.scale(), kept["weights"], d_weights)
        self.record("gradient of scores", d_scores, context.inside(cp=2, tp=1), context.sizes.length)
        d_query = each(lambda d, k: (d @ k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), d_scores, kept["key"])
        d_key = each(
            lambda d, q: (d.swapaxes(2, 3) @ q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), d_scores, kept["query"]
        )
        d_key = context.world.reduce_scatter(d_key, "cp", 1, f"{self.name}.key.backward")
        d_value = context.world.reduce_scatter(d_value, "cp", 1, f"{self.name}.value.backward")
        for name, parts in (("query", d_query), ("key", d_key), ("value", d_value)):
            self.record(f"gradient of {name}", parts, context.inside(tp=2), context.sizes.length)
        return d_query, d_key, d_value

    def _heads_backward(self, d_query: Parts, d_key: Parts, d_value: Parts) -> tuple[Parts, Parts, Parts]:
        """Gradients of the latents inside the region (partial over tp), and of the unturned shared key."""
        sizes, kept = self.context.sizes, self.kept
        nope, tokens = sizes.nope, sizes.batch * sizes.length
        d_query = each(
            lambda d, at: np.concatenate([d[..., :nope], rope(d[..., nope:], at, sizes.theta, -1)], -1),
            d_query,
            kept["positions"],
        )
        d_q_normed, d_weight = each_pair(linear_backward, kept["q_normed"], self.weight("q_up"), d_query)
        self.give("q_up", d_weight, tokens)
        d_key_value = each(lambda dk, dv: np.concatenate([dk[..., :nope], dv], -1), d_key, d_value)
        d_kv_normed, d_weight = each_pair(linear_backward, kept["kv_normed"], self.weight("kv_up"), d_key_value)
        self.give("kv_up", d_weight, tokens)
        shared = [d[..., nope:].sum(2, keepdims=True) for d in d_key]
        d_key_rope = each(lambda d, at: rope(d, at, sizes.theta, -1)[:, :, 0], shared, kept["positions"])
        return d_q_normed, d_kv_normed, d_key_rope

    def _norm_backward(self, which: str, d_normed: Parts) -> Parts:
        """Gradient of a latent, through its norm."""
        sizes = self.context.sizes
        self.record(f"gradient of {which} latent", d_normed, self.context.tokens(), sizes.heads * sizes.nope)
        d_latent, d_weight = each_pair(
            lambda x, g, d: rms_norm_backward(x, g, sizes.norm_eps, d),
            self.kept[f"{which}_latent"],
            self.weight(f"{which}_norm"),
            d_normed,
        )
        self.give(f"{which}_norm", d_weight, sizes.batch * sizes.length)
        return d_latent


def _to_heads(shared, like):
    """The one rotary key [B, S, 1, r] for each head of `like` [B, S, n, ...]."""
    return np.broadcast_to(shared, (*like.shape[:3], shared.shape[-1]))


def _scores(query, key):
    """[B, S, n, d] x [B, T, n, d] -> [B, n, S, T]."""
    return query.transpose(0, 2, 1, 3) @ key.transpose(0, 2, 3, 1)


def _out_backward(merged, weight, d_out):
    """Gradients of merged heads [B, S, n, v] and of out [n, v, h]."""
    flat = merged.reshape(*merged.shape[:2], -1)
    d_flat, d_weight = linear_backward(flat, weight.reshape(flat.shape[-1], -1), d_out)
    return d_flat.reshape(merged.shape), d_weight.reshape(weight.shape)
