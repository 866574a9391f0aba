"""This module prints the savings of operator fusion in the terminal, and draws the HBM traffic of a micro-batch before
and after fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.files.figure import new_figure, save_figure
from tools.fusion.report import ONCE, PASSES, fullest
from tools.hardware.units import GIB, MIB

REPLACED = "GroupedMatmul-Reshape-AssignAdd"  # by plugins.grouped_gradient
_SHOWN = 10  # rows of a table that may be long
_LONGEST = 60  # letters of a pattern


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print the report on operator fusion to `console`."""
    console.print(f"{report['recipe']}: level {report['level']} ({report['why']})")
    if report["disabled"]:
        console.print(f"not fused because of plugins.operator_fusion.disable: {', '.join(report['disabled'])}")
    console.print(_parts(report))
    console.print(
        "The table shows the MiB of HBM traffic of the operators that DVM takes, before and after fusion, for a layer "
        "of each kind. The column `others` shows the MiB of the operators that DVM refuses, except matrix products, "
        "attention and collectives."
    )
    console.print(_stages(report))
    if report["patterns"]:
        console.print(_patterns(report))
    console.print(_alone(report))
    if report["weight_gradients"]:
        console.print(_named(report))
        if any(row["chain"] == REPLACED for row in report["weight_gradients"]):
            console.print(f"{REPLACED}: plugins.grouped_gradient makes one operator of it (docs/grouped-gradient.md).")
    for row in report["parts"]:
        if "estimator" in row:
            console.print(_estimator(row))
    console.print(
        f"The seconds on {report['cluster']} are modelled: bytes divided by the HBM bandwidth that the estimator "
        f"assumes for elementwise operators. The error of these seconds for {report['error']}.",
        soft_wrap=True,
    )
    for line in report["not_known"]:
        console.print(f"not known: {line}", soft_wrap=True)


def _parts(report: Mapping[str, Any]) -> Table:
    table = _table("part", "in model", "pass", "operators", "kernels", "MiB before", "after", "others")
    for row in report["parts"]:
        for name, numbers in row["passes"].items():
            words = (row["part"], str(row["in_model"]), "once a step, with optimizer" if name == ONCE else name)
            counts = (f"{numbers[key]:,}" for key in ("operators", "kernels"))
            sizes = (f"{numbers[f'bytes_{key}'] / MIB:,.0f}" for key in ("before", "after", "of_others"))
            table.add_row(*words, *counts, *sizes)
    return table


def _stages(report: Mapping[str, Any]) -> Table:
    table = _table(
        "stage", "GiB before", "after", "modelled s before", "after", "saved", "launches saved", "s of these"
    )
    certainty = report["launch_certainty"]
    for name, row in _alike(report["stages"]):
        sizes = (f"{row[f'bytes_{key}'] / GIB:,.0f}" for key in ("before", "after"))
        seconds = (f"{row[f'seconds_{key}']:.3f}" for key in ("before", "after", "saved"))
        table.add_row(name, *sizes, *seconds, f"{row['launches_saved']:,}", f"{row['launch_seconds_saved']:.3f}")
    table.caption = (
        f"The table is for a step of {report['micro_batches']} micro-batches; fusion saves most on stage "
        f"{fullest(report)['stage']}. A launch takes {report['launch_seconds'] * 1e6:g} us ({certainty}), if the "
        "device waits for each launch."
    )
    return table


def _alike(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return one table row for consecutive stages that have the same parts."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for _, group in groupby(stages, key=lambda row: row["parts"]):
        first, *others = group
        name = "graph" if first["stage"] < 0 else str(first["stage"])
        found.append((f"{name}-{others[-1]['stage']}, each" if others else name, first))
    return found


def _patterns(report: Mapping[str, Any]) -> Table:
    table = _table("part", "runs each", "kernels", "MiB saved", "kernel")
    for row in report["patterns"][:_SHOWN]:
        pattern = row["pattern"]
        short = pattern if len(pattern) <= _LONGEST else f"{pattern[:_LONGEST]}... ({pattern.count('-') + 1})"
        table.add_row(row["part"], row["runs"], f"{row['kernels']:g}", f"{row['bytes_saved'] / MIB:,.1f}", short)
    return _left(table, report["patterns"])


def _alone(report: Mapping[str, Any]) -> Table:
    table = _table("part", "not fused", "operators", "MiB", "why")
    for row in report["alone"][:_SHOWN]:
        count, size = f"{row['operators']:g}", f"{row['bytes'] / MIB:,.0f}"
        table.add_row(row["part"], row["operator"], count, size, row["why"])
    return _left(table, report["alone"])


def _named(report: Mapping[str, Any]) -> Table:
    table = _table("part", "weight gradients", "products", "MiB at stake", "modelled ms", "pass", "matches")
    for row in report["weight_gradients"]:
        numbers = (f"{row['products']:g}", f"{row['bytes'] / MIB:,.0f}", f"{row['seconds'] * 1e3:.2f}")
        table.add_row(row["part"], row["chain"], *numbers, row["pass"], "yes" if row["matches"] else row["why"])
    return table


def _estimator(row: Mapping[str, Any]) -> str:
    """Return the traffic that the estimator counts, beside the traffic in the graph."""
    told = row["estimator"]
    return (
        f"{row['part']}, forward, except products and attention: the estimator counts {told['bytes'] / MIB:,.0f} MiB "
        f"({'x' if told['applied'] else 'unfused x'} {told['factor']:g}{'' if told['applied'] else ', not applied'}); "
        f"the graph has {told['graph_fused'] / MIB:,.0f} MiB, unfused x {told['graph_factor']:g}"
    )


def _left(table: Table, rows: list[Any]) -> Table:
    if len(rows) > _SHOWN:
        table.caption = f"{len(rows) - _SHOWN} more with --json"
    return table


def _table(*columns: str) -> Table:
    table = Table(caption_justify="left")
    words = ("part", "pass", "stage", "runs each", "kernel", "not fused", "why", "weight gradients", "matches")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return table


_COLOURS = ("#4c78a8", "#f2a541", "#72b7b2")


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw the bytes of HBM traffic by part of the model before and after fusion to an .svg or .png file; return
    `path`.
    """
    rows = [row for row in report["parts"] if set(row["passes"]) & set(PASSES)]
    figure = new_figure(9, 1.6 + 0.8 * max(len(rows), 1))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        for offset, key, hatch in ((-0.2, "bytes_before", ""), (0.2, "bytes_after", "//")):
            left = 0.0
            for name, colour in zip(PASSES, _COLOURS, strict=True):
                size = row["passes"].get(name, {}).get(key, 0) / GIB
                axes.barh(place + offset, size, height=0.36, left=left, color=colour, hatch=hatch, edgecolor="white")
                left += size
            axes.text(left, place + offset, f" {left:.1f}", va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row["part"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GiB of HBM traffic of the operators that DVM takes, for one micro-batch (modelled)")
    patches = [axes.barh(0, 0, color=colour, label=name) for name, colour in zip(PASSES, _COLOURS, strict=True)]
    patches.append(axes.barh(0, 0, color="#bbbbbb", hatch="//", edgecolor="white", label="after fusion"))
    figure.legend(handles=patches, fontsize="small", loc="outside lower center", ncols=len(patches))
    axes.set_title(f"{report['recipe']}: level {report['level']}, before and after fusion", fontsize="medium")
    return save_figure(figure, path)
