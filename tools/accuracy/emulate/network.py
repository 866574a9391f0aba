"""The whole network: weights and how they are cut, one step forward and backward."""

from __future__ import annotations

import numpy as np

from tools.accuracy.emulate.attention import Attention
from tools.accuracy.emulate.context import BACKWARD, CUT, FORWARD, Context, Module
from tools.accuracy.emulate.dense import Embedding, FeedForward, Head, Norm
from tools.accuracy.emulate.moe import Experts, Router
from tools.accuracy.emulate.sizes import Sizes
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.emulate.world import Parts, each
from tools.accuracy.merge import Layout


def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape, in the order of the network."""
    s = sizes
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (s.vocabulary, s.hidden)}
    for layer in range(s.layers):
        name = f"layers.{layer}"
        shapes[f"{name}.input_norm.weight"] = (s.hidden,)
        shapes[f"{name}.attention.q_down"] = (s.hidden, s.q_rank)
        shapes[f"{name}.attention.q_norm"] = (s.q_rank,)
        shapes[f"{name}.attention.q_up"] = (s.q_rank, s.heads, s.nope + s.rope)
        shapes[f"{name}.attention.kv_down"] = (s.hidden, s.kv_rank + s.rope)
        shapes[f"{name}.attention.kv_norm"] = (s.kv_rank,)
        shapes[f"{name}.attention.kv_up"] = (s.kv_rank, s.heads, s.nope + s.value)
        shapes[f"{name}.attention.out"] = (s.heads, s.value, s.hidden)
        shapes[f"{name}.mlp_norm.weight"] = (s.hidden,)
        ffn = s.ffn if layer < s.dense else s.shared_ffn
        kind = "mlp" if layer < s.dense else "shared_expert"
        if layer >= s.dense:
            shapes[f"{name}.router.weight"] = (s.hidden, s.experts)
            shapes[f"{name}.router.bias"] = (s.experts,)
            shapes[f"{name}.experts.w1"] = (s.experts, s.hidden, 2, s.expert_ffn)
            shapes[f"{name}.experts.w2"] = (s.experts, s.expert_ffn, s.hidden)
        shapes[f"{name}.{kind}.gate_up"] = (s.hidden, 2, ffn)
        shapes[f"{name}.{kind}.down"] = (ffn, s.hidden)
    return {**shapes, "final_norm.weight": (s.hidden,), "head.weight": (s.hidden, s.vocabulary)}


def make_weights(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Random weights in float64: matrices of unit gain, norms near one, a bias that changes some choices."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes_of(sizes).items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight") or name.endswith(("q_norm", "kv_norm")):
            weights[name] = 1 + 0.1 * values
        elif name.endswith("bias"):
            weights[name] = 0.05 * values
        else:
            inputs = shape[1] if ".experts." in name else 1 if name.startswith("embedding") else _inputs(name, shape)
            weights[name] = values / np.sqrt(inputs)
    return weights


def _inputs(name: str, shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] if name.endswith("attention.out") else shape[0]


def layouts_of(sizes: Sizes, strategy: Strategy) -> dict[str, Layout]:
    """How each weight is cut; what is not cut is on every rank."""
    layouts = {}
    for name in shapes_of(sizes):
        if ".experts." in name:
            layouts[name] = Layout(strategy.expert_mesh, {"ep": 0, "tp": 3 if name.endswith("w1") else 1})
        else:
            cut = [axis for end, axis in CUT.items() if name.endswith(end)]
            layouts[name] = Layout(strategy.mesh, {"tp": cut[0]} if cut else {})
    return layouts


def stage_of_weight(name: str, sizes: Sizes, strategy: Strategy) -> int:
    """The pipeline stage that holds a weight."""
    if name.startswith("layers."):
        return strategy.stage_of(int(name.split(".")[1]), sizes.layers)
    return 0 if name.startswith("embedding") else strategy.pp - 1


class Layer:
    """Attention and an FFN or experts, each after a norm and beside a residual connection."""

    def __init__(self, context: Context, number: int):
        stage = context.strategy.stage_of(number, context.sizes.layers)
        name = f"layers.{number}"
        self.input_norm = Norm(context, f"{name}.input_norm", stage)
        self.attention = Attention(context, f"{name}.attention", stage)
        self.mlp_norm = Norm(context, f"{name}.mlp_norm", stage)
        self.routed = number >= context.sizes.dense
        self.dense = FeedForward(context, f"{name}.{'shared_expert' if self.routed else 'mlp'}", stage)
        if self.routed:
            self.router = Router(context, f"{name}.router", stage)
            self.experts = Experts(context, f"{name}.experts", stage)
        self.residual = Module(context, name, stage)

    def forward(self, x: Parts) -> Parts:
        """[B, S, h] -> the same."""
        context = self.residual.context
        x = each(np.add, x, self.attention.forward(self.input_norm.forward(x)))
        normed = self.mlp_norm.forward(x)
        if self.routed:
            out = each(np.add, self.experts.forward(normed, *self.router.forward(normed)), self.dense.forward(normed))
        else:
            out = self.dense.forward(normed)
        x = each(np.add, x, out)
        self.residual.record("out", x, context.tokens(), context.sizes.hidden)
        return x

    def backward(self, d_x: Parts) -> Parts:
        """Gradient of the input."""
        context = self.residual.context
        d_normed = self.dense.backward(d_x)
        if self.routed:
            d_tokens, d_probs = self.experts.backward(d_x)
            d_normed = each(np.add, each(np.add, d_normed, d_tokens), self.router.backward(d_probs))
        d_x = each(np.add, d_x, self.mlp_norm.backward(d_normed))
        d_x = each(np.add, d_x, self.input_norm.backward(self.attention.backward(d_x)))
        self.residual.record("gradient of the input", d_x, context.tokens(), context.sizes.hidden)
        return d_x


class Stage:
    """The layers of one pipeline stage; embedding at the first, head at the last. It knows others by what they send."""

    def __init__(self, context: Context, number: int):
        strategy, layers = context.strategy, context.sizes.layers
        self.context, self.number, last = context, number, strategy.pp - 1
        self.embedding = Embedding(context, "embedding", 0) if number == 0 else None
        self.layers = [Layer(context, layer) for layer in range(layers) if strategy.stage_of(layer, layers) == number]
        self.norm = Norm(context, "final_norm", last) if number == last else None
        self.head = Head(context, "head", last) if number == last else None

    def source(self, phase: str) -> str:
        """Tag of what a pass starts from; empty where it starts here."""
        if phase == FORWARD:
            return "" if self.embedding else f"stages.{self.number - 1}.forward"
        return "" if self.head else f"stages.{self.number + 1}.backward"

    def forward(self, ids: Parts, targets: Parts) -> float:
        """The micro-batch whose turn it is; its share of the loss where that is computed, 0 elsewhere."""
        world, turn = self.context.world, self.context.turn
        x = self.embedding.forward(ids) if self.embedding else world.receive(self.source(FORWARD), turn)
        for layer in self.layers:
            x = layer.forward(x)
        if self.norm and self.head:
            return self.head.forward(self.norm.forward(x), targets)
        world.send(x, f"stages.{self.number}.forward", turn)
        return 0.0

    def backward(self) -> None:
        """Hand in the gradients of the micro-batch whose turn it is, and hand its input's on."""
        world, turn = self.context.world, self.context.turn
        if self.norm and self.head:
            d_x = self.norm.backward(self.head.backward())
        else:
            d_x = world.receive(self.source(BACKWARD), turn)
        for layer in reversed(self.layers):
            d_x = layer.backward(d_x)
        if self.embedding:
            self.embedding.backward(d_x)
        else:
            world.send(d_x, f"stages.{self.number}.backward", turn)


class Network:
    """All stages. Each works off its own order of passes, and waits for what others send."""

    def __init__(self, context: Context):
        self.context = context
        self.stages = [Stage(context, number) for number in range(context.strategy.pp)]

    def gradients(self, ids: np.ndarray, targets: np.ndarray) -> float:
        """Loss of token ids and targets [B, S]; gradients are handed in to the context.

        Every cp rank has its part of the sequence, every tp rank the same.
        """
        context, strategy = self.context, self.context.strategy
        cut, loss = context.inside(), 0.0
        context.gradients.clear()
        waiting = [schedule(stage.number, strategy.pp, strategy.micro) for stage in self.stages]
        while any(waiting):
            before = sum(map(len, waiting))
            for stage, passes in zip(self.stages, waiting, strict=True):
                while passes and self._can_start(stage, *passes[0]):
                    context.phase, context.turn = passes.pop(0)
                    if context.phase == FORWARD:
                        context.newest[stage.number] = context.turn
                        loss += stage.forward(context.of_turn(cut.pieces(ids)), context.of_turn(cut.pieces(targets)))
                    else:
                        stage.backward()
            assert sum(map(len, waiting)) < before, "the stages wait for each other"
        return loss

    def _can_start(self, stage: Stage, phase: str, turn: int) -> bool:
        tag = stage.source(phase)
        return not tag or self.context.world.arrived(tag, turn)


def schedule(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """(phase, micro-batch) of a stage's passes: one forward, one backward, after those that fill the pipeline."""
    ahead = min(stages - 1 - stage, micro)
    forward, backward = ([(phase, turn) for turn in range(micro)] for phase in (FORWARD, BACKWARD))
    both = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return [*forward[:ahead], *both, *backward[micro - ahead :]]
