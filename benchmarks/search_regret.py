"""What `tc3 search` gives up by placing few candidates: against every candidate placed, on 8 to 64 devices.

    python -m benchmarks.search_regret                    # 8 and 16 devices
    python -m benchmarks.search_regret --devices 32 64    # hours on few cores

A small MoE model whose memory is tight, so that layers and recomputation matter. Every planned candidate of the space
is placed with the same effort as the search gives; the regret is the search's best over the best of all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.model.architecture import Model, pattern_of
from tools.placement.budget import Budget
from tools.search.ranking.place_best import place_all
from tools.search.ranking.rank import rank
from tools.search.ranking.run import search
from tools.search.ranking.store import Store
from tools.search.space.limits import PLANNED, read_limit
from tools.search.space.request import Request

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
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--gib", type=float, default=3.0, help="of a device")
    parser.add_argument("--top", type=int, default=5)
    asked = parser.parse_args()
    print("| devices | all | placed by the search | best of all s | of the search s | regret | space's bound |")
    print("|---|---|---|---|---|---|---|")
    for devices in asked.devices:
        print(row(devices, asked), flush=True)


def row(devices, asked):
    """A line of the table."""
    base = Configuration(
        MODEL, layers=((MODEL.layers,),), sequence=2048, shared_whole=True, keep_gathered=True, overlap_dp=True
    )
    limits = tuple(map(read_limit, LIMITS))
    request = Request(base, cluster("atlas_800t_a2"), devices, 8 * devices, asked.gib * GIB, "benchmark", limits=limits)
    times, ranking, every = TimeModel(request.hardware), rank(request), {}
    ranked = [one for one in ranking.fastest() if one.candidate.recompute == PLANNED]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(request, times, Path(folder) / "all.json")
        place_all(request, ranked, times, Budget(asked.effort), store, every.__setitem__)
        begin = time.perf_counter()
        store = Store(request, times, Path(folder) / "search.json")
        found = search(request, asked.top, Budget(asked.effort), store, times, lambda *_: None)
        took = time.perf_counter() - begin
    best = min(placement.step_s for placement in every.values())
    ours = found.entries[0].seconds
    assert found.least <= best <= ours * (1 + 1e-9)
    words = [f"{devices}", f"{len(every)}", f"{found.placed} in {took:.0f} s", f"{best:.4f}", f"{ours:.4f}"]
    return f"| {' | '.join([*words, f'{ours / best - 1:.2%}', f'{found.least / best - 1:+.2%}'])} |"


if __name__ == "__main__":
    main()
