"""This module plans, runs and judges the collectives of a recipe's own groups (tp, cp, ep, dp, pp) with the recipe's
own sizes.

`tools.estimate.groups` says which groups and bytes there are, and which seconds the estimator predicts.
`launch/workers/collectives.py` measures the collectives under msrun: on this host's CPU, or on every node, with a work
folder that all nodes share. A group is slow by the rule of `tools.doctor.outliers.slow`; if the fastest group of one
kind (tp, cp, ep, dp or pp) takes more than `FACTOR` times the predicted seconds, the measurement contradicts the
hardware file.

On a CPU the groups are the same, but AllReduce is the only collective that MindSpore runs in a group there; at most
`CPU_BYTES` are sent, and no seconds are predicted. A recipe for one device is measured on two devices with data
parallelism.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired
from typing import Any

from launch.firsthour.calibrate import FACTOR
from launch.firsthour.checks import Finding, Verdict
from launch.firsthour.judge import LINK
from launch.run.msrun import MASTER, ROOT, free_port, msrun_of, worker_environment
from plugins.errors import ClusterError
from tools.doctor.ask import Trouble, call_each
from tools.doctor.outliers import MENDS, ON_CORES, UNCLEAR, Times, slow, unclear
from tools.estimate.configuration import Configuration
from tools.estimate.groups import collectives_of
from tools.files.atomic import write_atomically
from tools.hardware.load import Hardware
from tools.process.children import GRACE, child, terminate_as_interrupt

WORKER = ROOT / "launch" / "workers" / "collectives.py"
ROUNDS = 5
CPU_BYTES = 1 << 20
PORT = 8133  # of the scheduler on the first of several nodes


def rows_of(config: Configuration, hardware: Hardware, devices: int, on_cpu: bool) -> list[dict[str, Any]]:
    """Return the collectives that a recipe's communication groups run, as the list of dictionaries that
    `judge_collectives` takes; the measured seconds are still empty.

    Args:
        devices: the number of devices; groups that need more devices are left out of "groups".
    """
    run = replace(config, dp=2) if on_cpu and config.devices == 1 else config
    rows = []
    for one in collectives_of(run, hardware):
        size, operator = (min(one.bytes, CPU_BYTES), "AllReduce") if on_cpu else (one.bytes, one.operator)
        rows.append(
            {"group": one.group, "operator": operator, "bytes": size, "ranks": one.ranks, "stride": one.stride,
             "predicted": None if on_cpu else one.seconds, "groups": one.groups(devices), "seconds": []}
        )  # fmt: skip
    return rows


def words_of(row: Mapping[str, Any]) -> str:
    """Return a description in words of one measured collective, for the plan that --dry-run prints."""
    size = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] >= 1e5 else f"{row['bytes'] / 1e3:,.1f} kB"
    return f"{row['operator']} of {size}, {row['ranks']} ranks that are {row['stride']} apart ({row['group']})"


def command_of(
    folder: Path, workers: int, local: int, node: int = 0, master: str = MASTER, port: int = PORT
) -> list[str]:
    """Return the msrun command that times the collectives of the plan in `folder`; the command starts the `local`
    workers of one node, and `workers` is the number of workers on all nodes.
    """
    return [
        str(msrun_of()), f"--worker_num={workers}", f"--local_worker_num={local}", f"--node_rank={node}",
        f"--master_addr={master}", f"--master_port={port}", "--join=True", f"--log_dir={folder / f'logs_{node}'}",
        str(WORKER), str(folder / "plan.json"), str(folder),
    ]  # fmt: skip


def measured(
    rows: Sequence[Mapping[str, Any]], folder: Path, names: Sequence[str], each: int, target: str, seconds: float
) -> list[dict[str, Any]]:
    """Run the collectives of a plan on the nodes `names` with `each` devices on a node, and return them with "seconds":
    for each group the seconds of each round on the slowest rank of the group.

    Raises:
        ClusterError: a node failed, was too late, or a rank has written nothing.
    """
    shutil.rmtree(folder, ignore_errors=True)
    plan = {"target": target, "rounds": ROUNDS, "rows": list(rows)}
    write_atomically(folder / "plan.json", json.dumps(plan) + "\n")
    if len(names) == 1:
        _run(command_of(folder, each, each, port=free_port()), folder, each, seconds)
    else:
        argvs = {
            name: ["env", f"PYTHONPATH={ROOT}", *command_of(folder, each * len(names), each, node, names[0])]
            for node, name in enumerate(names)
        }
        for name, told in call_each(argvs, seconds).items():
            if isinstance(told, Trouble):
                raise ClusterError(f"{name}: the collectives were not measured: {told.words}; {told.mend}")
    ranks = [_of_rank(folder, rank) for rank in range(each * len(names))]
    return [{**row, "seconds": _seconds(row["groups"], [one[at] for one in ranks])} for at, row in enumerate(rows)]


def _run(command: Sequence[str], folder: Path, workers: int, seconds: float) -> None:
    """Run msrun on this host; its output goes to a file beside the logs."""
    with (
        (folder / "msrun.log").open("w", encoding="utf-8") as log,
        terminate_as_interrupt(),
        child(command, GRACE, stdout=log, stderr=log, env=worker_environment(workers, folder)) as process,
    ):
        try:
            code = process.wait(timeout=seconds)
        except TimeoutExpired:
            raise ClusterError(
                f"the collectives were not measured within {seconds:.0f} s; give more time with --budget"
            ) from None
    if code:
        raise ClusterError(
            f"{folder / 'msrun.log'}: the collectives were not measured, because msrun ended with exit code {code}; "
            "read its output in this file"
        )


def _of_rank(folder: Path, rank: int) -> list[list[float]]:
    file = folder / f"rank_{rank}.json"
    try:
        return list(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise ClusterError(
            f"{file}: rank {rank} did not write this file with its measured times; read the rank's log in {folder}"
        ) from None


def _seconds(groups: Sequence[Sequence[int]], ranks: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return for each group the seconds of each round on the slowest rank of the group."""
    return [[max(times) for times in zip(*(ranks[rank] for rank in group), strict=True)] for group in groups]


def judge_collectives(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], each: int, on_cpu: bool
) -> list[Finding]:  # fmt: skip
    """Return the findings about the communication groups of a recipe.

    Args:
        rows: for each kind of group "group", "operator", "bytes", "ranks", "stride", "groups" (lists of ranks),
            "seconds" (of each group and round), and "predicted" seconds, or None on a CPU.
        names, each: the names of the nodes, and the number of devices of a node.
    """
    found: list[Finding] = []
    for row in rows:
        place = f"{row['group']}, {row['ranks']} ranks"
        if not row["groups"]:
            words = f"{row['ranks']} ranks that are {row['stride']} apart do not fit {each * len(names)} devices"
            found.append(Finding("unknown", place, words))
            continue
        late = _slow_groups(row, names, each, place, on_cpu)
        failed = any(item.verdict == "fail" for item in late)
        found += late if failed else [*late, _as_predicted(row, place)]
    return found or [Finding("unknown", "collectives", "the recipe has no groups, because it is for one device")]


def _slow_groups(
    row: Mapping[str, Any], names: Sequence[str], each: int, place: str, on_cpu: bool
) -> list[Finding]:  # fmt: skip
    times = {number: Times(median(rounds), min(rounds)) for number, rounds in enumerate(row["seconds"])}
    floor = ON_CORES["bandwidth"] if on_cpu else LINK
    floors = dict.fromkeys(times, floor)
    verdicts: list[tuple[Verdict, Mapping[int, tuple[float, float]], str]] = [
        ("fail", slow(times, floors), ""), ("unknown", unclear(times, floors), f"; {UNCLEAR}"),
    ]  # fmt: skip
    found = []
    for verdict, named, why in verdicts:
        for number, (ratio, _) in named.items():
            first, last = row["groups"][number][0], row["groups"][number][-1]
            seen = f"{row['operator']} took {ratio:.1f} times as long as in most of {len(times)} groups"
            seen += f"; the group has ranks {first} to {last}{why}"
            found.append(Finding(verdict, place, seen, names[first // each], first % each, MENDS["bandwidth"]))
    return found


def _as_predicted(row: Mapping[str, Any], place: str) -> Finding:
    """Return the finding about the fastest of groups none of which is surely slower than the other groups."""
    took = min(median(rounds) for rounds in row["seconds"])
    words = f"{row['operator']} of {row['bytes'] / 1e6:,.1f} MB took {1e3 * took:.3g} ms"
    words += f" in the fastest group of {len(row['groups'])}"
    if row["predicted"] is None:
        return Finding("unknown", place, f"{words}; no prediction for a CPU to compare it with")
    words = f"{words}, {1e3 * row['predicted']:.3g} ms were predicted"
    if took > FACTOR * row["predicted"]:
        return Finding("warn", place, words, remedy="tc3 search with --measured; look at HCCL's algorithm and ports")
    return Finding("ok", place, words)
