"""A comparison on the terminal, and its files."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from tools.accuracy.compare.html import html
from tools.accuracy.compare.report import Report, as_json, finding_text
from tools.accuracy.compare.rows import Row
from tools.accuracy.dumps.names import PHASES
from tools.files.atomic import atomic_file, write_atomically

MOST = 8  # findings shown


def print_report(report: Report, console: Console) -> None:
    """Write what was found to `console`."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    line(report.summary(), "green" if report.passed else "bold red")
    for note in report.notes():
        line(f"note: {note}", "dim")
    if report.passed:
        return
    for phase in PHASES:
        row = report.first[phase]
        line(f"first {phase}: {finding_text(row) if row else 'none'}", "red" if row else "green")
    line(report.meaning(), "bold")
    rest = len(report.findings) - MOST
    for row in report.findings[:MOST]:
        line(f"finding: {finding_text(row)}", "red")
    if rest > 0:
        line(f"and {rest} more: --out DIR keeps them all", "dim")


def write_files(report: Report, out: Path, page: bool) -> list[Path]:
    """compare.json, rows.csv (every row) and, with `page`, compare.html, in the folder `out`."""
    files = [out / "compare.json", out / "rows.csv"]
    write_atomically(files[0], json.dumps(report.as_json(), indent=1))
    with atomic_file(files[1]) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in report.rows:
            writer.writerow({**as_json(row), "shape": "x".join(map(str, row.shape))})
    if page:
        files.append(out / "compare.html")
        write_atomically(files[-1], html(report))
    return files
