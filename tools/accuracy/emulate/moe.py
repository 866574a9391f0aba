"""The mixture of experts on ranks: router, exchange by the dispatch plan of `plugins.hierarchical_ep`, experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plugins.ep_overlap.plan import chunk_slices
from plugins.hierarchical_ep.plan import Plan, execute, execute_backward, make_plan
from plugins.hierarchical_ep.reference import expert, expert_backward
from plugins.hierarchical_ep.topology import of_mesh
from tools.accuracy.emulate.context import Context, Module
from tools.accuracy.emulate.kernels import linear, linear_backward
from tools.accuracy.emulate.world import Parts, each, each_pair
from tools.accuracy.merge import SUM, Rows


class Router(Module):
    """Sigmoid scores, the best k by score plus bias, probabilities normalised over them. Weights: weight [h, E]."""

    def forward(self, x: Parts) -> tuple[Parts, Parts]:
        """Tokens [B, S, h] -> probabilities and experts, both [B, S, k]."""
        context, sizes = self.context, self.context.sizes
        self.kept["x"] = x
        self.kept["scores"] = scores = each(lambda a, w: 1 / (1 + np.exp(-linear(a, w))), x, self.weight("weight"))
        chosen = each(lambda s, b: np.argsort(-(s + b), -1, kind="stable")[..., : sizes.top_k], scores, self.bias())
        self.kept["chosen"] = chosen
        self.record("chosen experts", chosen, context.tokens(), 0)
        picked = each(lambda s, c: np.take_along_axis(s, c, -1), scores, chosen)
        probs = each(lambda p: sizes.scaling * p / p.sum(-1, keepdims=True), picked)
        self.record("probabilities", probs, context.tokens(), sizes.hidden)
        return probs, chosen

    def bias(self) -> Parts:
        """The aux-free bias [E] on each rank; it chooses and does not weigh, so it has no gradient."""
        return self.weight("bias")

    def backward(self, d_probs: Parts) -> Parts:
        """Gradient of the tokens."""
        context, sizes = self.context, self.context.sizes
        d_logits = each(self._d_logits, self.kept["scores"], self.kept["chosen"], d_probs)
        d_x, d_weight = each_pair(linear_backward, self.kept["x"], self.weight("weight"), d_logits)
        self.give("weight", d_weight, sizes.batch * sizes.length)
        self.record("gradient of the input", d_x, context.tokens(), sizes.experts)
        return d_x

    def _d_logits(self, scores, chosen, d_probs):
        picked = np.take_along_axis(scores, chosen, -1)
        total = picked.sum(-1, keepdims=True)
        d_picked = self.context.sizes.scaling * (d_probs / total - (d_probs * picked).sum(-1, keepdims=True) / total**2)
        d_scores = np.zeros_like(scores)
        np.put_along_axis(d_scores, chosen, d_picked, -1)
        return d_scores * scores * (1 - scores)


class Experts(Module):
    """Routed experts over expert-parallel groups. Weights: w1 [E, h, 2, H] (gate, up), w2 [E, H, h].

    Without sequence parallelism the ranks of a tensor-parallel group have the same tokens and each a part of every
    expert's columns; with it each has tokens of its own and whole experts.
    """

    def __init__(self, context: Context, name: str, stage: int):
        super().__init__(context, name, stage)
        sizes, mesh = context.sizes, context.strategy.expert_mesh
        self.topology = of_mesh(mesh["ep"], max(1, min(mesh["ep"], sizes.devices_per_node)), sizes.experts)
        self.groups = context.world.on(mesh).groups(["ep"])
        self.split = mesh["tp"] > 1

    def forward(self, x: Parts, probs: Parts, chosen: Parts) -> Parts:
        """Tokens [B, S, h], probabilities and experts [B, S, k] -> [B, S, h]."""
        context, sizes = self.context, self.context.sizes
        local = np.arange(sizes.batch * sizes.length).reshape(sizes.batch, sizes.length)
        self.kept.update(ids=context.of_turn(context.tokens().pieces(local)), shape=x[0].shape)
        self.kept["x"] = [part.reshape(-1, sizes.hidden) for part in x]
        self.kept["probs"] = [part.reshape(-1, sizes.top_k) for part in probs]
        self.kept["chosen"] = chosen = [part.reshape(-1, sizes.top_k) for part in chosen]
        # whatever is wrong with the weights is wrong in both directions
        self.kept["w1"] = [context.kernels.expert_weights(r, w) for r, w in enumerate(self.weight("w1"))]
        self.kept["w2"] = [context.kernels.expert_weights(r, w) for r, w in enumerate(self.weight("w2"))]
        self._plan(chosen)
        weights = [context.kernels.combine_probs(rank, part) for rank, part in enumerate(self.kept["probs"])]
        self.kept["weights"] = weights
        out = [np.zeros_like(part) for part in self.kept["x"]]
        inputs, outputs = self._empty(), self._empty()
        for group, tokens, plan in self.kept["plans"]:

            def compute(index, rows, ends, group=group):
                inputs[group[index]].append(rows)
                done = self._on_experts(group[index], rows, ends)
                outputs[group[index]].append(done)
                return done

            x_parts, probs_parts = (
                [values[rank][at] for rank, at in zip(group, tokens, strict=True)]
                for values in (self.kept["x"], weights)
            )
            done = execute(plan, x_parts, probs_parts, compute)
            for rank, at, rows in zip(group, tokens, done, strict=True):
                out[rank][at] = rows
        self._record_rows("input of each expert", inputs, sizes.hidden, False)
        self._record_rows("output of each expert", outputs, sizes.expert_ffn, self.split)
        return self._leave([part.reshape(self.kept["shape"]) for part in out])

    def backward(self, d_out: Parts) -> tuple[Parts, Parts]:
        """Gradients of tokens [B, S, h] and probabilities [B, S, k]."""
        sizes, kept = self.context.sizes, self.kept
        flat = [part.reshape(-1, sizes.hidden) for part in d_out]
        d_x, d_probs = [np.zeros_like(part) for part in kept["x"]], [np.zeros_like(part) for part in kept["probs"]]
        d_w1, d_w2 = [np.zeros_like(w) for w in kept["w1"]], [np.zeros_like(w) for w in kept["w2"]]
        gradients = self._empty()
        for group, tokens, plan in kept["plans"]:

            def forward(index, rows, ends, group=group):
                return self._on_experts(group[index], rows, ends)

            def vjp(index, rows, ends, d_rows, group=group):
                done = self._experts_backward(group[index], rows, ends, d_rows, d_w1, d_w2)
                gradients[group[index]].append(done)
                return done

            x, weights, d = (
                [values[r][at] for r, at in zip(group, tokens, strict=True)]
                for values in (kept["x"], kept["weights"], flat)
            )
            done = execute_backward(plan, x, weights, forward, vjp, d)
            for rank, at, d_tokens, d_weights in zip(group, tokens, *done, strict=True):
                d_x[rank][at], d_probs[rank][at] = d_tokens, d_weights
        self._record_rows("gradient of each expert's input", gradients, 2 * sizes.expert_ffn, self.split)
        tokens = sizes.batch * sizes.length
        self.give("w1", d_w1, tokens)
        self.give("w2", d_w2, tokens)
        shape = kept["shape"]
        return (
            self._enter_backward([part.reshape(shape) for part in d_x], "gradient of the input"),
            self._enter_backward([part.reshape(*shape[:2], -1) for part in d_probs], "gradient of probabilities"),
        )

    def _plan(self, chosen: Parts) -> None:
        """A plan for each group and chunk: (ranks, token indices of each rank, plan), and the rows each rank gets."""
        sizes, strategy = self.context.sizes, self.context.strategy
        batch, length = self.kept["shape"][:2]
        plans = []
        rows: list[list[np.ndarray]] = self._empty()
        choices = np.zeros((sizes.batch * sizes.length, sizes.top_k), int)
        for ids, part in zip(self.kept["ids"], chosen, strict=True):
            choices[ids.reshape(-1)] = part
        for group in self.groups:
            for at in chunk_slices(batch, length, strategy.chunks):
                tokens = [at] * len(group)
                plan = make_plan(strategy.mode, self.topology, [chosen[rank][at] for rank in group])
                plans.append((group, tokens, plan))
                for rank, index in zip(group, self._arriving(plan, group, at, choices), strict=True):
                    rows[rank].append(index)
        self.kept.update(plans=plans, rows=[np.concatenate(parts) for parts in rows])

    def _arriving(self, plan: Plan, group: list[int], at: np.ndarray, choices: np.ndarray) -> Iterator[np.ndarray]:
        """For each rank the index (token * k + choice) of each row that its experts get: tokens' numbers are sent."""
        found: dict[int, np.ndarray] = {}

        def look(index, rows, ends):
            owner = self.topology.expert_bounds[index] + np.searchsorted(ends, np.arange(len(rows)), side="right")
            token = rows[:, 0].astype(int)
            found[index] = token * choices.shape[1] + (choices[token] == owner[:, None]).argmax(1)
            return rows

        numbers = [self.kept["ids"][rank].reshape(-1, 1)[at].astype(float) for rank in group]
        execute(plan, numbers, [np.ones((len(at), choices.shape[1]))] * len(group), look)
        return (found[index] for index in range(len(group)))

    def _on_experts(self, rank: int, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Rows sorted by expert through the experts of `rank`."""
        w1, w2 = self.kept["w1"][rank], self.kept["w2"][rank]
        out = np.zeros((len(rows), w2.shape[2]), rows.dtype)
        for e, (first, end) in enumerate(_spans(ends)):
            out[first:end] = expert(rows[first:end], w1[e].reshape(len(w1[e]), -1), w2[e])
        return out

    def _experts_backward(self, rank, rows, ends, d_rows, d_w1, d_w2) -> np.ndarray:
        """Gradient of the rows; those of the weights are added up in d_w1 and d_w2."""
        w1, w2 = self.kept["w1"][rank], self.kept["w2"][rank]
        out = np.zeros_like(rows)
        for e, (first, end) in enumerate(_spans(ends)):
            flat = w1[e].reshape(len(w1[e]), -1)
            out[first:end], one, two = expert_backward(rows[first:end], flat, w2[e], d_rows[first:end])
            d_w1[rank][e] += one.reshape(w1[e].shape)
            d_w2[rank][e] += two
        return out

    def _record_rows(self, tensor: str, rows: list[list[np.ndarray]], count: int, added: bool) -> None:
        """Record what arrived at experts, by token and choice."""
        sizes, times = self.context.sizes, self.context.strategy.expert_mesh["tp"]
        total = sizes.batch * sizes.length * sizes.top_k
        layout = Rows(self.kept["rows"], total, times, SUM if added else "same")
        self.record(tensor, [np.concatenate(parts) for parts in rows], layout, count)

    def _empty(self) -> list[list[np.ndarray]]:
        return [[] for _ in range(self.context.world.ranks)]

    def _leave(self, out: Parts) -> Parts:
        if self.split:
            out = self.context.world.all_reduce(out, ["tp"], f"{self.name}.out")
        self.record("out", out, self.context.tokens(), self.context.sizes.expert_ffn)
        return out

    def _enter_backward(self, gradient: Parts, tensor: str) -> Parts:
        if self.split:
            gradient = self.context.world.all_reduce(gradient, ["tp"], f"{self.name}.in.backward")
        self.record(tensor, gradient, self.context.tokens(), self.context.sizes.expert_ffn)
        return gradient


def _spans(ends: np.ndarray):
    return zip(np.concatenate([[0], ends[:-1]]).tolist(), ends.tolist(), strict=True)
