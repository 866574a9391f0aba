"""What `tc3 search` gives up against every strategy placed by the solver, and whether more effort ever makes it worse.

    python -m benchmarks.search_regret                      # 40 random small problems: regret, gap and certainty
    python -m benchmarks.search_regret --efforts            # 30 random problems, each at efforts low, normal and high
    python -m benchmarks.search_regret --first 7 --draw 1   # one of them

A problem is a dense or MoE model of 5 to 17 layers on 8 to 64 devices whose memory is tight or loose; its number draws
it. Every planned candidate that could be faster than the search's best by its plain bound is placed by the solver, the
others cannot be faster by the estimator. The regret is the search's best over the best of all. The sentence on
certainty is true if no strategy is under the bound that the search prints.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import EFFORTS, Budget
from tools.model.architecture import Latent, Model, pattern_of
from tools.search.ranking.rank import Chances, rank
from tools.search.ranking.run import Found, search
from tools.search.ranking.workers import place_all
from tools.search.request import Request, read_limit

LIMITS = ("pp>1", "cp=1", "shard=optimizer", "mode=global", "mbs<=2")
DEVICES = (8, 12, 16, 24, 32, 48, 64)
_DENSE = Model(pattern_of(9), hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=32000)
_MOE = replace(_DENSE, experts=32, top_k=4, expert_ffn=512, shared_ffn=512)
_LATENT = Latent(query_rank=384, kv_rank=128, nope=64, rope=32, value=64)


def problem(number: int, devices: tuple[int, ...] = DEVICES, layers: tuple[int, int] = (5, 17)) -> Request:
    """Return the request that `number` draws."""
    rng = np.random.default_rng(number)
    count, dense = int(rng.integers(layers[0], layers[1] + 1)), int(rng.integers(1, 4))
    family = ("dense", "moe", "latent", "mtp")[int(rng.integers(4))]
    model = replace(_DENSE, pattern=pattern_of(count))
    if family != "dense":
        model = replace(_MOE, pattern=pattern_of(count, 32, dense), mtp=int(family == "mtp"))
        model = replace(model, latent=_LATENT if family != "moe" else None)
    base = Configuration(
        model, layers=((count,),), sequence=2048, shared_whole=True, keep_gathered=True, overlap_dp=True
    )
    many, batch = int(rng.choice(devices)), int(rng.choice((4, 8, 16)))
    limits = tuple(map(read_limit, LIMITS))
    asked = Request(base, cluster("atlas_800t_a2"), many, batch * many, 1e4 * GIB, f"{family}", limits=limits)
    least = rank(asked).least
    assert least is not None
    return replace(asked, cap=float(rng.choice((1.05, 1.2, 1.6, 3.0))) * least.peak)


def regret(asked: Request, found: Found, effort: float) -> tuple[float, int]:
    """Return (seconds of the best of all, how many were placed), each strategy by the solver with `effort`."""
    every: dict = {}
    some = Chances(found.ranking, found.entries[0].seconds).open
    place_all(asked, some, TimeModel(asked.hardware), Budget(effort), every.__setitem__)
    steps = [placement.step_s for placement in every.values()]
    return min([found.entries[0].seconds, *steps]), len(every)


def searched(asked: Request, effort: float, top: int = 10) -> Found:
    """Return the search's answer."""
    return search(asked, top, Budget(effort), TimeModel(asked.hardware), lambda *_: None)


def _processor_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def print_regret(numbers: range, effort: float, solving: float) -> None:
    """Print a line for each problem."""
    heads = "problem", "family", "devices", "fit", "placed", "solved", "search s", "best of all s", "of", "regret"
    print(f"| {' | '.join([*heads, 'gap', 'bound holds', 'processor s'])} |\n{'|---' * (len(heads) + 3)}|")
    for number in numbers:
        asked, begin = problem(number), _processor_seconds()
        found = searched(asked, effort)
        if not found.entries:
            continue
        took, ours = _processor_seconds() - begin, found.entries[0].seconds
        best, many = regret(asked, found, solving)
        holds = "yes" if found.least <= best * (1 + 1e-6) else "NO"
        words = [f"{number}", asked.cap_source, f"{asked.devices}", f"{len(found.ranking.seconds)}", f"{found.placed}"]
        words += [f"{found.solved}", f"{ours:.4f}", f"{best:.4f}", f"{many}", f"{ours / best - 1:.2%}"]
        print(f"| {' | '.join([*words, f'{found.gap:.2%}', holds, f'{took:.0f}'])} |", flush=True)


def print_efforts(numbers: range) -> None:
    """Print a line for each problem: its best at every effort, which must not rise."""
    print(f"| problem | {' | '.join(EFFORTS)} | never worse | own mesh placed | bound holds |\n{'|---' * 7}|")
    for number in numbers:
        asked = problem(number)
        every = [searched(asked, effort) for effort in EFFORTS.values()]
        if not every[0].entries:
            continue
        steps = [found.entries[0].seconds for found in every]
        good = all(after <= before for before, after in itertools.pairwise(steps))
        holds = all(found.least <= steps[-1] * (1 + 1e-9) for found in every)
        own = every[0].own_mesh is not None
        words = [f"{number}", *(f"{step:.4f}" for step in steps), *("yes" if w else "NO" for w in (good, own, holds))]
        print(f"| {' | '.join(words)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--draw", type=int, help="problems; by default 40, or 30 with --efforts")
    parser.add_argument("--effort", type=float, default=EFFORTS["normal"], help="of the search")
    parser.add_argument("--solving", type=float, default=5.0, help="effort with which every strategy is placed")
    parser.add_argument("--efforts", action="store_true", help="compare efforts instead")
    asked_for = parser.parse_args()
    drawn = range(asked_for.first, asked_for.first + (asked_for.draw or (30 if asked_for.efforts else 40)))
    if asked_for.efforts:
        print_efforts(drawn)
    else:
        print_regret(drawn, asked_for.effort, asked_for.solving)
