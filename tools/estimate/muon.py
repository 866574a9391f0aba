"""This module counts the FLOPs and the AllGathers of MindFormers' Muon optimizer in the update of each step
(core/optim/muon.py of 1.9.0).

Muon makes the momentum of each matrix of a layer nearly orthogonal, by five Newton-Schulz steps in bfloat16; AdamW
updates embedding, output layer, norms and biases. Fused weights are split into their matrices first: the two parts of
the latent projections, gate and up, and the experts.

A rank that holds a part of a matrix gathers the whole matrix, first over the optimizer's shards, then over tensor
parallelism; each rank of the group then computes the whole matrix, and keeps its part. The weights of experts are never
gathered: tensor parallelism does not cut them in this estimator's model, and the optimizer's shards hold whole experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plugins.sealed_checkpoint import router_state
from tools.estimate.configuration import Configuration, weight_cut, weight_shards
from tools.estimate.layer_model import Matmul
from tools.model import ENDS, Weight

STEPS = 5  # of Newton-Schulz, whatever optimizer.ns_steps says
ITEM = 2  # bytes of a number that is gathered


@dataclass(frozen=True)
class Matrix:
    """A `Matrix` stands for `count` matrices of the shape [rows, columns], which Muon orthogonalizes one by one."""

    rows: int
    columns: int
    count: float = 1

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """Return the matmuls of all Newton-Schulz steps: A = X X^T, A A, and B X, where X has its shorter side first.
        Each Newton-Schulz step takes 4 m^2 n + 2 m^3 FLOPs, where m is the shorter and n the longer side of the matrix.
        """
        short, long = sorted((self.rows, self.columns))
        times = STEPS * self.count
        return (
            Matmul(short, short, long, times),
            Matmul(short, short, short, times),
            Matmul(short, long, short, times),
        )


def orthogonal(weight: Weight, config: Configuration) -> bool:
    """Return whether Muon (instead of AdamW) updates a weight of this run."""
    name, axes = ENDS.get(weight.name, weight.name), 2 if weight.columns > 1 else 1
    return config.muon and not weight.frozen and router_state.orthogonal(name, axes)


def matrices(weight: Weight, config: Configuration) -> tuple[Matrix, ...]:
    """Return the matrices of a weight that a device orthogonalizes; the list is empty if AdamW updates the weight."""
    if not orthogonal(weight, config):
        return ()
    model, columns = config.model, weight.columns
    mla = model.latent
    assert mla is not None, "Muon refuses other attention"
    if weight.split == "experts":
        local = model.experts / weight_cut(weight, config) / weight_shards(weight, config)
        rows = weight.rows // model.experts
        halves = 2 if weight.name == "experts_1" and model.gated else 1
        return (Matrix(rows, columns // halves, local * halves),)
    heads = {"q": (mla.nope, mla.rope), "q_up": (mla.nope, mla.rope), "kv_up": (mla.nope, mla.value)}
    if weight.name in heads:
        return tuple(Matrix(model.heads * size, columns) for size in heads[weight.name])
    if weight.name == "kv_down":
        return Matrix(mla.kv_rank, columns), Matrix(mla.rope, columns)
    if weight.name.endswith("_fc1") and model.gated:
        return (Matrix(weight.rows // 2, columns, 2),)
    return (Matrix(weight.rows, columns),)


def gathers(weight: Weight, config: Configuration) -> Iterator[tuple[float, int, int]]:
    """Yield (bytes of the gathered tensor, number of ranks, distance between neighbouring ranks) for each AllGather of
    a weight's momentum before Muon's update.
    """
    if not orthogonal(weight, config) or weight.split == "experts":
        return
    cut, shards = weight_cut(weight, config), weight_shards(weight, config)
    if shards > 1:
        yield ITEM * weight.size / cut, shards, cut
    if cut > 1:
        yield ITEM * weight.size, cut, 1
