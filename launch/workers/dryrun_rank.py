"""This module is the program that `tc3 dryrun` starts for each rank that it compiles, as msrun starts train.py for each
worker.

    python -m launch.workers.dryrun_rank PARENT JOB.json OUT.json [GRAPH.ir.gz]

PARENT is the pid of the process that waits for the result: if that process ended while this process imported MindSpore,
this process ends, too, because no other process would end it. JOB.json is `tools.dryrun.plan.Job`; OUT.json is written
completely or not at all when the compilation is over; before it, the text of the final graph is written if its path is
given.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from launch.workers.lifetime import die_with_parent
from plugins import enable_plugins
from tools.dryrun.plan import Job
from tools.dryrun.rank import compile_job
from tools.files.atomic import write_atomically
from tools.recipe.load import Recipe
from tools.recipe.view import View


def main() -> None:
    """Compile the train step of one rank of a job, and write the result to a file."""
    parent, *files = sys.argv[1:]
    die_with_parent(parent=int(parent))
    gc.set_threshold(100_000)  # as in train.py
    job_file, out, *text = map(Path, files)
    fields = json.loads(job_file.read_text(encoding="utf-8"))
    job = Job(**fields | {"recipe": Recipe(fields["recipe"])})
    report = compile_job(job, out.parent, partial(enable, on_cpu=View(job.recipe).cpu_classes), *text)
    write_atomically(out, json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # MindSpore's threads may crash on the way out after a compile for another target


def enable(config: Any, on_cpu: bool) -> None:
    """Enable the same parts as `train.py` does: the CPU backend for a recipe that targets CPU, and the recipe's
    plugins.
    """
    if on_cpu:
        from plugins.cpu_backend import adapter
        from plugins.cpu_backend import transport as peers

        adapter.enable(config)
        peers.connect = lambda timeout=0.0: None  # there is nobody to connect to
    enable_plugins(config)


if __name__ == "__main__":
    main()
