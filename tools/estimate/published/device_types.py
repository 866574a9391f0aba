"""Device types: which clusters share a set of efficiencies, where a set starts, and how far a fit may take it.

A type with few runs is drawn to the set of the type that it is most like (its parent); a type without a parent to the
start. How hard is `SPREAD`: what is a property of software or hosts is nearly the same on all devices, what is one of
the device is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.estimate.efficiency import Efficiency


@dataclass(frozen=True)
class DeviceType:
    """Clusters with one set of efficiencies.

    Args:
        parent: the type that it is drawn to; "" for the start.
        mesh: devices of a node are joined pair by pair.
        own: where single parameters are drawn to, instead of to the parent's, for a reason that is not in the rows.
    """

    clusters: tuple[str, ...]
    parent: str = ""
    mesh: bool = False
    own: Mapping[str, float] = field(default_factory=dict)


START = Efficiency(
    matmul=0.70,
    matmul_fp8=0.55,
    half_size=300.0,
    attention=0.55,
    memory=0.75,
    unfused=2.0,
    link=1.0,
    hidden=0.5,
    hidden_ep=0.8,
    layer_s=2e-5,
    moe_s=2e-3,
    burst=1.4,
    step_s=0.05,
    blocks=0.9,
    matmul_fp4=0.4,
    graphed=0.7,
    network=1.0,
)
TYPES = {
    "a100": DeviceType(("a100_80g",)),
    "h100": DeviceType(("h100",)),
    # PyTorch's attention of 2024, FlashAttention-2: 35 to 40 % of an H100 (FlashAttention-3's paper, arXiv 2407.08608)
    "h100_96g": DeviceType(("h100_96g",), "h100", own={"attention": 0.37}),
    "h800": DeviceType(("h800",), "h100"),
    "gb200": DeviceType(("gb200",), "h100"),
    "b200": DeviceType(("b200",), "gb200"),
    "gb300": DeviceType(("gb300",), "gb200"),
    "b300": DeviceType(("b300",), "gb300"),
    "ascend_910b": DeviceType(("atlas_800t_a2", "atlas_900_a2"), mesh=True),
    "ascend_910c": DeviceType(("atlas_900_a3",), "ascend_910b"),
}
# parameter -> standard deviations of (a type without a parent from the start, a type from its parent); of the
# logarithm, of shares that may be 0 as they are
SPREAD = {
    "matmul": (0.15, 0.15),
    "matmul_fp8": (0.15, 0.1),
    "half_size": (0.7, 0.3),
    "attention": (0.3, 0.2),
    "memory": (0.2, 0.15),
    "unfused": (0.3, 0.2),
    "link": (0.2, 0.2),
    "hidden": (0.25, 0.15),
    "hidden_ep": (0.15, 0.1),
    "layer_s": (0.7, 0.4),
    "moe_s": (0.7, 0.4),
    "burst": (0.15, 0.1),
    "step_s": (0.4, 0.2),
    "blocks": (0.1, 0.05),
    "matmul_fp4": (0.3, 0.1),
    "graphed": (0.3, 0.1),
    "network": (0.1, 0.1),
}

# parameter -> the one whose step from the parent it is taken to share: clocks and power move both
FOLLOWS = {"matmul_fp8": "matmul"}


def type_of(cluster: str) -> str:
    """The device type of a cluster."""
    return next(name for name, kind in TYPES.items() if cluster in kind.clusters)
