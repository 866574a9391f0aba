"""This module is the command `tc3 accuracy diagnose`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plugins.errors import DataError
from tools.accuracy.pages import keeping
from tools.files.atomic import real_path
from tools.process import children
from tools.process.children import terminate_as_interrupt
from tools.ranges import Number
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.schema.versions import require_verified, unverified_option

if TYPE_CHECKING:
    from tools.accuracy.diagnose.differences import Verdict
    from tools.accuracy.diagnose.evidence import Side


@click.command("diagnose")
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="[B]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--steps", default=3, show_default=True, type=Number("steps"), help="Train this many steps if A or B is a recipe."
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Print the differences of all steps and all stages (such as samples, forward, gradients), not only of the "
    "first stage that differs.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="If A or B is a recipe, keep the run that was trained for it in this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@unverified_option
def diagnose_command(a: Path, b: Path | None, steps: int, everything: bool, keep: Path | None, as_json: bool) -> None:
    """Find where two runs first differ: the step, the kind of value, the module and the ranks.

    A and B are folders of runs, or recipes, which are trained for --steps steps (a recipe for Ascend is trained as its
    mini recipe on CPU). The two runs are compared in the order in which differences arise: the configuration, and the
    state from which a run starts or that a resume restored; then for each step the samples, the loss and its parts, the
    gradient of each weight, the global norm and clipping, the update, and the routers. The first difference is printed,
    with its usual cause. Two runs of one layout and configuration must agree to the last bit.

    Without B, the command checks only laws (relations that hold in every correct run): the global norm is that of the
    gradients, AdamW with the step's learning rate and decay explains the updates, the experts' loads add up to the
    number of choices, biases move against the loads, copies on several ranks are equal, and a resume restores the saved
    state.

    Losses and samples are in every run's metrics; all other values are recorded with `--set
    plugins.step_record.steps=3`.

    Exit codes: 0 nothing differs, 1 something differs, 2 no step is in both runs, or a wrong input (such as a damaged
    run, or runs of different models).
    """
    from tools.accuracy.diagnose.differences import OtherModelError, diagnose
    from tools.accuracy.diagnose.evidence import read_side

    paths = [a] if b is None else [a, b]
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder; give the folder of a run, or a recipe")
    if b is not None and a.is_dir() and real_path(a) == real_path(b):
        raise DataError(f"{b}: A and B are the same run, which equals itself; leave out B to check the laws of one run")
    kept = keeping(None if all(path.is_dir() for path in paths) else keep, "tc3 accuracy diagnose")
    with kept, terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="tc3-diagnose-") as folder:
        work = (keep or Path(folder)).absolute()
        runs = [path if path.is_dir() else _train(path, work / "AB"[place], steps) for place, path in enumerate(paths)]
        sides = [read_side(run) for run in runs]
        try:
            verdict = diagnose(*sides)  # while the folders exist: it reads the weights that the runs kept
        except OtherModelError as error:
            raise DataError(
                f"{paths[-1]}: this run trained another model than {a} ({error}); compare runs of one model"
            ) from error
    if as_json:
        click.echo(json.dumps(_as_json(verdict, sides)))
    else:
        click.echo("\n".join(report(verdict, sides, everything)))
    sys.exit(1 if verdict.findings or verdict.changes else 2 if verdict.apart else 0)


def _train(recipe: Path, run_dir: Path, steps: int) -> Path:
    require_verified()
    mini = [] if View(load_recipe(recipe)).on_cpu else ["--mini"]
    command = [str(Path(sys.executable).with_name("tc3")), "train", str(recipe), *mini, "--run-dir", str(run_dir)]
    command += ["--steps", str(steps), "--set", f"plugins.step_record.steps={steps}"]
    click.echo(f"{recipe}: training {steps} steps{' of its mini' if mini else ''}", err=True)
    # in the caller's folder, to which the paths in a recipe are relative, as in `tc3 train`
    done = children.run_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise DataError(f"{recipe}: the training failed: " + (done.stderr or done.stdout).strip()[-800:])
    return run_dir


def report(verdict: Verdict, sides: list[Side], everything: bool = False) -> list[str]:
    """Return the lines that `tc3 accuracy diagnose` prints about its verdict."""
    from tools.accuracy.diagnose.evidence import RECORD
    from tools.accuracy.diagnose.laws import WORST
    from tools.accuracy.judge import facts

    lines = [f"{side.name}: {note}" for side in sides for note in side.notes]
    for change in verdict.changes:
        lines.append(f"changed key: {change.path} {change.before} -> {change.after}: {change.meaning.phrase}")
    for name, one, two in verdict.software:
        lines.append(f"other software: {name} {one} and {two}: compared within rounding, and not by bits")
    if verdict.layout:
        names = ", ".join(change.path for change in verdict.layout)
        lines.append(f"another layout, as intended ({names}): compared within rounding, and not by bits")
    shown = verdict.findings if everything else verdict.first[:WORST]
    for place, found in enumerate(shown):
        ranks = f", ranks {', '.join(map(str, found.ranks))}" if found.ranks else ""
        side = f" [{found.side}]" if found.side else ""
        where = f"step {found.step}, {found.stage}, {found.module}{ranks}{side}"
        lines.append(f"{'   ' if place else '-> '}{where}: {found.detail}")
    if verdict.findings:
        rest = len(verdict.findings) - len(shown) - verdict.before
        if rest > 0:
            lines.append(f"   and {rest} more difference{'s' * (rest > 1)}, which may follow from the first (--all)")
        if verdict.before and not everything:
            are = "difference is" if verdict.before == 1 else "differences are"
            lines.append(f"   before it, {verdict.before} {are} in bits only, as between sums in another order (--all)")
        lines.append(f"   usually: {facts('causes')['diagnose'][verdict.first[0].stage]}")
    if verdict.compared:
        lines.append(f"compared: {', '.join(verdict.compared)}")
    if verdict.unknown:
        lines.append(f"unknown, because it was not recorded: {', '.join(verdict.unknown)}; record it with `{RECORD}`")
    return [*lines, verdict.word]


def _as_json(verdict: Verdict, sides: list[Side]) -> dict:
    findings = [
        asdict(each) | {"error": each.error if math.isfinite(each.error) else None} for each in verdict.findings
    ]
    changes = [{"key": each.path, "before": str(each.before), "after": str(each.after), "means": each.meaning.phrase}
               for each in verdict.changes]  # fmt: skip
    return {"verdict": verdict.word, "findings": findings, "changed": changes, "compared": verdict.compared,
            "unknown": verdict.unknown, "gaps": verdict.gaps, "layout": [each.path for each in verdict.layout],
            "software": verdict.software,
            "notes": [f"{side.name}: {note}" for side in sides for note in side.notes]}  # fmt: skip
