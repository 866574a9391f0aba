"""`tc3 search validate`: predict published runs, to judge the estimator."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.search.rows import read_rows
from tools.search.validate import Prediction, predict, summary

_WIDTH = 180  # a row's names and numbers on one line, in files and pipes too


@click.command()
@click.argument("rows", type=click.Path(path_type=Path), metavar="ROWS.yaml")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list on stdout.")
def validate(rows: Path, as_json: bool) -> None:
    """Predict each run of a measurements file from its configuration alone.

    ROWS.yaml holds `rows`, each with id, hardware and config; where there is a `measured` block, too, errors are
    shown, with their mean and worst by device and kind over the rows with `use: fit`. A run that cannot be expressed
    says why.
    """
    predictions = [predict(row) for row in read_rows(rows)]
    if as_json:
        click.echo(json.dumps([prediction.as_json() for prediction in predictions]))
        return
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _WIDTH)
    console.print(_table(predictions))
    for field, name in (("step_error", "step time"), ("memory_error", "memory")):
        for group, values in summary(predictions, field).items():
            mean, worst = 100 * values["mean"], 100 * values["worst"]
            console.print(f"{name}, {group}: mean {mean:.1f} %, worst {worst:.1f} % of {values['rows']} rows")


def _table(predictions: list[Prediction]) -> Table:
    shown = Table(show_edge=False, pad_edge=False)
    for name in ("row", "device"):
        shown.add_column(name, no_wrap=True)
    for name in ("step s", "error", "tokens/s", "TFLOP/s", "MFU", "GB", "error"):
        shown.add_column(name, justify="right")
    shown.add_column("reason")
    for found in predictions:
        shown.add_row(
            found.row.id,
            found.row.cluster,
            _number(found.step_time_s, ".4g"),
            _percent(found.step_error),
            _number(found.tokens_per_s_per_device, ".4g"),
            _number(found.tflops_per_device, ".0f"),
            _number(found.mfu, ".3f"),
            _number(found.peak_memory_gb, ".1f"),
            _percent(found.memory_error),
            found.reason or "",
        )
    return shown


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"
