"""Draw an imbalance: document lengths, and who works how much in one step, without and with the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tools.files.figure import new_figure, save_figure
from tools.imbalance.measure import Imbalance
from tools.imbalance.steps import OneStep

_BEFORE, _AFTER = "tab:orange", "tab:blue"


def draw(found: Imbalance, path: Path) -> Path:
    """Draw to an .svg or .png; returns `path`. Lengths alone where every sample costs the same."""
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
    """Shares of documents and of tokens by powers of two."""
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
    """All attention of each rank."""
    _sorted(axes, step.before.mean(1), step.after.mean(1))
    axes.set_title(f"attention of each rank in step {step.number + 1:,}", loc="left", fontsize="medium")
    axes.set_xlabel("data-parallel ranks, heaviest first")


def _micro_batches(axes: Any, step: OneStep) -> None:
    """The slowest rank of each micro-batch, which the others wait for where experts are exchanged."""
    _sorted(axes, step.before.max(0), step.after.max(0))
    axes.set_title("slowest rank of each micro-batch", loc="left", fontsize="medium")
    axes.set_xlabel("micro-batches, slowest first")


def _sorted(axes: Any, before: np.ndarray, after: np.ndarray) -> None:
    for values, name, colour in ((before, "no scheduling", _BEFORE), (after, "attention_balance", _AFTER)):
        axes.stairs(np.sort(values)[::-1], np.arange(len(values) + 1), baseline=None, color=colour, label=name, lw=1.5)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("over the mean (modelled)")
