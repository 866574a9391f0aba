"""What the modules of an emulated step share: ranks, weights, gradients, and the record of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tools.accuracy.emulate.kernels import Kernels
from tools.accuracy.emulate.sizes import Sizes
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.emulate.world import Parts, World
from tools.accuracy.merge import SUM, Layout, Rows

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
Key = tuple[int, str, str, str]
# what ends a weight's name -> the axis of it that tensor parallelism cuts
CUT = {
    "embedding.weight": 0,
    "head.weight": 1,
    ".q_up": 1,
    ".kv_up": 1,
    ".attention.out": 0,
    ".gate_up": 2,
    ".down": 0,
}


@dataclass(frozen=True)
class Entry:
    """One recorded tensor.

    Args:
        step: from 1; phase: FORWARD, BACKWARD or OPTIMIZER; module, tensor: names; stage: of the pipeline, whose
        ranks the parts are; None: of all stages; parts: one array per rank (and micro-batch, the slowest);
        count: terms that an element accumulates, for Table 2.
    """

    step: int
    phase: str
    module: str
    tensor: str
    stage: int | None
    parts: Sequence[np.ndarray]
    layout: Layout | Rows
    count: int

    @property
    def key(self) -> Key:
        """What the entry of another run must have to be compared."""
        return self.step, self.phase, self.module, self.tensor

    def joined(self, later: Entry) -> Entry:
        """With the parts of a micro-batch whose turn came later."""
        layout = self.layout
        if isinstance(layout, Rows) and isinstance(later.layout, Rows):
            layout = replace(layout, index=[*layout.index, *later.layout.index])
        return replace(self, parts=[*self.parts, *later.parts], layout=layout)


@dataclass
class Context:
    """One run of the emulation.

    Args:
        weights: name -> one shard for each rank of the stage that holds it; layouts: name -> how a weight is cut;
        gradients: name -> one for each rank and micro-batch.
        kernels: what ranks compute; world: how they communicate.
        turn: the micro-batch that is computed; newest: stage -> the last one that went forward there.
    """

    sizes: Sizes
    strategy: Strategy
    world: World
    kernels: Kernels
    layouts: dict[str, Layout]
    weights: dict[str, Parts]
    gradients: dict[str, Parts] = field(default_factory=dict)
    recorded: dict[Key, Entry] = field(default_factory=dict)
    step: int = 1
    phase: str = FORWARD
    stage: int | None = 0
    turn: int = 0
    newest: dict[int, int] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """All that was recorded, in order of execution."""
        return list(self.recorded.values())

    @property
    def mesh(self) -> dict[str, int]:
        """Axes of the parts of a tensor: micro-batches come first, as ranks that take their turns."""
        return {"micro": self.strategy.micro, **self.world.mesh}

    def of_turn(self, parts: Parts) -> Parts:
        """The parts of the micro-batch whose turn it is."""
        return parts[self.turn * self.world.ranks : (self.turn + 1) * self.world.ranks]

    def tokens(self, **more: Any) -> Layout:
        """Layout of [B, S, ...] outside the tensor-parallel region."""
        tp = {"tp": 1} if self.strategy.sequence_parallel else {}
        return Layout(self.mesh, {"micro": 0, "dp": 0, "cp": 1, **tp, **more})

    def inside(self, **more: Any) -> Layout:
        """Layout of [B, S, ...] inside the region, where each tp rank has the whole sequence of its cp rank."""
        return Layout(self.mesh, {"micro": 0, "dp": 0, "cp": 1, **more})

    def record(self, module: str, tensor: str, parts: Sequence[np.ndarray], layout: Layout | Rows, count: int) -> None:
        """Add a tensor to the record, or the parts of a micro-batch to those of the ones before."""
        entry = Entry(self.step, self.phase, module, tensor, self.stage, parts, layout, count)
        before = self.recorded.get(entry.key)
        self.recorded[entry.key] = before.joined(entry) if before else entry

    # the two ends of the tensor-parallel region, and their adjoints

    def enter(self, parts: Parts, tag: str) -> Parts:
        """Tokens into the region: AllGather of the sequence, or nothing without sequence parallelism."""
        return self.world.all_gather(parts, "tp", 1, tag) if self.strategy.sequence_parallel else list(parts)

    def enter_backward(self, parts: Parts, tag: str) -> Parts:
        """Partial gradients out of the region: ReduceScatter or AllReduce."""
        return self.leave(parts, f"{tag}.backward")

    def leave(self, parts: Parts, tag: str) -> Parts:
        """Partial sums out of the region: ReduceScatter or AllReduce."""
        if self.strategy.sequence_parallel:
            return self.world.reduce_scatter(parts, "tp", 1, tag)
        return self.world.all_reduce(parts, ["tp"], tag)

    def leave_backward(self, parts: Parts, tag: str) -> Parts:
        """Gradients into the region."""
        return self.enter(parts, f"{tag}.backward")


class Module:
    """A part of the network: `forward` keeps what `backward` of the same micro-batch needs."""

    def __init__(self, context: Context, name: str, stage: int):
        self.context, self.name, self.stage = context, name, stage
        self.kept_of_turn: dict[int, dict[str, Any]] = {}

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept of the micro-batch whose turn it is."""
        context = self.context
        turn = context.turn
        if context.phase == BACKWARD:
            turn = context.kernels.activations_of(turn, context.newest[self.stage])
        return self.kept_of_turn.setdefault(turn, {})

    def weight(self, name: str) -> Parts:
        """One shard per rank."""
        return self.context.weights[f"{self.name}.{name}"]

    def give(self, name: str, gradients: Parts, count: int) -> None:
        """Hand in the gradient of a weight, of each rank's own tokens.

        Args:
            count: tokens of the step whose gradients are added up.
        """
        full = f"{self.name}.{name}"
        self.context.gradients.setdefault(full, []).extend(gradients)
        self.record(f"gradient of {name}", gradients, partial(self.context, full), count)

    def record(self, tensor: str, parts: Sequence[np.ndarray], layout: Layout | Rows, count: int) -> None:
        """Record a tensor of this module."""
        self.context.stage = self.stage
        self.context.record(self.name, tensor, parts, layout, count)


def partial(context: Context, name: str) -> Layout:
    """Layout of a weight's gradients before any reduction: sums over micro-batches and ranks that saw other tokens."""
    layout = accumulated(context, name)
    return Layout({"micro": context.strategy.micro, **layout.mesh}, {"micro": SUM, **layout.rules})


def accumulated(context: Context, name: str) -> Layout:
    """The same when those of all micro-batches have been added up."""
    layout = context.layouts[name]
    rules: dict[str, int | str] = {axis: SUM for axis in layout.mesh if axis != "tp"}
    if context.strategy.sequence_parallel and not name.endswith(tuple(CUT)):
        rules["tp"] = SUM
    return Layout(layout.mesh, {**rules, **layout.rules})
