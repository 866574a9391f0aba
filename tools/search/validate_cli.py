"""`tc3 search validate`: predict published runs, to judge the estimator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from plugins.errors import DataError
from tools.estimate.memory.error import known_errors, write_errors
from tools.estimate.published.rows import Row, read_rows
from tools.estimate.published.validate import Prediction, predict, summary
from tools.files.atomic import keep_existing
from tools.process.waiting import Progressing

_WIDTH = 180  # a row's names and numbers on one line, in files and pipes too


@click.command()
@click.argument("rows", type=click.Path(path_type=Path), metavar="ROWS.yaml")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.yaml",
    help="Write the errors of memory to a file such as tools/estimate/memory/errors.yaml.",
)
@click.option("--force", is_flag=True, help="Replace the file of --record, if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list on stdout.")
def validate(rows: Path, record: Path | None, force: bool, as_json: bool) -> None:
    """Predict each run of a measurements file from its configuration alone.

    ROWS.yaml holds `rows`, each with id, hardware and config (tools/search/examples/measurements.yaml is a commented
    example); where there is a `measured` block, too, errors are shown, with their mean and worst by device and kind
    over the rows with `use: fit`. A run that cannot be expressed says why.

    Exit codes: 0; 1 where the memory of a run of tools/estimate/memory/rows.yaml is predicted otherwise than
    errors.yaml beside it records; 2 a wrong input, a device that nobody knows too.
    """
    keep_existing("--record", record, force)
    with Progressing("predicting"):
        predictions = [predict(row) for row in read_rows(rows)]
    fitting = [found for found in predictions if found.row.use == "fit"]
    errors = {found.row.id: found.memory_error for found in fitting if found.memory_error is not None}
    if as_json:
        click.echo(json.dumps([prediction.as_json() for prediction in predictions]))
    else:
        _print(predictions)
    _refuse_unknown(rows, [found.row for found in predictions])
    if not any(found.step_time_s for found in predictions):
        reasons = "; ".join(f"{found.row.id}: {found.reason}" for found in predictions[:3])
        raise DataError(f"{rows}: no row can be predicted ({reasons})")
    if record:
        if not errors:
            raise DataError(f"{rows}: no row has a memory that is measured and can be predicted")
        write_errors(record, errors, rows)
        click.echo(f"written: {record}", err=True)
    elif changed := known_errors().differences(errors):
        for line in changed:
            click.echo(f"tc3: {line}; --record makes the file anew", err=True)
        sys.exit(1)


def _refuse_unknown(path: Path, rows: list[Row]) -> None:
    """Raise where a row's device is one that nobody knows, in one line for all of them."""
    unknown = [(index, row) for index, row in enumerate(rows) if not row.cluster]
    if unknown:
        index, row = unknown[0]
        more = f" (and {len(unknown) - 1} more rows)" if len(unknown) > 1 else ""
        raise DataError(f"{path}: rows[{index}].hardware: {row.reason}{more}")


def _print(predictions: list[Prediction]) -> None:
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
