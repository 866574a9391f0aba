"""Lines that keep the host's other work off the workers' cores; the plan changes nothing by itself."""

from __future__ import annotations

from tools.affinity.plan import Plan
from tools.process.host import compress


def isolation(plan: Plan) -> list[tuple[str, str]]:
    """(what it does, the line) of each; they need root. None where no core is left to the system."""
    workers = [core for worker in plan.workers for core in worker.cores]
    interrupts = [core for cores in plan.interrupts.values() for core in cores]
    rest = sorted({*interrupts, *plan.system, *plan.idle})
    if not rest or not workers:
        return []
    allowed = f"AllowedCPUs={compress(rest)}"
    return [
        (
            "services and log-ins leave the workers' cores (systemd on control groups of version 2)",
            f"systemctl set-property --runtime system.slice {allowed}; "
            f"systemctl set-property --runtime user.slice {allowed}",
        ),
        (
            "irqbalance leaves them, too (in /etc/sysconfig/irqbalance)",
            f"IRQBALANCE_BANNED_CPULIST={compress(workers)}",
        ),
        ("interrupts begin elsewhere (a kernel parameter)", f"irqaffinity={compress(interrupts or rest)}"),
    ]
