"""What a cluster manager is asked for, to start an agent on each node of a run; `slurm` and `volcano` write it down."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.run.msrun import ROOT
from plugins.errors import ClusterError

NOTICE = 300  # seconds between the manager's SIGTERM and its SIGKILL: time for a checkpoint
DECISION = ROOT / "launch/agent/decision.sh"  # what both kinds of script ask after their agents ended


@dataclass(frozen=True)
class Allocation:
    """One run of agents. `options` go to each agent as they stand, apart from its hosts, host and run's folder.

    `slots` are the workers of a node; relative paths start at the checkout; `made_by` is the command that wrote it.
    """

    recipe: str
    run_dir: str
    workers: int
    slots: int
    spares: int = 0
    target: str = "Ascend"
    notice: int = NOTICE
    options: Sequence[str] = field(default=())
    made_by: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        """Refuse workers that are no whole nodes.

        Raises:
            ClusterError: they are none, or there is no time for a checkpoint.
        """
        if self.workers % self.slots:
            raise ClusterError(f"{self.workers} workers are no whole nodes of {self.slots}: name hosts with --nodes")
        if self.notice < 1:
            raise ClusterError(f"a notice of {self.notice} s: a checkpoint needs some time, want 1 or more")

    @property
    def nodes(self) -> int:
        """Nodes that train; `spares` wait beside them."""
        return self.workers // self.slots

    @property
    def name(self) -> str:
        """A name that Slurm and Kubernetes take: lower case, digits and hyphens, from the run's folder."""
        words = re.sub(r"[^a-z0-9]+", "-", Path(self.run_dir).name.lower()).strip("-")
        return (words if words[:1].isalpha() else f"tc3-{words}")[:40].strip("-")

    @property
    def size(self) -> str:
        """How much it takes, in words."""
        spares = f" and {self.spares:,} spare{'s' * (self.spares > 1)}" if self.spares else ""
        nodes = f"{self.nodes:,} node{'s' * (self.nodes > 1)}"
        return f"{self.workers:,} worker{'s' * (self.workers > 1)} on {nodes}{spares}"


def body(path: Path) -> str:
    """The text of a bash file of this folder, without the line that tells linters its language."""
    return path.read_text(encoding="utf-8").split("\n", 1)[1]
