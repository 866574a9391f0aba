"""The agent of a node, of a run of small workers: what `tc3 agent` does, without MindSpore and with limits of seconds.

usage: agent.py RUN_DIR HOST HOSTS NODES [PORT]      HOSTS with commas between them, spares last
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launch.agent import planning
from launch.agent.decide import Rules
from launch.agent.loop import Agent
from launch.agent.phases import DEFAULTS, Limits
from launch.agent.planning import Job, first_number
from launch.run import msrun
from tools.recipe.load import load_recipe

HERE = Path(__file__).parent
LIMIT = 6.0  # seconds of any phase, unless $SMALL_LIMIT says otherwise
LOST = 4.0  # seconds without a sign of life, unless $SMALL_LOST says otherwise


def main() -> int:
    """The exit code of the agent."""
    run_dir, host, hosts, nodes, *port = sys.argv[1:]
    launcher = run_dir_file(Path(run_dir))
    msrun.msrun_of = lambda: launcher  # type: ignore[attr-defined]
    recipe = load_recipe(msrun.ROOT / "recipes/mini/pretrain_dp2.yaml")
    recipe["checkpoint"] = {**recipe["checkpoint"], "save_path": str(Path(run_dir) / "checkpoint")}
    names = tuple(hosts.split(","))
    job = Job(
        recipe,
        Path(run_dir),
        host,
        names,
        int(nodes),
        int(port[0]) if port else None,
        bind=False,
        rules=Rules(restarts=3, first=0.2, hosts=list(names)),
        lost_after=float(os.environ.get("SMALL_LOST", LOST)),
        patience=600.0,
        worker=HERE / "worker.py",
        watchful=True,
    )
    planning.SETTLE = float(os.environ.get("SMALL_SETTLE", planning.SETTLE))
    every = dict.fromkeys(DEFAULTS, float(os.environ.get("SMALL_LIMIT", LIMIT)))
    return Agent(job, limits=Limits(every, every)).run(first_number(job.run_dir, job.saves)).code


def run_dir_file(run_dir: Path) -> Path:
    """msrun's stand-in as a program."""
    program = run_dir / "msrun"
    if not program.exists():
        part = run_dir / f".msrun-{sys.argv[2]}"
        part.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "msrun.py"} "$@"\n')
        part.chmod(0o755)
        part.replace(program)
    return program


if __name__ == "__main__":
    sys.exit(main())
