"""This module is the command `tc3 affinity`. The command prints which cores each worker of this host gets, and changes
nothing.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import click

from plugins.errors import ClusterError
from tools.affinity import msrun
from tools.affinity.plan import Plan, how_far
from tools.affinity.topology import read_host, root_option
from tools.files.atomic import check_writable, write_atomically
from tools.process.host import Root, compress

_LEGEND = "0-9a-z: the worker of that rank   I: interrupts   S: system   .: nobody's   x: not allowed"
_MARKS = digits + ascii_lowercase


def isolation(plan: Plan) -> list[tuple[str, str]]:
    """Return (purpose, command) for each command that keeps other processes off the workers' cores. The returned
    commands need root permission. The list is empty if no core is left for the system.
    """
    workers = [core for worker in plan.workers for core in worker.cores]
    interrupts = [core for cores in plan.interrupts.values() for core in cores]
    rest = sorted({*interrupts, *plan.system, *plan.idle})
    if not rest or not workers:
        return []
    allowed = f"AllowedCPUs={compress(rest)}"
    return [
        (
            "services and log-ins leave the workers' cores (systemd on control groups of version 2)",
            f"systemctl set-property --runtime system.slice {allowed}; "
            f"systemctl set-property --runtime user.slice {allowed}",
        ),
        (
            "irqbalance leaves them, too (in /etc/sysconfig/irqbalance)",
            f"IRQBALANCE_BANNED_CPULIST={compress(workers)}",
        ),
        ("interrupts begin elsewhere (a kernel parameter)", f"irqaffinity={compress(interrupts or rest)}"),
    ]


def picture(plan: Plan) -> str:
    """Return one line of text for each NUMA node, like ``node 6 144-167 IS00000000000111... <- NPU 0, 1``, and a
    legend.
    """
    marks = {core: _MARKS[worker.rank % len(_MARKS)] for worker in plan.workers for core in worker.cores}
    marks.update(dict.fromkeys(plan.system, "S"))
    marks.update({core: "I" for cores in plan.interrupts.values() for core in cores})
    host = plan.host
    width = max(len(compress(cores)) for cores in host.nodes.values())
    rows = []
    for node, cores in host.nodes.items():
        line = "".join(marks.get(core, ".") if core in host.allowed else "x" for core in cores)
        near = ", ".join(str(npu) for npu, home in host.npus.items() if home == node)
        rows.append(f"node {node:<3d}{compress(cores):{width}s}  {line}{f'  <- NPU {near}' if near else ''}")
    return "\n".join([*rows, _LEGEND])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option(
    "--workers",
    type=int,
    help="Plan the CPU cores of this many workers on this host. By default, the plan is for the workers that RECIPE "
    "starts on one host or, if RECIPE is not given, for one worker for each NPU.",
)
@root_option
@click.option(
    "--bind-file",
    type=click.Path(path_type=Path),
    help="Write the plan, which gives each worker its CPU cores, to this file in the form that `msrun --bind_numa` "
    "reads.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON which CPU cores each worker gets.")
def affinity(recipe: Path | None, workers: int | None, root: Path, bind_file: Path | None, as_json: bool) -> None:
    """Plan which cores each worker gets. A worker's cores are near its NPU, are shared with no other worker and are
    divided by role. The plan is for as many workers as RECIPE starts on this host.

    The command changes nothing. Exit code: 0 a plan was made, 2 the user has to correct something first.
    """
    if bind_file is not None:
        check_writable(bind_file)
    source = Root(root)
    host = read_host(source)
    plan = msrun.plan_for(host, recipe, workers)
    numactl = source.has_tool("numactl")
    if bind_file is not None:
        if not plan.binds:
            raise ClusterError(f"--bind-file {bind_file}: {plan.notes[0]}")
        write_atomically(bind_file, json.dumps(msrun.bind_file(plan, numactl), indent=1) + "\n")
    answer = as_dict(plan, numactl)
    click.echo(json.dumps(answer) if as_json else _text(plan, answer, bind_file))


def as_dict(plan: Plan, numactl: bool) -> dict[str, Any]:
    """Return the core plan as JSON values. Cores are written as Linux writes lists of cores, such as 0-3,8."""
    host, devices = plan.host, [worker.npu for worker in plan.workers]
    words = msrun.prefixes(plan, numactl) if plan.binds else [[] for _ in devices]
    theirs = msrun.own_plan(host, devices)
    rows = []
    known = {core for members in host.nodes.values() for core in members}  # msrun's cpuset may be another container's
    for worker, prefix, other in zip(plan.workers, words, theirs, strict=True):
        far = how_far(host, worker.home, [core for core in other if core in known])
        rows.append(
            {
                "rank": worker.rank,
                "npu": worker.npu,
                "node": worker.home,
                "cores": compress(worker.cores),
                **worker.counts(host),
                "roles": {name: compress(cores) for name, cores in worker.roles.items()},
                "prefix": shlex.join(prefix),
                "msrun_bind_core": {"cores": compress(other), **far},
            }
        )
    return {
        "workers": rows,
        "interrupts": {str(node): compress(cores) for node, cores in plan.interrupts.items()},
        "system": compress(plan.system),
        "idle": compress(plan.idle),
        "bind_file": msrun.bind_file(plan, numactl) if plan.binds else None,
        "msrun_refuses": msrun.obstacle(host, plan),
        "isolation": [{"what": what, "line": line} for what, line in isolation(plan)],
        "notes": plan.notes,
    }


def _text(plan: Plan, answer: dict[str, Any], bind_file: Path | None) -> str:
    """Return the plan for people."""
    lines = [picture(plan), ""]
    for row in answer["workers"]:
        who = f"worker {row['rank']}" + (f" (NPU {row['npu']}, node {row['node']})" if row["npu"] is not None else "")
        roles = ", ".join(f"{name} {cores}" for name, cores in row["roles"].items() if name != "pynative")
        lines.append(f"{who}: {row['remote']} remote; {roles}" if row["cores"] else f"{who}: not bound")
    under_msrun = [row["msrun_bind_core"] for row in answer["workers"]]
    ours, theirs = (sum(row["remote"] for row in rows) for rows in (answer["workers"], under_msrun))
    bound = any(row["cores"] for row in under_msrun)
    lines += ["", f"cores of another socket than their NPU's: {ours} here, "]
    lines[-1] += f"{theirs} under msrun --bind_core=True" if bound else "and msrun --bind_core=True would bind nothing"
    if refused := answer["msrun_refuses"]:
        prefixes = [f"  worker {row['rank']}: {row['prefix']}" for row in answer["workers"] if row["prefix"]]
        lines += [f"{refused}. Before each worker's command instead:", *prefixes]
    elif plan.binds:
        name = bind_file or "FILE"
        written = "written" if bind_file else "write it with --bind-file FILE"
        lines.append(f"msrun --bind_numa {name}, and context.affinity_config: {name} for the roles ({written})")
    lines += [f"{item['what']}:\n  {item['line']}" for item in answer["isolation"]]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])
