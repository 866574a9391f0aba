"""Memory and proposals for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.hardware.units import GIB, MIB

_PARTS = ("weights", "state", "accumulated", "gathered", "activations", "working", "buffers", "peak")
_LEGEND = (
    "weights and Adam's state in fp32; accumulated: gradients; gathered: weights as they compute; activations: kept for"
    " backward; working: what one pass needs on top; buffers: of communication (docs/memory.md)"
)
_OWNERS = 8  # lines of a peak's owners
_PASSES = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def unit_of(size: float) -> tuple[int, str]:
    """GiB, or MiB for less than one of them."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def pass_in_words(label: str) -> str:
    """``the backward of micro-batch 3, chunk 0`` from ``B 3.0``."""
    if not label:
        return "no pass"
    kind, place = label.split(" ")
    micro_batch, chunk = place.split(".")
    return f"the {_PASSES[kind]} of micro-batch {micro_batch}, chunk {chunk}"


def print_stages(report: Mapping[str, Any], console: Console) -> None:
    """A row for each stage, then who holds the fullest one's peak."""
    unit, name = unit_of(max(stage["peak"] for stage in report["stages"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    for column in (*_PARTS, "fit"):
        table.add_column(column, justify="right")
    for stage in report["stages"]:
        table.add_row(str(stage["stage"]), *(f"{stage[part] / unit:.1f}" for part in _PARTS), stage["fit"])
    console.print(table)
    low, high = report["known_error"]
    console.print(f"{name} on one device, modelled. {_LEGEND}", style="dim")
    console.print(
        f"Published runs were predicted {low:+.1%} to {high:+.1%} off; none of them is MindFormers' or on Ascend.",
        style="dim",
    )
    console.print(f"room: {report['room']['words']}, by {report['room']['source']}")
    peak = report["peak"]
    console.print(
        f"stage {peak['stage']} holds most in {pass_in_words(peak['pass'])}: {peak['bytes'] / unit:.1f} {name}"
    )
    for owner in peak["owners"][:_OWNERS]:
        console.print(f"  {owner['bytes'] / unit:7.2f}  {owner['part']}: {owner['module']}")
    rest = peak["owners"][_OWNERS:]
    if rest:
        console.print(
            f"  {sum(owner['bytes'] for owner in rest) / unit:7.2f}  {len(rest)} more, see --json", style="dim"
        )


def print_proposals(proposals: Sequence[Mapping[str, Any]], console: Console, fits: bool = False) -> None:
    """A row for each proposal and its keys below; best first."""
    if fits:
        console.print("It fits as it is; what would free memory all the same:")
    if not proposals:
        console.print("nothing that this model knows frees memory here")
        return
    unit, size = unit_of(max(row["peak"] for row in proposals))
    table = Table(box=None, pad_edge=False)
    for name in (size, "frees", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("change")
    for row in proposals:
        fit = "refused by tc3 check" if row["refused"] else row["fit"]
        sizes = (f"{row['peak'] / unit:.1f}", f"{row['freed'] / unit:.1f}", f"{row['slower']:+.1%}")
        keys = "\n".join(f"  {key}: {value}" for key, value in row["keys"].items())
        table.add_row(*sizes, fit, f"{row['name']}\n{keys}" + (f"\n  {row['refused']}" if row["refused"] else ""))
    console.print(table)
    console.print(
        "Each row was predicted anew from its keys and given to tc3 check; step time is modelled, over its own."
        " Not predicted and so not proposed: swapping to the host, optimizer_level: level3.",
        style="dim",
    )
