"""This program compares a step of two CPU workers whose cores are divided by the plan with the same step under
MindFormers' own binding.

    python benchmarks/cluster/core_binding.py [--steps 78] [--block 6] [LAYOUT ...]

LAYOUT: dp2, pp2, tp2, cp2 (recipes/mini/pretrain_LAYOUT.yaml), by default dp2 (even phases) and pp2 (a stage waits
while the other computes). One run for each, started with --no-bind. Every BLOCK steps the threads of both workers move
to the next of three placements, so that all three see the same load of the machine and the same compiled graph:

    left     as MindFormers leaves them: on control groups of version 1 the main thread is on one core, others on all
    divided  the plan of `tc3 affinity`: each worker on its own cores
    free     every thread on all cores

The first step of a block is left out. The result is the median over rounds of a block's mean step time divided by that
of `left` in the same round; absolute seconds depend on the machine. The program needs two cores and the corpus of
launch/quickstart.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import click
import psutil

from launch.workers.cores import CORES
from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
from tools.process.host import Root

ROOT = Path(__file__).resolve().parents[2]
PLACEMENTS = ("left", "divided", "free")
Threads = dict[int, set[int]]


def workers_of(run_dir: Path) -> dict[int, psutil.Process]:
    """Return rank -> process of the workers that train in a folder."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(run_dir) in process.cmdline():
                environ = process.environ()
                if environ.get("MS_ROLE") == "MS_WORKER":
                    found[int(environ["RANK_ID"])] = process
    return found


def threads_of(process: psutil.Process) -> Threads:
    """Return thread -> the cores on which this thread of a process may run."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def place(process: psutil.Process, placement: str, left: Threads, own: set[int]) -> None:
    """Move the threads of one worker to the cores of a placement (`left`, `divided` or `free`)."""
    everywhere = os.sched_getaffinity(0)
    for thread in threads_of(process):
        cores = {"left": left.get(thread, everywhere), "divided": own, "free": everywhere}[placement]
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def steps_so_far(run_dir: Path) -> list[float]:
    """Return the seconds of the trained steps, from the metrics of the first rank that records them."""
    for file in sorted((run_dir / "metrics").glob("rank_*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if seconds := [record["seconds"] for record in records if "step" in record]:
            return seconds
    return []


def run(layout: str, steps: int, block: int) -> list[dict[str, float]]:
    """Return for each round of blocks the mean seconds of a step in each placement of the threads."""
    plan = make_plan(read_host(Root()), 2, None)
    own = [set(worker.cores) for worker in plan.workers]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        recipe = ROOT / "recipes" / "mini" / f"pretrain_{layout}.yaml"
        command = [str(Path(sys.executable).with_name("tc3")), "train", str(recipe), "--steps", str(steps), "--no-bind"]
        settings = ["lr_schedule.warmup_steps=0", "plugins.held_out_loss=False"]
        command += ["--run-dir", str(run_dir), *(word for one in settings for word in ("--set", one))]
        environ = {name: value for name, value in os.environ.items() if name != CORES}
        training = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
        blocks: dict[int, list[float]] = {}
        left: dict[int, Threads] = {}
        turn = -1
        try:
            while training.poll() is None:
                seconds = steps_so_far(run_dir)
                if (now := (len(seconds) - 2) // block) > turn and len(seconds) >= 2:
                    turn, workers = now, workers_of(run_dir)
                    for rank, process in workers.items():
                        place(process, PLACEMENTS[turn % 3], left.setdefault(rank, threads_of(process)), own[rank])
                time.sleep(0.05)
        finally:
            if training.poll() is None:
                training.send_signal(signal.SIGINT)
        if training.returncode:
            raise click.ClickException(f"{layout}: the training failed")
        seconds = steps_so_far(run_dir)
    for step, taken in enumerate(seconds[2:]):
        if step % block:
            blocks.setdefault(step // block, []).append(taken)
    whole = [mean(blocks[number]) for number in sorted(blocks) if len(blocks[number]) == block - 1]
    return [dict(zip(PLACEMENTS, whole[first : first + 3], strict=True)) for first in range(0, len(whole) // 3 * 3, 3)]


@click.command()
@click.argument("layouts", nargs=-1, type=click.Choice(["dp2", "pp2", "tp2", "cp2"]))
@click.option(
    "--steps", default=78, type=click.IntRange(min=20), show_default=True, help="Train this many steps in each run."
)
@click.option(
    "--block", default=6, type=click.IntRange(min=2), show_default=True, help="Train this many steps in each placement."
)
def main(layouts: tuple[str, ...], steps: int, block: int) -> None:
    """Print ratios of a step with divided and with free cores to one as MindFormers leaves them."""
    for layout in layouts or ("dp2", "pp2"):
        rounds = run(layout, steps, block)
        if not rounds:
            raise click.ClickException(f"{steps} steps are no whole round of three blocks of {block}")
        for placement in PLACEMENTS:
            ratios = sorted(row[placement] / row["left"] for row in rounds)
            seconds = median(row[placement] for row in rounds)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            click.echo(
                f"{layout} {placement:8s}: {seconds:.2f} s, {median(ratios):.2f}x ({spread}, {len(rounds)} rounds)"
            )
        click.echo(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
