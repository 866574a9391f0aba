"""This program runs `tc3 search` on the case of the report's Table 5: 438B, 4,096 devices, global batch 16,384.

    python -m benchmarks.search                # ranking, then the ten best placed, then the report's own layout
    python -m benchmarks.search --effort 3     # less effort for each placement

The program prints Markdown. The report gives PP 8, VPP 2, 64 micro-batches and 45 GB; tensor parallelism 2 and EP 16
are the recipe's (`recipes/telechat3_438b/card.yaml`), as are layers, recomputation and dispatch.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

from tools.estimate.time_model import TimeModel
from tools.layout.budget import EFFORTS, Budget
from tools.recipe.load import load_recipe
from tools.search.doubt import doubt_of
from tools.search.ranking.rank import rank
from tools.search.ranking.run import entry_of, search
from tools.search.ranking.workers import place_all
from tools.search.report import HEADS, cells, reasons
from tools.search.request import read_limit, request_of

RECIPE, CLUSTER = "recipes/telechat3_438b/pretrain_4k.yaml", "atlas_800t_a2"
REPORT_S = 39.969  # Table 5, "Tool-Generated"; experts' layouts 40.076 and 40.147
REPORT = ("pp=8", "vpp=2", "m=64")
PARTS = {  # of the space
    "report's PP, VPP and micro-batches, the rest free": REPORT,
    "with the recipe's TP, EP, dispatch, sharding": (
        *(*REPORT, "dp=256", "tp=2", "ep=16"),
        *("mode=hierarchical", "shard=optimizer"),
    ),
}


def row(values):
    return f"| {' | '.join(values)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--effort", type=float, default=EFFORTS["normal"], help="effort of the solver for each placement"
    )
    effort = parser.parse_args().effort
    recipe = load_recipe(RECIPE)
    request = request_of(recipe, CLUSTER)
    times = TimeModel(request.hardware)
    begin, processor = time.perf_counter(), time.process_time()
    ranking = rank(request)
    alone = time.perf_counter() - begin
    funnel = ranking.funnel
    print("| | |\n|---|---|")
    print(row(["candidates", f"{funnel.total:,}"]))
    print(row(["legal and fitting", f"{len(ranking.seconds):,}"]))
    print(row(["enumerated and ranked in", f"{alone:.1f} s ({time.process_time() - processor:.1f} s of one core)"]))
    begin = time.perf_counter()
    found = search(request, 10, Budget(effort), times, lambda *_: None)
    took = time.perf_counter() - begin
    print(row([f"ranked, bounded and {found.placed} placed in", f"{took:.0f} s on {os.cpu_count()} cores"]))
    print(f"\n{row(HEADS)}\n{'|---' * len(HEADS)}|")
    for number, entry in enumerate(found.entries, 1):
        print(row(cells(str(number), entry, request)))
    print(row(cells("recipe", found.own, request)))
    for name, limits in PARTS.items():
        print(row(cells(name, placed(request, limits, times, effort), request)))
    print()
    for line in reasons(found, doubt_of(found, times)):
        print(f"* {line}")
    own, best = found.own.seconds, found.entries[0].seconds
    print(
        f"* Table 5 has {REPORT_S:.3f} s; the recipe's own layout is predicted {own:.2f} s ({own / REPORT_S - 1:+.1%})."
    )
    print(f"* The first is predicted {1 - best / own:.1%} under the recipe's own layout.")
    print("\n| dropped | candidates |\n|---|---|")
    for reason, count in funnel.lines():
        print(row([reason, f"{count:,}"]))


def placed(request, limits, times, effort):
    """Return the fastest layout of a part of the search space, with its layers placed on stages."""
    asked = replace(request, limits=tuple(map(read_limit, limits)))
    entries = []

    def told(one, placement):
        assert placement.configuration is not None, placement.why
        entries.append(entry_of(placement.configuration, times, bound=placement.bound_s))

    place_all(asked, rank(asked).short_list(1), times, Budget(effort), told)
    return entries[0]


if __name__ == "__main__":
    main()
