"""A stand-in for msrun: workers in sessions of their own, logs by rank, and msrun's slowness to notice trouble.

usage: fake_msrun.py RUN_DIR ACTION...   (one action for each worker)
Every process writes its pid into RUN_DIR/pids. Actions: see `ACTIONS`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = "time.sleep(3600)"  # who waits for this, or for msrun, waits for longer than any test may take
ACTIONS = {
    "ok": "time.sleep(0.5)",
    "quick": "pass",
    "sleep": SLEEP,
    "stubborn": f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}",
    "fail": "time.sleep(0.5)\ndef deep():\n    raise RuntimeError('the first error')\ndeep()",
    "fail_later": (  # once another worker has failed
        "while 'the first error' not in Path(os.environ['LOGS'], 'worker_1.log').read_text(): time.sleep(0.05)\n"
        "time.sleep(60)\nraise RuntimeError('lost connection to the others')"
    ),
    "fail_at_once": "raise RuntimeError('the first error')",
    "user_error": "time.sleep(0.5); print('tc3: plugins.x: no such plugin'); sys.exit(2)",
    "stopped": f"time.sleep(0.5); os.kill(os.getpid(), signal.SIGSTOP); {SLEEP}",
    "fail_late": "time.sleep(4); raise RuntimeError('an error of its own')",
    "aborts_late": "time.sleep(4); os.kill(os.getpid(), signal.SIGABRT)",
    "killed_late": "time.sleep(4); os.kill(os.getpid(), signal.SIGKILL)",
    "killed": "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)",
    "crashes_done": "time.sleep(2); print('tc3: all work is done', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "heeds": (  # steps, and at the step that it is asked for it agrees with the others, and leaves
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\nfrom tests.launch.run.fake_msrun import heed\nheed()"
    ),
    "grows": (  # three steps, then the graph of a larger batch is compiled, in C code that no signal interrupts
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\nfrom tests.launch.run.fake_msrun import steps\n"
        f"list(steps(3)); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG)); {SLEEP}"
    ),
    "detach": f"subprocess.Popen(['setsid', sys.executable, '-c', note('child') + {SLEEP!r}]); {SLEEP}",
    "orphan": (  # its child's parent ends at once
        f"subprocess.Popen([sys.executable, '-c', 'import subprocess, sys; subprocess.Popen([sys.executable, \"-c\", '"
        f" + repr(note('orphan') + {SLEEP!r}) + '], start_new_session=True)']).wait(); {SLEEP}"
    ),
}


def steps(last):
    """Make the steps of a worker up to the step `last`, and yield each when it is on record."""
    from launch.workers.leave_request import VARIABLE

    metrics = Path(os.environ[VARIABLE]).parents[2] / "metrics" / f"rank_{os.environ['RANK_ID']}.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    for step in range(1, last + 1):
        time.sleep(0.02)
        with metrics.open("a") as out:
            out.write(json.dumps({"step": step, "seconds": 0.2}) + "\n")
        yield step


def heed():
    """A worker that makes steps, and waits after the third until it is asked to save and leave at a later one."""
    from launch.workers.leave_request import VARIABLE, agree, requested

    file, rank = Path(os.environ[VARIABLE]), int(os.environ["RANK_ID"])
    for step in steps(100_000):
        while step == 3 and requested(file) is None:
            time.sleep(0.05)
        if requested(file) == step and agree(file.parent, rank, 2, patience=3600.0):
            return


def note(name):
    """Source that writes the pid of the process running it, and imports what the actions need."""
    return (
        "import os, signal, subprocess, sys, time; from pathlib import Path\n"
        f"Path({os.environ['PIDS']!r}, f'{name}_{{os.getpid()}}').touch()\n"
    )


def start(run_dir, role, rank, action):
    """Start the scheduler or a worker as msrun does."""
    name = "scheduler" if role == "MS_SCHED" else f"worker_{rank}"
    source = f"{note(name)}sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom fake_msrun import note\n{action}"
    environment = {**os.environ, "MS_ROLE": role, "RANK_ID": str(rank)}
    with open(run_dir / "logs" / f"{name}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", source],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=role == "MS_WORKER",
        )


def main():
    """Start, then wait as msrun does."""
    run_dir, started = Path(sys.argv[1]), []

    def interrupted(number, frame):
        for process in started:
            process.kill()
        sys.exit(0)

    signal.signal(signal.SIGINT, interrupted)
    pids = run_dir / "pids"
    os.environ.update(PIDS=str(pids), LOGS=str(run_dir / "logs"))
    pids.mkdir(parents=True, exist_ok=True)
    (pids / f"msrun_{os.getpid()}").touch()
    started.append(scheduler := start(run_dir, "MS_SCHED", 0, SLEEP))
    for rank, action in enumerate(sys.argv[2:]):
        started.append(start(run_dir, "MS_WORKER", rank, ACTIONS[action]))
    workers = started[1:]
    while not all(list(pids.glob(f"*_{process.pid}")) for process in started):  # none is killed before it is on record
        time.sleep(0.02)
    while True:
        time.sleep(0.3)
        codes = [worker.poll() for worker in workers]
        bad = [worker for worker in workers if worker.returncode not in (0, None)]
        if bad:
            print(f"Worker process {bad[0].pid} exit with exception. Error code: {bad[0].returncode}.", flush=True)
            time.sleep(3600)  # as msrun waits for its scheduler, for half a minute
            sys.exit(1)
        if all(code == 0 for code in codes):
            scheduler.kill()
            sys.exit(0)


if __name__ == "__main__":
    main()
