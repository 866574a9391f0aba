"""A stand-in for msrun that starts in a moment: its options, its environment, its logs, its slowness to notice trouble.

As msrun: the scheduler runs where the master's address is a local one; workers are in sessions of their own.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType


def is_local(address: str) -> bool:
    """Return whether an address belongs to this node."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def main() -> int:
    """Start everything, and wait for it as msrun does."""
    parser = argparse.ArgumentParser()
    for name, kind in [("worker_num", int), ("local_worker_num", int), ("master_port", int), ("node_rank", int)]:
        parser.add_argument(f"--{name}", type=kind, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--log_dir", type=Path)
    args, rest = parser.parse_known_args()
    command = [
        sys.executable,
        *(word for word in rest if not word.startswith(("--join", "--tail", "--bind", "--cluster"))),
    ]
    args.log_dir.mkdir(parents=True, exist_ok=True)
    given = {"MS_WORKER_NUM": args.worker_num, "MS_SCHED_HOST": args.master_addr, "MS_SCHED_PORT": args.master_port}

    def start(role: str, rank: int, log: str) -> subprocess.Popen[bytes]:
        environment = {name: str(value) for name, value in {**given, "MS_ROLE": role, "RANK_ID": rank}.items()}
        with (args.log_dir / log).open("wb") as file:
            return subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=role == "MS_WORKER",
            )

    scheduler = start("MS_SCHED", 0, "scheduler.log") if is_local(args.master_addr) else None
    first = args.node_rank * args.local_worker_num
    ranks = range(first, first + args.local_worker_num)
    workers = [start("MS_WORKER", rank, f"worker_{rank}.log") for rank in ranks]
    everything = [*workers, *([scheduler] if scheduler else [])]

    def interrupted(number: int, frame: FrameType | None) -> None:
        for process in everything:
            process.kill()
        sys.exit(0)

    signal.signal(signal.SIGINT, interrupted)
    while True:
        time.sleep(0.3)
        bad = [worker for worker in workers if worker.poll() not in (0, None)]
        if bad:
            print(f"Worker process {bad[0].pid} exit with exception. Error code: {bad[0].returncode}.", flush=True)
            time.sleep(30)  # as msrun waits for its scheduler
            return 1
        if all(worker.returncode == 0 for worker in workers):
            return scheduler.wait() if scheduler else 0


if __name__ == "__main__":
    sys.exit(main())
