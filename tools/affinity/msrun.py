"""This module describes how `msrun` of MindSpore 2.9.0 treats a host: which bind file it reads, and which cores it
chooses itself.

The sources are below the installed `mindspore`: `parallel/cluster/process_entity/_bind.py` (prefixes, checks),
`runtime/thread_bind_core.py` (its own plan, cores by module), `parallel/cluster/run.py` (the option).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plugins.errors import ClusterError
from tools.affinity.plan import Plan, make_plan
from tools.affinity.topology import Host
from tools.process.host import compress
from tools.ranges import RANGES, Range
from tools.recipe.load import load_recipe
from tools.recipe.view import View

_VISIBLE = re.compile(r"\d+(?:,\d+)*")


def bind_file(plan: Plan, numactl: bool) -> dict[str, Any]:
    """Return the content of a file that binds the processes of a host to cores. `msrun --bind_numa FILE` reads the
    file, and MindSpore reads it to bind its threads if the recipe has `context.affinity_config: FILE`.

    If `numactl` is not installed, msrun refuses a file that binds memory, so the file then leaves memory out.
    """
    memory = _binds_memory(plan, numactl)
    content: dict[str, Any] = {
        "bind_config": {
            "bind_cpu_mode": "cpu",
            "bind_memory_mode": "numa" if memory else "none",
            "actor_thread_fix_bind": True,
        },
        "bind_cpu": {
            _key(worker.npu, worker.rank): {name: compress(cores) for name, cores in worker.roles.items()}
            for worker in plan.workers
        },
    }
    if memory:
        content["bind_memory"] = {_key(worker.npu, worker.rank): compress(worker.memory) for worker in plan.workers}
    return content


def _binds_memory(plan: Plan, numactl: bool) -> bool:
    """Return the NUMA nodes of a worker's cores, to which the worker's memory is bound; a single node could be too
    small for the two workers near it.
    """
    return numactl and len(plan.host.nodes) > 1 and all(worker.memory for worker in plan.workers)


def _key(npu: int | None, rank: int) -> str:
    return f"device{rank if npu is None else npu}"


def prefixes(plan: Plan, numactl: bool) -> list[list[str]]:
    """Return the command words that go before each worker's command, for launchers other than msrun and for hosts on
    which msrun cannot bind.
    """
    words = []
    for worker in plan.workers:
        cores = compress(worker.cores)
        if _binds_memory(plan, numactl):
            words.append(["numactl", "--membind", compress(worker.memory), "--physcpubind", cores])
        else:
            words.append(["taskset", "-c", cores])
    return words


def obstacle(host: Host, plan: Plan) -> str | None:
    """Return why msrun would refuse the bind file; return None if msrun would accept it."""
    if not host.msrun:
        return (
            "msrun of MindSpore 2.9.0 reads the cpuset of control groups of version 1 only; here it refuses every bind "
            "file ('No available CPU in the environment.') and ignores --bind_core"
        )
    cores = {core for worker in plan.workers for core in worker.cores}
    if unknown := cores.difference(host.msrun):
        return f"msrun takes cores {compress(unknown)} for unavailable: its cpuset is {compress(host.msrun)}"
    return None


def own_plan(host: Host, devices: Sequence[int | None]) -> list[list[int]]:
    """Return the cores that each worker gets under `msrun --bind_core=True`; return empty lists if msrun would bind
    nothing.

    msrun cuts the cores into equal parts, and gives a device cores of its own NUMA node first and then cores of the
    nodes without an NPU, in order and however far away they are. If `npu-smi` does not answer, or the cores of a node
    are not all written as ranges, msrun assigns the cores in the order of their numbers.
    """
    cores, npus = list(host.msrun), sorted(host.npus) if devices and devices[0] is not None else []
    parts = len(npus) or len(devices)
    share = len(cores) // parts
    if share < 1:
        return [[] for _ in devices]
    all_ranges = all("-" in part for cores in host.nodes.values() for part in compress(cores).split(","))
    if npus and all(host.npus[npu] is not None for npu in npus) and all_ranges:
        dealt = _by_node(host, npus, share)
    else:
        dealt = {npu: cores[i * share : (i + 1) * share] for i, npu in enumerate(npus or range(parts))}
        if not npus:
            dealt[parts - 1] = cores[(parts - 1) * share :]
    return [dealt[rank if npu is None else npu] for rank, npu in enumerate(devices)]


def _by_node(host: Host, npus: Sequence[int], share: int) -> dict[int, list[int]]:
    """Return the cores by node as msrun's `_assemble_env_info` deals them: those of a worker's own node first, then
    those of the nodes without an NPU.
    """
    may = set(host.msrun)
    near = set(host.npus.values())
    pool = [core for node, cores in host.nodes.items() if node not in near for core in cores if core in may]
    left = {node: [core for core in host.nodes[node] if core in may] for node in host.nodes}
    dealt = {}
    for npu in npus:
        home = host.npus[npu]
        assert home is not None
        given, left[home] = left[home][:share], left[home][share:]
        more = share - len(given)
        dealt[npu] = given + pool[:more]
        pool = pool[more:]
    return dealt


def visible(environ: Mapping[str, str], npus: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the NPU of each worker in the workers' order, and the faults of the variable ASCEND_RT_VISIBLE_DEVICES.

    MindSpore sorts this list before it names a device (`_get_physical_device_id`), and CANN accepts only ascending
    lists.
    """
    text = environ.get("ASCEND_RT_VISIBLE_DEVICES", "").strip()
    if not text:
        return sorted(npus), []
    match = _VISIBLE.match(text)
    listed = [int(word) for word in match[0].split(",")] if match else []
    notes, name = [], f"ASCEND_RT_VISIBLE_DEVICES={text}"
    if match is None or match[0] != text:
        notes.append(f"{name}: CANN reads it up to the first other character only (here {listed})")
    if listed != sorted(set(listed)):
        notes.append(
            f"{name}: CANN supports ascending lists only, and MindSpore sorts it; the plan does, too. "
            f"Write {','.join(map(str, sorted(set(listed))))}"
        )
    if npus and (gone := sorted(set(listed).difference(npus))):
        notes.append(f"{name}: this host has no NPU {', '.join(map(str, gone))}")
    return sorted(set(listed).intersection(npus)), notes


def plan_for(host: Host, recipe: Path | None, workers: int | None) -> Plan:
    """Return the core plan for the workers that a recipe starts on one node, for a given number of workers, or for one
    worker on each NPU.

    Raises:
        ClusterError: the recipe, the given number and the NPUs all leave the number of workers unknown; or there are
            more workers than NPUs.
        RecipeError: the recipe cannot be read.
    """
    view = View(load_recipe(recipe)) if recipe is not None else None
    on_cpu = not host.npus or (view is not None and view.on_cpu)
    npus, notes = ([], []) if on_cpu else visible(os.environ, list(host.npus))
    if workers is not None and (wrong := Range(1, RANGES["workers"].high).refusal(workers)):
        raise ClusterError(f"--workers {workers} {wrong}")
    count = workers or len(npus)
    if view is not None and not workers:  # on CPU a launch starts all workers on one host
        count = view.devices if on_cpu and view.on_cpu else min(view.devices, view.node)
    if not count:
        raise ClusterError("this host has no NPU; name a RECIPE, or give the number of --workers")
    if view is not None and on_cpu and not view.on_cpu:
        notes = [*notes, "the recipe is for NPUs, but no NPU is seen here; the plan is that for workers on CPU"]
    plan = make_plan(host, count, None if on_cpu else npus)
    plan.notes[:0] = notes
    return plan
