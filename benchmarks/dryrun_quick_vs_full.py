"""This program measures the difference between `tc3 dryrun --quick` and full depth for each stage, with recomputation,
offsets, chunks, MTP and swapping.

    python benchmarks/dryrun_quick_vs_full.py [--jobs N] [--only NAME]

The program compiles a small model (tests/tools/dryrun/pipeline.yaml: 16 devices per stage, dp 8 x tp 2 x ep 8).
Activations take most of the memory of this model, so the error of the activations that `--quick` adds up is a larger
share of the memory than in a real recipe. The results of the compiles stay in the dry run's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tools.check.check import check_recipe
from tools.dryrun.compiles import compile_all
from tools.dryrun.plan import Plan, plan_jobs, without_files
from tools.dryrun.quick import quick_plan
from tools.dryrun.report import report_of
from tools.ranges import Number
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "tests/tools/dryrun/pipeline.yaml"
MIB = 1 << 20
_NORMS = r".*\.norm"
_SHARED = r"mlp\.shared_experts\.activation_func\.silu"


def layout(
    layers: int, pp: int, offset: Any, recompute: dict[str, Any], chunks: int = 1, mtp: int = 0, swapped: Any = None
) -> dict[str, Any]:
    """Return the changes of the base recipe that make one pipeline layout."""
    model = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": mtp,
        "pp_interleave_num": chunks,
        "offset": offset,
    }
    if swapped:
        model |= {"swap": True, "layer_swap": swapped}
    return {
        "parallel_config": {"pipeline_stage": pp, "micro_batch_num": 8},
        "parallel": {"pipeline_config": {"pipeline_interleave": chunks > 1}},
        "recompute_config": recompute,
        "model": {"model_config": model},
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "recompute [2, 0], 3 + 2 layers": layout(5, 2, [1, 0], {"recompute": [2, 0]}),
    "interleaved, recompute [[2, 0], [0, 0]]": layout(
        6, 2, [[1, 0], [0, 1]], {"recompute": [[2, 0], [0, 0]]}, chunks=2
    ),
    "three stages, recompute [2, 1, 0]": layout(6, 3, [0, 1, -1], {"recompute": [2, 1, 0]}),
    "MTP, recompute [0, 2]": layout(4, 2, [0, 0], {"recompute": [0, 2]}, mtp=1),
    "recompute [1, 0], norms [2, 1]": layout(
        5, 2, [1, 0], {"recompute": [1, 0], "select_recompute": {_NORMS: [2, 1]}, "select_comm_recompute": [2, 1]}
    ),
    "recompute, of it excluded [2, 0]": layout(
        4, 2, [0, 0], {"recompute": True, "select_recompute_exclude": {r".*\.linear_fc1\.matmul": [2, 0]}}
    ),
    "layer 1 swapped, layers 2 and 3 recomputed": layout(
        5, 2, [1, 0], {"recompute": [2, 3]}, swapped=[{"backward_prefetch": 1, "layers": [1]}]
    ),
}


@click.command()
@click.option("--jobs", type=Number("workers"), default=2, help="Run this many compiles at a time.")
@click.option("--only", default="", help="Use only layouts whose name contains this text.")
def main(jobs: int, only: str) -> None:
    """Compile every layout both ways; a row for each stage."""
    print("| layout | stage | quick MiB | full MiB | difference | of it kept activations, quick / full |")
    print("|---|---:|---:|---:|---:|---:|")
    worst = 0.0
    for name, changes in LAYOUTS.items():
        if only in name:
            worst = max(worst, compare(name, changes, jobs))
    print(f"\nworst difference: {worst:.1%}")


def compare(name: str, changes: dict[str, Any], jobs: int) -> float:
    """Print the rows of a layout; return the largest difference between quick and full dry run of any stage, as a share
    of the memory at full depth.
    """
    recipe = recipe_of(changes)
    # tc3 check knows swapping by `swap_config`, which MindFormers hands no model: see tools/dryrun/plan.py
    errors = [str(error) for error in check_recipe(recipe).errors if "swap" not in str(error)]
    assert not errors, errors
    found = [memory(recipe, plan, jobs) for plan in (quick_plan(recipe), plan_jobs(recipe))]
    worst = 0.0
    for stage, (quick, full) in enumerate(zip(*found, strict=True)):
        off = quick["total"] / full["total"] - 1
        worst = max(worst, abs(off))
        sizes = f"{quick['total'] / MIB:.1f} | {full['total'] / MIB:.1f}"
        kept = f"{quick['saved'] / MIB:.1f} / {full['saved'] / MIB:.1f}"
        print(f"| {name} | {stage} | {sizes} | {off:+.1%} | {kept} |", flush=True)
    return worst


def recipe_of(changes: Mapping[str, Any]) -> Recipe:
    """Return the base recipe with the sections of a layout; the layout's recomputation replaces that of the base."""
    recipe = without_files(load_recipe(BASE))
    _merge(recipe, {**changes, "recompute_config": {}})
    recipe["recompute_config"] = dict(changes["recompute_config"])
    return recipe


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def memory(recipe: Recipe, plan: Plan, jobs: int) -> list[dict[str, Any]]:
    """Return the bytes of memory of each stage, as a dry run counts them."""
    results = compile_all(plan, jobs, use_cache=True)
    refused = [result["error"] for result in results if "error" in result]
    assert not refused, refused
    report = report_of(recipe, plan, results, View(recipe).node)
    return [stage["memory"] for stage in report["stages"]]


if __name__ == "__main__":
    main()
