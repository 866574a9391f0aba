"""A ladder on a terminal: one line a rung, and beneath it what the first failure points at."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.accuracy.align import Ladder
from tools.accuracy.align_compare import FAILED, PASSED, UNDECIDED

STYLES = {PASSED: "green", FAILED: "bold red", UNDECIDED: "yellow"}
MOST = 8  # rows of a failed rung that are printed


def print_ladder(ladder: Ladder, console: Console) -> None:
    """Write everything to `console`."""
    console.print(f"{ladder.ours}  against  {ladder.theirs}", markup=False, soft_wrap=True)
    for key, value in ladder.about.items():
        console.print(f"{key}: {value}", style="dim", markup=False, soft_wrap=True)
    table = Table("rung", "status", "compared", "error", "tolerance", "rounding", "worst")
    for column in table.columns[:2]:
        column.no_wrap = True
    for number, rung in enumerate(ladder.rungs, 1):
        style, worst = STYLES.get(rung.status, "dim"), rung.worst
        cells = ["", "", "", ""]
        if worst is not None and worst.error > 0:
            floor = f"{worst.floor:.1e}" if worst.floor else ""
            cells = [f"{worst.error:.1e}", f"{worst.tolerance:.0e}", floor, f"{worst.name} ({worst.measure})"]
        table.add_row(f"{number} {rung.name}", f"[{style}]{rung.status}[/]", str(len(rung.rows) or ""), *cells)
    console.print(table)
    for rung in ladder.rungs:
        if rung.reason:
            style = "red" if rung.status == FAILED else "dim"
            console.print(f"{rung.name}: {rung.reason}", style=style, markup=False, soft_wrap=True)
        failed = [row for row in rung.rows if row.status == FAILED]
        for row in sorted(failed, key=lambda row: -row.error)[:MOST]:
            text = f"  {row.name}: {row.error:.3g} ({row.measure}; at most {row.tolerance:g}) {row.detail}"
            console.print(text.rstrip(), style="red", markup=False, soft_wrap=True)
    for setting in [setting for setting in ladder.settings if setting.kind == "may differ"]:
        text = f"may differ: {setting.path}: {setting.ours} | {setting.theirs} ({setting.meaning})"
        console.print(text, style="dim", markup=False, soft_wrap=True)
    undecided = [row for rung in ladder.rungs for row in rung.rows if row.status == UNDECIDED]
    if undecided:
        console.print(
            f"undecided: {len(undecided)} numbers differ no more than the reference does from itself when its weights "
            "change in the last place",
            style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip
    console.print("aligned" if ladder.passed else "not aligned", style="green" if ladder.passed else "bold red")
