"""Faults that training has met or could meet when its layout changes (report, section 3.2 and Table 3), by name.

Each says where it must be found: phase, module, tensor and ranks.
"""

from dataclasses import dataclass, field

import numpy as np

from tools.accuracy.emulate.context import BACKWARD, FORWARD, OPTIMIZER
from tools.accuracy.emulate.kernels import Kernels
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.emulate.world import World
from tools.accuracy.promotion import round_bfloat16


class WithoutCollective(World):
    """One collective does nothing, in all groups or in one."""

    def __init__(self, mesh, tag, group=None):
        super().__init__(mesh)
        self.tag, self.group = tag, group

    def all_reduce(self, parts, axes, tag, reduce=np.add.reduce):
        right = super().all_reduce(parts, axes, tag, reduce)
        if tag != self.tag:
            return right
        out = list(parts)
        for number, group in enumerate(self.groups(axes)):
            for rank in group:
                out[rank] = parts[rank] if self.group in (None, number) else right[rank]
        return out

    def all_gather(self, parts, axis, dim, tag):
        right = super().all_gather(parts, axis, dim, tag)
        if tag != self.tag:
            return right
        # a stale buffer: every rank takes the first rank's piece for all pieces
        return [np.concatenate([parts[group[0]]] * len(group), dim) for group in self.groups([axis]) for _ in group]


class OtherMicroBatch(World):
    """Micro-batches are handed over in each other's place, two by two."""

    def __init__(self, mesh, tag, group=None):
        super().__init__(mesh)
        self.tag = tag

    def send(self, parts, tag, turn):
        super().send(parts, tag, turn ^ 1 if tag == self.tag else turn)


class OneBufferForActivations(Kernels):
    """A stage that goes forward with the next micro-batch forgets what it kept of the one before."""

    def activations_of(self, turn, newest):
        return newest


class DecayOfNorms(Kernels):
    """The wrong group decays: norms too."""

    def decays(self, name, dimensions):
        return True


class NoDecayOfExperts(Kernels):
    def decays(self, name, dimensions):
        return super().decays(name, dimensions) and ".experts." not in name


class LossNotDivided(Kernels):
    """The loss is summed over tp and not divided by it."""

    def loss_divisor(self, micro, dp, cp, tp):
        return micro * dp * cp

    seed_divisor = loss_divisor


class SeedNotDivided(Kernels):
    """The printed loss is right, its gradient is tp times too large."""

    def seed_divisor(self, micro, dp, cp, tp):
        return micro * dp * cp


class PositionsFromZero(Kernels):
    """Every part of the sequence counts from 0."""

    def first_position(self, part, length):
        return 0


class CombineMismatch(Kernels):
    """One rank weighs the experts' outputs by its choices' probabilities in another order."""

    def combine_probs(self, rank, probs):
        return np.roll(probs, 1, axis=-1) if rank == 2 else probs


class AccumulationInBfloat16(Kernels):
    def accumulate(self, total, gradient):
        return round_bfloat16((total + gradient).astype(np.float32)).astype(np.float64)


class SoftmaxScaled(Kernels):
    def softmax(self, rank, scores):
        return 1.01 * super().softmax(rank, scores)


class SwappedExperts(Kernels):
    """A checkpoint that was converted with two experts of rank 1 in each other's place."""

    def expert_weights(self, rank, weight):
        return weight[[1, 0, *range(2, len(weight))]] if rank == 1 else weight


@dataclass(frozen=True)
class Mutation:
    """A fault, the strategy in which it happens, and the first tensor that it spoils; no ranks: all of them."""

    strategy: Strategy
    phase: str
    module: str
    tensor: str
    ranks: tuple[int, ...] | None = None
    kernels: Kernels = field(default_factory=Kernels)
    tag: str = ""
    group: int | None = None
    communication: type[World] = WithoutCollective

    def world(self):
        return self.communication(self.strategy.mesh, self.tag, self.group)

    def expected_ranks(self):
        return tuple(range(self.strategy.pp * self.strategy.stage_ranks)) if self.ranks is None else self.ranks


DP2, TP2, CP2 = Strategy(dp=2), Strategy(tp=2), Strategy(cp=2)
EP4 = Strategy(dp=4, ep=4, mode="hierarchical")
DP2_TP2 = Strategy(dp=2, tp=2)
SP2 = Strategy(tp=2, sequence_parallel=True)
ZERO2 = Strategy(dp=2, zero=True)
MICRO4 = Strategy(micro=4)
PP2, PP2_TP2 = Strategy(micro=2, pp=2), Strategy(micro=2, pp=2, tp=2)

MUTATIONS = {
    "weight decay applied to the wrong group": Mutation(
        DP2, OPTIMIZER, "final_norm", "change of weight", kernels=DecayOfNorms()
    ),
    "weight decay not applied to experts": Mutation(
        EP4, OPTIMIZER, "layers.1.experts", "change of w1", kernels=NoDecayOfExperts()
    ),
    "missing AllReduce of a gradient over data parallel": Mutation(
        DP2, BACKWARD, "layers.1.attention", "reduced gradient of q_up", tag="layers.1.attention.q_up.gradient"
    ),
    "missing AllReduce of a row-parallel output in one group": Mutation(
        DP2_TP2, FORWARD, "layers.0.attention", "out", (2, 3), tag="layers.0.attention.out", group=1
    ),
    "missing AllReduce of a column-parallel input's gradient": Mutation(
        TP2, BACKWARD, "layers.0.mlp", "gradient of the input", tag="layers.0.mlp.in.backward"
    ),
    "missing AllReduce of norms under sequence parallelism": Mutation(
        SP2, BACKWARD, "layers.1.mlp_norm", "reduced gradient of weight", tag="layers.1.mlp_norm.weight.gradient"
    ),
    "missing AllReduce of the largest logit": Mutation(
        TP2, FORWARD, "head", "loss of each token", tag="head.max"
    ),
    "missing AllReduce of the sum of exponents": Mutation(
        TP2, FORWARD, "head", "loss of each token", tag="head.sum"
    ),
    "missing AllReduce of the global norm": Mutation(
        TP2, OPTIMIZER, "optimizer", "global norm", tag="global_norm"
    ),
    "stale AllGather of a sharded optimizer's changes": Mutation(
        ZERO2, OPTIMIZER, "layers.0.mlp", "change of gate_up", tag="layers.0.mlp.gate_up.change"
    ),
    "loss not divided by TP": Mutation(TP2, FORWARD, "head", "loss", kernels=LossNotDivided()),
    "gradient's seed not divided by TP": Mutation(
        DP2_TP2, BACKWARD, "head", "gradient of logits", kernels=SeedNotDivided()
    ),
    "wrong RoPE offset under sequence split": Mutation(
        Strategy(dp=2, cp=2), FORWARD, "layers.0.attention", "rope of keys", (1, 3), kernels=PositionsFromZero()
    ),
    "routing and combine mismatch": Mutation(
        EP4, FORWARD, "layers.1.experts", "out", (2,), kernels=CombineMismatch()
    ),
    "accumulation in bf16": Mutation(
        MICRO4, BACKWARD, "head", "accumulated gradient of weight", kernels=AccumulationInBfloat16()
    ),
    "softmax scaled by 1.01": Mutation(TP2, FORWARD, "layers.0.attention", "softmax", kernels=SoftmaxScaled()),
    "a pipeline stage is sent another micro-batch": Mutation(
        PP2_TP2, FORWARD, "layers.1.input_norm", "out", (2, 3), tag="stages.0.forward", communication=OtherMicroBatch
    ),
    "a pipeline stage is sent another micro-batch's gradient": Mutation(
        PP2, BACKWARD, "layers.0.mlp", "gradient of inner", (0,), tag="stages.1.backward", communication=OtherMicroBatch
    ),
    "one buffer for the activations of all micro-batches": Mutation(
        PP2, BACKWARD, "layers.0.mlp", "gradient of down", (0,), kernels=OneBufferForActivations()
    ),
    "missing AllReduce of the global norm over stages": Mutation(
        PP2_TP2, OPTIMIZER, "optimizer", "global norm", tag="global_norm.stages"
    ),
    "a swapped expert weight": Mutation(
        EP4, FORWARD, "layers.1.experts", "output of each expert", (1,), kernels=SwappedExperts()
    ),
}  # fmt: skip
