"""This module applies the plan of `tc3 affinity` to the workers that a launch starts on this host (docs/affinity.md).

If msrun accepts the plan, it gets the plan as a file, and MindSpore binds threads by their role. Otherwise each worker
binds itself to its cores (launch/workers/cores.py). A plan that fails is reported and does not stop the launch.

    python -m launch.run.cores WORKERS TARGET FILE     # for launch/script_body.sh: the same as assignments of bash
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from launch.workers.cores import CORES, binds_itself
from tools.affinity.msrun import bind_file, obstacle, visible
from tools.affinity.plan import Plan, make_plan
from tools.affinity.topology import read_host
from tools.files.atomic import write_atomically
from tools.process.host import Root, compress

THREADS = "OMP_NUM_THREADS"
OWN_CHOICE = "--bind_core=True"  # msrun's, for workers on NPUs of which no plan could be made


@dataclass(frozen=True)
class Cores:
    """A `Cores` is the core binding of one launch: the options of msrun, the environment of the workers, and the bind
    file if there is one.

    Attributes:
        options: the options of msrun.
        environment: the environment of the workers; a value that the user has set stays.
        said: sentences for the user.
        file: the path and the content of the bind file; None if msrun takes no bind file.
    """

    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    file: tuple[Path, Mapping[str, Any]] | None = None

    def write(self) -> None:
        """Write the file from which msrun reads each worker's cores, if this core binding uses such a file."""
        if self.file is not None:
            path, content = self.file
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content, indent=1) + "\n")


def of_launch(recipe: Mapping[str, Any], workers: int, file: Path) -> Cores:
    """Return the core binding of the workers that train `recipe` on this host.

    `file` is for msrun; MindFormers wants it to end in .json.
    """
    if binds_itself(recipe):
        return Cores(said=("cores: the recipe has its own (context.affinity_config or affinity_cpu_list)",))
    return of_host(workers, (recipe.get("context") or {}).get("device_target") == "CPU", file)


def of_host(workers: int, on_cpu: bool, file: Path, root: Root = Root()) -> Cores:  # noqa: B008 it is frozen
    """Return the core binding for a number of workers; this function raises no error."""
    if on_cpu and workers == 1:
        return Cores()  # nothing to divide
    try:
        host = read_host(root)
        npus, notes = ([], []) if on_cpu else visible(os.environ, list(host.npus))
        plan = make_plan(host, workers, None if on_cpu else npus)
        plan.notes[:0] = notes
        return _applied(plan, on_cpu or not root.has_tool("taskset"), file)
    except Exception as error:  # whatever it is: a launch without bound cores is slower, one that ends is none
        options = () if on_cpu else (OWN_CHOICE,)
        instead = f"msrun {OWN_CHOICE} chooses" if options else "none is bound"
        return Cores(options, said=(f"cores: no plan for this host, {instead}: {error}",))


def _applied(plan: Plan, by_worker: bool, file: Path) -> Cores:
    """Return the binding that applies the plan by msrun, or by the workers themselves if msrun cannot."""
    said = tuple(f"cores: {note}" for note in plan.notes)
    if not plan.binds:
        return Cores(said=said)
    lists = [compress(worker.cores) for worker in plan.workers]
    said = ("cores: " + "; ".join(f"worker {rank}: {cores}" for rank, cores in enumerate(lists)), *said)
    if by_worker or obstacle(plan.host, plan):
        threads = min(len(worker.cores) for worker in plan.workers)
        return Cores(environment={CORES: " ".join(lists), THREADS: str(threads)}, said=said)
    threads = min(len(worker.roles["main"]) for worker in plan.workers)
    # memory comes from where a thread runs; bound to nodes, a worker would end when they are full
    content = bind_file(plan, numactl=False)
    return Cores((f"--bind_numa={file}",), {THREADS: str(threads)}, said, (file, content))


def main() -> None:
    """Write the file from which msrun reads the workers' cores, and print shell assignments for the launch script;
    messages for the user go to stderr.
    """
    workers, target, file = sys.argv[1:]
    cores = of_host(int(workers), target == "CPU", Path(file))
    cores.write()
    for sentence in cores.said:
        click.echo(f"note: {sentence}", err=True)
    click.echo(f"BINDING=({shlex.join(cores.options)})")
    for name, value in cores.environment.items():
        if not os.environ.get(name):  # what the user has set stays
            click.echo(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
