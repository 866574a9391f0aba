"""This program checks our Volcano job against the schema that the Volcano project publishes.

    python benchmarks/cluster/volcano_schema.py CRD.yaml

CRD.yaml: `config/crd/volcano/bases/batch.volcano.sh_jobs.yaml` of github.com/volcano-sh/volcano, whole, at any commit.
The program prints which rules of the schema the job breaks, and whether the schema refuses jobs with single mistakes;
the exit code is 1 if the job breaks a rule or a mistake is not refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.agent.cluster import Allocation, volcano_job
from tests.launch.agent.openapi import broken

MISTAKES: dict[str, Callable[[Any], Any]] = {
    "an unknown key": lambda job: job["spec"].update(minAvailible=2),
    "an unknown event": lambda job: job["spec"]["policies"][-1]["events"].append("PodGone"),
    "text for a number": lambda job: job["spec"].update(minAvailable="two"),
    "a task with capitals": lambda job: job["spec"]["tasks"][0].update(name="Node"),
    "a container without a name": lambda job: job["spec"]["tasks"][0]["template"]["spec"]["containers"][0].pop("name"),
    "a volume elsewhere": lambda job: job["spec"]["tasks"][0]["template"].update(volumes=[]),
}


def main() -> int:
    """Check the Volcano job against the schema; return exit code 0 if the job is valid and the schema refuses every job
    with a mistake.
    """
    if len(sys.argv) != 2:
        sys.exit("python benchmarks/cluster/volcano_schema.py CRD.yaml")
    versions = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))["spec"]["versions"]
    schema = next(each for each in versions if each["name"] == "v1alpha1")["schema"]["openAPIV3Schema"]
    job = Allocation(
        "recipes/telechat3_105b/pretrain_4k.yaml", "output/run", 4096, 8, spares=4, options=("--restarts", "20")
    )
    content = yaml.safe_load(volcano_job(job, Path("/shared/telechat3-moe")))
    wrong = list(broken(schema, content, "job"))
    print("\n".join(wrong) or "the job holds")
    missed = 0
    for name, mistake in MISTAKES.items():
        other = copy.deepcopy(content)
        mistake(other)
        said = list(broken(schema, other, "job"))
        missed += not said
        print(f"{name}: {'; '.join(said) or 'NOT FOUND'}")
    return int(bool(wrong) or missed > 0)


if __name__ == "__main__":
    sys.exit(main())
