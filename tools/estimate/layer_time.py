"""Seconds of one layer and micro-batch on a device: rooflines with efficiencies, and communication by link.

Forward:

    matmuls       FLOPs / (peak x matmul x d / (d + half_size)), d the smallest dimension; at least the time to move
                  their operands
    attention     FLOPs / (peak x attention)
    elementwise   bytes / (HBM bandwidth x memory)
    tp            AllGathers and ReduceScatters over the slowest link of the group
    cp            keys and values once round the group; with Ulysses an All-to-All of queries, keys, values and results
                  beside it, which is the least of what compiled graphs show; logits on their way to the loss
                  (`logit_exchanges`)
    ep            the EP planner's expected bytes (`plugins.hierarchical_ep.traffic`), dispatch and combine
    fixed         host and launches, more for MoE layers

Backward is twice the matmuls, elementwise traffic and fixed time, 2.5 times fused attention (it computes scores again)
and the same communication (keys and values are sent again, but for MindFormers' training_graph, which keeps them);
recomputation adds forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import expected_steps, hit_probability
from tools.estimate.activations_graph import logit_exchanges
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency, efficiency_of
from tools.estimate.layer_model import Matmul, Work, score_bytes, work
from tools.hardware import Hardware, Link


@dataclass(frozen=True)
class Parts:
    """Seconds of one layer and micro-batch on a device."""

    matmul: float
    attention: float
    elementwise: float
    tp: float
    cp: float
    ep: float
    fixed: float

    @property
    def total(self) -> float:
        """All of it, one after the other."""
        return self.matmul + self.attention + self.elementwise + self.tp + self.cp + self.ep + self.fixed


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward of a layer without recomputation, and what each recompute option adds to backward."""

    forward: Parts
    backward: Parts
    again: Mapping[str, float]


class LayerTimes:
    """The time of layers on one cluster."""

    def __init__(self, hardware: Hardware, efficiency: Efficiency | None = None):
        self.hardware = hardware
        self.reached = efficiency or efficiency_of(hardware)

    def layer(self, config: Configuration, kind: str) -> LayerTime:
        """Seconds of one layer of a kind."""
        forward = self._forward(config, kind)
        backward = Parts(
            matmul=2 * forward.matmul,
            attention=(2.5 if config.flash else 2) * forward.attention,
            elementwise=2 * forward.elementwise,
            tp=forward.tp * self._backward_tp(config),
            cp=(1 if config.training_graph else 2) * forward.cp,
            ep=forward.ep,
            fixed=2 * forward.fixed,
        )
        return LayerTime(forward, backward, self._again(config, kind, forward))

    def _forward(self, config: Configuration, kind: str) -> Parts:
        done = work(config, kind)
        return Parts(
            matmul=sum(self._matmul(config, matmul) for matmul in done.matmuls),
            attention=done.attention / self._attention_flops(config),
            elementwise=self._elementwise(config, done) + (self._scores(config) if done.attention else 0.0),
            tp=done.collectives * self._tensor(config, done.gathered),
            cp=self._context(config, done) + self._logits(config, kind),
            ep=self._experts(config, done),
            fixed=self._fixed(config, kind, done),
        )

    def _again(self, config: Configuration, kind: str, forward: Parts) -> dict[str, float]:
        """Seconds that each recompute option adds to a layer's backward; an MTP layer's head does not run again."""
        if kind not in ("dense", "moe"):
            repeated = 0.0
            if kind == "mtp":
                repeated = _repeated(config, forward) - _repeated(config, self._forward(config, "head"))
            return {"none": 0.0, "select": 0.0, "communication": 0.0, "full": repeated}
        cheap = {
            "norms": forward.elementwise / 2,
            "attention": 0.0 if config.flash else forward.attention + self._scores(config),
            "operators": forward.elementwise + forward.matmul / 2,
        }[config.recompute.selective]
        return {"none": 0.0, "select": cheap, "communication": forward.tp / 2, "full": _repeated(config, forward)}

    def _fixed(self, config: Configuration, kind: str, done: Work) -> float:
        """Forward seconds that do not depend on sizes; a layer's benchmark keeps its device busy."""
        if kind in ("embedding", "head") or config.layer_only:
            return 0.0
        return self.reached.layer_s + (self.reached.moe_s if done.copies else 0.0)

    def _backward_tp(self, config: Configuration) -> float:
        """Share of forward's tensor-parallel time that backward shows: gradients of weights can hide that of inputs."""
        if not config.overlap_tp_backward:
            return 1.0
        return 0.5 if config.sequence_parallel else 0.0

    def _peak(self, config: Configuration) -> float:
        flops = self.hardware.peak_flops
        return flops.get(config.dtype, flops["bf16"])

    def _attention_flops(self, config: Configuration) -> float:
        dtype = config.dtype if config.dtype in ("bf16", "fp16") else "bf16"
        width = config.model.qk_dim
        batched = self.reached.matmul * width / (width + self.reached.half_size)
        return self.hardware.peak_flops[dtype] * (self.reached.attention if config.flash else batched)

    def _matmul(self, config: Configuration, matmul: Matmul) -> float:
        """Forward seconds."""
        size = min(matmul.rows, matmul.columns, matmul.depth)
        if not size:
            return 0.0
        low = config.dtype == "fp8" and "fp8" in self.hardware.peak_flops
        share = self.reached.matmul_fp8 if low else self.reached.matmul
        share *= self.reached.burst if config.layer_only and not low else 1
        computing = matmul.flops / (self._peak(config) * share * size / (size + self.reached.half_size))
        moved = matmul.rows * (matmul.depth + matmul.columns) + matmul.depth * matmul.columns
        return max(computing, 2 * moved * matmul.times / self.hardware.hbm_bytes_per_s)

    def _elementwise(self, config: Configuration, done: Work) -> float:
        more = 1 if config.fused else self.reached.unfused
        return more * done.elementwise / (self.hardware.hbm_bytes_per_s * self.reached.memory)

    def _limited(self, config: Configuration, nodes: int) -> float:
        """Share of the expected traffic between nodes that is left where routing visits few nodes for a token."""
        limit, model = config.model.node_limit, config.model
        if not limit or nodes <= limit:
            return 1.0
        expected = nodes * hit_probability(model.experts, model.experts // nodes, model.top_k)
        return min(1.0, limit / expected)

    def _scores(self, config: Configuration) -> float:
        """Forward seconds of what an unfused attention moves."""
        return score_bytes(config) / (self.hardware.hbm_bytes_per_s * self.reached.memory)

    def _link(self, span: int) -> Link:
        """The slowest link inside `span` consecutive ranks."""
        return self.hardware.intra_node if span <= self.hardware.devices_per_node else self.hardware.inter_node

    def _speed(self, link: Link) -> float:
        return link.reached * min(self.reached.link, 1 / link.efficiency)

    def _collective(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of an AllGather or ReduceScatter of a tensor of `size` bytes over ranks that are `stride` apart.

        Across nodes, ranks of the same node send different parts over their own links.
        """
        if ranks == 1:
            return 0.0
        node, intra, inter = self.hardware.devices_per_node, self.hardware.intra_node, self.hardware.inter_node
        if ranks * stride <= node:
            link, speed = intra, self._speed(intra)
            speed *= (ranks - 1) / (node - 1) if self.reached.mesh else 1
        else:
            beside = max(1, node // stride)
            link, speed = inter, min(self._speed(inter) * beside, self._speed(intra))
        return self.hardware.launch_s + link.latency_s * min(ranks - 1, 64) + size * (1 - 1 / ranks) / speed

    def _exposed(self, overlap: bool) -> float:
        return 1 - self.reached.hidden if overlap else 1.0

    def _tensor(self, config: Configuration, size: float) -> float:
        return self._collective(size, config.tp, 1) * self._exposed(config.overlap_tp)

    def _context(self, config: Configuration, done: Work) -> float:
        gathered = self._collective(done.moved_keys * config.cp, config.cp, config.tp)
        exchanged = self._collective(done.turned_heads, config.head_parts, config.tp)
        return (gathered + exchanged) * self._exposed(True)

    def _logits(self, config: Configuration, kind: str) -> float:
        """Forward seconds of logits on their way to the loss, with nothing beside them."""
        moved = logit_exchanges(config) if kind in ("head", "mtp") else []
        return sum(self._collective(size, ranks, stride) for size, ranks, stride in moved)

    def _experts(self, config: Configuration, done: Work) -> float:
        """Dispatch and combine, forward."""
        if not done.copies or config.ep == 1:
            return 0.0
        if config.overlap_ep and config.schedule == "zero_bubble_v":
            return 0.0  # forward and backward of two micro-batches run as a pair (DualPipe) and hide it all
        nodes, steps = _ep_bytes(config, self.hardware.devices_per_node, done.copies / config.model.top_k)
        share, once, model = self._limited(config, nodes), 1.0, config.model
        if config.ep_mode == "deepep":
            # a row goes once to each rank that holds one of its experts
            hit = hit_probability(model.experts, model.experts // config.ep, model.top_k)
            once = config.ep * hit / model.top_k
        inter, intra = self.hardware.inter_node, self.hardware.intra_node
        total = 0.0
        for inter_bytes, intra_bytes, inter_peers, intra_peers in steps:
            outside = share * inter_bytes / self._speed(inter) + (inter.latency_s if inter_peers else 0.0)
            inside = once * intra_bytes / self._speed(intra) + (intra.latency_s if intra_peers else 0.0)
            total += max(outside, inside) + self.hardware.launch_s
        return total * (1 - self.reached.hidden_ep * config.overlap_ep)


def _repeated(config: Configuration, forward: Parts) -> float:
    """Seconds of a forward that runs again."""
    return forward.total - (0 if config.recompute.replay_tp else forward.tp)


@lru_cache(maxsize=65536)
def _steps(mode: str, nodes: int, width: int, experts: int, tokens: float, top_k: int, hidden: int) -> tuple:
    steps = expected_steps(mode, Topology(nodes, width, experts), tokens, top_k, hidden, 2)
    return tuple((step.inter_bytes, step.intra_bytes, step.inter_peers, step.intra_peers) for step in steps)


def _ep_bytes(config: Configuration, devices_per_node: int, tokens: float) -> tuple[int, tuple]:
    """Nodes of the group, and each step's (inter bytes, intra bytes, inter peers, intra peers)."""
    span = config.ep * (config.tp if config.expert_tp else 1)
    nodes = max(1, -(-span // devices_per_node))
    while config.ep % nodes:
        nodes += 1
    mode = "deduplicated" if config.ep_mode == "deepep" else config.ep_mode
    mode = mode if nodes > 1 else "global"
    model = config.model
    return nodes, _steps(mode, nodes, config.ep // nodes, model.experts, tokens, model.top_k, model.hidden)
