"""This program compares the pipeline simulator with the slow reference of the tests: 16 stages, 4 chunks or fewer, 256
micro-batches.

    python benchmarks/pipeline_simulator.py

"first" is the time of a simulation that also makes the order of the schedule (for zb_v, whose orders are kept, only
once); "again" is the time of a simulation of other durations in the same order.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tools.pipeline.reference_simulator import reference, with_pairs
from tools.pipeline.schedules import PAPER_SCHEDULES, SCHEDULES, shape_of
from tools.pipeline.simulate import Durations, simulate
from tools.pipeline.timetable import timetable

STAGES, MICRO_BATCHES, RUNS = 16, 256, 5
ONE = ("1f1b", "zb_h1", "zb_h2")
TWO = ("zero_bubble_v", "zb_v", "v_half", "v_min", "dual_pipe", "dual_pipe_v")
CHUNKS = dict.fromkeys(ONE, 1) | dict.fromkeys(TWO, 2)


def milliseconds(work) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    print("| schedule | first, ms | again, ms | reference, ms | reference / first |\n|---|---:|---:|---:|---:|")
    for schedule in (*SCHEDULES, *PAPER_SCHEDULES):
        chunks = CHUNKS.get(schedule, 4)
        ones = np.ones((chunks, STAGES))
        durations = Durations(ones, 2 * ones, ones, transfer=0.1)

        def ours(schedule=schedule, durations=durations) -> float:
            return simulate(schedule, MICRO_BATCHES, durations).makespan

        def obvious(schedule=schedule, chunks=chunks, durations=durations) -> None:
            table = timetable(schedule, STAGES, chunks, MICRO_BATCHES)
            reference(with_pairs(table.orders, table.tables), chunks, durations, shape_of(schedule))

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
