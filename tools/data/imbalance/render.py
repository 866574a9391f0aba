"""This module shows how evenly a corpus loads the devices of a recipe, as text for people, as JSON for programs, and as
a picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from plugins.attention_balance.plan import Balance
from plugins.spike_guard.ledger import count
from tools.data.imbalance.measure import QUANTILES, Distribution, Imbalance, Result
from tools.data.imbalance.recipe import SHARES, OneStep, Setting, Steps
from tools.files.figure import new_figure, save_figure

NOTE = (
    "modelled, not measured: uneven experts are not counted, so the real gain is a smaller part of the step. step/even "
    "is a step's computation and waiting, without communication, over that of a step whose samples all cost the same"
)
BELOW_ONE = "; a pipeline can stay below 1, for it waits less where its first and last micro-batches are short"


def as_json(found: Imbalance) -> dict[str, Any]:
    """Return how evenly a corpus loads the devices of a recipe, as one JSON object. In the JSON object, a pair is
    [value without the plugin, value with the plugin], and each load is divided by the mean load of the step.
    """
    rows = [dict(zip(("from", "below", "documents", "tokens"), row, strict=True)) for row in found.documents.octaves()]
    tokens = {str(share): found.documents.weighted_quantile(share) for share in QUANTILES}
    return {
        "prefix": found.prefix,
        "recipe": found.recipe,
        "modelled": True,
        "documents": {**_distribution(found.documents), "token_quantiles": tokens, "histogram": rows},
        "equal_costs": found.equal or None,
        "result": _result(found, found.result) if found.result else None,
        "seconds": _seconds(found),
    }


def _seconds(found: Imbalance) -> dict[str, Any]:
    """Return the predicted seconds of a step: of the recipe's step, with samples of equal cost, and with the corpus's
    uneven samples.
    """
    seconds = found.seconds
    if isinstance(seconds, str):
        return {"step": None, "why": seconds}
    return {
        "cluster": seconds.cluster,
        "step": seconds.whole,
        "even": seconds.even,
        "uneven": list(found.uneven) if found.uneven else None,
    }


def _result(found: Imbalance, result: Result) -> dict[str, Any]:
    setting, steps = result.setting, result.steps
    context = steps.context and dict(zip(("contiguous", "balanced"), steps.context, strict=True))
    return {
        "layout": _layout(setting),
        "cost": {"per_pair": setting.cost.per_pair, "per_token": setting.cost.per_token, "unit": setting.cost.unit},
        "dataset_samples": result.dataset,
        "samples_left_out": count(setting.skipped),
        "epochs": result.epochs,
        "documents_of_a_sample": {**_distribution(result.samples), "room": setting.room},
        "pairs_over_undivided": steps.of_one_document,
        "steps_looked_at": steps.numbers.tolist(),
        "attention_over_even": _balance(steps.attention, setting),
        "step_over_even": _balance(steps.model, setting),
        "attention_share": steps.attention_share,
        "speed_up": found.speed_up,
        "speed_up_of": "step" if found.uneven else "computation",
        "attention_of_a_micro_batch": _loads(steps.micro_batch_loads),
        "attention_of_a_rank_and_step": _loads(steps.step_loads),
        "context_parallel_slowest_over_mean": context,
        "notes": list(setting.notes),
    }


def _layout(setting: Setting) -> dict[str, Any]:
    layout = setting.layout
    return {
        "data_parallel_ranks": layout.ranks,
        "micro_batches": layout.micro_batches,
        "samples_of_a_micro_batch": layout.slots,
        "samples_of_a_step": layout.batch,
        "ranks_per_barrier": layout.objective.ranks_per_barrier,
        "pipeline_stages": layout.objective.stages,
        "sequence_length": setting.sequence_length,
        "steps": setting.steps,
        "window": layout.window,
    }


def _distribution(found: Distribution) -> dict[str, Any]:
    quantiles = {str(share): found.quantile(share) for share in QUANTILES}
    return {"count": found.count, "total": found.total, "mean": found.total / found.count, "quantiles": quantiles}


def _balance(found: Balance, setting: Setting) -> dict[str, Any]:
    """Return the means over the steps, and the worst step. If a window moves samples between steps, no lower bound for
    a step exists.
    """
    bound = float(found.bound.mean()) if setting.layout.window == 1 else None
    return {
        "mean": [float(found.before.mean()), float(found.after.mean())],
        "worst": [float(found.before.max()), float(found.after.max())],
        "lower_bound": bound,
    }


def _loads(sides: tuple[np.ndarray, np.ndarray]) -> dict[str, list[float]]:
    return {str(share): [float(side[at]) for side in sides] for at, share in enumerate(SHARES)}


def print_text(found: Imbalance, console: Console) -> None:
    """Print statistics of the documents, then of the samples and steps, and then an explanation of the results."""
    documents = found.documents
    console.print(
        f"{found.prefix}: {documents.count:,} documents, {documents.total:,} tokens, "
        f"{documents.total / documents.count:,.0f} a document"
    )
    for table in (_quantiles(documents), _histogram(documents)):
        console.print(table)
        console.print()
    if found.result:
        _print_result(found, found.result, console)
    else:
        console.print(f"nothing to balance: {found.equal}")
    console.print(f"step: {_seconds_words(found)}")


def _seconds_words(found: Imbalance) -> str:
    seconds = found.seconds
    if isinstance(seconds, str):
        return f"not predicted: {seconds}"
    uneven = ""
    if found.uneven:
        without, balanced = found.uneven
        uneven = (
            f". This corpus: {seconds.even:.2f} s if its samples all cost the same, {without:.2f} s as they come, "
            f"{balanced:.2f} s with plugins.attention_balance"
        )
    return (
        f"{seconds.whole:.2f} s on {seconds.cluster} for samples of one document, as tc3 search and ep-report have "
        f"it{uneven}. Such step times are {seconds.error}"
    )


def _print_result(found: Imbalance, result: Result, console: Console) -> None:
    setting, steps, samples = result.setting, result.steps, result.samples
    layout = setting.layout
    room = f" (the mask has room for {setting.room:,})" if setting.room else ""
    console.print(
        f"samples of {setting.sequence_length:,} tokens: {samples.quantile(0.5):,} documents in half of them, at most "
        f"{samples.values[-1]:,}{room}; {steps.of_one_document:.1%} of the attention of undivided samples"
    )
    console.print(
        f"layout: {layout.batch:,} samples per step = {layout.ranks:,} x {layout.micro_batches:,} x {layout.slots:,} "
        f"(data-parallel ranks, micro-batches, samples of one); {_waiting(setting)}"
    )
    window = f"; samples change places within {layout.window:,} steps" if layout.window > 1 else ""
    console.print(
        f"looked at {len(steps.numbers):,} of {setting.steps:,} steps, spread over the run; "
        f"the dataset is {result.epochs:,} x the corpus{window}"
    )
    console.print()
    console.print(_table(steps, setting))
    console.print()
    console.print(f"{_gain(found)}; attention is {steps.attention_share:.0%} of the work")
    if steps.context:
        console.print(
            f"inside a sample, over {setting.context_parallel} context-parallel ranks: slowest/mean attention "
            f"{steps.context[0]:.2f} in consecutive parts, {steps.context[1]:.2f} if cut by document; "
            "this comes on top, scheduling does not change it"
        )
    below = BELOW_ONE if setting.layout.objective.stages > 1 else ""
    for note in (NOTE + below, *setting.notes):
        console.print(f"note: {note}")


def _gain(found: Imbalance) -> str:
    """Return a sentence with the predicted gain by the plugin, computed from the seconds that are printed below the
    sentence.
    """
    what = "step time" if found.uneven else "computation of a step, without communication,"
    speed_up = found.speed_up or 1.0
    return f"predicted {what} with plugins.attention_balance: {1 / speed_up - 1:+.1%} ({speed_up:.3f} x as fast)"


def _waiting(setting: Setting) -> str:
    objective, ranks = setting.layout.objective, setting.layout.ranks
    stages = f"; {objective.stages} pipeline stages" if objective.stages > 1 else ""
    together = objective.ranks_per_barrier
    if together == 1:
        return f"ranks wait for each other at the end of a step{stages}" if ranks > 1 else f"one rank{stages}"
    who = "all ranks" if together == ranks else f"groups of {together:,} ranks"
    return f"{who} wait for each other in every micro-batch (expert parallelism){stages}"


def _quantiles(found: Distribution) -> Table:
    table = _plain_table("share", "documents of up to", "tokens in documents of up to")
    for share in QUANTILES:
        table.add_row(f"{share:.0%}", f"{found.quantile(share):,}", f"{found.weighted_quantile(share):,}")
    return table


def _histogram(found: Distribution) -> Table:
    table = _plain_table("tokens", "documents", "share", "of tokens", "")
    rows = list(found.octaves())
    most = max(tokens for *_, tokens in rows)
    for start, below, documents, tokens in rows:
        shares = f"{documents / found.count:.1%}", f"{tokens / found.total:.1%}"
        table.add_row(f"{start:,} - {below - 1:,}", f"{documents:,}", *shares, "#" * round(20 * tokens / most))
    table.columns[-1].justify = "left"
    return table


def _table(steps: Steps, setting: Setting) -> Table:
    table = _plain_table("", "no scheduling", "attention_balance", "lower bound")
    for name, found in (("attention", steps.attention), ("all work", steps.model)):
        row = _balance(found, setting)
        bound = "-" if row["lower_bound"] is None else f"{row['lower_bound']:.3f}"
        table.add_row(f"step/even, {name}", *(f"{value:.3f}" for value in row["mean"]), bound)
        table.add_row("  worst step", *(f"{value:.3f}" for value in row["worst"]), "")
    table.add_section()
    for name, loads in (("a micro-batch", steps.micro_batch_loads), ("a rank's step", steps.step_loads)):
        table.add_row(f"attention of {name}/mean", "", "", "")
        for at, word in ((0, "least"), (1, "half up to"), (2, "90% up to"), (-1, "most")):
            table.add_row(f"  {word}", *(f"{side[at]:.2f}" for side in loads), "")
    return table


def _plain_table(first: str, *columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")  # whole in 80 columns too, as of a file or pipe
    return table


# Draw an imbalance: document lengths, and who works how much in one step, without and with the plugin.

_BEFORE, _AFTER = "tab:orange", "tab:blue"


def draw(found: Imbalance, path: Path) -> Path:
    """Draw the lengths of documents and the loads of ranks and micro-batches to an .svg or .png file; return `path`. If
    every sample needs the same amount of computation, the picture shows only the lengths of the documents.
    """
    panels = 3 if found.result else 1
    figure = new_figure(4 + 4.5 * panels, 4)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _lengths(axes[0], found)
    if found.result:
        _ranks(axes[1], found.result.steps.one_step)
        _micro_batches(axes[2], found.result.steps.one_step)
        # below the panels and without a frame: no curve is hidden, and a reader's font may be wider than ours
        lines = axes[1].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=2, columnspacing=4, frameon=False, fontsize="small")
    figure.suptitle(f"{Path(found.prefix).name}, {found.recipe}", fontsize="medium")
    return save_figure(figure, path)


def _lengths(axes: Any, found: Imbalance) -> None:
    rows = list(found.documents.octaves())
    edges = [rows[0][0], *(below for _, below, _, _ in rows)]
    for column, name, colour in ((2, "documents", "0.7"), (3, "tokens", "tab:green")):
        shares = np.array([row[column] for row in rows]) / sum(row[column] for row in rows)
        axes.stairs(100 * shares, edges, fill=True, alpha=0.6, color=colour, label=name)
    axes.set_xscale("log", base=2)
    if found.result:
        axes.axvline(found.result.setting.sequence_length, color="black", linestyle=":", label="a sample")
    axes.set_title("document lengths", loc="left", fontsize="medium")
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("% of all")
    axes.legend(fontsize="small", frameon=False)


def _ranks(axes: Any, step: OneStep) -> None:
    _sorted(axes, step.before.mean(1), step.after.mean(1))
    axes.set_title(f"attention of each rank in step {step.number + 1:,}", loc="left", fontsize="medium")
    axes.set_xlabel("data-parallel ranks, heaviest first")


def _micro_batches(axes: Any, step: OneStep) -> None:
    """Draw the slowest rank of each micro-batch, for which the other ranks wait if experts are exchanged."""
    _sorted(axes, step.before.max(0), step.after.max(0))
    axes.set_title("slowest rank of each micro-batch", loc="left", fontsize="medium")
    axes.set_xlabel("micro-batches, slowest first")


def _sorted(axes: Any, before: np.ndarray, after: np.ndarray) -> None:
    for values, name, colour in ((before, "no scheduling", _BEFORE), (after, "attention_balance", _AFTER)):
        axes.stairs(np.sort(values)[::-1], np.arange(len(values) + 1), baseline=None, color=colour, label=name, lw=1.5)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("over the mean (modelled)")
