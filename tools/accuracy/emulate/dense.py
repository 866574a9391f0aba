"""Norm, FFN, embedding, head with its loss: forward and backward on ranks."""

from __future__ import annotations

import numpy as np

from plugins.hierarchical_ep.reference import swiglu, swiglu_backward
from tools.accuracy.emulate.context import Module
from tools.accuracy.emulate.kernels import linear, linear_backward, rms_norm, rms_norm_backward
from tools.accuracy.emulate.world import Parts, each, each_pair
from tools.accuracy.merge import SUM, Layout


class Norm(Module):
    """RMSNorm of tokens outside the tensor-parallel region: with sequence parallelism each rank norms its slice."""

    def forward(self, x: Parts) -> Parts:
        """[B, S, h] -> the same."""
        eps = self.context.sizes.norm_eps
        self.kept["x"] = x
        out = each(lambda x, g: rms_norm(x, g, eps), x, self.weight("weight"))
        self.record("out", out, self.context.tokens(), self.context.sizes.hidden)
        return out

    def backward(self, d_out: Parts) -> Parts:
        """Gradient of the input."""
        sizes = self.context.sizes
        d_x, d_weight = each_pair(
            lambda x, g, d: rms_norm_backward(x, g, sizes.norm_eps, d), self.kept["x"], self.weight("weight"), d_out
        )
        self.give("weight", d_weight, sizes.batch * sizes.length)
        self.record("gradient of the input", d_x, self.context.tokens(), sizes.hidden)
        return d_x


class FeedForward(Module):
    """SwiGLU FFN: gate_up [h, 2, F] cut by columns, down [F, h] by rows, one reduction at the end."""

    def forward(self, x: Parts) -> Parts:
        """[B, S, h] -> the same."""
        context = self.context
        self.kept["x"] = x = context.enter(x, f"{self.name}.in")
        self.kept["gate_up"] = gate_up = each(_flat_linear, x, self.weight("gate_up"))
        self.kept["inner"] = inner = each(swiglu, gate_up)
        self.record("inner", inner, context.inside(tp=2), context.sizes.hidden)
        out = context.leave(each(linear, inner, self.weight("down")), f"{self.name}.out")
        self.record("out", out, context.tokens(), self.inner_size())
        return out

    def backward(self, d_out: Parts) -> Parts:
        """Gradient of the input."""
        context, sizes = self.context, self.context.sizes
        d_out = context.leave_backward(d_out, f"{self.name}.out")
        d_inner, d_down = each_pair(linear_backward, self.kept["inner"], self.weight("down"), d_out)
        self.record("gradient of inner", d_inner, context.inside(tp=2), sizes.hidden)
        self.give("down", d_down, sizes.batch * sizes.length)
        d_gate_up = each(swiglu_backward, self.kept["gate_up"], d_inner)
        d_x, d_weight = each_pair(_flat_linear_backward, self.kept["x"], self.weight("gate_up"), d_gate_up)
        self.give("gate_up", d_weight, sizes.batch * sizes.length)
        d_x = context.enter_backward(d_x, f"{self.name}.in")
        self.record("gradient of the input", d_x, context.tokens(), 2 * self.inner_size())
        return d_x

    def inner_size(self) -> int:
        """Columns of the whole FFN."""
        return self.weight("down")[0].shape[0] * self.context.strategy.tp


def _flat_linear(x, weight):
    """x [..., h], weight [h, 2, F] -> [..., 2F], gate first."""
    return linear(x, weight.reshape(len(weight), -1))


def _flat_linear_backward(x, weight, d_out):
    d_x, d_weight = linear_backward(x, weight.reshape(len(weight), -1), d_out)
    return d_x, d_weight.reshape(weight.shape)


class Embedding(Module):
    """The vocabulary cut over tp: each rank looks up the words it owns, and the rest comes from the others."""

    def forward(self, ids: Parts) -> Parts:
        """Token ids [B, S] of each cp rank -> [B, S, h]."""
        context = self.context
        self.kept["ids"] = ids = [local - self._first(rank) for rank, local in enumerate(ids)]
        looked_up = each(_lookup, self.weight("weight"), ids)
        out = context.leave(looked_up, f"{self.name}.out")
        self.record("out", out, context.tokens(), 1)
        return out

    def backward(self, d_out: Parts) -> None:
        """Gradients into the rows of the table."""
        sizes = self.context.sizes
        d_out = self.context.leave_backward(d_out, f"{self.name}.out")
        self.give("weight", each(_add_rows, self.weight("weight"), self.kept["ids"], d_out), sizes.batch * sizes.length)

    def _first(self, rank: int) -> int:
        """The first word that a rank owns."""
        return rank % self.context.strategy.tp * len(self.weight("weight")[rank])


def _lookup(table, ids):
    own = (ids >= 0) & (ids < len(table))
    return np.where(own[..., None], table[np.where(own, ids, 0)], 0)


def _add_rows(table, ids, d_out):
    own = (ids >= 0) & (ids < len(table))
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids[own], d_out[own])
    return gradient


class Head(Module):
    """Logits by columns of the vocabulary, and a cross entropy that needs the whole row of none of them."""

    def forward(self, x: Parts, targets: Parts) -> float:
        """Tokens [B, S, h] and target ids [B, S] of each cp rank -> the micro-batch's share of the mean loss."""
        context, strategy = self.context, self.context.strategy
        self.kept["x"] = x = context.enter(x, f"{self.name}.in")
        logits = each(linear, x, self.weight("weight"))
        self.record("logits", logits, context.inside(tp=2), context.sizes.hidden)
        largest = context.world.all_reduce(
            [part.max(-1) for part in logits], ["tp"], f"{self.name}.max", np.maximum.reduce
        )
        exponents = each(lambda part, top: np.exp(part - top[..., None]), logits, largest)
        sums = context.world.all_reduce([part.sum(-1) for part in exponents], ["tp"], f"{self.name}.sum")
        self.kept["softmax"] = each(lambda part, total: part / total[..., None], exponents, sums)
        self.kept["hot"] = hot = [self._hot(rank, ids, logits[rank]) for rank, ids in enumerate(targets)]
        own = each(lambda part, mask: (part * mask).sum(-1), logits, hot)
        wanted = context.world.all_reduce(own, ["tp"], f"{self.name}.target")
        losses = each(lambda total, top, target: np.log(total) + top - target, sums, largest, wanted)
        self.record("loss of each token", losses, context.inside(), context.sizes.vocabulary)
        divisor = context.kernels.loss_divisor(strategy.micro, strategy.dp, strategy.cp, strategy.tp)
        means = [np.asarray(local.mean() / divisor) for local in losses]
        loss = context.world.all_reduce(means, list(context.world.mesh), f"{self.name}.mean")
        self.record("loss", loss, Layout(context.mesh, {"micro": SUM}), _tokens(context.sizes))
        return float(loss[0])

    def _hot(self, rank, ids, logits):
        """1 where a column of this rank is the target."""
        first = rank % self.context.strategy.tp * logits.shape[-1]
        return (ids[..., None] == first + np.arange(logits.shape[-1])).astype(logits.dtype)

    def backward(self) -> Parts:
        """Gradient of the tokens."""
        context, sizes, strategy = self.context, self.context.sizes, self.context.strategy
        divisor = context.kernels.seed_divisor(strategy.micro, strategy.dp, strategy.cp, strategy.tp)
        # the adjoint of the sums over tp in the loss: every rank of the group sends its share of the seed
        seeds = context.world.all_reduce(
            [np.asarray(1 / divisor)] * context.world.ranks, ["tp"], f"{self.name}.sum.backward"
        )
        d_logits = each(
            lambda p, hot, seed: (p - hot) * seed / p[..., 0].size, self.kept["softmax"], self.kept["hot"], seeds
        )
        self.record("gradient of logits", d_logits, context.inside(tp=2), sizes.vocabulary)
        d_x, d_weight = each_pair(linear_backward, self.kept["x"], self.weight("weight"), d_logits)
        self.give("weight", d_weight, _tokens(sizes))
        d_x = context.enter_backward(d_x, f"{self.name}.in")
        self.record("gradient of the input", d_x, context.tokens(), sizes.vocabulary)
        return d_x


def _tokens(sizes) -> int:
    return sizes.batch * sizes.length
