"""How long a training step takes, in closed form: computation, bubble, and every kind of communication.

Modelled, not measured. Per device and step:

    compute   FLOPs of the device / (peak x matmul efficiency), a third more (without the head) when layers are
              recomputed; expert matmuls times the load of the busiest rank, at least the time to read their weights;
              permutation of copies at HBM bandwidth
    EP        (layer's makespan - its computation) x MoE layers of a stage x micro-batches (plugins/ep_overlap)
    TP        sequence parallel: 2 AllGather + 2 ReduceScatter of the micro-batch's activations a layer, forward,
              backward, and once more where recomputation replays them
    CP        AllGather of keys and values a layer, their ReduceScatter backward
    PP        a stage's output in the compute dtype and its gradient back, each micro-batch and chunk
    DP        once a step: ReduceScatter of fp32 gradients and AllGather of weights (AllReduce without the optimizer's
              shards), dense weights over dp x cp, expert weights over dp x tp x cp / ep
    step      (compute + EP exposed + TP + CP + PP) x (1 + (pp - 1) / (chunks x micro-batches)) + DP

Layers are taken as spread evenly over stages. TP, CP, PP and DP are not overlapped with anything, and no latency of
the host is counted: a real step differs by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plugins.ep_overlap.plan import Layer, Links
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import backward, expected_steps
from tools.ep_report.shapes import Shape
from tools.hardware import Hardware, Link

_FP32 = 4


@dataclass(frozen=True)
class Base:
    """Seconds of a device and step that do not depend on how tokens are dispatched; `bubble` is a factor, 1 or more."""

    compute: float
    communication: Mapping[str, float]  # "tp", "cp", "pp", "dp"
    bubble: float

    @property
    def others(self) -> float:
        """All communication but EP's."""
        return sum(self.communication.values())

    def step(self, exposed_ep: float) -> float:
        """Seconds of a step with so many exposed seconds of EP communication a device."""
        once = self.communication["dp"]
        return (self.compute + self.others - once + exposed_ep) * self.bubble + once


def links_of(hardware: Hardware) -> Links:
    """The numbers of a hardware file that overlap planning needs."""
    inter, intra = hardware.inter_node, hardware.intra_node
    return Links(inter.reached, intra.reached, inter.latency_s, intra.latency_s, hardware.launch_s)


def layer_of(shape: Shape, hardware: Hardware, topology: Topology, mode: str, skew: float) -> Layer:
    """One MoE layer on one micro-batch in a dispatch mode."""
    sizes = (shape.rank_tokens, shape.top_k, shape.hidden, shape.itemsize)
    forward = expected_steps(mode, topology, *sizes, skew=skew)
    shared = 6 * shape.hidden * shape.shared_width * shape.rank_tokens / hardware.flops(shape.dtype)
    return Layer(
        forward,
        backward(forward),
        experts=skew * _experts(shape, hardware),
        shared=shared,
        permutation=_permutation(shape, hardware),
        weights=_reading(shape, hardware),
        replay=shape.recompute,
        shared_beside=shape.shared_beside,
    )


def runs(shape: Shape) -> float:
    """How often a device runs an MoE layer (forward and backward) in a step."""
    return shape.moe_layers / shape.pp * shape.micro_batches


def base_of(shape: Shape, hardware: Hardware, skew: float) -> Base:
    """Everything but EP communication."""
    tokens = shape.batch * shape.sequence * shape.micro_batches / (shape.tp * shape.cp * shape.pp)
    again = (shape.flops_per_token - shape.head_flops_per_token) / 3 if shape.recompute else 0
    compute = tokens * (shape.flops_per_token + again) / hardware.flops(shape.dtype)
    passes = 4 if shape.recompute else 3  # forward, twice backward, and forward again
    mean = _experts(shape, hardware)
    extra = max(skew * mean, _reading(shape, hardware)) - mean + _permutation(shape, hardware)
    communication = {
        "tp": _tensor(shape, hardware),
        "cp": _context(shape, hardware),
        "pp": _pipeline(shape, hardware),
        "dp": _data(shape, hardware),
    }
    bubble = 1 + (shape.pp - 1) / (shape.chunks * shape.micro_batches)
    return Base(compute + extra * passes * runs(shape), communication, bubble)


def _experts(shape: Shape, hardware: Hardware) -> float:
    """Forward seconds of the routed experts of a rank with the mean load: 3 matrices, 2 FLOPs per weight and copy."""
    copies = shape.rank_tokens * shape.top_k
    return 6 * shape.hidden * shape.expert_width * copies / hardware.flops(shape.dtype)


def _reading(shape: Shape, hardware: Hardware) -> float:
    """Seconds to read the expert weights of a rank's layer once."""
    weights = 3 * shape.hidden * shape.expert_width * shape.experts / shape.ep
    return weights * shape.itemsize / hardware.hbm_bytes_per_s


def _permutation(shape: Shape, hardware: Hardware) -> float:
    """Seconds to sort copies by expert and back: read and written once before and once after the experts."""
    copies = shape.rank_tokens * shape.top_k
    return 4 * copies * shape.hidden * shape.itemsize / hardware.hbm_bytes_per_s


def _collective(size: float, ranks: int, link: Link, hardware: Hardware) -> float:
    """Seconds of an AllGather or ReduceScatter whose whole tensor has `size` bytes; 0 for a rank alone."""
    if ranks == 1:
        return 0.0
    return hardware.launch_s + (ranks - 1) * link.latency_s + size * (ranks - 1) / ranks / link.reached


def _link(span: int, hardware: Hardware) -> Link:
    """The slowest link inside `span` consecutive ranks."""
    return hardware.intra_node if span <= hardware.devices_per_node else hardware.inter_node


def _passes(shape: Shape) -> int:
    """How often a layer's forward communication runs: forward, its mirror in backward, and the replay."""
    return 3 if shape.replay_tp else 2


def _tensor(shape: Shape, hardware: Hardware) -> float:
    size = shape.batch * shape.sequence / shape.cp * shape.hidden * shape.itemsize
    one = _collective(size, shape.tp, _link(shape.tp, hardware), hardware)
    return 4 * _passes(shape) * one * shape.layers / shape.pp * shape.micro_batches


def _context(shape: Shape, hardware: Hardware) -> float:
    tokens = shape.batch * shape.sequence / shape.tp
    gathered = _collective(tokens * shape.attention_bytes, shape.cp, _link(shape.tp * shape.cp, hardware), hardware)
    # Ulysses: heads to their ranks and back; MindFormers 1.9.0 gathers keys and values all the same
    parts = shape.ulysses if shape.cp % shape.ulysses == 0 else 1
    turned = tokens / shape.cp * (shape.attention_bytes + shape.query_bytes)
    exchanged = _collective(turned, parts, _link(shape.tp * parts, hardware), hardware)
    return _passes(shape) * (gathered + exchanged) * shape.layers / shape.pp * shape.micro_batches


def _pipeline(shape: Shape, hardware: Hardware) -> float:
    if shape.pp == 1:
        return 0.0
    size = shape.rank_tokens * shape.hidden * shape.itemsize
    link = _link(shape.devices, hardware)  # a neighbouring stage is devices / pp ranks away
    one = hardware.launch_s + link.latency_s + size / link.reached
    return 2 * one * shape.chunks * shape.micro_batches


def _data(shape: Shape, hardware: Hardware) -> float:
    link = _link(shape.dp * shape.cp * shape.tp, hardware)
    bytes_each = _FP32 + (shape.itemsize if shape.optimizer_shard else _FP32)
    total = 0.0
    for weights, cut, ranks in (
        (shape.weights_dense, shape.tp, shape.dp * shape.cp),
        (shape.weights_expert, shape.ep, shape.dp * shape.tp * shape.cp // shape.ep),
    ):
        total += _collective(weights / (cut * shape.pp) * bytes_each, ranks, link, hardware)
    return total
