"""This program compares the plan time and the quality of the attention-aware scheduler with each baseline, in one run
on one core.

    python benchmarks/attention_balance.py [--prefix output/data/stdlib] [--steps 4] [--json]

Except in the last part, the corpora are synthetic (benchmarks/corpora.py, seeded). "slowest/mean" is the time of a step
divided by that of a step whose attention is spread evenly, averaged over steps; the bound next to it is the best
possible value for each number of micro-batches. Times are medians of one global batch; "CPU" counts this process's
processor time, which a busy machine does not inflate as it does the wall clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import CORPORA, synthetic_index
from plugins.attention_balance.assign import assign, loads_of
from plugins.attention_balance.context_parallel import balanced, contiguous, head_tail
from plugins.attention_balance.objective import Objective, lower_bound
from plugins.attention_balance.plan import Layout, balance, epoch_plan
from plugins.attention_balance.reference import BASELINES
from plugins.attention_balance.samples import Cost, build_gpt_index, segments_of
from tools.data.index import IndexReader
from tools.layout.resolve import sample_cost
from tools.recipe.load import load_recipe

ATTENTION = Cost(1.0, 0.0, "pair")
MODEL_105B = sample_cost(load_recipe(Path(__file__).resolve().parents[1] / "recipes/telechat3_105b/context_128k.yaml"))
BATCH, LONGEST = 16_384, 131_072
SEED = 1234

# what waits -> ranks, micro-batches, slots, objective; 16,384 samples each
SETTINGS = {
    "EP over 256 ranks": (256, 64, 1, Objective(256)),
    "EP over 16 of 256 ranks": (256, 64, 1, Objective(16)),
    "plain DP, 256 ranks": (256, 64, 1, Objective(1)),
    "plain DP, 2,048 ranks": (2048, 8, 1, Objective(1)),
    "plain DP, 8 ranks": (8, 2048, 1, Objective(1)),
    "EP over 256 ranks, 8 stages": (256, 64, 1, Objective(256, 8)),
    "EP over 256 ranks, 2 a slot": (256, 32, 2, Objective(256)),
    "EP over 256 ranks, 4 a slot": (256, 16, 4, Objective(256)),
}


def timed(call: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, float]:
    """Return the result of one call, and its wall and processor time in milliseconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def against_baselines(
    costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective
) -> list[dict]:
    """Return rows that compare plan time and quality of every scheduling method on every global batch of costs [steps,
    batch]; the methods take turns.
    """
    shape = (ranks, micro_batches, slots)
    methods = {**BASELINES, "this plugin": lambda batch, *shape: assign(batch, *shape, objective)}
    assign(costs[0], *shape, objective)  # the first call builds the pipeline's table
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in methods}
    for batch in costs:
        even = objective.even_time(batch.sum(), *shape[:2])
        for name, method in methods.items():
            times = [timed(lambda: method(batch, *shape)) for _ in range(5 if name == "this plugin" else 1)]  # noqa: B023
            slowest = float(objective.step_time(loads_of(batch, times[0][0])) / even)
            runs[name].append((slowest, median(t[1] for t in times), median(t[2] for t in times)))
    bound = float(np.mean(lower_bound(costs, *shape, objective) / objective.even_time(costs.sum(1), *shape[:2])))
    rows = []
    for name, results in runs.items():
        slowest, wall, cpu = zip(*results, strict=True)
        row = {"method": name, "slowest_over_mean": float(np.mean(slowest)), "bound": bound}
        rows.append({**row, "wall_ms": median(wall), "cpu_ms": median(cpu)})
    for row in rows:
        row["times_as_long"] = row["cpu_ms"] / rows[-1]["cpu_ms"]
    return rows


def by_micro_batches(attention: np.ndarray, model: np.ndarray) -> list[dict]:
    """Return rows for samples of 128K tokens on 256 ranks in one expert-parallel barrier, by the number of
    micro-batches of a step and by the plugin's window.
    """
    rows: list[dict] = []
    for micro_batches, window in ((2, 1), (2, 8), (2, 32), (8, 1), (8, 8), (16, 1), (16, 4), (32, 1), (64, 1)):
        layout = Layout(256, micro_batches, 1, Objective(256), window)
        found = balance(attention, epoch_plan(attention, layout), layout)
        whole = balance(model, epoch_plan(model, layout), layout)
        row: dict = {"micro_batches": micro_batches, "window": window, "steps": len(found.after)}
        row |= {"before": float(found.before.mean()), "after": float(found.after.mean())}
        # a window's samples change steps: the bound of the old steps does not hold for the new ones
        row["bound"] = float(found.bound.mean()) if window == 1 else None
        rows.append({**row, "model_before": float(whole.before.mean()), "model_after": float(whole.after.mean())})
    return rows


def by_length(steps: int) -> list[dict]:
    """Return rows for corpora of other context lengths, on 256 ranks in one expert-parallel barrier, with 64
    micro-batches.
    """
    rows = []
    layout = Layout(256, 64, 1, Objective(256))
    for length in CORPORA:
        index = synthetic_index(steps * BATCH, length, SEED)
        costs = ATTENTION.of_dataset(index)
        plan, wall, _ = timed(lambda: epoch_plan(costs, layout))  # noqa: B023
        found = balance(costs, plan, layout)
        row = {"sequence_length": length, "documents": len(index.lengths), "ms_per_step": wall / len(plan)}
        rows.append(row | {name: float(getattr(found, name).mean()) for name in ("before", "after", "bound")})
    return rows


def context_parallel(samples: int) -> list[dict]:
    """Return rows for samples of 128K tokens that are split over context-parallel ranks: the attending pairs of the
    slowest rank divided by the mean over ranks.
    """
    segments = segments_of(synthetic_index(samples, LONGEST, SEED), 0, samples)
    rows = []
    for ranks in (2, 8, 16):
        for name, split in (("contiguous", contiguous), ("head-tail", head_tail), ("this plugin", balanced)):
            plans = [timed(lambda: split(segments[sample], ranks)) for sample in range(samples)]  # noqa: B023
            imbalance = [plan.imbalance for plan, _, _ in plans]
            row = {"ranks": ranks, "method": name, "mean": float(np.mean(imbalance)), "worst": max(imbalance)}
            ranges = float(np.mean([len(own) for plan, _, _ in plans for own in plan.ranges]))
            rows.append({**row, "ranges": ranges, "ms": median(wall for _, wall, _ in plans)})
    return rows


def real_corpus(prefix: str) -> list[dict]:
    """Return rows for a corpus on disk, with one expert-parallel barrier. The corpus is small, so only a few ranks are
    planned.
    """
    lengths = IndexReader(prefix).lengths
    rows = []
    for length, ranks, micro_batches in ((4_096, 8, 8), (4_096, 8, 32), (32_768, 4, 8)):
        index = build_gpt_index(lengths, length, 4 * ranks * micro_batches, SEED)
        costs = ATTENTION.of_dataset(index)
        layout = Layout(ranks, micro_batches, 1, Objective(ranks))
        found = balance(costs, epoch_plan(costs, layout), layout)
        row = {"sequence_length": length, "ranks": ranks, "micro_batches": micro_batches, "steps": len(found.after)}
        rows.append(row | {name: float(getattr(found, name).mean()) for name in ("before", "after", "bound")})
    return rows


def table(title: str, rows: list[dict]) -> None:
    """Print rows as a Markdown table."""
    click.echo(f"\n{title}\n")
    click.echo("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = [f"{value:.4f}" if isinstance(value, float) else f"{value or '-'}" for value in row.values()]
        click.echo("| " + " | ".join(cells) + " |")


@click.command()
@click.option(
    "--prefix",
    default="output/data/stdlib",
    show_default=True,
    help="Also use the corpus with this prefix, if it exists.",
)
@click.option("--steps", default=4, show_default=True, help="Plan this many steps of 16,384 samples each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def main(prefix: str, steps: int, as_json: bool) -> None:
    """Measure plan time and quality against each baseline."""
    index = synthetic_index(steps * BATCH, LONGEST, SEED)
    attention, model = ATTENTION.of_dataset(index), MODEL_105B.of_dataset(index)
    batches = attention[: steps * BATCH].reshape(steps, BATCH)
    parts: dict[str, list[dict]] = {}
    for name, setting in SETTINGS.items():
        click.echo(f"measuring: {name}", err=True)
        parts[f"16,384 samples of 128K, {name}"] = against_baselines(batches, *setting)
    parts["128K, EP over 256 ranks, one sample a slot, by micro-batches and window"] = by_micro_batches(
        attention, model
    )
    parts["EP over 256 ranks, 64 micro-batches, by sequence length"] = by_length(steps)
    parts["one 128K sample over context-parallel ranks"] = context_parallel(64)
    if Path(f"{prefix}.idx").exists():
        parts[f"real corpus {Path(prefix).name}, EP over all ranks"] = real_corpus(prefix)
    if as_json:
        click.echo(json.dumps(parts, indent=1))
        return
    for title, rows in parts.items():
        table(title, rows)


if __name__ == "__main__":
    main()
