"""This module writes a recipe's launch as plain bash: one script for all nodes, to be started by hand, by Slurm or by
another manager.

The upper part of a script, which this module writes, says which command runs on which node; the lower part is
`launch/script_body.sh`. `tc3 train --script` prints both parts as one file that needs no other file. `python -m
launch.run.script` writes the scripts of the reference layouts into launch/scripts/, which contain only the upper part
and source the lower part.

`outside` finds the paths of a script that lie outside the checkout: every node needs these files at the same place.
`of_script` makes the checks for the workers of a script and writes their files, as `tc3 train` does before it starts a
worker.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from launch.resume import data
from launch.resume.checkpoints import (
    check_data_order,
    check_save_path,
    check_share,
    complete,
    one_iteration,
    save_path,
    step_in,
)
from launch.resume.model import check_load_path, check_model
from launch.run.msrun import MASTER, ROOT, on_ascend, optimizer_environment, refuse_other_port, worker_count
from launch.run.preflight import data_prefixes, held_out
from launch.workers.cores import binds_itself
from plugins.errors import ClusterError
from plugins.operator_fusion import plan as operator_fusion
from tools.checkpoint.scan import CheckpointInfo
from tools.process.host import DEVICES, read_hosts
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import LOADER, View
from tools.schema.versions import VARIABLE, going_on, unverified_words

BODY = ROOT / "launch" / "script_body.sh"
SCRIPTS = ROOT / "launch" / "scripts"
REFERENCES = ("mini/pretrain*.yaml", "telechat3_*/pretrain_*.yaml")  # below recipes/, each with a script in SCRIPTS
PORT = 8118  # msrun's own default
INDENT = " " * 4
# Where Slurm runs a copy of the script, the checkout is not beside it. The body ends with exit.
SOURCING = """\
for TC3_ROOT in "${TC3_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")/../.." "${SLURM_SUBMIT_DIR:-}" "$PWD"; do
    # shellcheck source=../script_body.sh
    [ ! -f "$TC3_ROOT/launch/script_body.sh" ] || source "$TC3_ROOT/launch/script_body.sh"
done
echo 'error: no launch/train.py here: start the script from the checkout, or set TC3_ROOT to it' >&2 && exit 2
"""
AS_THEY_STAND = "# shellcheck disable=SC2016 # overrides are taken as they stand"
_DATA_PATH = (*LOADER, "config", "data_path")
_OTHER_PATHS = ("checkpoint.load_path", "checkpoint.save_path", "load_checkpoint", "pretrained_model_dir")


def outside(recipe_file: Path, recipe: Recipe, resume: str | None, run_dir: Path | None) -> list[str]:
    """Return a sentence for each path that a launch script uses and that lies outside of the checkout; relative paths
    start at the checkout.
    """
    return [
        f"{name}: {path} is outside the checkout ({ROOT}): every node needs this path"
        for name, path in _paths(recipe_file, recipe, resume, run_dir)
        if path and not Path(os.path.normpath(ROOT / path)).is_relative_to(ROOT)
    ]


def _paths(recipe_file: Path, recipe: Recipe, resume: str | None, run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Yield pairs (description, path), in the order in which a launch reads the paths."""
    view = View(recipe)
    yield "the recipe", str(recipe_file.absolute())
    if run_dir:
        yield "--run-dir", str(run_dir.absolute())
    if resume:
        yield "--resume", str(Path(resume).absolute())
    if view.megatron and view.has(_DATA_PATH):
        yield from ((".".join(_DATA_PATH), prefix) for prefix in data_prefixes(view.get(_DATA_PATH)))
    yield from ((".".join((*LOADER, "data_files")), file) for file in view.instruction_files)
    yield from (("plugins.held_out_loss.data_path", prefix) for prefix in held_out(recipe))
    for key in _OTHER_PATHS:
        value = view.get(tuple(key.split(".")))
        yield key, value if isinstance(value, str) else ""


def of_script(recipe: Recipe, run_dir: Path, resume: Path | None) -> Callable[[int], None]:
    """Make the checks whose result is the same on all workers that a launch script starts; return a function that makes
    the checks of one worker, given its rank.

    The other checks wait until all ranks are connected, because they may fail on only some ranks: each rank reads its
    share of a sealed checkpoint; rank 0, the only rank that may have to read an index, compares the data and its order
    (in a new run, the weights with which it begins), and writes the recipe and the data's digests into the run's
    folder. If nothing is left to train, the worker says so and ends with code 0.

    Raises:
        CheckpointError: as in `tc3 train`, here or later.
    """
    checkpoint = None
    if resume is None:
        check_save_path(save_path(recipe), resume=False, force=False)
    else:
        folder = one_iteration(str(resume))
        checkpoint = CheckpointInfo(folder, step_in(folder))
        if done := complete(recipe, checkpoint):  # all workers see the same, and so does the scheduler's process
            click.echo(f"tc3: {done}")
            sys.exit(0)

    def check_and_keep(rank: int) -> None:
        if checkpoint is not None:
            check_share(checkpoint, rank, worker_count(recipe))
        if rank == 0:
            if checkpoint is None:
                check_load_path(recipe)
            else:
                check_model(recipe, checkpoint.path)
                check_data_order(recipe, run_dir, checkpoint)
            dump_recipe(recipe, run_dir / "recipe.yaml")
            data.keep_digests(recipe, run_dir)

    return check_and_keep


@dataclass(frozen=True)
class Cluster:
    """A `Cluster` holds the nodes of a run, the master node first, with `slots` workers on each node; `names` is the
    list of nodes in bash.
    """

    nodes: int
    slots: int
    names: str
    source: str = ""  # the hosts file; empty: names to be edited


@dataclass(frozen=True)
class Launch:
    """A `Launch` describes the training that a script starts: `settings` are overrides for launch/train.py; relative
    paths start at the checkout.

    `bind`: whether workers get cores of their own.
    """

    recipe: str
    run_dir: str
    settings: Sequence[str] = field(default=())
    port: int | None = None
    resume: str = ""
    bind: bool = True


def node_size(recipe: Recipe) -> int:
    """Return the number of workers on a node if there is no file of hosts: the number of devices per node for which the
    recipe's communication groups are laid out.
    """
    return View(recipe).node if on_ascend(recipe) else DEVICES


def cluster_for(workers: int, hosts_file: Path | None = None, each: int = DEVICES) -> Cluster:
    """Return the nodes that `hosts_file` lists: a name and a number of workers (default: `each`) on each line. If there
    is no file, return nodes of `each` workers with placeholder names, which the user has to edit.

    Raises:
        ClusterError: the file does not give exactly `workers` workers, the same number on each of its hosts.
    """
    if hosts_file is not None:
        hosts, slots = read_hosts(hosts_file, each)
        if len(hosts) * slots != workers:
            found = f"{len(hosts)} host{'s' * (len(hosts) > 1)} x {slots} = {len(hosts) * slots} workers"
            hint = f": list {workers // slots} hosts of {slots} workers" if workers % slots == 0 else ""
            raise ClusterError(f"{hosts_file}: the file lists {found}, but the recipe needs {workers} workers{hint}")
        return Cluster(len(hosts), slots, " ".join(map(shlex.quote, hosts)), str(hosts_file))
    if workers <= each:
        return Cluster(1, workers, MASTER)
    if workers % each:
        raise ClusterError(
            f"the recipe's {workers} workers do not fill whole nodes of {each} workers: write a file with the line "
            "NAME WORKERS for each host, where WORKERS is its number of workers, and give the file with --nodes"
        )
    return Cluster(workers // each, each, f"node{{0..{workers // each - 1}}}")


def launch_script(launch: Launch, recipe: Recipe, hosts_file: Path | None = None) -> str:
    """Return the bash script that trains `recipe`, the effective recipe of `launch`, on every node of its cluster.

    The script sources no other file.

    Raises:
        ClusterError: the hosts do not fit the recipe, or the port is outside msrun's range.
    """
    workers, cluster, port = _sizes(launch, recipe, hosts_file)
    return "\n".join(
        [*_head(launch, workers, cluster), *_values(launch, recipe, workers, cluster, port), "\n" + body(BODY)]
    )


def sourcing_script(launch: Launch, recipe: Recipe) -> str:
    """Return the same script as `launch_script`, but with the body sourced from the checkout, as in launch/scripts/."""
    workers, cluster, port = _sizes(launch, recipe, None)
    size = size_in_words(workers, cluster.nodes)
    head = ["#!/usr/bin/env bash", f"# {size}. How to start it: docs/train.md", "set -euo pipefail"]
    return "\n".join([*head, *_values(launch, recipe, workers, cluster, port), SOURCING])


def _sizes(launch: Launch, recipe: Recipe, hosts_file: Path | None) -> tuple[int, Cluster, int]:
    """Return the number of workers, their cluster and the port of msrun's scheduler.

    Raises:
        ClusterError: as in `launch_script`.
    """
    port = PORT if launch.port is None else launch.port
    refuse_other_port(port)
    workers = worker_count(recipe)
    return workers, cluster_for(workers, hosts_file, node_size(recipe)), port


def size_in_words(workers: int, nodes: int) -> str:
    """Return in words how many nodes and workers a run takes."""
    return f"{workers:,} worker{'s' * (workers > 1)} on {nodes:,} node{'s' * (nodes > 1)}"


def one_line(command: Sequence[str]) -> str:
    """Return a command as a bash comment of one line."""
    return " ".join(shlex.join(command).splitlines())


def _head(launch: Launch, workers: int, cluster: Cluster) -> list[str]:
    """Return comments that say what the script does and how to start it."""
    settings = [word for setting in launch.settings for word in ("--set", setting)]
    command = ["tc3", "train", launch.recipe, *settings, "--script"]
    command += ["--nodes", cluster.source] * bool(cluster.source) + ["--no-bind"] * (not launch.bind)
    command += unverified_words()
    start = [
        "# Start it on every node, with the checkout, the data and RUN_DIR on a disk that all of them see:",
        "#   bash SCRIPT [NODE_RANK]      without it the rank is $NODE_RANK, $SLURM_NODEID or the place in HOSTS",
        f"#   srun --nodes={cluster.nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 bash SCRIPT",
    ]
    return [
        "#!/usr/bin/env bash",
        f"# {size_in_words(workers, cluster.nodes)}. Written by: {one_line(command)}",
        *(start if cluster.nodes > 1 else []),
        "# The environment can set: TC3_ROOT (the checkout), RUN_DIR, MASTER_ADDR, MASTER_PORT, RESUME (a checkpoint),",
        "# BIND (yes, or no: workers get no cores of their own).",
        "# Exit code: 0 trained, 1 failed (its log says why), 2 correct something here first, 130 or 143 interrupted.",
        "set -euo pipefail",
        "",
    ]


def _values(launch: Launch, recipe: Mapping[str, Any], workers: int, cluster: Cluster, port: int) -> list[str]:
    """Return the assignments of the values that differ between scripts."""
    settings = [f"{INDENT}--set {shlex.quote(setting)}" for setting in launch.settings]
    lines = [
        f"RECIPE={shlex.quote(launch.recipe)}",
        *([AS_THEY_STAND, "SETTINGS=(", *settings, ")"] if settings else ["SETTINGS=()"]),
        f"TARGET={shlex.quote(str((recipe.get('context') or {}).get('device_target', 'Ascend')))}",
        f"WORKERS={workers}",
        f"SLOTS={cluster.slots} # workers of a node",
        *_hosts(cluster),
        default("RUN_DIR", launch.run_dir),
        f"SAVE_PATH={shlex.quote(str((recipe.get('checkpoint') or {}).get('save_path') or ''))} # empty: in RUN_DIR",
        default("MASTER_PORT", str(port)),
        default("RESUME", launch.resume),
        default("BIND", "yes" if launch.bind and not binds_itself(recipe) else "no"),
    ]
    if going_on():
        lines += ["# --unverified: with another MindSpore or MindFormers, too.", f"export {VARIABLE}=1"]
    lines += _fusion_flags(recipe)
    for name, value in optimizer_environment(recipe).items():
        lines += [
            "# optimizer.swap needs it, says mindformers/core/optim/adamw.py.",
            default(name, value),
            f"export {name}",
        ]
    return lines


def _fusion_flags(recipe: Mapping[str, Any]) -> list[str]:
    """Return the lines that set the flags of plugins.operator_fusion on every node; a node that exports other flags
    starts nothing.
    """
    flags = operator_fusion.environment(recipe, {}).get(operator_fusion.VARIABLE)
    return [f"FUSION_FLAGS={shlex.quote(flags)} # {operator_fusion.KEY}, see docs/fusion.md"] if flags else []


def _hosts(cluster: Cluster) -> list[str]:
    """Return the list of nodes by rank, and whether Slurm's own list of nodes replaces it, which is the case if the
    user would otherwise have to edit the list.
    """
    if cluster.nodes == 1:
        return [f"HOSTS=({cluster.names})", "HOSTS_OF_SLURM=no"]
    if not cluster.source:
        edit = "# nodes by rank, the first is the master: put your names here; Slurm's are taken as they are"
        return [f"HOSTS=({cluster.names}) {edit}", "HOSTS_OF_SLURM=yes"]
    whole: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    names = textwrap.wrap(cluster.names, 110, initial_indent=INDENT, subsequent_indent=INDENT, **whole)
    first = "# The nodes by rank; the first one is the master, whose scheduler all workers look for."
    return [first, "HOSTS=(", *names, ")", "HOSTS_OF_SLURM=no"]


def default(name: str, value: str) -> str:
    """Return a bash assignment of a default value, which an environment variable of the same name overrides."""
    return f'[ -n "${{{name}:-}}" ] || {name}={shlex.quote(value)}'


def body(path: Path) -> str:
    """Return the text of a bash file that several scripts share, without its first line, which is only for linters."""
    return path.read_text(encoding="utf-8").split("\n", 1)[1]


def in_checkout(path: Path) -> str:
    """Return a path as scripts write it: relative to the checkout if the path lies inside the checkout, so that the
    script fits any machine.
    """
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def reference_scripts() -> dict[Path, str]:
    """Return a dictionary file name -> text of the scripts in launch/scripts/."""
    scripts = {}
    for pattern in REFERENCES:
        for path in sorted((ROOT / "recipes").glob(pattern)):
            name = f"{path.parent.name}-{path.stem}"
            recipe: Recipe = load_recipe(path)
            scripts[SCRIPTS / f"{name}.sh"] = sourcing_script(Launch(in_checkout(path), f"output/{name}"), recipe)
    return scripts


def main() -> None:
    """Generate the launch scripts of all recipes anew, in the folder launch/scripts/."""
    SCRIPTS.mkdir(exist_ok=True)
    wanted = reference_scripts()
    for path in set(SCRIPTS.glob("*.sh")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


if __name__ == "__main__":
    main()
