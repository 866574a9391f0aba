"""A Volcano job whose pods are agents: https://volcano.sh, a batch scheduler for Kubernetes, Ascend's own among others.

The agents restart a failed run in their pods; Volcano brings back single pods. `volcano.yaml` is the job, and
`volcano_pod.sh` the script of a pod in it.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from string import Template

from launch.agent.cluster.allocation import DECISION, Allocation, body

YAML = DECISION.with_name("volcano.yaml")
POD = DECISION.with_name("volcano_pod.sh")
RESOURCES = {"Ascend": "huawei.com/Ascend910"}  # what Ascend's device plugin for Kubernetes calls an NPU
INDENT = 18  # of the script and of resources, less 2


def volcano_job(job: Allocation, root: Path) -> str:
    """The YAML of `job`; `root` is the checkout, whose parent is where the shared volume is mounted."""
    values = {
        "size": job.size,
        "made_by": " ".join(shlex.join(job.made_by).splitlines()),
        "name": job.name,
        "nodes": job.nodes,
        "replicas": job.nodes + job.spares,
        "notice": job.notice,
        "root": json.dumps(str(root)),
        "mount": json.dumps(str(root.parent)),
        "script": textwrap.indent(pod_script(job), " " * INDENT, lambda line: line.strip() != ""),
        "resources": textwrap.indent(_resources(job), " " * (INDENT - 2)),
    }
    return Template(YAML.read_text(encoding="utf-8")).substitute(values)


def pod_script(job: Allocation) -> str:
    """What a pod runs, as bash."""
    spares = ["--spares", str(job.spares)] if job.spares else []
    lines = [
        "# shellcheck disable=SC2016 # words are taken as they stand",
        "set -euo pipefail",
        f"JOB={job.name}",
        f"RECIPE={shlex.quote(job.recipe)}",
        f"RUN_DIR={shlex.quote(job.run_dir)}",
        f"SLOTS={job.slots}",
        f"OPTIONS=({' '.join(shlex.quote(word) for word in (*job.options, *spares))})",
    ]
    return "\n".join([*lines, body(DECISION) + body(POD)]).rstrip("\n")


def _resources(job: Allocation) -> str:
    """Devices of a node for its pod; on CPU a core for each worker."""
    name = RESOURCES.get(job.target, "cpu")
    return f"limits:\n  {name}: {job.slots}"
