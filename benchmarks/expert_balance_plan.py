"""This program compares planners of expert placements: max/mean in the next period, moved experts, time relative to the
greedy planner, and the best possible placement.

    OMP_NUM_THREADS=1 python benchmarks/expert_balance_plan.py             # 58 layers x 256 experts on 8 to 64
    OMP_NUM_THREADS=1 python benchmarks/expert_balance_plan.py --best 20   # beside every placement, and beside HiGHS
    OMP_NUM_THREADS=1 python benchmarks/expert_balance_plan.py --spare 1   # copies in spare slots, beside EPLB's

The loads are those of tests/plugins/expert_balance/drifting.py: log weights of experts walk (an AR(1) whose stationary
distribution is normal(0, spread) and of which a period keeps a share), and 64 x 4096 tokens x top-8 are drawn by them.
Each planner gets the loads of a period and is judged by the loads of the next period. Times are the smallest of three
processor times of this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from plugins.expert_balance.copies import NOTHING, imbalance_with, next_state, none
from plugins.expert_balance.plan import device_loads, greedy, imbalance, moved, next_placements, swaps
from plugins.expert_balance.reference import least_by_program, least_by_trying
from plugins.expert_balance.replay import eplb, eplb_with_copies, of_slots
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import drifting

LAYERS, EXPERTS, PERIODS = 58, 256, 6
PLANNERS = {
    "experts stay": lambda loads, old, devices: old,
    "greedy": lambda loads, old, devices: greedy(loads, devices),
    "EPLB": lambda loads, old, devices: eplb(loads, devices),
    "swaps": swaps,
    "aligned": lambda loads, old, devices: swaps(loads, old, devices, aligned=True),
    "swaps, 8 moves": lambda loads, old, devices: swaps(loads, old, devices, most=4),
}


def walk(loads, devices, planner):
    """Return a planner's max/mean in the next period, the experts of a layer that it moves after the first plan, and
    the seconds of the first plan and of a later plan.
    """
    old = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    ratios, moves, seconds = [], [], []
    for now, later in pairwise(loads):
        taken = []
        for _ in range(3):
            began = time.process_time()
            new = np.stack([planner(*pair, devices) for pair in zip(now, old, strict=True)])
            taken.append(time.process_time() - began)
        seconds.append(min(taken))
        ratios.append(imbalance(later, new, devices).mean())
        moves.append(moved(new, old, devices) / LAYERS)
        old = new
    return np.mean(ratios), np.mean(moves[1:]), seconds[0], np.mean(seconds[1:])


def planners(sizes):
    print(f"{LAYERS} layers x {EXPERTS} experts; next period's max/mean, experts moved a layer, time over greedy's: "
          "first plan / later ones")  # fmt: skip
    for devices in sizes:
        for spread, keep in ((0.15, 0.99), (0.3, 0.99), (0.3, 0.9), (0.6, 0.99), (1.0, 0.99)):
            loads = drifting(5, spread, keep, PERIODS, LAYERS, EXPERTS)
            rows = {name: walk(loads, devices, planner) for name, planner in PLANNERS.items()}
            first, later = rows["greedy"][2:]
            cells = [
                f"{name} {row[0]:.4f}, {row[1]:.1f}, {row[2] / first:.2f} / {row[3] / later:.2f}"
                for name, row in rows.items()
            ]
            print(
                f"D {devices:2d} spread {spread:4.2f} keep {keep}: {'; '.join(cells)} (greedy {first:.3f} s)",
                flush=True,
            )


def copied(sizes, spare, layers=8):
    print(f"{layers} layers x {EXPERTS} experts, {spare} spare slots of a device. max/mean of the next period, after "
          "the second plan and later: experts stay; moves; moves and copies (experts moved, copies, ms of a layer's "
          "plan); EPLB with copies (experts that come to a device which held none, of a layer and plan)")  # fmt: skip
    for devices in sizes:
        for spread in (0.3, 0.6, 1.0, 1.5):
            stay, move, copy, told, eplb_, brought = following(devices, spread, spare, layers)
            print(f"D {devices:2d} spread {spread:4.2f} keep 0.99: {stay:.3f}; {move:.3f}; {copy:.3f} ({told}); "
                  f"{eplb_:.3f} ({brought:.0f})", flush=True)  # fmt: skip


def following(devices, spread, spare, layers):
    """Return the values that `copied` prints in a row."""
    settings, stay = Settings(spare=spare), np.tile(np.arange(EXPERTS), (layers, 1))
    moving = slots = stay
    copies, held = none(layers, devices, spare), None
    ratios, seconds, made, gone, brought = [], [], [], [], []
    for now, later in pairwise(drifting(5, spread, 0.99, PERIODS, layers, EXPERTS)):
        moving, old, before = next_placements(settings, now, moving, devices, step=1), slots, held
        began = time.process_time()
        slots, copies = next_state(settings, now, slots, copies, devices, step=1)
        seconds.append((time.process_time() - began) / layers)
        held = np.stack([eplb_with_copies(one, devices, spare) for one in now])
        ours = [imbalance(later, stay, devices), imbalance(later, moving, devices)]
        ratios.append([*ours, imbalance_with(later, slots, copies, devices), of_slots(later, held)])
        made.append((copies != NOTHING).sum() / layers)
        gone.append(moved(slots, old, devices) / layers)
        brought += [] if before is None else [sum(map(_new, before, held)) / layers]
    one, two, three, four = np.mean(ratios[1:], axis=(0, 2))
    told = f"{np.mean(gone[1:]):.0f}, {np.mean(made[1:]):.0f}, {1e3 * min(seconds):.0f}"
    return one, two, three, told, four, np.mean(brought)


def _new(before, after):
    """Return how many experts are on a device after a plan of EPLB that were not on this device before."""
    return sum(len(set(later) - set(earlier)) for earlier, later in zip(before.tolist(), after.tolist(), strict=True))


def best(cases):
    print(f"fullest device over the least possible, percent above: mean (worst) of {cases} loads")
    for experts, devices in ((8, 4), (8, 2), (9, 3), (10, 2), (12, 3), (12, 4), (16, 4)):
        for spread in (0.3, 0.6, 1.0):
            loads = drifting(11, spread, 0.5, cases, 1, experts, tokens=8 * 65536)[:, 0]
            least = least_by_program if experts > 12 else least_by_trying
            lowest = [least(one, devices) for one in loads]
            told = []
            for name, near in (("swaps", 0.0), ("swaps with the stop", None), ("greedy", None)):
                found = [
                    greedy(one, devices) if name == "greedy" else swaps(one, np.arange(experts), devices, near=near)
                    for one in loads
                ]
                above = [
                    100 * (device_loads(one, slots, devices).max() / low - 1)
                    for one, slots, low in zip(loads, found, lowest, strict=True)
                ]
                told.append(f"{name} {np.mean(above):.2f} ({max(above):.2f})")
            print(f"{experts} experts on {devices}, spread {spread}: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--best", type=int, metavar="CASES")
    parser.add_argument("--spare", type=int, metavar="SLOTS")
    parser.add_argument("--devices", type=int, nargs="+", default=(8, 16, 32, 64))
    options = parser.parse_args()
    if options.best:
        best(options.best)
    elif options.spare:
        copied(options.devices, options.spare)
    else:
        planners(options.devices)
