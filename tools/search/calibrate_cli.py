"""`tc3 search calibrate`: a device's efficiencies from measured steps or a profile; exit code 2 where none serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.estimate.efficiency import Efficiency
from tools.estimate.published.calibrate import Calibration, calibrate, cluster_text
from tools.estimate.published.rows import read_rows
from tools.files.atomic import keep_existing, write_atomically
from tools.hardware import DEFAULT_HARDWARE
from tools.process.waiting import Progressing
from tools.profile.cluster_file import file_text
from tools.profile.study import Study, fitted, run_of, start_of, study
from tools.ranges import Number
from tools.search.explain import lines, table


@click.command("calibrate")
@click.argument("measured", type=click.Path(path_type=Path), metavar="MEASURED.yaml|PROFILE")
@click.option("--recipe", type=click.Path(path_type=Path), metavar="RECIPE", help="That PROFILE is of.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that RECIPE has.")
@click.option("--steps", type=Number("steps"), help="That PROFILE holds, where its files do not tell steps apart.")
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME|FILE.yaml",
    help=f"Default: {DEFAULT_HARDWARE}; of a CPU's profile the host itself, measured by its best kernels.",
)
@click.option("--like", metavar="NAME", help="Start from this cluster's efficiencies where FILE.yaml has none.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Cluster file to write.")
@click.option("--force", is_flag=True, help="Replace the file of --out, if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def calibrate_command(
    measured: Path,
    recipe: Path | None,
    overrides: tuple[str, ...],
    steps: int | None,
    cluster_name: str | None,
    like: str | None,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Fit what the devices of a cluster reach to measured steps or to one profiled step, and write a cluster file.

    MEASURED.yaml has the rows of `tc3 search validate`: id, hardware, config, and measured with a step time or a
    throughput (tools/search/examples/measurements.yaml is a commented example). All rows must come from the one
    cluster. Only parameters that these steps can tell apart are fitted: a few steps that differ in batch, layout and
    sequence length tell more than many that are alike.

    PROFILE is a folder that MindSpore's profiler wrote in a run of RECIPE, on an Ascend device or a CPU: operators,
    links and the host are fitted to their own times, and what it cannot tell apart is said (docs/calibrate.md).

    \b
    tc3 search calibrate steps.yaml --cluster atlas_800t_a2 --out mine.yaml
    tc3 search calibrate output/profile --recipe recipes/telechat3_105b/pretrain_4k.yaml --out mine.yaml
    """
    keep_existing("--out", out, force)
    if measured.is_dir():
        _from_profile(measured, recipe, overrides, steps, cluster_name, like, out, as_json)
        return
    if recipe or overrides or steps:
        raise click.UsageError(f"{measured}: --recipe, --set and --steps belong to the folder of a profile")
    cluster_name = cluster_name or DEFAULT_HARDWARE
    with Progressing("fitting"):
        start = start_of(cluster_name, like)
        found = calibrate(read_rows(measured), cluster_name, start)
    write_atomically(out, cluster_text(cluster_name, out.stem, found, measured.name))
    if as_json:
        click.echo(json.dumps({**asdict(found), "path": str(out)}))
    else:
        _print(found, start)
    click.echo(f"written: {out}", err=True)


def _from_profile(
    folder: Path,
    recipe: Path | None,
    overrides: tuple[str, ...],
    steps: int | None,
    cluster_name: str | None,
    like: str | None,
    out: Path,
    as_json: bool,
) -> None:
    if recipe is None:
        raise click.UsageError(f"{folder}: a profile needs the recipe that it is of: --recipe RECIPE.yaml")
    with Progressing("fitting"):
        seen = study(folder, run_of(recipe, overrides), steps)
        if cluster_name is None and seen.profile.device != "CPU":
            cluster_name = DEFAULT_HARDWARE
        found, content, called = fitted(seen, cluster_name, like, out.stem)
    write_atomically(out, file_text(content, out.stem, found, seen.profile, called))
    if as_json:
        click.echo(json.dumps({**found.as_json(), "notes": seen.profile.notes, "path": str(out)}))
    else:
        console = Console(soft_wrap=True, highlight=False, markup=False)
        _say(seen, console)
        console.print(table(lines(found.after, seen.measured), "fitted s"))
        for name in found.fitted:
            console.print(f"{name}: {getattr(found.efficiency, name):.4g}{_remark(found.kept.get(name))}")
        for name in sorted(set(found.kept) - set(found.fitted)):
            console.print(f"{name}: stays {getattr(found.efficiency, name):.4g}: {found.kept[name]}")
    click.echo(f"written: {out}", err=True)


def _remark(text: str | None) -> str:
    return f" ({text})" if text else ""


def _say(seen: Study, console: Console) -> None:
    profile = seen.profile
    console.print(f"{profile.source}: {profile.device}, {profile.steps} steps, one of {profile.step.seconds:.4g} s")
    for note in profile.notes:
        console.print(f"note: {note}")


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
