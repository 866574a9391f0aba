"""Memory and proposals for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.hardware.units import GIB

_PARTS = ("weights", "state", "accumulated", "gathered", "activations", "working", "buffers", "peak")
_OWNERS = 8  # lines of a peak's owners


def print_stages(report: Mapping[str, Any], console: Console) -> None:
    """A row for each stage, then who holds the fullest one's peak."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    for name in (*_PARTS, "fit"):
        table.add_column(name, justify="right")
    for stage in report["stages"]:
        table.add_row(str(stage["stage"]), *(f"{stage[name] / GIB:.1f}" for name in _PARTS), stage["fit"])
    console.print(table)
    low, high = report["known_error"]
    console.print(
        f"GiB on one device, modelled; activations and what a pass works with are estimates. Published runs were"
        f" predicted {low:+.1%} to {high:+.1%} off; none of them is MindFormers' or on Ascend.",
        style="dim",
    )
    console.print(f"room: {report['room']['words']}, by {report['room']['source']}")
    peak = report["peak"]
    console.print(
        f"stage {peak['stage']} is fullest in {peak['pass']} (micro-batch.chunk): {peak['bytes'] / GIB:.1f} GiB"
    )
    for owner in peak["owners"][:_OWNERS]:
        console.print(f"  {owner['bytes'] / GIB:7.2f}  {owner['part']}: {owner['module']}")
    rest = peak["owners"][_OWNERS:]
    if rest:
        console.print(
            f"  {sum(owner['bytes'] for owner in rest) / GIB:7.2f}  {len(rest)} more, see --json", style="dim"
        )


def print_proposals(proposals: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A row for each proposal and its keys below; best first."""
    if not proposals:
        console.print("nothing that this model knows frees memory here")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("GiB", "frees", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("change")
    for row in proposals:
        fit = "refused by tc3 check" if row["refused"] else row["fit"]
        sizes = (f"{row['peak'] / GIB:.1f}", f"{row['freed'] / GIB:.1f}", f"{row['slower']:+.1%}")
        keys = "\n".join(f"  {key}: {value}" for key, value in row["keys"].items())
        table.add_row(*sizes, fit, f"{row['name']}\n{keys}" + (f"\n  {row['refused']}" if row["refused"] else ""))
    console.print(table)
    console.print(
        "Each row was predicted anew from its keys and given to tc3 check; step time is modelled, over its own."
        " Not predicted and so not proposed: swapping to the host, optimizer_level: level3.",
        style="dim",
    )
