"""The pipeline simulator against the obvious one of the tests: 16 stages, 4 chunks or fewer, 256 micro-batches.

    python benchmarks/pipeline_simulator.py

"first" lays out the schedule too, "again" simulates other durations on the same timetable.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tools.pipeline.reference_simulator import reference
from tools.pipeline.schedules import SCHEDULES, is_v_shaped, operations
from tools.pipeline.simulate import Durations, simulate
from tools.pipeline.timetable import timetable

STAGES, MICRO_BATCHES, RUNS = 16, 256, 5
CHUNKS = {"1f1b": 1, "zero_bubble_v": 2}


def milliseconds(work) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    print("| schedule | first, ms | again, ms | reference, ms | reference / first |\n|---|---:|---:|---:|---:|")
    for schedule in SCHEDULES:
        chunks = CHUNKS.get(schedule, 4)
        ones = np.ones((chunks, STAGES))
        durations = Durations(ones, 2 * ones, ones, transfer=0.1)

        def ours(schedule=schedule, durations=durations) -> float:
            return simulate(schedule, MICRO_BATCHES, durations).makespan

        def obvious(schedule=schedule, chunks=chunks, ones=ones) -> None:
            orders = [operations(schedule, stage, STAGES, chunks, MICRO_BATCHES) for stage in range(STAGES)]
            reference(orders, chunks, ones, 2 * ones, ones, 0.1, "full", is_v_shaped(schedule))

        first, again = [], []
        for _ in range(RUNS):
            timetable.cache_clear()
            first.append(milliseconds(ours))
            again.append(milliseconds(ours))
        slow = milliseconds(obvious)
        median = float(np.median(first))
        print(f"| {schedule} | {median:.0f} | {np.median(again):.0f} | {slow:.0f} | {slow / median:.0f} |")


if __name__ == "__main__":
    main()
