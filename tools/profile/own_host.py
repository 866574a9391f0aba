"""A cluster file of a CPU that nobody has described: what the best kernels of its profile reach, as peaks."""

from __future__ import annotations

import os
from math import prod
from typing import Any

from plugins.errors import DataError
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency
from tools.profile.kernels import Profile
from tools.profile.kinds import term_of
from tools.profile.shapes import matmul_of

START = Efficiency(
    matmul=0.9, matmul_fp8=0.5, half_size=64.0, attention=0.3, memory=0.05, unfused=1.0, link=1.0, hidden=0.5,
    hidden_ep=0.5, layer_s=1e-3, moe_s=1e-3, burst=1.0, step_s=1e-2,
    weight_s=1e-4,
)  # fmt: skip
_LARGE = 1e-4  # seconds: shorter kernels are mostly their own start
_ITEM = 4


def host_content(profile: Profile, config: Configuration, name: str) -> dict[str, Any]:
    """What a hardware file of the profiled CPU holds.

    The peak is that of the fastest matmul, bandwidth that of the fastest elementwise operator, of those that take more
    than 0.1 ms. A model of one device sends nothing, so links are assumed.

    Raises:
        DataError: the profile has no shapes, so nothing tells FLOPs.
    """
    rates, bytes_ = [], []
    for kernel in profile.step.kernels:
        if kernel.seconds / kernel.count < _LARGE:
            continue
        term = term_of(kernel, config)
        matmul = matmul_of(kernel) if term == "matmul" else None
        if matmul:
            rates.append(matmul.flops * kernel.count / kernel.seconds)
        elif kernel.inputs and term == "elementwise":
            sizes = [prod(shape) for shape in kernel.inputs]
            bytes_.append(_ITEM * (sum(sizes) + max(sizes)) * kernel.count / kernel.seconds)
    if not rates or not bytes_:
        raise DataError(f"{profile.source}: no shapes of matmuls and other operators: a CPU's peaks cannot be measured")
    peak = _figure(max(rates), "derived", "fastest matmul of the profile")
    link = {
        "bytes_per_s": _figure(1e10, "assumed", "one device sends nothing"),
        "latency_s": _figure(0.0, "assumed", "one device sends nothing"),
        "efficiency": _figure(1.0, "assumed", "one device sends nothing"),
    }
    # of bf16, too, for fused attention is counted against it
    return {
        "name": name,
        "device": "CPU",
        "peak_flops": {"fp32": peak, "bf16": _figure(max(rates), "derived", "as fp32, which it is computed in")},
        "hbm_bytes": _figure(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "derived", "this host"),
        "hbm_bytes_per_s": _figure(
            max(bytes_), "derived", "fastest elementwise operator of the profile, caches included"
        ),
        "devices_per_node": _figure(1, "assumed", "one process"),
        "intra_node": link,
        "inter_node": link,
        "launch_s": _figure(1e-5, "assumed", "gaps between operators stand in layer_s and step_s"),
    }


def _figure(value: float, certainty: str, source: str) -> dict[str, Any]:
    return {"value": float(f"{value:.5g}"), "certainty": certainty, "source": source}
