"""This module holds the commands of `tc3 search` that need measured steps: `validate`, `calibrate` and `explain`.

`validate` predicts published runs and compares the predictions with their measurements. `calibrate` fits a device's
efficiencies to measured steps or to a profile. `explain` finds the terms of the estimator in which a measured step
differs from the predicted step. The exit code 2 means a wrong input.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from plugins.errors import DataError
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import UNKNOWN, Efficiency, cluster, efficiency_of, known_error
from tools.estimate.memory.room import known_errors, write_errors
from tools.estimate.published.calibrate import Calibration, calibrate, cluster_text
from tools.estimate.published.rows import read_rows
from tools.estimate.published.validate import Prediction, predict, summary
from tools.files.atomic import check_writable, keep_existing, write_atomically
from tools.hardware import DEFAULT_HARDWARE
from tools.process.waiting import Progressing
from tools.profile.attribute import Line, gap_advice, gap_lines, gap_lines_of_total, gap_table, modelled
from tools.profile.fit import Fit, file_text
from tools.profile.study import Study, fitted, run_of, start_of, study
from tools.ranges import RANGES, Number
from tools.search.options import json_option, overrides_option

_steps = click.option(
    "--steps",
    type=Number("steps"),
    help="Assume that PROFILE contains this many training steps, if its files do not state the number of steps.",
)
_WIDTH = 180  # a row's names and numbers on one line, in files and pipes too


@click.command()
@click.argument("rows", type=click.Path(path_type=Path), metavar="ROWS.yaml")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.yaml",
    help="Write the error of the predicted memory of each run to this file, in the form of "
    "tools/estimate/memory/errors.yaml.",
)
@click.option("--force", is_flag=True, help="Overwrite the file that --record names if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON list on stdout.")
def validate(rows: Path, record: Path | None, force: bool, as_json: bool) -> None:
    """Predict each run of a measurements file from its configuration only.

    ROWS.yaml holds `rows`, each with id, hardware and config (tools/search/examples/measurements.yaml is a commented
    example); if a row also has a `measured` block, its errors are shown, with the mean and the worst error by device
    and kind over the rows with `use: fit`. For a run that cannot be predicted the output says why.

    Exit codes: 0 on success; 1 if the memory error of a run of tools/estimate/memory/rows.yaml differs from the error
    that errors.yaml in the same folder records; 2 a wrong input, such as an unknown device.
    """
    keep_existing("--record", record, force)
    with Progressing("predicting"):
        predictions = [predict(row) for row in read_rows(rows)]
    fitting = [found for found in predictions if found.row.use == "fit"]
    errors = {found.row.id: found.memory_error for found in fitting if found.memory_error is not None}
    if as_json:
        click.echo(json.dumps([prediction.as_json() for prediction in predictions]))
    else:
        _print_validation(predictions)
    unknown = [(index, found.row) for index, found in enumerate(predictions) if not found.row.cluster]
    if unknown:  # devices that nobody knows, in one line for all of them
        index, row = unknown[0]
        more = f" (and {len(unknown) - 1} more rows have an unknown device)" if len(unknown) > 1 else ""
        raise DataError(f"{rows}: rows[{index}].hardware: {row.reason}{more}")
    if not any(found.step_time_s for found in predictions):
        reasons = "; ".join(f"{found.row.id}: {found.reason}" for found in predictions[:3])
        raise DataError(f"{rows}: the estimator can predict none of the rows ({reasons})")
    if record:
        if not errors:
            raise DataError(f"{rows}: no row has both a measured memory and a predicted one")
        write_errors(record, errors, rows)
        click.echo(f"written: {record}", err=True)
    elif changed := known_errors().differences(errors):
        for line in changed:
            click.echo(f"tc3: {line}; --record makes the file anew", err=True)
        sys.exit(1)


def _print_validation(predictions: list[Prediction]) -> None:
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
            *("" if value is None else form.format(value) for value, form in _cells(found)),
            found.reason or "",
        )
    return shown


def _cells(found: Prediction) -> list[tuple[float | None, str]]:
    errors = (None if error is None else 100 * error for error in (found.step_error, found.memory_error))
    step, memory = ((error, "{:+.1f} %") for error in errors)
    speeds = [(found.tokens_per_s_per_device, "{:.4g}"), (found.tflops_per_device, "{:.0f}"), (found.mfu, "{:.3f}")]
    return [(found.step_time_s, "{:.4g}"), step, *speeds, (found.peak_memory_gb, "{:.1f}"), memory]


@click.command("calibrate")
@click.argument("measured", type=click.Path(path_type=Path), metavar="MEASURED.yaml|PROFILE")
@click.option(
    "--recipe", type=click.Path(path_type=Path), metavar="RECIPE", help="Give the recipe that the profiled run trained."
)
@overrides_option("RECIPE")
@_steps
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME|FILE.yaml",
    help=(
        f"Start the fit with the efficiencies of this cluster. By default the fit starts with {DEFAULT_HARDWARE} or, "
        "for a profile of a CPU, with a cluster as fast as the profile's fastest kernels."
    ),
)
@click.option(
    "--like",
    metavar="NAME",
    help="Start the fit with the efficiencies of this cluster; this option is needed if the cluster that "
    "--cluster names has no efficiencies.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Write the cluster file with the fitted efficiencies here.",
)
@click.option("--force", is_flag=True, help="Overwrite the file that --out names if it exists.")
@json_option
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
    """Fit the efficiencies of a cluster to measured steps or to one profiled step, and write them as a cluster file.

    MEASURED.yaml has the rows of `tc3 search validate`: id, hardware, config, and measured with a step time or a
    throughput (tools/search/examples/measurements.yaml is a commented example). All rows must come from this cluster.
    The command fits only the parameters that these steps determine: a few steps that differ in batch, layout and
    sequence length determine more parameters than many similar steps.

    PROFILE is a folder that MindSpore's profiler wrote in a run of RECIPE, on an Ascend device or a CPU: the parameters
    of operators, links and the host are each fitted to the times of these parts in the profile; the cluster file lists
    the parameters that the profile does not determine (docs/calibrate.md).

    \b
    tc3 search calibrate steps.yaml --cluster atlas_800t_a2 --out mine.yaml
    tc3 search calibrate output/profile --recipe recipes/telechat3_105b/pretrain_4k.yaml --out mine.yaml
    """
    keep_existing("--out", out, force)
    check_writable(out)
    if measured.is_dir():
        if recipe is None:
            raise click.UsageError(f"{measured}: name the recipe of the profiled run: --recipe RECIPE.yaml")
        with Progressing("fitting"):
            seen, profiled, text = _of_profile(measured, run_of(recipe, overrides), steps, cluster_name, like, out.stem)
        write_atomically(out, text)
        if as_json:
            click.echo(json.dumps({**profiled.as_json(), "notes": seen.profile.notes, "path": str(out)}))
        else:
            _print_profile(profiled, seen)
        click.echo(f"written: {out}", err=True)
        return
    if recipe or overrides or steps:
        raise click.UsageError(
            f"{measured}: --recipe, --set and --steps can be given only if MEASURED is the folder of a profile"
        )
    with Progressing("fitting"):
        start, found, text = _of_rows(measured, cluster_name, like, out.stem)
    write_atomically(out, text)
    if as_json:
        click.echo(json.dumps({**asdict(found), "path": str(out)}))
    else:
        _print_fit(found, start)
    click.echo(f"written: {out}", err=True)


def cluster_from(measured: Path, recipe: Path, cluster_name: str | None, name: str) -> tuple[str, str]:
    """Return the text of a cluster file called `name` whose efficiencies are fitted to measured steps, and a sentence
    about the fit. The fit starts with the efficiencies of `cluster_name`. The default of `cluster_name` is the default
    cluster, or the host itself for a profile of a CPU run.

    Raises:
        DataError: the profile does not exist, or belongs to another run.
        RecipeError: the cluster has no efficiencies.
    """
    if measured.is_dir():
        seen, profiled, text = _of_profile(measured, run_of(recipe, ()), None, cluster_name, None, name)
        words = f"{len(profiled.fitted)} efficiencies fitted to a step of {seen.profile.step.seconds:.4g} s"
        return text, f"{words} in {seen.profile.source}"
    _, found, text = _of_rows(measured, cluster_name, None, name)
    off = [100 * sum(abs(pair[at]) for pair in found.errors.values()) / len(found.errors) for at in (0, 1)]
    words = f"{len(found.fitted)} efficiencies fitted to {len(found.errors)} measured steps of {measured}"
    return text, f"{words}: off by {off[0]:.1f} % before, {off[1]:.1f} % after"


def _of_profile(
    folder: Path, config: Configuration, steps: int | None, cluster_name: str | None, like: str | None, name: str
) -> tuple[Study, Fit, str]:
    """Return what a profile shows of a run, the fit to it, and the text of the cluster file called `name`. The fit
    starts with the efficiencies of `cluster_name`, by default those of the default cluster, or of the host itself for a
    profile of a CPU.
    """
    seen = study(folder, config, steps)
    start = DEFAULT_HARDWARE if cluster_name is None and seen.profile.device != "CPU" else cluster_name
    found, content, called = fitted(seen, start, like, name)
    return seen, found, file_text(content, name, found, seen.profile, called)


def _of_rows(file: Path, cluster_name: str | None, like: str | None, name: str) -> tuple[Efficiency, Calibration, str]:
    """Return the efficiencies with which the fit to measured steps starts, the fit, and the text of the cluster file
    called `name`.
    """
    start = cluster_name or DEFAULT_HARDWARE
    before = start_of(start, like)
    found = calibrate(read_rows(file), start, before)
    return before, found, cluster_text(start, name, found, file.name)


def _print_profile(found: Fit, seen: Study) -> None:
    console, profile = Console(soft_wrap=True, highlight=False, markup=False), seen.profile
    console.print(f"{profile.source}: {profile.device}, {profile.steps} steps, one of {profile.step.seconds:.4g} s")
    for note in profile.notes:
        console.print(f"note: {note}")
    console.print(gap_table(gap_lines(found.after, seen.measured), "fitted s"))
    for name in found.fitted:
        remark = f" ({found.kept[name]})" if found.kept.get(name) else ""
        console.print(f"{name}: {getattr(found.efficiency, name):.4g}{remark}")
    for name in sorted(set(found.kept) - set(found.fitted)):
        console.print(f"{name}: stays {getattr(found.efficiency, name):.4g}: {found.kept[name]}")


def _print_fit(found: Calibration, start: Efficiency) -> None:
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


@click.command("explain")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--measured",
    required=True,
    metavar="SECONDS|PROFILE",
    help="Compare the predicted step with this measured step time in seconds, or with the profile in this folder.",
)
@click.option("--cluster", "cluster_name", default=DEFAULT_HARDWARE, show_default=True, metavar="NAME|FILE.yaml")
@overrides_option("RECIPE")
@_steps
@json_option
def explain(
    recipe: Path, measured: str, cluster_name: str, overrides: tuple[str, ...], steps: int | None, as_json: bool
) -> None:
    """Compare RECIPE's predicted step with a measured step, term by term, and name the largest differences.

    With a profile, every second of the step is attributed to a term of the estimator. With only the time of a step, the
    measured terms are unknown, and the table shows the error that each term would need to explain the whole difference
    (docs/calibrate.md).

    \b
    tc3 search explain recipes/telechat3_105b/pretrain_4k.yaml --measured 12.3
    tc3 search explain recipes/telechat3_105b/pretrain_4k.yaml --measured output/profile --cluster mine.yaml
    """
    config = run_of(recipe, overrides)
    seconds = _seconds(measured)
    seen = None if seconds else study(Path(measured), config, steps)
    hardware = cluster(cluster_name)
    if seen and seen.profile.device == "CPU" != hardware.device:
        raise DataError(
            f"--cluster {cluster_name}: {seen.profile.source} is a profile of a CPU; write a cluster file for this CPU "
            f"with `tc3 search calibrate {measured} --recipe {recipe} --out FILE.yaml`"
        )
    predicted = modelled(config, hardware, efficiency_of(hardware), seen.stage if seen else None)
    rows = gap_lines(predicted, seen.measured) if seen else gap_lines_of_total(predicted, seconds or 0.0)
    total = seen.measured.seconds if seen else seconds or 0.0
    error = known_error(hardware)
    if as_json:
        click.echo(json.dumps(_as_json(rows, predicted, total, seen, error.as_json() if error else None)))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    step = sum(predicted.values())
    console.print(f"predicted {step:.4g} s, measured {total:.4g} s: the prediction is {step / total - 1:+.1%} off")
    console.print(f"such predictions: {error.words if error else UNKNOWN}")
    console.print(gap_table(rows))
    for line in _remarks(rows, total, seen):
        console.print(line)


def _seconds(text: str) -> float | None:
    """Return a step's time; None where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    if refusal := RANGES["seconds"].refusal(number):
        raise DataError(f"--measured {text}: {refusal}")
    return number


def _remarks(rows: list[Line], total: float, seen: Study | None) -> list[str]:
    if seen is None:
        return ["factor: what to multiply the term by if only this term is wrong; a profile shows which term is wrong"]
    found = [f"gap: {line}" for line in gap_advice(rows, total)] or ["no term is off by more than 1 % of the step"]
    if seen.measured.replayed:
        found.append(f"of matmuls, attention and other operators {seen.measured.replayed:.4g} s are recomputation")
    kinds = sorted(seen.measured.unknown.items(), key=lambda item: -item[1])
    found += [f"not attributed: {kind}: {seconds:.4g} s" for kind, seconds in kinds[:10]]
    return [*found, *(f"note: {note}" for note in seen.profile.notes)]


def _as_json(
    rows: list[Line], predicted: dict[str, float], total: float, seen: Study | None, error: dict[str, float] | None
) -> dict[str, object]:
    return {
        "predicted": sum(predicted.values()),
        "measured": total,
        "known_error": error,
        "terms": [{**asdict(line), "gap": line.gap} for line in rows],
        "advice": gap_advice(rows, total),
        "recomputation": seen.measured.replayed if seen else None,
        "not_attributed": seen.measured.unknown if seen else None,
        "notes": list(seen.profile.notes) if seen else [],
    }
