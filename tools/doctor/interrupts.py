"""Interrupts of network cards, disks and NPUs against the cores that workers get."""

from __future__ import annotations

import re

from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
from tools.doctor.checks import REPORT, Answer, Patient, check
from tools.host.cores import compress, expand

# what drivers call their interrupts: NICs of Huawei and Mellanox, NVMe, NPUs (sq_send_trigger_irq)
_DEVICES = re.compile(r"hns|hclge|hinic|mlx|nvme|sq_send|devdrv|davinci", re.IGNORECASE)


@check(
    why="an interrupt on a worker's core delays its operators; isolation gained 10-15 % in the report (its number)",
    source=REPORT,
    mend="echo CORES > /proc/irq/N/smp_affinity_list, with the interrupts' cores that tc3 affinity prints",
    npu=True,
)
def interrupts(patient: Patient) -> Answer:
    """Devices interrupt cores that no worker has in the plan of `tc3 affinity`."""
    host = read_host(patient.root)
    plan = make_plan(host, patient.workers, sorted(host.npus) or None)
    workers = {core for worker in plan.workers for core in worker.cores}
    seen, hit = 0, set()
    for folder in patient.root.find("/proc/irq/[0-9]*"):
        names = [path.rpartition("/")[2] for path in patient.root.find(f"{folder}/*/")]
        if any(_DEVICES.search(name) for name in names):
            effective = patient.root.read(f"{folder}/effective_affinity_list")
            hit |= workers.intersection(expand(effective or patient.root.read(f"{folder}/smp_affinity_list") or ""))
            seen += 1
    if not seen:
        return Answer("unknown", "no interrupts of known devices are seen (in a container: ask its host)")
    return Answer("warn" if hit else "ok", f"{seen} of devices, on workers' cores: {compress(hit) or 'none'}")
