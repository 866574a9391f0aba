"""This program measures how soon a slow rank is named, and how often a healthy one, with simulated ranks and with two
real workers on this machine.

    python benchmarks/cluster/stragglers.py simulate [--every 20 --every 5] [--clean 200] [--trials 24]
    python benchmarks/cluster/stragglers.py train [--limit 0.1] [--steps 60]
    python benchmarks/cluster/stragglers.py cost [--threads 80]

`simulate` simulates 512 ranks in 8 stages for 1,500 steps. The speeds of devices differ permanently by 0.5 %, the times
of probes by 1 % each time, and one probe of 500 takes 1.5 times as long; in slowed runs one rank is slower from step
500 on. A run in which a healthy rank is named is wrong. `train` trains recipes/mini/pretrain_dp2.yaml with the plugin's
defaults. With --limit, worker 1 gets that share of a core from step 10 on, by a separate control group (this needs
root); without --limit no rank is slowed and no rank may be named. `cost` measures the processor time of a probe on CPU,
in a process with the given number of idle threads.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import click
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plugins.straggler_probe.plan import ALARM, FLOORS, KINDS, LEAST, Settings, slow_ranks, tested, threshold
from plugins.straggler_probe.record import probe_file, read_run
from plugins.straggler_probe.watch import Watch, processor_work
from tests.plugins.straggler_probe import workers
from tools.runs.readings import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RANKS, STAGES, STEPS, ONSET = 512, 8, 1500, 500
SLOWED_FROM = 10


@click.group()
def cli():
    """See the module's text."""


def simulated(rng: np.random.Generator, every: int, by: float) -> tuple[np.ndarray, int]:
    """Return simulated times of the probe's work [probes, ranks], and the rank that is slower by the share `by`."""
    times = rng.normal(1, 0.005, RANKS) * rng.lognormal(0, 0.01, (STEPS // every, RANKS))
    times = np.where(rng.random(times.shape) < 0.002, times * 1.5, times)
    who = int(rng.integers(RANKS))
    times[ONSET // every :, who] *= 1 + by
    return times, who


def named(times: np.ndarray) -> dict[int, int]:
    """Return rank -> the probe at which `slow_ranks` would name the rank by the measure of devices."""
    enough = threshold(len(KINDS) * RANKS, max(LEAST, len(times)), ALARM)
    found = {}
    for first in range(0, RANKS, RANKS // STAGES):
        stage = np.log(times[:, first : first + RANKS // STAGES])
        reached = tested(stage, float(np.log1p(FLOORS["device"])), enough)[2]
        found.update(
            {first + int(rank): int(reached[:, rank].argmax()) for rank in np.flatnonzero(reached.any(axis=0))}
        )
    return found


@cli.command()
@click.option("--every", multiple=True, type=int, default=(20, 5))
@click.option("--clean", type=int, default=200, help="Simulate this many runs without a slow rank.")
@click.option("--trials", type=int, default=24, help="Simulate this many runs for each slowness.")
def simulate(every, clean, trials):
    """Print how many slow and healthy ranks the test names in simulated runs of 512 ranks."""
    print(f"{RANKS} ranks in {STAGES} stages, {STEPS} steps, floor {FLOORS['device']:.0%}")
    for steps in every:
        for by, runs in ((0.0, clean), (0.05, trials), (0.02, trials)):
            rng, delays, wrong = np.random.default_rng(1), [], 0
            for _ in range(runs):
                times, who = simulated(rng, steps, by)
                found = named(times)
                wrong += bool(found.keys() - ({who} if by else set()))
                delays += [found[who] * steps - ONSET] if by and who in found else []
            told = f"median delay {median(delays):.0f} steps, longest {max(delays)}" if delays else ""
            print(
                f"every {steps}, slower by {by:.0%}: found {len(delays)}, wrong {wrong} of {runs}; {told}", flush=True
            )


@cli.command()
@click.option("--limit", type=float, help="From step 10 on, give worker 1 only this share of a core.")
@click.option("--steps", type=int, default=100)
@click.option("--recipe", default="recipes/mini/pretrain_dp2.yaml")
def train(limit, steps, recipe):
    """Train with two real workers, one of which a limit of processor time may slow down."""
    with tempfile.TemporaryDirectory() as folder:
        child, run_dir = Path(folder) / "probed.yaml", Path(folder) / "run"
        child.write_text(f"base_config: {ROOT / recipe}\nplugins: {{held_out_loss: False, straggler_probe: {{}}}}\n")
        command = [str(Path(sys.executable).with_name("tc3")), "train", str(child), "--run-dir", str(run_dir)]
        run = subprocess.Popen([*command, "--steps", str(steps)], cwd=ROOT, stdout=subprocess.DEVNULL)
        with contextlib.ExitStack() as held:
            while limit and run.poll() is None and last_step(run_dir) < SLOWED_FROM:
                time.sleep(0.2)
            if limit and run.poll() is None:
                held.enter_context(workers.limit([pid_of(run_dir, 1)], limit))
                print(f"worker 1 gets {limit:.0%} of a core from step {last_step(run_dir)} on", flush=True)
            code = run.wait()
        records = read_run(run_dir)
        seconds = [one["seconds"] for one in read_metrics(run_dir / "metrics" / "rank_0.jsonl").steps.values()]
        print(f"exit code {code}, load {os.getloadavg()}, {median(seconds):.2f} s a step")
        told: set = set()
        for step in sorted({one.step for one in records}):
            for one in slow_ranks(one for one in records if one.step <= step).slow:
                if (one.rank, one.kind) not in told:
                    told.add((one.rank, one.kind))
                    print(f"after step {step}: rank {one.rank}, {one.kind}: {one.seen}")
        print(f"after step {step}: {slow_ranks(records)}")
        for rank in (0, 1):
            own = [one for one in records if one.rank == rank]
            shares = {name: median(getattr(one, name) / one.seconds for one in own) for name in ("data", "cpu", "waited", "stopped")}  # fmt: skip  # noqa: E501
            print(f"rank {rank}: probe {1e3 * median(one.probe for one in own):.2f} ms, shares of time {shares}")


def last_step(run_dir: Path) -> int:
    """Return the newest step in the metrics of a run."""
    return read_metrics(run_dir / "metrics" / "rank_0.jsonl").last.get("step", 0)


def pid_of(run_dir: Path, rank: int) -> int:
    """Return the process id of one rank's worker that trains in a folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(run_dir) in process.cmdline():
                environ = process.environ()
                if environ.get("MS_ROLE") == "MS_WORKER" and environ.get("RANK_ID") == str(rank):
                    return process.pid
    raise SystemExit(f"no worker {rank} trains in {run_dir}")


@cli.command()
@click.option("--threads", type=int, default=80)
def cost(threads):
    """Print the processor time that a probe takes."""
    done = threading.Event()
    for _ in range(threads):
        threading.Thread(target=done.wait, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(Settings(every=1), probe_file(folder, 0), 0, "here", "CPU", processor_work(), True)
        watch.end(1)
        took = []
        for step in range(2, 52):
            began = time.process_time()
            watch.begin()
            watch.end(step)
            took.append(time.process_time() - began)
    print(f"{1e3 * median(took):.1f} ms of processor time a probe, with {threads} idle threads")
    done.set()


if __name__ == "__main__":
    cli()
