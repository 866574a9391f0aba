"""A worker for faults: a sum over all workers a step, records as real workers write them, a checkpoint now and then.

Started as launch/train.py is, by msrun or its stand-in, also as the scheduler, which here forms the sums. Without
MindSpore, so that an attempt starts in a moment. As MindSpore's workers do, it complains about a lost connection late,
$SMALL_COMPLAIN seconds after it broke. $SMALL_STEPS, $SMALL_PAUSE (seconds a step), $SMALL_EVERY (steps a checkpoint).
Behind step $SMALL_HOLD it waits for a file RUN/go.
SIGUSR1 makes its main thread hang; a file RUN/nan lets its next loss be none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from launch.workers import lifetime
from launch.workers.lifetime import die_with_parent
from plugins.sealed_checkpoint.plan import write_seal
from tests.launch.agent.small.mindspore.numbers import NUMBER, receive
from tools.runs.attempts import STOPPED

BYE = -math.inf  # a worker's last number
BLOB = 100_000  # bytes of a rank's checkpoint


def setting(name: str, otherwise: float) -> float:
    """A number from the environment."""
    return float(os.environ.get(f"SMALL_{name}", otherwise))


def contribution(state: float, step: int, rank: int) -> float:
    """Return the number that a rank adds to the sum of a step."""
    return math.sin(state * (rank + 1) + step)


def losses(steps: int, world: int) -> list[float]:
    """Losses of an uninterrupted run, from step 1 on."""
    state, found = 1.0, []
    for step in range(1, steps + 1):
        state = 0.9 * state + 0.1 * sum(contribution(state, step, rank) for rank in range(world))
        found.append(state)
    return found


def schedule(port: int, world: int) -> None:
    """Be the scheduler: collect a number of each rank, give everybody the sum, until they have gone."""
    with socket.create_server((os.environ["MS_SCHED_HOST"], port)) as server:
        ranks: dict[int, socket.socket] = {}
        while len(ranks) < world:
            connection, _ = server.accept()
            ranks[int(receive(connection))] = connection
        while True:
            try:
                parts = [receive(ranks[rank]) for rank in range(world)]
                if BYE in parts:
                    return
                total = sum(parts)
                for rank in range(world):
                    ranks[rank].sendall(NUMBER.pack(total))
            except (ConnectionError, TimeoutError):
                time.sleep(setting("COMPLAIN", 20))
                return


def connect(port: int, rank: int) -> socket.socket:
    """The connection to the scheduler, which may start later."""
    while True:
        try:
            connection = socket.create_connection((os.environ["MS_SCHED_HOST"], port), timeout=2)
        except OSError:
            time.sleep(0.1)
            continue
        connection.settimeout(None)
        connection.sendall(NUMBER.pack(rank))
        return connection


def save(root: Path, step: int, rank: int, world: int, state: float) -> None:
    """A sealed checkpoint of this rank."""
    folder = root / f"iteration_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"small-model-{rank:07d}-{world:07d}.safetensors"
    part.write_bytes(struct.pack("!d", state) + bytes(BLOB))
    write_seal(folder, rank, world, step)


def load(folder: Path) -> tuple[int, float]:
    """(step, state) of a checkpoint, by any rank's part."""
    part = next(folder.glob("*.safetensors")).read_bytes()
    return int(folder.name.removeprefix("iteration_")), NUMBER.unpack(part[: NUMBER.size])[0]


def train(run_dir: Path, saves: Path, resume: Path | None, rank: int, world: int, port: int) -> None:
    """All steps that are left."""
    done, state = load(resume) if resume else (0, 1.0)
    last, every, hold = int(setting("STEPS", 40)), int(setting("EVERY", 10)), setting("HOLD", math.inf)
    print(".........Starting Training Model..........", flush=True)  # as MindFormers says
    connection = connect(port, rank)
    metrics = run_dir / "metrics" / f"rank_{rank}.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    with metrics.open("a") as file:
        print(json.dumps({"total_steps": last, "start_step": done, "world_size": world}), file=file, flush=True)
        for step in range(done + 1, last + 1):
            while step > hold and not (run_dir / "go").exists():
                time.sleep(0.02)
            began = time.time()
            time.sleep(setting("PAUSE", 0.05))
            own = contribution(state, step, rank)
            connection.sendall(NUMBER.pack(math.nan if (run_dir / "nan").exists() else own))
            state = 0.9 * state + 0.1 * receive(connection)
            if not math.isfinite(state):
                print(f"{STOPPED}the loss of step {step} is {state}", flush=True)
                os._exit(1)
            record = {"step": step, "loss": state, "seconds": time.time() - began}
            print(json.dumps(record), file=file, flush=True)
            if step % every == 0:
                save(saves, step, rank, world, state)
    connection.sendall(NUMBER.pack(BYE))


def hang(number: int, frame: object) -> None:
    """Hang as a deadlock does: other threads go on."""
    threading.Event().wait()


def main() -> None:
    """Scheduler or worker, as the environment says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--config", type=Path)
    args, _ = parser.parse_known_args()
    die_with_parent()
    port, world = int(os.environ["MS_SCHED_PORT"]), int(os.environ["MS_WORKER_NUM"])
    if os.environ["MS_ROLE"] == "MS_SCHED":
        schedule(port, world)
        return
    lifetime.answer_with_stacks()
    signal.signal(signal.SIGUSR1, hang)
    saves = args.run_dir / "checkpoint"
    try:
        train(args.run_dir, saves, args.resume, int(os.environ["RANK_ID"]), world, port)
    except ConnectionError:
        time.sleep(setting("COMPLAIN", 20))
        raise


if __name__ == "__main__":
    sys.exit(main())
