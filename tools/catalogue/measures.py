"""What section 6 of the technical report did to its hosts: what a launch here applies, and what `tc3 doctor` checks.

docs/doctor.md has the same as a table for people; cards say it of their recipes under `host_measures`.
"""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("applied", "checked")  # by each launch; by `tc3 doctor` only, and the administrator mends it


@dataclass(frozen=True)
class Measure:
    """One measure: what the report gained by it on up to 4,096 devices, our role, and the checks that look at it.

    The gains are the report's. Nothing here has measured them.
    """

    gain: str
    role: str
    checks: tuple[str, ...]


_ISOLATION = "10-15 % in large configurations, 1-2 % in small ones, up to 38 % less variance; both together"
MEASURES = {
    "core_binding": Measure(_ISOLATION, "applied", ("binding", "cores")),
    "isolation": Measure(_ISOLATION, "checked", ("irqbalance", "interrupts", "isolated")),
    "idle_threshold": Measure("25-30 %", "checked", ("npu_clock",)),
    "iommu_passthrough": Measure("3-5 %", "checked", ("iommu",)),
}
