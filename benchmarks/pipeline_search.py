"""This program measures the speed of the pipeline simulator, and the quality of the pipeline optimiser's plans.

    python benchmarks/pipeline_search.py                        # the simulator
    python benchmarks/pipeline_search.py INSTANCE.json ...      # one after the other through `tc3 search pipeline`

An instance is a file of the schema pp-balance/1; the plan's step time is compared with `best_known.neutral_time` in
this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.layout.instance import read_instance
from tools.pipeline.simulate import Durations, makespans, simulate
from tools.pipeline.timetable import timetable

STAGES, CHUNKS, MICRO_BATCHES, PLANS = 16, 4, 256, 64
SEARCH = "from tools.search.cli import search; search(prog_name='tc3 search')"


class Judgement(NamedTuple):
    """A `Judgement` holds a solution's simulated step time, the peak memory of each stage, and for each stage over the
    memory limit the excess.
    """

    time: float
    peak: np.ndarray
    over: dict[int, float]


def plan_of(problem, solution):
    """Return the plan [K, C] of a solution n[type][v][s][option], a count of layers."""
    size = problem.chunks * problem.stages
    return problem.by_stage(np.concatenate([np.asarray(part).reshape(size, -1).T for part in solution]))


def judge(problem, solution):
    """Return the simulated step time and memory of a solution, by the rules in the schema's `doc`."""
    plan = plan_of(problem, solution)[None]
    assert problem.well_formed(plan)[0]
    peak = problem.peak_memory(plan)[0]
    over = {int(stage): float(peak[stage] - problem.cap) for stage in np.flatnonzero(~problem.within(peak))}
    return Judgement(float(problem.step_times(plan)[0]), peak, over)


def milliseconds(work, repetitions=9):
    """Return the median and, in brackets, the smallest time of `repetitions` calls of `work`, in milliseconds."""
    taken = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - begin))
    return f"{statistics.median(taken):.1f} ({min(taken):.1f})"


def simulator():
    rng = np.random.default_rng(0)
    forward = 1 + rng.random((PLANS, CHUNKS, STAGES))
    times = Durations(forward[0], 2 * forward[0])

    def new():
        timetable.cache_clear()
        simulate("interleaved_1f1b", MICRO_BATCHES, times)

    def many():
        makespans(table, forward, 2 * forward)

    print(
        f"{STAGES} stages x {CHUNKS} chunks x {MICRO_BATCHES} micro-batches, interleaved 1F1B; ms, median (least) of 9"
    )
    print(f"  a schedule seen for the first time  {milliseconds(new)}")
    table = timetable("interleaved_1f1b", STAGES, CHUNKS, MICRO_BATCHES)
    print(f"  seen before, all starts and ends    {milliseconds(lambda: simulate('interleaved_1f1b', 256, times))}")
    print(f"  {PLANS} plans at once, step time only   {milliseconds(many)}")


def optimiser(paths, limit):
    print("| instance | best known | ours | ours / best | lower bound | gap | MB under the cap | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            words = ["pipeline", str(path), "--json", "--time-limit", str(limit), "--out", f"{folder}/solution.json"]
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", SEARCH, *words], capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - begin
            written = json.loads(Path(folder, "solution.json").read_text("utf-8"))
        instance, report = read_instance(path), json.loads(done.stdout)
        judged = judge(instance, written["solution"])
        best = json.loads(path.read_text("utf-8"))["best_known"]["neutral_time"]
        proof = "proven" if report["proven"] else f"{100 * report['gap']:.2f} %"
        print(
            f"| {instance.name} | {best:.8g} | {judged.time:.8g} | {judged.time / best:.5f} "
            f"| {report['lower_bound']:.8g} | {proof} | {instance.cap - judged.peak.max():.0f} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("instances", nargs="*", type=Path)
    parser.add_argument("--time-limit", type=float, default=60)
    arguments = parser.parse_args()
    if arguments.instances:
        optimiser(arguments.instances, arguments.time_limit)
    else:
        simulator()
