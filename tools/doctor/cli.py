"""This module is the command `tc3 doctor`. The command reports whether this host is fit for training, or which hosts of
a cluster are not fit for training.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import click

from tools.affinity.topology import root_option
from tools.doctor import devices, host
from tools.doctor.ask import LIMIT, PROBE_LIMIT, ask_all, read_folder
from tools.doctor.checks import COLOURS, Finding, Patient, examine
from tools.doctor.compare import as_json as comparison_as_json
from tools.doctor.compare import compare
from tools.doctor.compare import text as comparison_as_text
from tools.doctor.outliers import against
from tools.doctor.outliers import findings as probe_findings
from tools.doctor.probe import probe_if, probe_options
from tools.doctor.report import Report, gather
from tools.measured import origin, read_bundle
from tools.process.host import Root, read_hosts
from tools.ranges import Number
from tools.recipe.load import load_recipe
from tools.recipe.view import View

MODULES = [module.__name__ for module in (host, devices)]  # the order of the report


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@root_option
@probe_options
@click.option(
    "--nodes",
    type=click.Path(exists=True, path_type=Path),
    help=(
        "Check by ssh the hosts that this file lists, one host per line as NAME or as NAME WORKERS (its number of "
        "workers). If --nodes is a folder, no host is checked, and the hosts' reports are read from the folder's "
        "HOST.json files."
    ),
)
@click.option(
    "--limit",
    type=Number("patience"),
    help=f"Wait at most this many seconds for each host of --nodes.  [default: {PROBE_LIMIT:g} with "
    f"--probe, otherwise {LIMIT:g}]",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="BUNDLE.zip",
    help="With --probe: also compare the speed of this host's workers with the speed that tc3 firsthour measured.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings and the facts about the host as JSON.")
def doctor(
    recipe: Path | None,
    root: Path,
    wants_probe: bool,
    workers: int | None,
    nodes: Path | None,
    limit: float | None,
    measured: Path | None,
    as_json: bool,
) -> None:
    """Check a host for faults that would slow down or end a training run. With RECIPE, also check what that recipe
    needs.

    The command changes nothing on the host and does not need root. Exit codes: 0 if the host is fit, 1 if a check
    fails, 2 if the command itself cannot run until an error is corrected.
    """
    if measured is not None and (nodes is not None or not wants_probe):
        raise click.UsageError("--measured compares the workers of this host: add --probe, and leave out --nodes")
    bundle = read_bundle(measured) if measured is not None else None
    view = View(load_recipe(recipe)) if recipe is not None else None
    patient = Patient(Root(root), view)
    if nodes is not None:
        if not patient.root.live:
            raise click.UsageError(
                "--root names one recorded host and --nodes names many hosts; give only one of the two options"
            )
        if nodes.is_dir() and wants_probe:
            raise click.UsageError(
                "--probe cannot be given with a folder of reports, which already hold the results of their probes; "
                "leave out --probe"
            )
        words = [] if recipe is None else [str(recipe.absolute())]
        words += ["--probe"] * wants_probe + (["--workers", str(workers)] if workers is not None else [])
        _compare(nodes, words, limit or (PROBE_LIMIT if wants_probe else LIMIT), as_json)
    if limit is not None:
        raise click.UsageError("--limit works only with --nodes; add --nodes, or leave out --limit")
    probed = probe_if(wants_probe, patient, recipe, workers)
    findings = examine(patient, MODULES) + (probe_findings({"": probed}) if probed else [])
    if probed and bundle:
        click.echo(origin(bundle), err=True)
        findings += against(probed, bundle)
    click.echo(Report(findings, gather(patient), probed).text() if as_json else _text(findings))
    sys.exit(any(item.verdict == "fail" for item in findings))


def _compare(nodes: Path, words: list[str], limit: float, as_json: bool) -> NoReturn:
    """Print the differences between hosts, and end the command: with exit code 1 if any host is unfit or gives no
    report.
    """
    answers = read_folder(nodes) if nodes.is_dir() else ask_all(read_hosts(nodes)[0], words, limit)
    comparison = compare(answers)
    click.echo(
        json.dumps(comparison_as_json(answers, comparison)) if as_json else comparison_as_text(answers, comparison)
    )
    sys.exit(any(item.verdict == "fail" for item in comparison.outliers))


def _text(findings: list[Finding]) -> str:
    """Return a line for each check; below a check that is not ok follow the reason and the remedy, and failing checks
    are repeated at the end.
    """
    width, lines = max(len(item.check) for item in findings), []
    for item in findings:
        verdict = click.style(f"{item.verdict:8s}", fg=COLOURS[item.verdict])
        lines.append(f"{verdict}{item.check:{width}s}  {item.seen}")
        if item.verdict in ("warn", "fail"):
            lines.append(f"{'':8s}{'':{width}s}  {item.why} ({item.source})")
            lines.append(f"{'':8s}{'':{width}s}  mend: {item.mend}")
    lines += [
        click.style(f"fail: {item.check}: {item.seen}; mend: {item.mend}", fg=COLOURS["fail"])
        for item in findings
        if item.verdict == "fail"
    ]
    counts = Counter(item.verdict for item in findings)
    return "\n".join([*lines, ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLOURS if counts[verdict])])
