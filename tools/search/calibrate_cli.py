"""`tc3 search calibrate`: a device's efficiencies from a few measured steps; exit code 2 where no row can be used."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from plugins.errors import RecipeError
from tools.estimate.efficiency import Efficiency, cluster, efficiency_of
from tools.estimate.published.calibrate import Calibration, calibrate, cluster_text
from tools.estimate.published.rows import read_rows
from tools.files.atomic import keep_existing, write_atomically
from tools.hardware import DEFAULT_HARDWARE
from tools.process.waiting import Progressing


@click.command("calibrate")
@click.argument("measured", type=click.Path(path_type=Path), metavar="MEASURED.yaml")
@click.option("--cluster", "cluster_name", default=DEFAULT_HARDWARE, show_default=True, metavar="NAME|FILE.yaml")
@click.option("--like", metavar="NAME", help="Start from this cluster's efficiencies where FILE.yaml has none.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Cluster file to write.")
@click.option("--force", is_flag=True, help="Replace the file of --out, if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def calibrate_command(
    measured: Path, cluster_name: str, like: str | None, out: Path, force: bool, as_json: bool
) -> None:
    """Fit what the devices of a cluster reach to the steps of MEASURED.yaml, and write a cluster file with it.

    MEASURED.yaml has the rows of `tc3 search validate`: id, hardware, config, and measured with a step time or a
    throughput (tools/search/examples/measurements.yaml is a commented example). All rows must come from the one
    cluster. Only parameters that these steps can tell apart are fitted: a few steps that differ in batch, layout and
    sequence length tell more than many that are alike.
    """
    keep_existing("--out", out, force)
    with Progressing("fitting"):
        start = _start(cluster_name, like)
        found = calibrate(read_rows(measured), cluster_name, start)
    write_atomically(out, cluster_text(cluster_name, out.stem, found, measured.name))
    if as_json:
        click.echo(json.dumps({**asdict(found), "path": str(out)}))
    else:
        _print(found, start)
    click.echo(f"written: {out}", err=True)


def _start(cluster_name: str, like: str | None) -> Efficiency:
    hardware = cluster(cluster_name)
    try:
        return efficiency_of(cluster(like) if like else hardware)
    except RecipeError as error:
        raise RecipeError(f"{error} with --like") from None


def _print(found: Calibration, start: Efficiency) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    rows = Table("row", "error before", "after", show_edge=False, pad_edge=False)
    for name, (before, after) in found.errors.items():
        rows.add_row(name, f"{before:+.1%}", f"{after:+.1%}")
    console.print(rows)
    for name in found.fitted:
        console.print(f"{name}: {getattr(start, name):.4g} -> {getattr(found.efficiency, name):.4g}")
    for name, why in found.kept.items():
        console.print(f"{name}: stays {getattr(start, name):.4g}: {why}")
    for name, why in found.skipped.items():
        console.print(f"left out: {name}: {why}")
