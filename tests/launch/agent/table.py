"""The table of faults: what is done to a run, and what its agents are to make of it."""

from __future__ import annotations

import contextlib
import signal
import time

from tests.launch.agent.faults import Act, Fault, Trial
from tests.launch.agent.small.agent import LIMIT

HANG = LIMIT + 4.0  # seconds within which a hang is to be seen


def disk_full(trial: Trial) -> None:
    """Fill the checkpoints' disk, and make room again when a save has failed."""
    filler = trial.run_dir / "checkpoint" / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    trial.go()
    trial.wait(trial.failed, "failed save")
    filler.unlink()


def flap(trial: Trial) -> None:
    """Unplug node 1 for five seconds, less than a limit."""
    trial.nodes.link(1, up=False)
    trial.go()
    time.sleep(5.0)
    trial.nodes.link(1, up=True)


def unplug(trial: Trial) -> None:
    """Unplug node 1 for good."""
    trial.nodes.link(1, up=False)


def nothing(trial: Trial) -> None:
    """No fault, or one from the start."""


def stand_still(trial: Trial) -> None:
    """Stop the main thread of worker 1; what sends heartbeats goes on."""
    trial.nodes.freeze(1, "worker")


def poison(trial: Trial) -> None:
    """From now on every loss is no number."""
    (trial.run_dir / "nan").touch()


def send(number: signal.Signals, node: int, role: str) -> Act:
    """A signal to one kind of process of a node."""
    return lambda trial: trial.nodes.signal(node, number, role)


KILL, STOP, HANGS = signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1
TABLE = {
    fault.name: fault
    for fault in (
        Fault("none", nothing, restarts=0, at_step=None),
        Fault("kill worker 0", send(KILL, 0, "worker"), by=(0,)),
        Fault("kill worker 1", send(KILL, 1, "worker")),
        Fault("stop worker 1", send(STOP, 1, "worker"), cause=("hang",), seen=HANG),
        # a worker of MindSpore's has no handler for this signal, and dies of it
        Fault("hang of worker 1", send(HANGS, 1, "worker"), cause=("hang", "signal"), seen=HANG),
        Fault("main thread of worker 1 stopped", stand_still, cause=("hang",), seen=HANG),
        Fault("link of node 1 down", unplug, cause=("lost node",), seen=HANG, hosts=3),
        Fault("link of node 1 down for 5 s", flap, restarts=0),
        Fault("all of node 0", lambda trial: trial.kill_node(0), by=(0,), cause=("lost node",), hosts=3),
        Fault("all of node 1", lambda trial: trial.kill_node(1), cause=("lost node",), hosts=3),
        Fault("scheduler", send(KILL, 0, "scheduler"), by=(0,), cause=("exit", "signal")),
        Fault("disk full in a save", disk_full, by=(0, 1, None), cause=("exit",), seen=None),
        Fault("port taken", nothing, by=(0,), cause=("port",), port=18118, seen=None, at_step=None, real=False),
        Fault("loss is NaN", poison, by=(0, 1, None), cause=("not finite",), codes=1, restarts=0, real=False),
    )
}
