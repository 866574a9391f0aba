"""This module binds a worker to the cores that the plan of its host assigns to it; `launch/run/cores.py` makes the
plan.

The module uses only the standard library, because it runs before NumPy, OpenMP and MindSpore start threads, and these
threads stay on the cores of the process that starts them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from tools.process.host import expand

CORES = "TC3_CORES"  # lists of cores by local rank, with blanks between: "0-3,8 4-7,9"
BIND_FILE = "MSRUN_BIND_FILE"  # msrun sets it where it has bound the worker by a file
FOR_MINDSPORE = "MSRUN_CPU_LIST"  # MindSpore binds the thread that calls it to these (runtime/thread_bind_core.py)


def stay_on_own_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bind this process to its cores, if the launch has assigned cores to it; if binding fails, print a message and
    continue.

    MindFormers asks MindSpore to bind every worker (`build_context._setup_affinity`). With control groups of version 1
    MindSpore would then move the main thread to cores of its own choice, so this function gives MindSpore the planned
    cores.
    """
    lists = environ.get(CORES, "").split()
    if not lists or environ.get("MS_ROLE") != "MS_WORKER":  # msrun starts its scheduler with the same command
        return
    try:
        cores = expand(lists[int(environ["DEVICE_ID"])])  # msrun's number of a worker on its host
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    except (OSError, ValueError, KeyError, IndexError) as error:
        print(f"note: {CORES}={environ[CORES]}: this worker stays where it was started ({error})", flush=True)
        return
    environ[FOR_MINDSPORE] = str(cores)


def with_bind_file(recipe: dict[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the recipe with `context.affinity_config` set to msrun's file of core bindings, so that MindSpore binds
    its threads to the same cores as msrun. A recipe with its own binding is returned unchanged.

    Without this key MindFormers lets MindSpore move the main thread to other cores. MindFormers recognises a file by
    the ending of its name.
    """
    file, context = environ.get(BIND_FILE, ""), recipe.get("context") or {}
    if not file.endswith(".json") or binds_itself(recipe):
        return recipe
    return {**recipe, "context": {**context, "affinity_config": file}}


def binds_itself(recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe itself binds the workers to cores; a launch then does not bind its workers."""
    context = recipe.get("context") or {}
    return any(context.get(key) for key in ("affinity_config", "affinity_cpu_list"))
