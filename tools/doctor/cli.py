"""`tc3 doctor`: is this host fit to train."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from tools.affinity.cli import root_option
from tools.doctor import interrupts, needs, network, npu, processor, system
from tools.doctor.checks import Finding, Patient, Verdict, examine
from tools.host.root import Root
from tools.recipe.load import load_recipe
from tools.recipe.view import View

MODULES = [
    module.__name__ for module in (processor, interrupts, system, network, npu, needs)
]  # the order of the report
COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "cyan"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@root_option
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(recipe: Path | None, root: Path, as_json: bool) -> None:
    """Look at what slows or ends runs on a host; with RECIPE, also at what that one needs.

    Nothing is changed, and root is not needed. Exit code: 0 fit, 1 a check fails, 2 something to mend first.
    """
    view = View(load_recipe(recipe)) if recipe is not None else None
    findings = examine(Patient(Root(root), view), MODULES)
    click.echo(json.dumps([asdict(item) for item in findings]) if as_json else _text(findings))
    sys.exit(any(item.verdict == "fail" for item in findings))


def _text(findings: list[Finding]) -> str:
    """A line for each check; why, and what mends it, below those that want something."""
    width, lines = max(len(item.check) for item in findings), []
    for item in findings:
        verdict = click.style(f"{item.verdict:8s}", fg=COLOURS[item.verdict])
        lines.append(f"{verdict}{item.check:{width}s}  {item.seen}")
        if item.verdict in ("warn", "fail"):
            lines.append(f"{'':8s}{'':{width}s}  {item.why} ({item.source})")
            lines.append(f"{'':8s}{'':{width}s}  mend: {item.mend}")
    counts = Counter(item.verdict for item in findings)
    return "\n".join([*lines, ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLOURS if counts[verdict])])
