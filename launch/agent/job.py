"""What a node's agent trains and how, the same in every attempt; and the folders of a run's attempts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from launch.agent.decide import Rules
from launch.agent.meeting import LOST_AFTER
from launch.run.msrun import TRAIN, worker_count
from tools.checkpoint.scan import CheckpointInfo
from tools.recipe.load import Recipe
from tools.runs.attempts import folder_of, numbers

LOGS = "logs"
PATIENCE = 600.0  # seconds
Tick = Callable[[], None]


def own_name() -> str:
    """This host's name, as files can bear it."""
    return socket.gethostname().replace("/", "_") or "localhost"


@dataclass(frozen=True)
class Job:
    """A run as the agent of one node sees it.

    Attributes:
        recipe: effective; a plan may override more of it.
        host: this node, by its name in `hosts`.
        hosts: all that the run may use, spares too, in the order of use.
        nodes: that take part in an attempt.
        port: of msrun's scheduler in the first attempt; None: a free one.
        resume: the checkpoint to begin from, where none is saved since.
        choose: finds that checkpoint, by who plans; in the place of `resume`.
        first: the earliest attempt that can be of this launch.
        bind: whether workers get cores of their own.
        lost_after: seconds without a sign of life after which a node, or the disk, is lost.
        patience: seconds until hosts that never came are given up.
        watchful: whether hangs and a lost disk end an attempt, and SIGTERM is notice of an end that is to come.
        cached: whether workers load, and write, the compile cache (launch/run/compile_cache.py).
        show: a context that shows the steps of an attempt, and what it wants to be called for it.
        say: says a sentence to the user.
        worker: the file that every worker runs.
    """

    recipe: Recipe
    run_dir: Path
    host: str = field(default_factory=own_name)
    hosts: tuple[str, ...] = ()
    nodes: int = 1
    port: int | None = None
    resume: CheckpointInfo | None = None
    choose: Callable[[], CheckpointInfo | None] = lambda: None
    first: int = 0
    bind: bool = True
    rules: Rules = field(default_factory=lambda: Rules(restarts=0))
    lost_after: float = LOST_AFTER
    patience: float = PATIENCE
    watchful: bool = False
    cached: bool = False
    show: Callable[[], AbstractContextManager[Tick]] = lambda: nullcontext(lambda: None)
    say: Callable[[str], None] = lambda sentence: click.echo(sentence, err=True)
    worker: Path = TRAIN

    @property
    def several(self) -> bool:
        """Whether the run may have more than this node."""
        return len(self.hosts) > 1

    @property
    def saves(self) -> Path:
        """Where its checkpoints go."""
        return Path(self.recipe["checkpoint"]["save_path"])

    @property
    def slots(self) -> int:
        """Workers of each node."""
        return worker_count(self.recipe) // self.nodes


def next_number(run_dir: Path) -> int:
    """The attempt that a new launch begins with: logs of a run from before attempts count as its first one."""
    known = numbers(run_dir)
    if known:
        return known[-1] + 1
    return 1 if _is_folder(run_dir / LOGS) else 0


def logs_of(run_dir: Path, number: int, rank: int | None = None) -> Path:
    """Where msrun and the workers of an attempt log; `rank`: of a node among several."""
    logs = folder_of(run_dir, number) / LOGS
    return logs if rank is None else logs / f"node_{rank}"


def link_logs(run_dir: Path, number: int) -> None:
    """Let RUN/logs lead to the logs of attempt `number`; a folder of that name goes to the attempt before."""
    link, logs = run_dir / LOGS, logs_of(run_dir, number)
    logs.mkdir(parents=True, exist_ok=True)
    if _is_folder(link):
        earlier = logs_of(run_dir, max(number - 1, 0))
        if earlier.exists():
            earlier = earlier.with_name("logs_before")
        earlier.parent.mkdir(parents=True, exist_ok=True)
        link.rename(earlier)
    part = run_dir / f".{LOGS}.{os.getpid()}"
    with suppress(FileNotFoundError):
        part.unlink()
    part.symlink_to(logs.relative_to(run_dir))
    part.replace(link)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
