"""From each rank's gradients to new weights: accumulation, reduction, clipping, AdamW."""

from __future__ import annotations

import numpy as np

from tools.accuracy.emulate.context import BACKWARD, OPTIMIZER, Context, accumulated
from tools.accuracy.emulate.network import stage_of_weight
from tools.accuracy.emulate.world import Parts
from tools.accuracy.merge import SUM, Layout


class Optimizer:
    """AdamW on the shards of each rank, with decay where `Kernels.decays` says.

    With `Strategy.zero` each data-parallel rank keeps the moments of its own slice of a flat shard, works out the
    change of that slice, and an AllGather brings the changes together.
    """

    def __init__(self, context: Context):
        self.context = context
        self.own = {name: self._slices(name, parts) for name, parts in context.weights.items()}
        self.m = {name: [np.zeros(len(own)) for own in slices] for name, slices in self.own.items()}
        self.v = {name: [np.zeros(len(own)) for own in slices] for name, slices in self.own.items()}

    def _slices(self, name: str, parts: Parts) -> Parts:
        """Indices into a rank's flat shard of the elements whose moments it keeps."""
        owned = [np.arange(part.size) for part in parts]
        if self.context.strategy.zero:
            for group in self.context.world.on(self.context.layouts[name].mesh).groups([self._axis(name)]):
                for rank, piece in zip(group, np.array_split(owned[group[0]], len(group)), strict=True):
                    owned[rank] = piece
        return owned

    def _axis(self, name: str) -> str:
        """The mesh axis along which ranks hold the same shard of a weight and saw other tokens."""
        return "edp" if "edp" in self.context.layouts[name].mesh else "dp"

    def _gathered(self, name: str, slices: Parts, tag: str) -> Parts:
        """Every rank's slices of flat shards as shards."""
        if self.context.strategy.zero:
            world = self.context.world.on(self.context.layouts[name].mesh)
            slices = world.all_gather(slices, self._axis(name), 0, f"{name}.{tag}")
        return [part.reshape(weight.shape) for part, weight in zip(slices, self.context.weights[name], strict=True)]

    def step(self) -> float:
        """Update the weights; returns the global norm before clipping."""
        context = self.context
        context.phase = BACKWARD
        gradients = {name: self._reduce(name, parts) for name, parts in context.gradients.items()}
        context.phase = OPTIMIZER
        norms = self._norms(gradients)
        scales = [context.sizes.clip / max(norm, context.sizes.clip) for norm in norms]
        for name, parts in gradients.items():
            self._update(name, [scales[rank] * part for rank, part in enumerate(parts, self._first(name))])
        context.step += 1
        return norms[0]

    def _first(self, name: str) -> int:
        """The first rank, of those of all stages, of the stage that holds a weight."""
        return stage_of_weight(name, self.context.sizes, self.context.strategy) * self.context.world.ranks

    def _record(self, name: str, tensor: str, parts: Parts, layout: Layout, count: int) -> None:
        module, _, weight = name.rpartition(".")
        self.context.stage = stage_of_weight(name, self.context.sizes, self.context.strategy)
        self.context.record(module, f"{tensor} of {weight}", parts, layout, count)

    def _reduce(self, name: str, parts: Parts) -> Parts:
        """Gradients of each rank's tokens: micro-batches accumulated, then summed over the ranks that saw others."""
        context, layout = self.context, accumulated(self.context, name)
        tokens = context.sizes.batch * context.sizes.length
        ranks, micro = context.world.ranks, context.strategy.micro
        totals = []
        for rank in range(ranks):
            total = np.zeros_like(parts[rank])
            for turn in range(micro):
                total = context.kernels.accumulate(total, parts[turn * ranks + rank])
            totals.append(total)
        self._record(name, "accumulated gradient", totals, layout, tokens)
        axes = [axis for axis, rule in layout.rules.items() if rule == SUM]
        whole = context.world.on(layout.mesh).all_reduce(totals, axes, f"{name}.gradient")
        self._record(name, "reduced gradient", whole, context.layouts[name], tokens)
        return whole

    def _norms(self, gradients: dict[str, Parts]) -> list[float]:
        """The norm of all gradients, as each rank of each stage knows it; what several ranks hold is counted once."""
        context = self.context
        world = context.world.on({"pp": context.strategy.pp, **context.world.mesh})
        squares = [np.zeros(()) for _ in range(world.ranks)]
        for name, parts in gradients.items():
            copies = context.layouts[name].copies()
            for rank, part in enumerate(parts, self._first(name)):
                squares[rank] = squares[rank] + np.square(part).sum() / copies
        of_stage = world.all_reduce(squares, list(context.world.mesh), "global_norm")
        norms = [np.sqrt(value) for value in world.all_reduce(of_stage, ["pp"], "global_norm.stages")]
        context.stage = None
        # squares add up without cancelling: relative to the sum, they err as the gradients do
        tokens = context.sizes.batch * context.sizes.length
        context.record("optimizer", "global norm", norms, Layout(world.mesh, {}), tokens)
        return [float(norm) for norm in norms]

    def _update(self, name: str, gradients: Parts) -> None:
        """Moments, the change of the weight, and the weight."""
        sizes, layout, step = self.context.sizes, self.context.layouts[name], self.context.step
        (beta1, beta2), weights = sizes.betas, self.context.weights[name]
        decays = self.context.kernels.decays(name, weights[0].ndim)
        changes: Parts = []
        for rank, (own, gradient) in enumerate(zip(self.own[name], gradients, strict=True)):
            g, weight = gradient.reshape(-1)[own], weights[rank].reshape(-1)[own]
            self.m[name][rank] = m = beta1 * self.m[name][rank] + (1 - beta1) * g
            self.v[name][rank] = v = beta2 * self.v[name][rank] + (1 - beta2) * g * g
            adam = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + sizes.adam_eps)
            changes.append(-sizes.rate * (adam + (sizes.decay * weight if decays else 0.0)))
        changes = self._gathered(name, changes, "change")
        self._record(name, "first moment", self._gathered(name, self.m[name], "m"), layout, 1)
        self._record(name, "second moment", self._gathered(name, self.v[name], "v"), layout, 1)
        self._record(name, "change", changes, layout, 1)
        self.context.weights[name] = new = [w + change for w, change in zip(weights, changes, strict=True)]
        self._record(name, "new value", new, layout, 1)
