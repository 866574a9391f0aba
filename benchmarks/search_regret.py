"""What `tc3 search` gives up by placing few candidates: against every candidate placed, on 8 to 64 devices.

    python -m benchmarks.search_regret                               # 8 devices
    python -m benchmarks.search_regret --devices 16 32 64 --most 40  # the 40 that rank best of those that are open

A small MoE model whose memory is tight, so that layers and recomputation matter. Every planned candidate of the space
that could be faster than the search's best by its bound is placed with the same effort as the search gives; the
others cannot be faster, by the estimator. The regret is the search's best over the best of all. With `--most` only so
many are placed, those that rank best, and the regret is that over them: the whole space's may be larger.
"""

from __future__ import annotations

import argparse
import time

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.model.architecture import Model, pattern_of
from tools.search.candidates import RECOMPUTE
from tools.search.ranking.rank import Chances
from tools.search.ranking.run import place_all, search
from tools.search.request import PLANNED, Request, read_limit

MODEL = Model(
    pattern=pattern_of(17, 32, 1),
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn=4096,
    vocab=32000,
    experts=32,
    top_k=4,
    expert_ffn=512,
    shared_ffn=512,
)
LIMITS = ("pp>1", "cp=1", "shard=optimizer", "mode=global", "mbs<=2")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8])
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--gib", type=float, default=3.0, help="of a device")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--most", type=int, default=10**9, help="candidates to place beside the search's")
    asked = parser.parse_args()
    heads = "devices", "all", "open", "placed", "placed by the search", "best of all s", "of the search s", "regret"
    print(f"| {' | '.join([*heads, 'bound'])} |\n{'|---' * 9}|")
    for devices in asked.devices:
        print(row(devices, asked), flush=True)


def row(devices, asked):
    """A line of the table."""
    base = Configuration(
        MODEL, layers=((MODEL.layers,),), sequence=2048, shared_whole=True, keep_gathered=True, overlap_dp=True
    )
    limits = tuple(map(read_limit, LIMITS))
    request = Request(base, cluster("atlas_800t_a2"), devices, 8 * devices, asked.gib * GIB, "benchmark", limits=limits)
    times, every = TimeModel(request.hardware), {}
    begin = time.perf_counter()
    found = search(request, asked.top, Budget(asked.effort), times, lambda *_: None)
    took, ours = time.perf_counter() - begin, found.entries[0].seconds
    left = sorted(Chances(found.ranking, ours).open, key=lambda one: one.seconds)
    some = left[: asked.most]
    place_all(request, some, times, Budget(asked.effort), every.__setitem__)
    best = min([ours, *(placement.step_s for placement in every.values() if placement.configuration)])
    assert len(some) < len(left) or found.least <= best <= ours
    planned = int((found.ranking.places[:, 2] == RECOMPUTE.index(PLANNED)).sum())
    words = [f"{devices}", f"{planned}", f"{len(left)}", f"{len(every)}", f"{found.placed} in {took:.0f} s"]
    return f"| {' | '.join([*words, f'{best:.4f}', f'{ours:.4f}', f'{ours / best - 1:.2%}', f'{found.least:.4f}'])} |"


if __name__ == "__main__":
    main()
