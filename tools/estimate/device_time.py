"""Seconds of single operators and collectives on a cluster: rooflines with fitted efficiencies.

matmul        FLOPs / (peak x matmul x d / (d + half_size)), d the smallest dimension; at least the time to move
              its operands
elementwise   bytes / (HBM bandwidth x memory)
collective    launch + latency of each message + bytes over the slowest link of the group
"""

from __future__ import annotations

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency, efficiency_of
from tools.estimate.layer_model import Matmul
from tools.hardware import Hardware, Link

_WIDE_HEAD = 128  # the width of heads for which kernels of fused attention are made
_PRODUCT_BYTES = 4  # of a score that one unfused matmul writes and the other reads
_LOW = ("fp8", "mxfp8", "nvfp4")
_BLOCKS = {"mxfp8": "fp8", "nvfp4": "fp4"}  # what hardware files call their peaks


class DeviceTimes:
    """The time of operators on one cluster."""

    def __init__(self, hardware: Hardware, efficiency: Efficiency | None = None):
        self.hardware = hardware
        self.reached = efficiency or efficiency_of(hardware)

    def _peak(self, dtype: str) -> float:
        """FLOP/s of a dtype; of bf16 where the file has none for it.

        Raises:
            RecipeError: it has neither.
        """
        flops, dtype = self.hardware.peak_flops, _BLOCKS.get(dtype, dtype)
        if dtype not in flops and "bf16" not in flops:
            raise RecipeError(f"{self.hardware.name}: peak_flops.bf16: missing; the file has {', '.join(flops)}")
        return flops[dtype] if dtype in flops else flops["bf16"]

    def _attention(self, config: Configuration, flops: float) -> float:
        """Forward seconds of so many FLOPs of scores and their products with the values.

        Two unfused matmuls move their scores while they compute, or take as long as moving them does.
        """
        dtype, width = config.dtype if config.dtype in ("bf16", "fp16") else "bf16", config.model.qk_dim
        if config.flash:
            # narrower heads have as many exponentials for each score
            return flops / (self._peak(dtype) * self.reached.attention * min(1.0, width / _WIDE_HEAD))
        computing = flops / (self._peak(dtype) * self.reached.matmul * width / (width + self.reached.half_size))
        scores = flops / (2 * (width + config.model.v_dim))
        return max(computing, _PRODUCT_BYTES * scores / self.hardware.hbm_bytes_per_s)

    def _matmul(self, config: Configuration, matmul: Matmul) -> float:
        """Forward seconds."""
        size = min(matmul.rows, matmul.columns, matmul.depth)
        if not size:
            return 0.0
        dtype = "bf16" if matmul.high and config.dtype in _LOW else config.dtype
        share = self._share(dtype)
        share *= self.reached.burst if config.layer_only and dtype not in _LOW else 1
        computing = matmul.flops / (self._peak(dtype) * share * size / (size + self.reached.half_size))
        moved = matmul.rows * (matmul.depth + matmul.columns) + matmul.depth * matmul.columns
        return max(computing, 2 * moved * matmul.times / self.hardware.hbm_bytes_per_s)

    def _share(self, dtype: str) -> float:
        """Of the peak that a large matmul reaches."""
        if _BLOCKS.get(dtype, dtype) not in self.hardware.peak_flops or dtype not in _LOW:
            return self.reached.matmul
        if dtype == "nvfp4":
            return self.reached.matmul_fp4
        return self.reached.matmul_fp8 * (self.reached.blocks if dtype == "mxfp8" else 1)

    def _moved(self, config: Configuration, size: float) -> float:
        """Seconds in which elementwise operators read and write so many bytes."""
        more = 1 if config.fused else self.reached.unfused
        more *= self.reached.graphed if config.graphs == "step" else 1
        return more * self.moving(size)

    def moving(self, size: float) -> float:
        """Seconds in which operators read and write `size` bytes of HBM, all that there is counted."""
        return size / (self.hardware.hbm_bytes_per_s * self.reached.memory)

    def launching(self, operators: float) -> float:
        """Seconds to launch so many operators, if the device waits for each."""
        return operators * self.hardware.launch_s

    def to_host(self, size: float) -> float | None:
        """Seconds to copy `size` bytes to the host's memory with nothing else on the link; None where it is unknown."""
        host = self.hardware.host_link
        return None if host is None else size / host.bytes_per_s

    def multiplying(self, config: Configuration, matmul: Matmul) -> float:
        """Seconds of `matmul` in the run's precision."""
        return self._matmul(config, matmul)

    def _link(self, span: int) -> Link:
        """The slowest link inside `span` consecutive ranks."""
        return self.hardware.intra_node if span <= self.hardware.devices_per_node else self.hardware.inter_node

    def _speed(self, link: Link) -> float:
        factor = self.reached.network if link == self.hardware.inter_node else self.reached.link
        return link.reached * min(factor, 1 / link.efficiency)

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
