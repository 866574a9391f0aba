"""This module makes the msrun command of a recipe: the number of workers, the argv, the environment and the port. The
module starts no process.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import ClusterError, RecipeError
from tools.process import children
from tools.schema.versions import unverified_words

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "launch" / "train.py"  # what msrun starts on every worker
MASTER = "127.0.0.1"
PORTS = range(20000, 32000)  # below those that Linux gives to connections by itself
_CHANCE = random.SystemRandom()  # two processes never draw alike
TOGETHER = 7200  # seconds that nodes may start and compile apart; launch/script_body.sh says why
NO_CORES: Mapping[str, str] = {}
PARALLEL_SIZES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


@dataclass(frozen=True)
class Node:
    """A `Node` is one of several nodes of a run: its rank, the number of workers of each node, and the address and port
    of the common scheduler.
    """

    rank: int
    nodes: int
    slots: int
    master: str


def worker_count(recipe: Mapping[str, Any]) -> int:
    """Return the number of workers (devices) of a recipe: the product of its parallel sizes, or 1 without
    `use_parallel`.

    Raises:
        RecipeError: a parallel size is not a positive integer.
    """
    if not recipe.get("use_parallel", False):
        return 1
    count = 1
    for name in PARALLEL_SIZES:
        size = (recipe.get("parallel_config") or {}).get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RecipeError(f"parallel_config.{name}: {size!r} is not a positive integer; write 1 or more")
        count *= size
    return count


def msrun_command(
    recipe: Mapping[str, Any],
    run_dir: Path,
    port: int,
    resume: Path | None = None,
    options: Sequence[str] = (),
    logs: Path | None = None,
    node: Node | None = None,
    worker: Path = TRAIN,
    config: Path | None = None,
) -> list[str]:
    """Return the exact argv that trains `config` (default: RUN/recipe.yaml) on this host; a single worker is also
    started by msrun.

    `resume` is one iteration's checkpoint folder, `options` are additional options of msrun, `logs` is the folder of
    its logs (default: RUN/logs), `node` describes this host if there are several, `worker` is the file that every
    worker runs. msrun is set to copy no worker's log to its own output (the documented value for that is the number of
    workers), because the supervisor reads the logs.

    Raises:
        ClusterError: there is no msrun beside the running Python.
    """
    count = worker_count(recipe)
    command = [
        str(msrun_of()),
        f"--worker_num={count}",
        f"--local_worker_num={node.slots if node else count}",
        *([f"--node_rank={node.rank}"] if node else []),
        f"--master_addr={node.master if node else MASTER}",
        f"--master_port={port}",
        "--join=True",
        f"--log_dir={logs or run_dir / 'logs'}",
        f"--tail_worker_log={count}",
        *([f"--cluster_time_out={TOGETHER}"] if node and on_ascend(recipe) else []),
        *options,
        str(worker),
        "--config",
        str(config or run_dir / "recipe.yaml"),
        "--run-dir",
        str(run_dir),
    ]
    return [*command, *(["--resume", str(resume)] if resume else []), *unverified_words()]


def msrun_of() -> Path:
    """Return the path of the msrun that belongs to this Python environment, whatever PATH says.

    Raises:
        ClusterError: there is no msrun.
    """
    path = Path(sys.executable).parent / "msrun"
    if not path.exists():
        raise ClusterError(f"{path} does not exist: install mindspore into this Python environment")
    return path


def on_ascend(recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe trains on NPUs, which is also MindFormers' default."""
    return (recipe.get("context") or {}).get("device_target", "Ascend") == "Ascend"


def worker_environment(
    workers: int,
    run_dir: Path,
    environ: Mapping[str, str] = os.environ,
    cores: Mapping[str, str] = NO_CORES,
    logs: Path | None = None,
) -> dict[str, str]:
    """Return `environ` with the variables that `workers` workers on this host need, and with their binding to `cores`;
    variables that the user set are kept.

    msrun starts the first `python` on PATH, so the running Python is put first. The threads of all workers together do
    not exceed the cores. MindSpore logs only errors; MindFormers' log goes into the run's folder. MindFormers assumes a
    node of 8 devices unless a variable says otherwise, and refuses to save the checkpoint of a node with more devices.
    """
    logs = logs or run_dir / "logs"
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "GLOG_v": "3",
        "PYTHONUNBUFFERED": "1",
        **children.HUGE_PAGES,
        "DEVICE_NUM_PER_NODE": str(workers),
        "LOG_MF_PATH": str(logs / "mindformers"),
    }
    ours = {
        "TC3_SUPERVISED": "1",  # a worker then ends with msrun, whatever ends msrun
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")])),
    }
    return {**defaults, **cores, **environ, **ours}


def optimizer_environment(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the additional variables that workers need because the recipe swaps the optimizer's state to the host.

    Source: the docstring of `swap` in mindformers/core/optim/adamw.py.
    """
    swaps = on_ascend(recipe) and (recipe.get("optimizer") or {}).get("swap")
    return {"MS_DEV_RUNTIME_CONF": "switch_inline:False"} if swaps else {}


def cluster_environment(recipe: Mapping[str, Any], run_dir: Path, logs: Path) -> dict[str, str]:
    """Return the additional variables that workers on several nodes need. The script launch/script_body.sh sets the
    same variables for workers on several nodes, and explains each variable.
    """
    saves = (recipe.get("checkpoint") or {}).get("save_path")
    shared = {"SHARED_PATHS": ",".join(dict.fromkeys([str(run_dir), *([str(saves)] if saves else [])]))}
    if not on_ascend(recipe):
        return shared
    return {**shared, "HCCL_CONNECT_TIMEOUT": str(TOGETHER), "ASCEND_PROCESS_LOG_PATH": str(logs / "ascend")}


def free_port() -> int:
    """Return a TCP port on which nobody listens at this moment. The function prefers a port in `PORTS`, because the
    system may give a port outside of `PORTS` to another program's connection before msrun's scheduler listens.
    """
    for port in [*(_CHANCE.choice(PORTS) for _ in range(64)), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((MASTER, port))
            return int(probe.getsockname()[1])
    raise ClusterError("no port is free on this host; end processes that hold many connections")


def any_port() -> int:
    """Return one of `PORTS` at random, for use on another host."""
    return _CHANCE.choice(PORTS)


def refuse_other_port(port: int) -> None:
    """Raise ClusterError for a port that msrun does not accept."""
    if not 1024 <= port <= 65535:
        raise ClusterError(f"--port {port}: msrun needs a port from 1024 to 65535")


def check_port(port: int) -> None:
    """Raise ClusterError if `port` cannot be the scheduler's port, because msrun would report this only after 44 s
    and in vague words.
    """
    refuse_other_port(port)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"--port {port}: this port is in use ({error.strerror}); leave --port out, so that a free port is "
                "chosen"
            ) from None
