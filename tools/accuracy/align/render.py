"""A ladder on a terminal: one line a rung, and beneath it what the first failure points at."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.accuracy.align.compare import FAILED, PASSED, UNDECIDED, Row
from tools.accuracy.align.config import LAYOUT, MAY
from tools.accuracy.align.ladder import ALIGNED, NOT_ALIGNED, NOT_COMPARED, SAME_NUMBERS, Ladder

STYLES = {PASSED: "green", FAILED: "bold red", UNDECIDED: "yellow"}
VERDICTS = {
    ALIGNED: "aligned",
    SAME_NUMBERS: "nothing was run: no setting differs that could change a number",
    NOT_COMPARED: "not compared: settings differ that may change rounding, and CPU runs nothing that they change",
    NOT_ALIGNED: "not aligned",
}
BY_ROUNDING = "differ no more than the reference does from itself when its weights change in the last place"
BY_A_TIE = "differ by more than rounding, but by no more than a choice of an expert that moved at a tie may do"
MOST = 8  # rows of a failed rung that are printed


def failed_text(row: Row) -> str:
    """One line: how far off a number is, how many things differ, or both sides of a setting."""
    if row.counted and row.detail:
        return f"{row.name}: {row.detail} ({row.measure})"
    if row.counted:
        return f"{row.name}: {row.error:.0f} {row.measure}, should be none"
    return f"{row.name}: {row.error:.3g} ({row.measure}; at most {row.tolerance:g}) {row.detail}".rstrip()


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
            numbers = [f"{worst.error:.0f}", "0"] if worst.counted else [f"{worst.error:.1e}", f"{worst.tolerance:.0e}"]
            cells = [*numbers, floor, f"{worst.name} ({worst.measure})"]
        table.add_row(f"{number} {rung.name}", f"[{style}]{rung.status}[/]", str(len(rung.rows) or ""), *cells)
    console.print(table)
    for rung in ladder.rungs:
        if rung.reason:
            style = "red" if rung.status == FAILED else "dim"
            console.print(f"{rung.name}: {rung.reason}", style=style, markup=False, soft_wrap=True)
        failed = [row for row in rung.rows if row.status == FAILED]
        for row in sorted(failed, key=lambda row: -row.error)[:MOST]:
            console.print(f"  {failed_text(row)}", style="red", markup=False, soft_wrap=True)
    for setting in [setting for setting in ladder.settings if setting.kind in (LAYOUT, MAY)]:
        text = f"{setting.kind}: {setting.path}: {setting.ours} | {setting.theirs} ({setting.meaning})"
        console.print(text, style="dim", markup=False, soft_wrap=True)
    undecided = [row for rung in ladder.rungs for row in rung.rows if row.status == UNDECIDED]
    for rows, words in (([row for row in undecided if row.rounding], BY_ROUNDING),
                        ([row for row in undecided if not row.rounding], BY_A_TIE)):  # fmt: skip
        if rows:
            text = f"undecided: {len(rows)} numbers {words} (largest: {max(rows, key=lambda row: row.error).name})"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
    told = VERDICTS[ladder.verdict] + ", but for what is undecided" * bool(ladder.passed and undecided)
    console.print(told, style="green" if ladder.passed else "bold red", soft_wrap=True)
