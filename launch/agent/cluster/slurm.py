"""An sbatch file that starts an agent on each node.

The agents restart a failed run inside the job, on the nodes that it has; the job is requeued when they cannot go on:
no node left, preempted, out of time. The upper part of the file is written here, the lower one is `slurm_body.sh`.
"""

from __future__ import annotations

import shlex

from launch.agent.cluster.allocation import DECISION, Allocation, body

BODY = DECISION.with_name("slurm_body.sh")
REQUEUES = 3


def sbatch_file(job: Allocation) -> str:
    """The text of the sbatch file of `job`; options of sbatch's own command line win over those in it."""
    return "\n".join([*_head(job), *_values(job), "", body(DECISION) + body(BODY)])


def _head(job: Allocation) -> list[str]:
    """What Slurm reads, and what a user does."""
    made_by = " ".join(shlex.join(job.made_by).splitlines())
    return [
        "#!/usr/bin/env bash",
        f"# {job.size}. Written by: {made_by}",
        "# Submit it from the checkout, which lies with the data and RUN_DIR on a disk that all nodes see:",
        "#   sbatch [--time=7-0] [--partition=NAME] [--account=NAME] FILE",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes + job.spares}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "# A lost node does not end the job: the agents go on with a spare, or smaller.",
        "#SBATCH --no-kill",
        "# Before the time limit, and before a preemption if the site sends it (PreemptParameters=send_user_signal),",
        f"# each agent gets SIGTERM and has {job.notice} s to save and leave. proctrack/cgroup and proctrack/pgid",
        "# send it to the agents alone, as it has to be; proctrack/linuxproc would send it to the workers, too.",
        f"#SBATCH --signal=TERM@{job.notice}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        "# The environment can set: TC3_ROOT (the checkout), RUN_DIR, REQUEUES (how often it is queued again).",
        "# Exit code: 0 trained, 1 given up, 2 something to mend first, 130 or 143 interrupted.",
        "# shellcheck disable=SC2016 # words are taken as they stand",
        "set -euo pipefail",
        "",
    ]


def _values(job: Allocation) -> list[str]:
    """The assignments that set this file apart from others."""
    spares = ["--spares", str(job.spares)] if job.spares else []
    options = " ".join(shlex.quote(word) for word in (*job.options, *spares))
    return [
        f"RECIPE={shlex.quote(job.recipe)}",
        f"OPTIONS=({options})",
        f"SLOTS={job.slots} # workers of a node",
        f'[ -n "${{RUN_DIR:-}}" ] || RUN_DIR={shlex.quote(job.run_dir)}',
        f'[ -n "${{REQUEUES:-}}" ] || REQUEUES={REQUEUES}',
    ]
